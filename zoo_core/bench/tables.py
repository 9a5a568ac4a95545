"""Tables for people, by Rich.

A column named /sdpa holds times divided by that of sdpa in the same rounds: below 1 is faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zoo_core.bench import baseline, scaling
from zoo_core.bench.baseline import Break, Change
from zoo_core.bench.cases import Case
from zoo_core.bench.rows import Ratio, Row
from zoo_core.bench.scaling import BreakEven, Scaling

if TYPE_CHECKING:
    from rich.table import Table

_AXES = ("mode", "batch", "heads", "width", "dtype", "device", "padded", "native")
_NONE = "-"

LAYERS_LEGEND = (
    "Times divided by others of the same rounds, below 1 is faster: /sdpa fused softmax; /flops "
    "and /bytes the least time for its products, and for q, k, v and output, at the rates measured "
    "here; /peer the fastest public implementation."
)
MODELS_LEGEND = (
    "tax = (t - floor) / floor; the floor is the same model whose attention returns the values. "
    "/stock and /peer: times divided by the stock model's and by the fastest public model's."
)
GROWTH_LEGEND = (
    "Time and memory grow like n to these powers, fitted over the lengths above; declared: what "
    "the mechanism's record says over the same lengths (of time for a forward, of memory for "
    f"forward and backward together), off where the fit is farther than {scaling.TOLERANCE} away "
    "(off? if only by its error)."
)
PAYS_LEGEND = "pays from: the tokens from which on it is faster than {}."
CHANGES_LEGEND = (
    "before and now: time divided by that of fused softmax in the same run (whole models: of their "
    f"floor). A change within noise, the tolerance or {baseline.ERRORS:g} standard errors, is "
    "none; broken: what was measured before and is refused now."
)


def layers_table(rows: Sequence[Row]) -> Table:
    """Bare mechanisms: time, its ratios, and peak memory, by length."""
    axes = _varying(row.case for row in rows)
    eager = any("eager" in row.ratios for row in rows)
    peers = any(row.best_peer for row in rows)
    spare = [*(["/eager"] if eager else []), *(["/peer"] if peers else [])]
    table = _table("tokens", *axes)
    _numbers(table, "ms", "+-%", "/sdpa", "/flops", "/bytes", *spare, "MB")
    for row in _measured(rows):
        ratios = row.ratios
        _add(
            table,
            row,
            *_start(row, axes),
            *_time(row),
            _verdict(ratios.get("sdpa")),
            _ratio(ratios.get("flops")),
            _ratio(ratios.get("bytes")),
            *([_verdict(ratios.get("eager"))] if eager else []),
            *([_verdict(row.best_peer and row.best_peer[1])] if peers else []),
            megabytes(row.peak),
        )
    return table


def models_table(rows: Sequence[Row]) -> Table:
    """Whole models: time, the attention tax, the ratio to the stock model, and peak memory."""
    axes = _varying(row.case for row in rows)
    peers = any(row.best_peer for row in rows)
    table = _table("tokens", *axes)
    _numbers(table, "ms", "+-%", "tax", "/stock", *(["/peer"] if peers else []), "MB")
    for row in _measured(rows):
        _add(
            table,
            row,
            *_start(row, axes),
            *_time(row),
            _NONE if row.tax is None else f"{row.tax:.2f}",
            _verdict(row.ratios.get("stock")),
            *([_verdict(row.best_peer and row.best_peer[1])] if peers else []),
            megabytes(row.peak),
        )
    return table


def scaling_table(found: Iterable[Scaling], breaks: Iterable[BreakEven]) -> Table:
    """One line for each competitor and mode: fitted exponents, declared ones, break-even."""
    found, breaks = list(found), list(breaks)
    fitted = ["time", "declared", "memory", "declared"] if found else []
    cases = [*(one.case for one in found), *(one.case for one in breaks)]
    axes = [axis for axis in _varying(cases) if axis != "mode"]
    table = _table("mode", *axes, *fitted, "pays from")
    by: dict[tuple[str, str, Case], dict[str, Scaling]] = {}
    for one in found:
        by.setdefault((one.name, one.of, one.case), {})[one.quantity] = one
    where = {(one.name, "", one.case): one for one in breaks}
    for key in dict.fromkeys([*by, *where]):
        name, of, case = key
        fits = by.get(key, {})
        table.add_row(
            f"  {name}" if of else name,
            case.mode,
            *(_axis(case, axis) for axis in axes),
            *(_exponent(fits.get("time")) if found else ()),
            *(_exponent(fits.get("memory")) if found else ()),
            str(where.get(key, _NONE)),
            style="" if key in where else "dim",
        )
    return table


def changes_table(changes: Iterable[Change], broken: Iterable[Break] = ()) -> Table:
    """What a comparison found; what is broken comes last."""
    table = _table("tokens", "mode")
    _numbers(table, "before", "now", "change", "noise")
    table.add_column("")
    colours = {"slower": "red", "faster": "green", "same": "dim"}
    for one in changes:
        case = one.row.case
        table.add_row(
            one.row.name,
            str(case.length),
            case.mode,
            _ratio(one.before),
            _ratio(one.now),
            f"{one.change - 1:+.0%}",
            f"{one.noise:.0%}",
            f"[{colours[one.verdict]}]{one.verdict}[/]",
        )
    for gone in broken:
        case, before = gone.row.case, _ratio(gone.before)
        cells = (gone.row.name, str(case.length), case.mode, before, *[_NONE] * 3)
        table.add_row(*cells, "[red]broken[/]")
    return table


def caption(rows: Sequence[Row]) -> str:
    """What all rows have in common, in one line."""
    case = rows[0].case
    varying = _varying(row.case for row in rows)
    parts = {
        "batch": f"batch {case.batch}",
        "heads": f"{case.heads} heads",
        "width": f"width {case.width}",
        "dtype": case.dtype,
        "mode": case.mode,
        "padded": "padded" if case.padded else "",
        "native": "native kernels" if case.native else "",
    }
    return ", ".join(text for axis, text in parts.items() if text and axis not in varying)


def headline(machine: Mapping[str, Any]) -> str:
    """What `describe_machine` says, in one line."""
    device = machine["device"] if machine["device"] != "cpu" else machine["processor"]
    threads = machine["threads"]
    return (
        f"{device}, {threads} {'thread' if threads == 1 else 'threads'} on {machine['cores']} "
        f"cores, torch {machine['torch']}"
    )


def megabytes(size: int | None) -> str:
    """Three figures, in MB."""
    return _NONE if size is None else figures(size / 1e6)


def figures(value: float) -> str:
    """A number with three figures, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("mechanism", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right" if column == "tokens" else "left", no_wrap=True)
    return table


def _numbers(table: Table, *columns: str) -> None:
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)


