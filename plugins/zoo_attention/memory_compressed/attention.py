"""Softmax attention over keys and values of which every `factor` neighbours are made one.

    o_i = sum_c softmax_c(scale * q_i . k'_c) v'_c,   k'_c = 1/n_c sum_t (I + W_t) k_{c factor + t}

and v' likewise, for block c of n_c tokens, n_c = factor but in a sample's last block; W = 0, as at
the start, is the mean. Causal, with c(i) the block of token i, it is one softmax over

    {k'_c : c < c(i)}  and  {k_j : j <= i, c(j) = c(i)}

Liu, Saleh, Pot, Goodrich, Sepassi, Kaiser, Shazeer, "Generating Wikipedia by Summarizing Long
Sequences", 2018, arXiv:1801.10198.
Deviations: blocks count a sample's real tokens behind its prefix, which stays as it is; W is one
matrix per head and tap, without a bias; a short block is divided by its own number of tokens; in
the causal form a token sees its own block uncompressed, where an incomplete block would show the
future or nothing at all. The null key, a logit of 0 whose value is 0, is optional.
Exact when: factor = 1, W = 0, no null key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import masks, softmax
from zoo_core.nn.precision import sum_dtype

if TYPE_CHECKING:
    from zoo_attention.memory_compressed import MemoryCompressedOptions


class MemoryCompressedAttention(nn.Module):
    """Attention to compressed keys and values.

    mix_keys, mix_values: W, (H, factor, D, D) from input to output width; None for the mean.
    """

    mix_keys: nn.Parameter | None
    mix_values: nn.Parameter | None

    def __init__(self, site: Site, options: MemoryCompressedOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.factor = options.factor
        self.null_key = options.null_key
        shape = (site.heads, options.factor, site.head_dim, site.head_dim)
        mixes = options.pool == "conv"
        self.mix_keys = nn.Parameter(torch.zeros(shape)) if mixes else None
        self.mix_values = nn.Parameter(torch.zeros(shape)) if mixes else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        In the causal form the queries are those of the last L of the S tokens.
        """
        tokens = masks.align(ctx.key_padding)
        k, v = tokens.front(k), tokens.front(v)
        count = masks.count(ctx.key_padding, k)
        prefix = 0 if ctx.causal else min(ctx.prefix, k.shape[-2])
        short_k = self._compress(k, self.mix_keys, prefix, count)
        short_v = self._compress(v, self.mix_values, prefix, count)
        if not ctx.causal:
            return self._attend_all(q, short_k, short_v, self._seen(ctx, prefix, short_k, count))
        if q.shape[-2] < k.shape[-2]:
            return self._attend_last(q, k, v, short_k, short_v, ctx)
        return tokens.back(self._attend_past(tokens.front(q), k, v, short_k, short_v))

    def _compress(self, x: Tensor, mix: Tensor | None, prefix: int, count: Tensor) -> Tensor:
        """Keep the first `prefix` of the tokens x (B, H, S, D), and make one of each block."""
        total = self._sums(x[:, :, prefix:], mix)
        first = torch.arange(total.shape[2], device=x.device) * self.factor + prefix
        members = (count[:, None] - first).clamp(min=1, max=self.factor)
        means = (total / members[:, None, :, None]).to(x.dtype)
        return torch.cat([x[:, :, :prefix], means], 2) if prefix else means

    def _sums(self, x: Tensor, mix: Tensor | None) -> Tensor:
        """Sums of (I + W_t) x over the blocks of x (B, H, S, D): (B, H, C, D), in at least fp32."""
        whole = x.shape[2] - x.shape[2] % self.factor
        weight = None if mix is None else self._weight(mix, x)
        sums = self._sum(x[:, :, :whole].unflatten(2, (-1, self.factor)), weight)
        if whole == x.shape[2]:
            return sums
        # The last tokens by themselves: to pad all of x would copy it.
        return torch.cat([sums, self._sum(self._blocks(x[:, :, whole:]), weight)], 2)

    def _weight(self, mix: Tensor, x: Tensor) -> Tensor:
        """I + W for the width of x (..., D): (H, factor * D, D), in at least fp32."""
        wide = sum_dtype(x)
        # No channel beyond the host's head width has a weight: there the mean stays.
        width, beyond = x.shape[-1], x.shape[-1] - mix.shape[-1]
        weight = F.pad(mix, (0, beyond, 0, beyond)).to(wide)
        return (weight + torch.eye(width, dtype=wide, device=mix.device)).flatten(1, 2)

    def _sum(self, blocks: Tensor, weight: Tensor | None) -> Tensor:
        """As `_sums`, of whole blocks (B, H, C, factor, D)."""
        if weight is None:
            return blocks.sum(3, dtype=sum_dtype(blocks))
        with torch.autocast(blocks.device.type, enabled=False):  # I + W needs all its digits
            return blocks.to(weight.dtype).flatten(3) @ weight

    def _blocks(self, x: Tensor) -> Tensor:
        """Cut x (B, H, S, D) into blocks (B, H, C, factor, D), the last filled up with zeros."""
        number = -(-x.shape[-2] // self.factor)
        x = F.pad(x, (0, 0, 0, number * self.factor - x.shape[-2]))
        return x.unflatten(2, (number, self.factor))

    def _seen(self, ctx: Context, prefix: int, short_k: Tensor, count: Tensor) -> Tensor | None:
        """Which compressed keys hold a real token, (B, C); None = all."""
        if ctx.key_padding is None:
            return None
        place = torch.arange(short_k.shape[-2], device=short_k.device)
        first = torch.where(place < prefix, place, (place - prefix) * self.factor + prefix)
        return first < count[:, None]

    def _attend_all(
        self, q: Tensor, short_k: Tensor, short_v: Tensor, seen: Tensor | None
    ) -> Tensor:
        """Every query attends to every compressed key that is seen."""
        if self.null_key:
            short_k, short_v = (F.pad(x, (0, 0, 0, 1)) for x in (short_k, short_v))
            seen = None if seen is None else F.pad(seen, (0, 1), value=True)
        ctx = Context(key_padding=seen)
        dropout = self.dropout if self.training else 0.0
        return softmax.attend(q, short_k, short_v, ctx, scale=self.scale, dropout=dropout)

    def _attend_last(
        self, q: Tensor, k: Tensor, v: Tensor, short_k: Tensor, short_v: Tensor, ctx: Context
    ) -> Tensor:
        """The causal form of a few queries, those of the last tokens: one dense mask."""
        keys, blocks = k.shape[-2], short_k.shape[-2]
        i = masks.positions(ctx.key_padding, k)[:, None, -q.shape[-2] :, None]
        own = i // self.factor
        block, j = (torch.arange(n, device=k.device) for n in (blocks, keys))
        mask = torch.cat([block < own, (j >= own * self.factor) & (j <= i)], -1)
        both_k, both_v = torch.cat([short_k, k], 2), torch.cat([short_v, v], 2)
        if self.null_key:
            both_k, both_v = (F.pad(x, (0, 0, 0, 1)) for x in (both_k, both_v))
            mask = F.pad(mask, (0, 1), value=True)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            q, both_k, both_v, attn_mask=mask, dropout_p=dropout, scale=self.scale
        )

    def _attend_past(
        self, q: Tensor, k: Tensor, v: Tensor, short_k: Tensor, short_v: Tensor
    ) -> Tensor:
        """The causal form of a whole sequence, real tokens first, without an L x S mask.

        The tokens at one place of all blocks see what is_causal shows them: query c sees the keys
        up to c of [own, k'_0, k'_1, ...]. `own` stands for the query's block: its logit is the
        log of that block's mass, and its value, read off one more channel, is how much weight it
        got.
        """
        length, D, E = q.shape[-2], q.shape[-1], v.shape[-1]
        q = self._blocks(q)
        own, mass = self._attend_own(q, self._blocks(k), self._blocks(v))
        width = softmax.fused_width(max(D + 2, E + 1))
        # Two terms keep the digits of a half-precision logit that the kernel would see rounded.
        high = mass.to(q.dtype)
        low = (mass - high).to(q.dtype)
        queries = F.pad(torch.cat([q, high, low], -1), (0, width - D - 2))
        keys = F.pad(short_k[:, :, :-1], (0, width - D, 1, 0))
        keys[:, :, 0, D : D + 2] = 1
        values = F.pad(short_v[:, :, :-1], (0, width - E, 1, 0))
        values[:, :, 0, E] = 1
        # Places within a block stand where there were heads: (B, H * factor, C, width).
        keys, values = (x.repeat_interleave(self.factor, 1) for x in (keys, values))
        out = F.scaled_dot_product_attention(
            queries.transpose(2, 3).flatten(1, 2),
            keys,
            values,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            scale=self.scale,
        )
        out = out.unflatten(1, (-1, self.factor)).transpose(2, 3)
        whole = out[..., :E] + out[..., E : E + 1] * own
        return whole.flatten(2, 3)[:, :, :length]

    def _attend_own(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attend within blocks (B, H, C, factor, D): means (..., E), and logs of mass over scale.

        The null key counts among a query's own.
        """
        wide = sum_dtype(q)
        scores = (q @ k.mT).to(wide) * self.scale
        future = ~masks.causal(self.factor, self.factor, 0, q.device)
        scores = scores.masked_fill(future, torch.finfo(wide).min)
        if self.null_key:
            scores, v = F.pad(scores, (0, 1)), F.pad(v, (0, 0, 0, 1))
        mass = scores.logsumexp(-1, keepdim=True)
        return (scores - mass).exp().to(v.dtype) @ v, mass / self.scale
