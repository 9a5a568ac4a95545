"""The points of a sweep. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal, get_args

from zoo_core.errors import BenchError

Mode = Literal["forward", "backward", "compiled"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]

MODES: tuple[str, ...] = get_args(Mode)
DTYPES: tuple[str, ...] = get_args(Dtype)

#: Where the cost exponents of the records are meant to hold.
LENGTHS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of a sweep.

    length, batch, heads, width: N tokens, B, H, and D per head, of queries, keys and values.
    device: as torch writes it, "cpu" or "cuda:0".
    mode: "forward" (eval, no gradients), "backward" (training, forward + backward), or "compiled"
        (the forward through torch.compile).
    padded: the samples have from N/2 to N real tokens, spread evenly over the batch (a single one
        3N/4), and padding on the right. Otherwise all tokens are real and there is no mask.
    native: with the native kernels of `zoo native`, which have to be built; otherwise, on a CPU,
        plain torch even where they are.
    """

    length: int
    batch: int = 1
    heads: int = 12
    width: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    mode: str = "forward"
    padded: bool = False
    native: bool = False

    def __post_init__(self) -> None:
        for name in ("length", "batch", "heads", "width"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise BenchError(f"{name} {value!r} must be a whole number of at least 1")
        for name, known in (("dtype", DTYPES), ("mode", MODES)):
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise BenchError(f"{name} {value!r} must be one of {', '.join(known)}")

    @property
    def dim(self) -> int:
        """The model's width, H * D."""
        return self.heads * self.width

    @property
    def real_tokens(self) -> list[int]:
        """How many tokens of each sample are real."""
        if not self.padded:
            return [self.length] * self.batch
        half = self.length / 2
        steps = [(i + 0.5) / self.batch for i in range(self.batch)]
        return [max(1, round(half + half * step)) for step in steps]


def sweep(*, length: int | Sequence[int] = LENGTHS, **axes: Any) -> list[Case]:
    """Every combination of the given values; each axis is a field of Case, a value or several.

    Lengths vary slowest and grow, so that an interrupted run has finished the short ones.
    """
    known = [spec.name for spec in fields(Case)]
    for name in axes:
        if name not in known:
            raise BenchError(f"a case has no {name!r} (has: {', '.join(known)})")
    axes = {"length": length, **axes}
    lists = {name: _several(values) for name, values in axes.items()}
    lists["length"] = sorted(set(lists["length"]))
    return [Case(**dict(zip(lists, point, strict=True))) for point in product(*lists.values())]


def _several(values: Any) -> list[Any]:
    one = isinstance(values, str) or not isinstance(values, Sequence)
    return [values] if one else list(dict.fromkeys(values))