def _add(table: Table, row: Row, *cells: str) -> None:
    """A row; what is not a mechanism is dim, and a reference begins the next case."""
    if row.role == "reference" and table.row_count:
        table.add_section()
    table.add_row(*cells, style="" if row.role == "mechanism" else "dim")


def _measured(rows: Iterable[Row]) -> list[Row]:
    """Rows with numbers."""
    return [row for row in rows if row.seconds is not None]


def _varying(cases: Iterable[Case]) -> list[str]:
    """The axes besides the length that need a column."""
    cases = list(cases)
    return [axis for axis in _AXES if len({getattr(case, axis) for case in cases}) > 1]


def _axis(case: Case, axis: str) -> str:
    value = getattr(case, axis)
    return (axis if value else "") if axis in ("padded", "native") else str(value)


def _start(row: Row, axes: Sequence[str]) -> list[str]:
    name = f"  {row.name}" if row.role == "peer" else row.name
    return [name, str(row.case.length), *(_axis(row.case, axis) for axis in axes)]


def _time(row: Row) -> list[str]:
    if row.seconds is None or row.spread is None:
        return [_NONE, _NONE]
    return [figures(row.seconds * 1e3), f"{50 * row.spread / row.seconds:.0f}"]


def _ratio(ratio: Ratio | None) -> str:
    return _NONE if ratio is None else figures(ratio.value)


def _verdict(ratio: Ratio | None) -> str:
    """Green where it is faster beyond its error, red where it is slower."""
    if ratio is None:
        return _NONE
    colour = ""
    if abs(ratio.value - 1) > 2 * ratio.error:
        colour = "green" if ratio.value < 1 else "red"
    return f"[{colour}]{_ratio(ratio)}[/]" if colour else _ratio(ratio)


def _exponent(fit: Scaling | None) -> tuple[str, str]:
    """`1.02 +-0.03`, and what the record says; marked where they disagree."""
    if fit is None:
        return _NONE, _NONE
    measured = f"{fit.exponent:.2f} +-{fit.error:.2f}"
    declared = _NONE if fit.declared is None else f"{fit.declared:.2f}"
    if not fit.off:
        return measured, declared
    colour, mark = ("red", "off") if fit.sure else ("yellow", "off?")
    return f"[{colour}]{measured}[/]", f"[{colour}]{declared} {mark}[/]"
