"""BigBird: a block of tokens sees the blocks near it, a few random ones, and the global tokens.

    o_i = sum_{j in A(i)} softmax_{j in A(i)}(scale * q_i . k_j) v_j
    A(i) = {j : |b(i) - b(j)| <= window, or b(j) in R(b(i)), or i or j is global}
    b(i) = i // block

Zaheer, Guruganesh, Dubey, Ainslie, Alberti, Ontanon, Pham, Ravula, Wang, Yang, Ahmed, "Big Bird:
Transformers for Longer Sequences", 2020, arXiv:2007.14062.
Deviations: global are the prefix and the first tokens, at the host's projections, not the first and
the last block. R(b), of each head, takes one block from each of `random` stretches into which the
blocks outside the window divide, a circle begun anywhere: it reaches over the whole sample, however
long, and has no block twice. Causal calls draw from what lies before the window. Blocks count real
tokens only.
Exact when: block >= N, or window >= N / block, or random >= N / block and not causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core import Site
from zoo_core.nn import tiles
from zoo_core.nn.blocks import surroundings
from zoo_core.nn.parts import attend_in_parts
from zoo_core.nn.patterns import Neighbours
from zoo_core.nn.sparse import Extent, SparseAttention

if TYPE_CHECKING:
    from zoo_attention.bigbird import BigBirdOptions

#: Bits of a draw: an integer, which no change of the model's dtype rounds.
BITS = 31

#: Queries, of all heads together, that are worked on at once without gradients: the keys and values
#: that are copied for them then stay in the cache.
ROWS = 2048


class BigBirdAttention(SparseAttention):
    """Softmax over window, random blocks and global tokens; it has no parameters.

    draws: (H, blocks of max_len, random + 1), integers below 2 ** BITS: where in its stretch each
    random block lies, and where the first stretch begins. Longer inputs use them again.
    """

    draws: Tensor

    def __init__(self, site: Site, options: BigBirdOptions) -> None:
        options = options.clamped(site)
        self.window, self.random = options.window, options.random
        others = 2 * self.window + self.random
        super().__init__(
            site, few=options.block, short=others * options.block, multiple=options.block
        )
        self.block = options.block
        self.hubs = options.global_tokens
        shape = (site.heads, options.blocks_at(site), self.random + 1)
        self.register_buffer("draws", torch.randint(1 << BITS, shape))

    def sees(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        """Whether the query of rank i sees the key of rank j: (B or 1, H, L, S)."""
        i, j = i // self.block, j // self.block
        blocks = -(-j.shape[-1] // self.block)
        drawn = self.drawn(blocks, extent)
        chosen = (drawn[..., None] == torch.arange(blocks, device=j.device)).any(-2)
        sample = torch.arange(chosen.shape[0], device=j.device)[:, None, None, None]
        head = torch.arange(chosen.shape[1], device=j.device)[:, None, None]
        return ((i - j).abs() <= self.window) | chosen[sample, head, i, j]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, extent: Extent) -> Tensor:
        """Attend block by block: q, k, v (B, H, N, width) -> (B, H, N, E)."""
        block, hubs = self.block, min(extent.hubs, q.shape[-2])
        near = Neighbours(block, self.window, 0 if extent.causal else self.window)
        drawn = self.drawn(q.shape[-2] // block, extent)
        # Random blocks are copied as rows.
        of_keys, of_values = (torch.unflatten(x, 2, (-1, block)).flatten(3) for x in (k, v))

        def attend(heads: slice, span: slice) -> Tensor:
            chosen = drawn[:, heads, span.start // block : span.stop // block]
            keys = self._shown(k, of_keys, heads, span, chosen, near, hubs)
            values = self._shown(v, of_values, heads, span, chosen, near, hubs)
            mask = self._mask_of_blocks(chosen, near, span, hubs, extent)
            mask = mask.expand(q.shape[0], *mask.shape[1:])
            queries = torch.unflatten(q[:, heads, span], 2, (-1, block))
            # Blocks stand where there were heads.
            tensors = (x.flatten(0, 1) for x in (queries, keys, values, mask))
            out = self._fused(*tensors).flatten(1, 2)
            return torch.unflatten(out, 0, queries.shape[:2]).to(v.dtype)

        dropout = self.dropout if self.training else 0.0
        return attend_in_parts(attend, q, v, multiple=block, rows=ROWS, dropout=dropout)

    def runs(self, length: int, begin: Tensor, stop: Tensor, extent: Extent) -> Tensor | None:
        """Window and random blocks of tiles of queries, (B or 1, H, R, random + 1, 6)."""
        if self.block % tiles.TILE:
            return None
        block = begin // self.block
        drawn = self.drawn(-(-length // self.block), extent)[:, :, block]
        ahead = 0 if extent.causal else self.window
        near = (block - self.window).clamp(min=0).expand_as(drawn[..., 0])[..., None]
        after = torch.cat([(block + ahead).expand_as(near[..., 0])[..., None], drawn], -1) + 1
        start = torch.cat([near, drawn.clamp(min=0)], -1) * self.block
        count = (after * self.block).minimum(extent.count[..., None]) - start
        # In a causal call a key is seen from its own place on.
        lanes = {"first": start - begin[:, None], "first_step": 1} if extent.causal else {}
        return tiles.run(start, count, **lanes).squeeze(-2)

    def drawn(self, blocks: int, extent: Extent) -> Tensor:
        """The random blocks R(b) of each block b, (B or 1, H, blocks, random); -1 where none."""
        b = torch.arange(blocks, device=self.draws.device)
        draws = self.draws[:, b % self.draws.shape[1]]
        b = b.view(1, 1, -1, 1)
        window = (b - self.window).clamp(min=0)  # its first block
        if extent.causal:
            width, outside = torch.zeros_like(window), window
        else:
            held = -(-extent.count.view(-1, 1, 1, 1) // self.block)
            width = (b + self.window + 1).minimum(held) - window
            outside = held - width
        borders = outside * torch.arange(self.random + 1, device=b.device) // self.random
        stretch = borders.diff()
        block = borders[..., :-1] + (draws[..., :-1] * stretch >> BITS)
        # Stretches differ in size by one; begun anywhere, they make all blocks equally likely.
        begin = draws[..., -1:] * outside >> BITS
        block = (block + begin) % outside.clamp(min=1)
        block = torch.where(block < window, block, block + width)
        return block.masked_fill(stretch <= 0, -1)

    def _shown(
        self,
        x: Tensor,
        blocks: Tensor,
        heads: slice,
        span: slice,
        drawn: Tensor,
        near: Neighbours,
        hubs: int,
    ) -> Tensor:
        """What blocks see of x (B, H, N, D): window, random blocks, hubs: (B, H, R, W, D).

        blocks: x by blocks, (B, H, all blocks, block * D). heads, span: those asked for.
        """
        batch, every, number, _ = blocks.shape
        head = torch.arange(batch * every, device=x.device).view(batch, every)[:, heads]
        row = drawn.clamp(0, number - 1) + head[..., None, None] * number
        random = F.embedding(row, blocks.flatten(0, 2)).view(*row.shape[:3], -1, x.shape[-1])
        x = x[:, heads]
        window = surroundings(
            x, near.size, before=near.before, after=near.after, start=span.start, stop=span.stop
        )
        first = x[:, :, None, :hubs].expand(-1, -1, row.shape[2], -1, -1)
        return torch.cat([window, random, first], 3)

    def _mask_of_blocks(
        self, drawn: Tensor, near: Neighbours, span: slice, hubs: int, extent: Extent
    ) -> Tensor:
        """Which keys of `_shown` take part, (B or 1, H, R, block or 1, W)."""
        device = drawn.device
        within = torch.arange(self.block, device=device)
        begin = torch.arange(span.start, span.stop, self.block, device=device)[:, None]
        width = (near.before + 1 + near.after) * self.block
        window = begin - near.before * self.block + torch.arange(width, device=device)
        random = (drawn[..., None] * self.block + within).flatten(3)
        first = torch.arange(hubs, device=device)
        # Hubs are shown once, in the place of their own.
        shown = [x.masked_fill(x < hubs, -1) for x in (window, random)]
        j = torch.cat([x.expand(*random.shape[:3], -1) for x in (*shown, first)], -1)[..., None, :]
        seen = (j >= 0) & (j < extent.count[..., None, None])
        if extent.causal:
            seen = seen & (j <= (begin + within)[..., None])
        return seen
