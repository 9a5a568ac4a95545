"""Softmax within a window around each token, and a prefix that sees and is seen by all.

Nothing of size N x N is made; distance counts a sample's real tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.nn import gpu, masks, softmax, tiles
from zoo_core.nn.blocks import Blocks
from zoo_core.nn.scores import dot_product

# Keys per block: fewer do not fill the kernel, more see too much that lies out of reach.
SMALLEST, LARGEST = 16, 128


@dataclass(frozen=True)
class Window:
    """Who sees whom: token i the tokens j with |i - j| <= reach.

    prefix: the first `prefix` real tokens see, and are seen by, all.
    causal: of all these, only the tokens up to i are seen.
    stride: key j stands for the tokens from stride * j on; the distance is |i // stride - j|.
        A stride other than 1 goes with neither prefix nor causal.
    """

    reach: int
    prefix: int = 0
    causal: bool = False
    stride: int = 1

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding: Tensor | None,
        *,
        scale: float,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attend to tokens as a host orders them: (B, H, L, E), zeros where no key is seen.

        q (B, H, L, D): the queries of the last L tokens. k (B, H, S, D), v (B, H, S, E), whose
        padding may hold anything. dropout: pass 0 outside training.
        """
        queries, keys = q.shape[-2], k.shape[-2]
        if queries <= self._size or self._is_short(keys, in_tiles=_tiled(q, k, v, dropout)):
            k, v = masks.hide(k, key_padding), masks.hide(v, key_padding)
            mask = self._mask_of_tokens(q, k, key_padding)
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale
            )
        tokens = masks.align(key_padding)
        q = F.pad(q, (0, 0, keys - queries, 0)) if queries < keys else q
        q, k, v = (tokens.front(x) for x in (q, k, v))
        real = None if key_padding is None else key_padding.sum(-1)
        out = self.attend_front(q, k, v, real, scale=scale, dropout=dropout)
        return tokens.back(out)[:, :, keys - queries :]

    def attend_front(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        real: Tensor | None,
        *,
        scale: float,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attend to tokens of which the real ones lie at the front: (B, H, N, E).

        q (B, H, N, D), k (B, H, S, D), v (B, H, S, E), S = ceil(N / stride); padding is finite.
        real: (B,) number of keys that are no padding, None = all. dropout: as in `attend`.
        """
        fused = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scale)
        in_tiles = _tiled(q, k, v, dropout)
        if not self._is_short(k.shape[-2], in_tiles=in_tiles):
            if in_tiles:
                leading = 0 if self.causal else self.prefix
                borders = tiles.borders(q.shape[-2], leading, q.device)
                runs = self._runs(borders, k.shape[-2], real, q.device)
                return tiles.attend(q, k, v, runs, borders, scale=scale)
            out = None if dropout else self._attend_in_kernel(q, k, v, real, scale)
            return self._attend_in_blocks(q, k, v, real, fused) if out is None else out
        i, j = (torch.arange(x.shape[-2], device=x.device)[None] for x in (q, k))
        if real is not None:
            j = j.masked_fill(j >= real[:, None], -1)
        return fused(q, k, v, attn_mask=self._mask(i, j))

    def weights(self, q: Tensor, k: Tensor, key_padding: Tensor | None, *, scale: float) -> Tensor:
        """The map (B, H, L, S) of `attend`, dense: for looking, not for running."""
        dots = dot_product(q, k, key_padding, scale=scale)
        return softmax.masked_softmax(dots, self._mask_of_tokens(q, k, key_padding))

    @property
    def _neighbours(self) -> int:
        """Blocks that a window spans to each side."""
        return max(1, -(-self.reach // LARGEST))

    @property
    def _size(self) -> int:
        """Keys in a block."""
        return max(SMALLEST, -(-self.reach // self._neighbours))

    def _is_short(self, keys: int, *, in_tiles: bool) -> bool:
        """Whether blocks, or tiles, would see about as much as a dense mask shows."""
        if in_tiles:
            return keys <= 2 * self.reach
        return keys <= 2 * (self._neighbours + 1) * self._size

    def _mask_of_tokens(self, q: Tensor, k: Tensor, key_padding: Tensor | None) -> Tensor:
        """The dense mask of a call, (B or 1, 1, L, S)."""
        positions = masks.positions(key_padding, k)
        return self._mask(positions[:, -q.shape[-2] :], positions)

    def _mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Who sees whom, (B, 1, L, S), by positions (B, L) and (B, S); key -1 is no token."""
        i, j = queries[:, None, :, None], keys[:, None, None, :]
        own = i if self.stride == 1 else i // self.stride
        past = (j >= own - self.reach) | (j < self.prefix)
        future = j <= i if self.causal else (j <= own + self.reach) | (i < self.prefix)
        return past & future & (j >= 0)

    def _attend_in_kernel(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, scale: float
    ) -> Tensor | None:
        """Attend in one kernel for GPUs; None where it cannot be."""
        if self.stride != 1:
            return None
        return gpu.window(
            q,
            k,
            v,
            real,
            reach=self.reach,
            prefix=self.prefix,
            causal=self.causal,
            scale=scale,
        )

    def _runs(
        self, borders: Tensor, keys: int, real: Tensor | None, device: torch.device
    ) -> Tensor:
        """What each tile of queries sees, (B or 1, 1, R, 2, 6): the prefix, and the window or all.

        Tiles that lie within the prefix see all, unless the call is causal.
        """
        begin, stop, stride = borders[:-1], borders[1:], self.stride
        end = torch.full((1, 1, 1), keys, device=device) if real is None else real[:, None, None]
        ahead = 0 if self.causal else self.reach
        low = (begin // stride - self.reach).clamp(min=0)
        high = ((stop - 1) // stride + ahead).minimum(end - 1)
        first = (low - ahead) * stride - begin
        last = (low + self.reach) * stride + stride - 1 - begin
        window = tiles.run(
            low, high - low + 1, first=first, first_step=stride, last=last, last_step=stride
        )
        if not self.prefix:
            return window
        leading = tiles.leading(begin, self.prefix, end, causal=self.causal)
        return torch.cat([leading, window], -2)

    def _attend_in_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, fused: Callable[..., Tensor]
    ) -> Tensor:
        """Attend block by block; the prefix, whose rows differ, is attended apart."""
        keys, size, before = k.shape[-2], self._size, self._neighbours
        prefix, after = min(self.prefix, keys), 0 if self.causal else before
        # Before the blocks, so that its gradients are not alive when those of all windows are.
        first = self._attend_to_prefix(q, k, v, real, fused) if prefix else None
        of_keys = Blocks(k.shape[0], keys, size, before=before, after=after, prefix=prefix)
        of_queries = Blocks(q.shape[0], q.shape[-2], size * self.stride, before=before, after=after)
        mask = self._mask_of_blocks(of_keys, real, q)
        windows = (of_keys.windows(x) for x in (k, v))
        out = of_queries.join(fused(of_queries.split(q), *windows, attn_mask=mask))
        if first is None:
            return out
        # Put together as hosts store it, tokens before heads.
        parts = [first.transpose(1, 2), out.transpose(1, 2)[:, prefix:]]
        return torch.cat(parts, 1).transpose(1, 2)

    def _attend_to_prefix(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, fused: Callable[..., Tensor]
    ) -> Tensor:
        """The rows of the prefix: each sees all tokens or, in a causal call, those up to itself."""
        prefix = min(self.prefix, k.shape[-2])
        if self.causal:
            k, v = k[:, :, :prefix], v[:, :, :prefix]
        j = torch.arange(k.shape[-2], device=k.device)
        seen = None if real is None else (j < real[:, None])[:, None, None]
        if self.causal:
            past = j <= j[:, None]
            seen = past if seen is None else past & seen
        return fused(q[:, :, :prefix], k, v, attn_mask=seen)

    def _mask_of_blocks(self, blocks: Blocks, real: Tensor | None, q: Tensor) -> Tensor:
        """What to add to the scores of each window, 0 or -inf in q's dtype: (M, 1, L / M, W).

        Reach is the same in all blocks, what there is to see the same for all queries of one: a
        comparison of all pairs of positions would take as long as the products.
        """
        i = torch.arange(blocks.size * self.stride, device=q.device)[:, None] // self.stride
        j, copy = blocks.offsets(q.device)
        near = (j >= i - self.reach) & (j <= (i if self.causal else i + self.reach)) | copy
        hidden = torch.full((), -torch.inf, dtype=q.dtype, device=q.device)
        near = torch.where(near, torch.zeros_like(hidden), hidden)
        there = blocks.keys(q.device, real) >= 0
        return torch.where(there[:, None, None], near, hidden)


def _tiled(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    return not dropout and tiles.suits(q, k, v)
