"""The summary of a run for a README: one line for each mechanism, one column for each length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from zoo_core.bench.cases import Case
from zoo_core.bench.rows import Row
from zoo_core.bench.scaling import Scaling, break_evens, scalings
from zoo_core.bench.tables import figures, megabytes
from zoo_core.words import markdown_table

_NONE = "-"


def markdown(rows: Sequence[Row]) -> str:
    """A table for each combination of everything but the length, under its name.

    Bare mechanisms: where they pay, time divided by that of fused softmax by length, the exponents
    of length with which time and memory grow beside those that the record declares, peak memory
    beside that of fused softmax at the longest length that all reached, and time divided by that
    of the fastest public implementation, or of itself without compilation, at the longest length
    with one. Whole models: the attention tax, and time divided by that of the stock model, by
    length.
    """
    groups: dict[tuple[str, Case], list[Row]] = {}
    for row in rows:
        if row.seconds is not None:
            groups.setdefault((row.model, replace(row.case, length=1)), []).append(row)
    return "\n\n".join(_section(model, case, group) for (model, case), group in groups.items())


def _section(model: str, case: Case, rows: Sequence[Row]) -> str:
    lengths = sorted({row.case.length for row in rows})
    by_name: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.role == "mechanism":
            by_name.setdefault(row.name, {})[row.case.length] = row
    table = _models if model else _layers
    padded = ", padded" if case.padded else ""
    native = ", native kernels" if case.native else ""
    shape = f"{case.mode}, batch {case.batch}, {case.dtype}{padded}{native}"
    title = f"{model}, {shape}" if model else shape
    return f"{title}:\n\n{table(rows, by_name, lengths)}"


def _layers(rows: Sequence[Row], by_name: dict[str, dict[int, Row]], lengths: Sequence[int]) -> str:
    pays = {one.name: str(one) for one in break_evens(rows)}
    references = {row.case.length: row for row in rows if row.role == "reference"}
    common = [n for n in lengths if all(n in found for found in by_name.values())]
    end = max(common or lengths)
    sizes = f"MB at {end} (sdpa {_megabytes(references.get(end))})"
    start = ["pays from"] if pays else []
    grown = {(one.name, one.quantity): one for one in scalings(rows)}
    growth = {
        quantity: f"{quantity} ~ n^p" + (", p (declared)" if _any_declared(found) else "")
        for quantity in ("time", "memory")
        if (found := [one for one in grown.values() if one.quantity == quantity])
    }
    compiled = any(row.case.mode == "compiled" for row in rows)
    rival, ratio = ("/ uncompiled", _eager) if compiled else ("/ best peer", _best_peer)
    ratios = [f"/ sdpa at {n}" for n in lengths]
    head = [
        "mechanism",
        *start,
        *ratios,
        *growth.values(),
        sizes,
        rival,
    ]
    lines = [
        [
            f"`{name}`",
            *([pays.get(name, _NONE)] if pays else []),
            *_by_length(found, lengths, lambda row: _value(row, "sdpa")),
            *(_exponents(grown.get((name, quantity))) for quantity in growth),
            _megabytes(found.get(end)),
            ratio(found),
        ]
        for name, found in sorted(by_name.items())
    ]
    return markdown_table(head, lines)


def _models(rows: Sequence[Row], by_name: dict[str, dict[int, Row]], lengths: Sequence[int]) -> str:
    head = ["attention", *(f"tax at {n}" for n in lengths), *(f"/ stock at {n}" for n in lengths)]
    stock = {row.case.length: row for row in rows if row.role == "reference"}
    lines = [
        [
            name,
            *_by_length(found, lengths, lambda row: _NONE if row.tax is None else f"{row.tax:.2f}"),
            *_by_length(found, lengths, lambda row: _value(row, "stock")),
        ]
        for name, found in {"stock": stock, **by_name}.items()
    ]
    return markdown_table(head, lines)


def _by_length(
    rows: dict[int, Row], lengths: Sequence[int], value: Callable[[Row], str]
) -> list[str]:
    return [value(rows[length]) if length in rows else _NONE for length in lengths]


def _value(row: Row, to: str) -> str:
    return figures(row.ratios[to].value) if to in row.ratios else _NONE


def _any_declared(found: Sequence[Scaling]) -> bool:
    return any(one.declared is not None for one in found)


def _exponents(found: Scaling | None) -> str:
    """The fitted and, in parentheses, the declared one, if there is one."""
    if found is None:
        return _NONE
    declared = "" if found.declared is None else f" ({found.declared:.2f})"
    return f"{found.exponent:.2f}{declared}"


def _megabytes(row: Row | None) -> str:
    return megabytes(row.peak) if row else _NONE


def _best_peer(rows: dict[int, Row]) -> str:
    """At the longest length at which one was measured."""
    for length in sorted(rows, reverse=True):
        if best := rows[length].best_peer:
            return f"{figures(best[1].value)} ({best[0]})"
    return _NONE


def _eager(rows: dict[int, Row]) -> str:
    """At the longest length."""
    return _value(rows[max(rows)], "eager")
