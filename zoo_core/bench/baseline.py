"""Measurements kept as JSON, and what got slower since.

Times of two runs are not compared: the machine, its load and torch differ. Ratios are, to the
reference of the same run: of a bare mechanism to fused softmax, of a whole model to its floor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zoo_core.bench.rows import Ratio, Row
from zoo_core.bench.scaling import break_evens, scalings
from zoo_core.errors import BenchError, ZooError
from zoo_core.targets import check_file

SCHEMA = 1
_KIND = "zoo bench"

#: Two runs of the same code differ by this much even where each one seems sure.
TOLERANCE = 0.10
#: And by so many standard errors of their medians.
ERRORS = 3.0

Verdict = Literal["slower", "faster", "same"]


@dataclass(frozen=True)
class Baseline:
    """A file of `save`. machine: as `describe_machine` gives it. command: how it was made."""

    machine: Mapping[str, Any]
    rows: Sequence[Row]
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One row against the same row of a baseline.

    to: what both ratios are to. change: new ratio / old ratio. noise: the relative change that
    may be chance. verdict: beyond it or not.
    """

    row: Row
    to: str
    before: Ratio
    now: Ratio
    change: float
    noise: float

    @property
    def verdict(self) -> Verdict:
        """What to make of it."""
        if self.change > 1 + self.noise:
            return "slower"
        return "faster" if self.change * (1 + self.noise) < 1 else "same"

    def as_dict(self) -> dict[str, Any]:
        """One flat JSON object."""
        return {**_flat(self), "verdict": self.verdict}


@dataclass(frozen=True, kw_only=True)
class Break:
    """A refused row, `row.refused` says why, of which the baseline has numbers.

    before: the baseline's ratio; None where its reference had no numbers.
    """

    row: Row
    to: str
    before: Ratio | None

    def as_dict(self) -> dict[str, Any]:
        """One flat JSON object with the fields of a change."""
        nothing = {"now": None, "change": None, "noise": None}
        return {**_flat(self), **nothing, "verdict": "broken", "refused": self.row.refused}


def save(path: Path, rows: Sequence[Row], machine: Mapping[str, Any], *, command: str = "") -> None:
    """Write a baseline, whole or not at all. Raises ZooError where it cannot be written."""
    document = {
        "kind": _KIND,
        "schema": SCHEMA,
        "machine": dict(machine),
        "command": command,
        "scalings": [scaling.as_dict() for scaling in scalings(rows)],
        "break_evens": [one.as_dict() for one in break_evens(rows)],
    }
    # A line for each row, so that versions of the file can be compared.
    lines = ",\n".join(json.dumps(row.as_dict(), ensure_ascii=False) for row in rows)
    head = json.dumps(document, ensure_ascii=False).removesuffix("}")
    check_file(path)
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_text(f'{head},\n"rows": [\n{lines}\n]}}\n', "utf-8")
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):  # a half of it is of no use, and the first error says more
            beside.unlink()
        raise ZooError(f"{path} could not be written: {error.strerror or error}") from error


