"""Measurements kept as JSON, and what got slower since.

Times of two runs are not compared: the machine, its load and torch differ. Ratios are, to the
reference of the same run: of a bare mechanism to fused softmax, of a whole model to its floor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from zoo_core.bench.rows import Ratio, Row
from zoo_core.bench.scaling import break_evens, scalings
from zoo_core.errors import BenchError, ZooError

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
        return "faster" if self.change < 1 / (1 + self.noise) else "same"

    def as_dict(self) -> dict[str, Any]:
        """One flat JSON object."""
        whole = asdict(self)
        row = whole.pop("row")
        return {"name": row["name"], "model": row["model"], **row["case"], **whole} | {
            "verdict": self.verdict
        }


def save(path: Path, rows: Sequence[Row], machine: Mapping[str, Any], *, command: str = "") -> None:
    """Write a baseline, whole or not at all. Raises BenchError where it cannot be written."""
    document = {
        "kind": _KIND,
        "schema": SCHEMA,
        "machine": dict(machine),
        "command": command,
        "scalings": [scaling.as_dict() for scaling in scalings(rows)],
        "break_evens": [
            {"name": one.name, "mode": one.case.mode, "length": str(one)}
            for one in break_evens(rows)
        ],
    }
    # A line for each row, so that versions of the file can be compared.
    lines = ",\n".join(json.dumps(row.as_dict(), ensure_ascii=False) for row in rows)
    head = json.dumps(document, ensure_ascii=False).removesuffix("}")
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_text(f'{head},\n"rows": [\n{lines}\n]}}\n', "utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise BenchError(f"{path} could not be written: {error}") from error


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
    known = {row.key: row for row in before}
    changes = []
    for row in now:
        to = "floor" if row.model else "sdpa"
        old = known.get(row.key)
        if row.role != "mechanism" or old is None or not (to in row.ratios and to in old.ratios):
            continue
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


def other_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two machines and moves ratios, in words."""
    keys = ("processor", "device", "cores", "threads", "torch")
    return [
        f"{key} {before.get(key)} then, {now.get(key)} now"
        for key in keys
        if before.get(key) != now.get(key)
    ]
