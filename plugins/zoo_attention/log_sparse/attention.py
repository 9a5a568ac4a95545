"""LogSparse attention: each token sees itself and the tokens 1, 2, 4, 8, ... away.

    o_i = sum_{j in A(i)} softmax_{j in A(i)}(scale * q_i . k_j) v_j
    A(i) = {j : |i - j| is 0, at most `window`, or a power of two, or i or j lies in the prefix}

Li, Jin, Xuan, Zhou, Chen, Wang, Yan, "Enhancing the Locality and Breaking the Memory Bottleneck of
Transformer on Time Series Forecasting", 2019, arXiv:1907.00235.
Deviations: the paper's is causal, this one looks both ways unless the call is causal; the prefix
sees, and is seen by, all; i and j count real tokens only; the window of the paper's "local
attention" leaves the powers of two where they are; no "restart attention", and no convolution for
queries and keys.
Exact when: window >= N, or N <= 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo_core import Site
from zoo_core.nn import tiles
from zoo_core.nn.patterns import Distances, Neighbours, Pattern
from zoo_core.nn.sparse import Extent, PatternAttention

if TYPE_CHECKING:
    from zoo_attention.log_sparse import LogSparseOptions


# Tokens per block: within and next to it products cost less than one distance after the other.
BLOCK = 16


class LogSparseAttention(PatternAttention):
    """Softmax over O(log N) keys per query, and a window; it has no parameters."""

    def __init__(self, site: Site, options: LogSparseOptions) -> None:
        self.window = options.window
        self.size = max(BLOCK, options.window)
        super().__init__(
            site,
            few=self.size,
            short=max(256, 4 * self.size),
            multiple=self.size,
            global_prefix=options.global_prefix,
        )

    def sees(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        """Whether |i - j| is a power of two, 0, or within the window."""
        distance = (i - j).abs()
        return (distance & (distance - 1) == 0) | (distance <= self.window)

    def runs(self, length: int, begin: Tensor, stop: Tensor, extent: Extent) -> Tensor:
        """The window of tiles of queries and the powers of two beyond it, (B or 1, 1, R, P, 6)."""
        reach, ahead = self.window, 0 if extent.causal else self.window
        low = (begin - reach).clamp(min=0)
        found = [
            tiles.run(
                low,
                (stop + ahead).minimum(extent.count) - low,
                first=low - ahead - begin,
                first_step=1,
                last=low + reach - begin,
                last_step=1,
            )
        ]
        past = [-power for power in powers_of_two(reach, length)]
        for offset in (*past, *([] if extent.causal else [-power for power in past])):
            start = (begin + offset).clamp(min=0)
            count = (stop + offset).minimum(extent.count) - start
            # The query that sees the first of them; the next one sees the next.
            lane = start - offset - begin
            found.append(tiles.run(start, count, first=lane, first_step=1, last=lane, last_step=1))
        return torch.cat([x.view(-1, 1, *x.shape[-3:]) for x in found], -2)

    def layout(
        self, length: int, extent: Extent, device: torch.device
    ) -> list[tuple[Pattern, Tensor]]:
        """The blocks nearby, and the powers of two that lead beyond them."""
        near = Neighbours(self.size, before=1, after=0 if extent.causal else 1)
        found: list[tuple[Pattern, Tensor]] = [(near, near.positions(length, device))]
        past = [-distance for distance in powers_of_two(self.size, length)]
        if past:
            far = Distances((*past, *([] if extent.causal else [-d for d in past])))
            i, j = torch.arange(length, device=device)[:, None], far.positions(length, device)
            found.append((far, j.masked_fill(near.reach(i, j), -1)))
        return found


def powers_of_two(low: int, high: int) -> list[int]:
    """The powers of two above `low`, below `high`."""
    found = []
    power = 1 << low.bit_length()
    while power < high:
        found.append(power)
        power *= 2
    return found
