"""What the machine can do at the moment: one large matrix product, one large copy.

Both take part in every race, so that a floor is measured in the same rounds as what it is a floor
of. Small matrices reach a lower rate than this one, and data that fits a cache moves faster than
this copy: the two ratios say how far there is to go at most, not that one can get there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zoo_core.bench.cases import Case
from zoo_core.bench.timing import Call, Timing

PRODUCT, COPY = "matrix product", "copy"

#: Side of the square matrices: large enough to run at full rate, small enough for every round.
SIZE_ON_CPU, SIZE_ELSEWHERE = 1024, 8192
#: More than a cache holds.
COPIED_BYTES = 1 << 26


@dataclass(frozen=True)
class Yardsticks:
    """The two calls. size: of the square matrices. moved: bytes read and written by the copy."""

    size: int
    moved: int
    calls: dict[str, Call]

    @classmethod
    def of(cls, case: Case) -> Yardsticks:
        """In the case's dtype, on its device."""
        size = SIZE_ON_CPU if case.device == "cpu" else SIZE_ELSEWHERE
        how = {"dtype": getattr(torch, case.dtype), "device": case.device}
        a, b = torch.randn(2, size, size, **how)
        source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=case.device)
        target, product = torch.empty_like(source), torch.empty_like(a)
        return cls(
            size=size,
            moved=2 * COPIED_BYTES,
            calls={
                PRODUCT: lambda: torch.mm(a, b, out=product),
                COPY: lambda: target.copy_(source),
            },
        )

    def floors(
        self, timings: dict[str, Timing], *, flops: int | None, moved: int
    ) -> dict[str, Timing]:
        """The least time for so many products and additions, and for moving so many bytes."""
        floors = {"bytes": timings[COPY].scaled(moved / self.moved)}
        if flops:
            floors["flops"] = timings[PRODUCT].scaled(flops / (2 * self.size**3))
        return floors
