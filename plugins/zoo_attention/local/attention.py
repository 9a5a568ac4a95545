"""Local attention: each token sees the tokens near it; the prefix sees, and is seen by, all.

    o_i = sum_{j in W(i)} softmax_{j in W(i)}(scale * q_i . k_j) v_j
    W(i) = {j : |i - j| <= window, or i or j lies in the prefix}

Beltagy, Peters, Cohan, "Longformer: The Long-Document Transformer", 2020, arXiv:2004.05150.
Deviations: `window` is the reach to one side, half of the paper's; i and j count real tokens only;
global tokens use the host's projections, which the paper's separate ones start from; no dilation.
Exact when: window >= N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import masks, softmax
from zoo_core.nn.blocks import Blocks

if TYPE_CHECKING:
    from zoo_attention.local import LocalOptions

# Tokens per block: fewer do not fill the kernel, more see too much that lies out of reach.
SMALLEST, LARGEST = 16, 128


class LocalAttention(nn.Module):
    """Softmax over `window` tokens to each side and the prefix; it has no parameters."""

    def __init__(self, site: Site, options: LocalOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.window = options.window
        self.global_prefix = options.global_prefix
        self.reach = -(-self.window // LARGEST)  # in blocks
        self.size = max(SMALLEST, -(-self.window // self.reach))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        The queries are those of the last L of the S tokens.
        """
        queries, keys = q.shape[-2], k.shape[-2]
        few = queries <= self.size or keys <= 2 * (self.reach + 1) * self.size
        return self._whole(q, k, v, ctx) if few else self._blocked(q, k, v, ctx)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        k = masks.hide(k, ctx.key_padding)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).mT) * self.scale
        return softmax.masked_softmax(scores, self._mask(q, k, ctx))

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Attend under one mask: few queries, or a sequence that blocks would not shorten."""
        k, v = masks.hide(k, ctx.key_padding), masks.hide(v, ctx.key_padding)
        return self._attend(q, k, v, self._mask(q, k, ctx))

    def _blocked(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Attend block by block; a prefix that sees everything is attended apart."""
        queries, keys = q.shape[-2], k.shape[-2]
        tokens = masks.align(ctx.key_padding)
        q = F.pad(q, (0, 0, keys - queries, 0)) if queries < keys else q
        q, k, v = (tokens.front(x) for x in (q, k, v))
        prefix = min(self._prefix(ctx), keys)
        after = 0 if ctx.causal else self.reach
        blocks = Blocks(len(q), keys, self.size, before=self.reach, after=after, prefix=prefix)
        real = None if ctx.key_padding is None else ctx.key_padding.sum(-1)
        mask = self._visible(blocks.queries(q.device), blocks.keys(q.device, real), ctx)
        out = self._attend(blocks.split(q), blocks.windows(k), blocks.windows(v), mask)
        out = blocks.join(out)
        if prefix and not ctx.causal:
            seen = None if real is None else tokens.key_padding[:, None, None]
            first = self._attend(q[:, :, :prefix], k, v, seen)
            # Put together as hosts store it, tokens before heads.
            parts = [first.transpose(1, 2), out.transpose(1, 2)[:, prefix:]]
            out = torch.cat(parts, 1).transpose(1, 2)
        return tokens.back(out)[:, :, keys - queries :]

    def _mask(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The mask of the whole call, (B or 1, 1, L, S)."""
        if ctx.key_padding is None:
            positions = torch.arange(k.shape[-2], device=k.device)[None]
        else:
            positions = masks.rank(ctx.key_padding).masked_fill(~ctx.key_padding, -1)
        return self._visible(positions[:, -q.shape[-2] :], positions, ctx)

    def _visible(self, queries: Tensor, keys: Tensor, ctx: Context) -> Tensor:
        """Who sees whom, (B, 1, L, S), by positions (B, L) and (B, S); key -1 is no token."""
        i, j, prefix = queries[:, None, :, None], keys[:, None, None, :], self._prefix(ctx)
        past = (j >= i - self.window) | (j < prefix)
        future = j <= i if ctx.causal else (j <= i + self.window) | (i < prefix)
        return past & future & (j >= 0)

    def _prefix(self, ctx: Context) -> int:
        return ctx.prefix if self.global_prefix else 0

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=self.scale
        )
