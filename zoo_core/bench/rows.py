"""What was measured, as data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from zoo_core.bench.cases import Case

Role = Literal["mechanism", "reference", "peer", "floor"]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median over the rounds of one time divided by another of the same round.

    error: standard error of that median, in the same unit.
    """

    value: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """One competitor at one case.

    name: a mechanism; "sdpa" or "stock", the reference; "floor"; or a public implementation.
    role: which of these it is. of: the mechanism that a public implementation implements.
    model: the architecture, for whole models; "" for a bare mechanism.
    seconds: median per call. spread: distance between the quartiles of the rounds, in seconds.
    ratios: time divided by that of "sdpa", "flops" and "bytes" (the two floors of the machine),
        "eager" (compiled mode), "stock" and "floor" (whole models), and of each peer by its name.
    flops: products and additions of the matrix products in one call.
    peak: bytes that one call allocates beyond what was there before it, at the most.
    refused: why there are no numbers, in words that start with the name.
    """

    case: Case
    name: str
    role: Role
    of: str = ""
    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    spread: float | None = None
    rounds: int = 0
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    flops: int | None = None
    peak: int | None = None
    refused: str = ""

    @property
    def tax(self) -> float | None:
        """(t - t_floor) / t_floor of a whole model: what its attention adds."""
        ratio = self.ratios.get("floor")
        return None if ratio is None or not self.model else ratio.value - 1

    @property
    def best_peer(self) -> tuple[str, Ratio] | None:
        """The fastest public implementation of this mechanism, and the ratio to it."""
        peers = {name: ratio for name, ratio in self.ratios.items() if name not in _MEASURES}
        return max(peers.items(), key=lambda item: item[1].value) if peers else None

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two rows of different runs comparable."""
        options = tuple(sorted((name, repr(value)) for name, value in self.options.items()))
        return self.model, self.name, self.of, options, self.case

    def as_dict(self) -> dict[str, Any]:
        """One flat JSON object, the fields of the case among it."""
        whole = asdict(self)
        return {**whole.pop("case"), **whole, **({"tax": self.tax} if self.model else {})}

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Self:
        """The row that `as_dict` wrote. Raises KeyError, TypeError or ZooError for another one."""
        values = {"native": False, **values}  # files from before there were such kernels
        case = Case(**{spec.name: values[spec.name] for spec in fields(Case)})
        own = {spec.name: values[spec.name] for spec in fields(cls) if spec.name != "case"}
        own["ratios"] = {name: Ratio(**ratio) for name, ratio in own["ratios"].items()}
        return cls(case=case, **own)


_MEASURES = ("sdpa", "flops", "bytes", "eager", "stock", "floor")