def load(path: Path) -> Baseline:
    """Read a baseline. Raises BenchError for what is not one."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BenchError(f"{path} could not be read: {error}") from error
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise BenchError(f"{path} was not written by `zoo bench --save`")
    if document.get("schema") != SCHEMA:
        raise BenchError(
            f"{path} has schema {document.get('schema')!r}, this version reads {SCHEMA}; "
            "measure it again"
        )
    try:
        rows = [Row.of_dict(row) for row in document["rows"]]
        return Baseline(dict(document["machine"]), rows, str(document.get("command", "")))
    except (KeyError, TypeError, AttributeError, ZooError) as error:
        raise BenchError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def compare(
    before: Iterable[Row], now: Iterable[Row], *, tolerance: float = TOLERANCE
) -> list[Change]:
    """Every mechanism that both have at the same case with the same options, worst first.

    A change counts where it exceeds the tolerance and ERRORS standard errors of both medians.
    """
    changes = []
    for old, row, to in _pairs(before, now):
        first, second = old.ratios[to], row.ratios[to]
        errors = math.hypot(first.error / first.value, second.error / second.value)
        changes.append(
            Change(
                row=row,
                to=to,
                before=first,
                now=second,
                change=second.value / first.value,
                noise=max(tolerance, ERRORS * errors),
            )
        )
    return sorted(changes, key=lambda change: change.change, reverse=True)


def broken(before: Iterable[Row], now: Iterable[Row]) -> list[Break]:
    """Every mechanism that a baseline has numbers of, and that is refused now at the same case."""
    find = _finder((row for row in before if row.role == "mechanism" and not row.refused), _work)
    found = []
    for row in now:
        old = find(row)
        if row.role == "mechanism" and row.refused and old is not None:
            to = _reference(row)
            found.append(Break(row=row, to=to, before=old.ratios.get(to)))
    return found


def unmatched(before: Iterable[Row], now: Iterable[Row]) -> list[Row]:
    """Every mechanism's row with numbers that `compare` finds no counterpart of."""
    rows = list(now)
    matched = {row.key for _, row, _ in _pairs(before, rows)}
    return [
        row
        for row in rows
        if row.role == "mechanism" and not row.refused and row.key not in matched
    ]


def why_unmatched(before: Iterable[Row], now: Sequence[Row]) -> dict[str, str]:
    """Why a baseline has no counterpart of any of these rows, by the name of the mechanism.

    That is where the nearest rows of the name differ, such as "length 512 then, 64 now".
    """
    measured = [row for row in before if row.role == "mechanism" and not row.refused]
    reasons = {}
    for name in dict.fromkeys(row.name for row in now):
        olds = [row for row in measured if row.name == name]
        pairs = [(old, row) for row in now if row.name == name for old in olds]
        if not pairs:
            reasons[name] = "the baseline has no numbers of it"
            continue
        nearest = min(pairs, key=lambda pair: _distance(*pair))
        reasons[name] = "; ".join(_apart(*nearest)) or "no ratio to its reference"
    return reasons


def _distance(old: Row, row: Row) -> tuple[int, int]:
    """In how many things two rows differ, and by how many tokens."""
    return len(_apart(old, row)), abs(old.case.length - row.case.length)


def other_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two machines and moves ratios, in words."""
    keys = ("processor", "device", "cores", "threads", "torch")
    return [
        f"{key} {before.get(key)} then, {now.get(key)} now"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def _flat(found: Change | Break) -> dict[str, Any]:
    whole = asdict(found)
    row = whole.pop("row")
    return {"name": row["name"], "model": row["model"], **row["case"], **whole}


def _reference(row: Row) -> str:
    return "floor" if row.model else "sdpa"


def _pairs(before: Iterable[Row], now: Iterable[Row]) -> list[tuple[Row, Row, str]]:
    """Mechanisms' rows of the same work that both have a ratio: old, new, and to what it is."""
    find = _finder(before, lambda row: row.key)
    pairs = []
    for row in now:
        to, old = _reference(row), find(row)
        if row.role == "mechanism" and old and to in row.ratios and to in old.ratios:
            pairs.append((old, row, to))
    return pairs


def _finder(
    rows: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]
) -> Callable[[Row], Row | None]:
    """What finds the row of the same key.

    Where no row of a mechanism has native kernels they are no part of it, and do not matter.
    """
    rows = list(rows)
    known = {key(row): row for row in rows}
    kernels = {row.name for row in rows if row.case.native and row.role == "mechanism"}

    def find(row: Row) -> Row | None:
        if row.case.native and row.name not in kernels:
            row = replace(row, case=replace(row.case, native=False))
        return known.get(key(row))

    return find


def _work(row: Row) -> tuple[Any, ...]:
    """The key; of a whole model without options, since a refused one never got its layers' own."""
    return (replace(row, options={}) if row.model else row).key


def _apart(old: Row, row: Row) -> list[str]:
    """Each axis in which two rows of a mechanism differ, in words."""
    then, now = (
        {"model": one.model or "none", **asdict(one.case), "options": dict(one.options)}
        for one in (old, row)
    )
    return [
        f"{axis} {then[axis]} then, {now[axis]} now" for axis in then if then[axis] != now[axis]
    ]
