"""From how many tokens on a mechanism pays: read from the measurements that come with zoo-core.

They were made by `examples/benchmarks.py` with default options, on the machine that the file
describes. Other machines and options shift a break-even; its order of magnitude stays. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from zoo_core.attention import Site
from zoo_core.bench.baseline import Baseline, load
from zoo_core.bench.rows import Row
from zoo_core.bench.scaling import BreakEven, break_evens
from zoo_core.bench.tables import headline
from zoo_core.mechanism import Mechanism

#: The measurements that come with zoo-core.
FILE = Path(__file__).with_name("measured.json")

_OWNER = "zoo-core"
_SOFTMAX = "softmax"  # it is what the others are compared with


@dataclass(frozen=True)
class Verdict:
    """From where on one mechanism was faster than fused softmax, forward, one sample.

    longest: the measurement at the longest length.
    with_kernels: the break-even with native kernels; None where it has none.
    """

    break_even: BreakEven
    longest: Row
    machine: str
    with_kernels: BreakEven | None = None

    def pays(self, length: int) -> bool:
        """Whether it is faster for inputs of this many tokens."""
        start = self.break_even.length
        return start is not None and length >= start

    @property
    def summary(self) -> str:
        """From where on it pays, in words."""
        start = self.break_even.length
        if start is None:
            times, length = self.longest.ratios["sdpa"].value, self.longest.case.length
            most = f"at {length} tokens, the most that was measured"
            return f"slower than fused softmax, taking {times:.1f} times as long {most}"
        words = f"faster than fused softmax from {_about(self.break_even)} on"
        if self.with_kernels is None or self.with_kernels.length is None:
            return words
        return f"{words}, with native kernels from {_about(self.with_kernels)} on"

    @property
    def how(self) -> str:
        """What was measured, in words."""
        return f"measured with default options on {self.machine}"

    @property
    def aside(self) -> str:
        """In words, for options that nobody measured."""
        name = self.break_even.name
        return f"{name} was not measured with these options; it is {self.summary} ({self.how})"

    def note(self, length: int) -> str:
        """In words, for a model that sees at most this many tokens."""
        name = self.break_even.name
        if self.pays(length):
            shorter = "" if self.break_even.at_most else ", and slower on shorter inputs"
            return f"{name} is {self.summary}{shorter} ({self.how})"
        here = f"; this model sees at most {length}" if self.break_even.length else ""
        kernels = self.with_kernels.length if self.with_kernels else None
        with_them = kernels is not None and length >= kernels
        pays = "pays here with native kernels only" if with_them else "does not pay here"
        return f"{name} {pays}: it is {self.summary}{here} ({self.how})"


def _about(start: BreakEven) -> str:
    tokens = f"{start.length:.0f} tokens"
    return f"{tokens} or fewer" if start.at_most else f"about {tokens}"


def as_measured(mechanism: Mechanism, options: Mapping[str, Any], site: Site) -> bool:
    """Whether options, clamped to their site, are those that `verdict` speaks of: the defaults."""
    return mechanism.options().clamped(site).as_dict() == options


def verdict(mechanism: Mechanism) -> Verdict | None:
    """What was measured of a mechanism; None for one of another distribution, or never measured."""
    if mechanism.distribution != _OWNER or mechanism.name == _SOFTMAX:
        return None
    return _verdicts(FILE).get(mechanism.name)


@cache
def _verdicts(path: Path) -> dict[str, Verdict]:
    if not path.exists():
        return {}
    kept = load(path)
    rows = forward(kept)
    longest = {row.name: row for row in sorted(rows, key=lambda row: row.case.length)}
    machine = headline(kept.machine)
    kernels = {one.name: one for one in break_evens(forward(kept, native=True))}
    return {
        one.name: Verdict(one, longest[one.name], machine, kernels.get(one.name))
        for one in break_evens(rows)
        if one.name in longest
    }


def forward(kept: Baseline, *, native: bool = False) -> list[Row]:
    """The rows of bare mechanisms, forward, one sample without padding.

    native: those with the native kernels.
    """
    return [
        row
        for row in kept.rows
        if row.role == "mechanism" and not (row.model or row.refused or row.case.padded)
        if row.case.mode == "forward" and row.case.batch == 1 and row.case.native == native
    ]
