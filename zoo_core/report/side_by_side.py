"""What stands on the page of a comparison. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from zoo_core import words
from zoo_core.bench.rows import Row
from zoo_core.diagnose.reports import HEAD_SCORES
from zoo_core.fidelity.reports import SCORES
from zoo_core.report import findings
from zoo_core.report.blocks import (
    Block,
    Bullets,
    Facts,
    Figure,
    Gallery,
    Lines,
    Page,
    Picture,
    Range,
    Ranges,
    Section,
    Series,
    Table,
    Text,
)
from zoo_core.report.records import PATCHED, Comparison, LayerMap, Maps, Report
from zoo_core.report.sections.maps import map_words
from zoo_core.report.sections.wording import FLOOR, made

_MOST_LINES = 6
_MOST_WARNINGS = 3


def page(comparison: Comparison) -> Page:
    """The whole page; the models that keep most come first."""
    reports = ranked(comparison.reports)
    first = reports[0]
    found = [
        Section("overview", "Overview", list(_overview(reports))),
        Section("models", "What they are", [_models(reports)]),
        Section("kept", "What they keep", list(_kept(reports))),
        Section("speed", "Speed beside the stock model", list(_speed(reports))),
        Section("maps", "Attention maps", list(_maps(reports))),
        Section("diagnosis", "Diagnosis", list(_diagnosis(reports))),
        Section("warnings", "Warnings", list(_warnings(reports))),
        *_failed(comparison),
        Section("method", "How this was measured", [_method(first)]),
    ]
    return Page(
        title=f"{words.plural(len(reports), 'model')} compared",
        subtitle=f"on {first.samples} samples of {first.data}",
        verdict=list(_verdict(reports, comparison)),
        sections=found,
        footer=made(first),
    )


def ranked(reports: Sequence[Report]) -> list[Report]:
    """Those that keep most first; those of which it is not known last."""
    return sorted(reports, key=lambda report: -_cosine(report, default=-2.0))


def overview(reports: Sequence[Report]) -> Table:
    """One line for each model; its attention where its name does not say that already."""
    heads: tuple[str, ...] = ("model", "attention", "kept", "95 % interval", "floor")
    heads += ("time", "memory", "warnings")
    rows = [_line(report) for report in reports]
    if all(report.name == report.attention for report in reports):
        heads, rows = _without_second(heads), [_without_second(row) for row in rows]
    return Table("The models at a glance", heads, rows)


def _without_second(row: tuple[str, ...]) -> tuple[str, ...]:
    return row[:1] + row[2:]


def _line(report: Report) -> tuple[str, ...]:
    score = findings.main_score(report)
    kept = ("-", "-", "-")
    if score is not None:
        interval = words.interval(score.low, score.high)
        kept = (words.number(score.value), interval, words.number(score.floor))
    ratios = (words.ratio(_time(report)), words.ratio(_memory(report)))
    return report.name, report.attention, *kept, *ratios, str(len(report.warnings))


def _cosine(report: Report, default: float = math.nan) -> float:
    score = findings.main_score(report)
    return default if score is None else score.value


def _time(report: Report) -> float | None:
    found = report.speed.ratio(report.speed.lengths[-1]) if report.speed else None
    return None if found is None else found.value


def _memory(report: Report) -> float | None:
    return report.speed.memory(report.speed.lengths[-1]) if report.speed else None


def _verdict(reports: Sequence[Report], comparison: Comparison) -> Iterator[str]:
    known = [report for report in reports if findings.main_score(report) is not None]
    if known:
        best = words.number(_cosine(known[0]))
        names = [report.name for report in known if words.number(_cosine(report)) == best]
        keep, its = ("keeps", "its") if len(names) == 1 else ("keep", "their")
        yield (
            f"{words.listed(names)} {keep} most: {its} embeddings have a cosine of {best} to the "
            "original's."
        )
    raced = [(r.speed, r) for r in reports if r.speed and r.speed.ratio(r.speed.lengths[-1])]
    if raced:
        speed, fastest = min(raced, key=lambda pair: _time(pair[1]) or math.inf)
        length = speed.lengths[-1]
        yield (
            f"{fastest.name} is fastest: at {length} tokens it takes "
            f"{words.with_error(speed.ratio(length))} times the time of the stock model."
        )
    if comparison.failed:
        yield f"{words.plural(len(comparison.failed), 'model')} could not be examined."


def _overview(reports: Sequence[Report]) -> Iterator[Block]:
    yield Text(
        "Kept: cosine of the embeddings to the original's. Floor: the same with uniform attention. "
        "Time and memory: divided by those of the stock model at the longest length measured."
    )
    yield overview(reports)
    rows = [
        Range(report.name, score.value, score.low, score.high, score.floor)
        for report in reports
        if (score := findings.main_score(report)) is not None
    ]
    if rows:
        title = "Kept: cosine of the embeddings"
        yield Ranges(title, rows, 1.0, "original", FLOOR)
    timed = [
        Range(report.name, ratio, ratio, ratio)
        for report in reports
        if (ratio := _time(report)) is not None
    ]
    if timed:
        title = "Time at the longest length, stock model = 1"
        yield Ranges(title, timed, 1.0, "stock model", logarithmic=True)


def _models(reports: Sequence[Report]) -> Table:
    heads = ("model", "class", "attention", "options", "parameters", "own parameters")
    rows = []
    for report in reports:
        sites = report.model.sites
        options = dict.fromkeys(
            ", ".join(f"{key}={value}" for key, value in site.options.items()) or "none"
            for site in sites
        )
        own = sum(site.parameters for site in sites)
        names = ", ".join(report.mechanisms)
        counts = (f"{report.parameters:,}", f"{own:,}")
        rows.append((report.name, report.model.model, names, "; ".join(options), *counts))
    return Table("What runs in them", heads, rows)


def _kept(reports: Sequence[Report]) -> Iterator[Block]:
    measured = [report for report in reports if report.retention is not None]
    yield from _absent(reports, "retention")
    if not measured:
        return
    names = [name for name in SCORES if any(_has(report, name) for report in measured)]
    rows = [(report.name, *(_score(report, name) for name in names)) for report in measured]
    heads = ("model", *(SCORES[name][0] for name in names))
    yield Table("Every score, and in brackets that of uniform attention", heads, rows)
    yield from _errors(measured)


def _has(report: Report, name: str) -> bool:
    return report.retention is not None and name in report.retention.scores


def _score(report: Report, name: str) -> str:
    score = report.retention.scores.get(name) if report.retention else None
    return "-" if score is None else f"{words.number(score.value)} ({words.number(score.floor)})"


def _errors(reports: Sequence[Report]) -> Iterator[Block]:
    """Errors by layer: a chart of a few models, a table of all."""
    errors = {
        report.name: [layer.error.value for layer in report.retention.layers]
        for report in reports
        if report.retention is not None and report.retention.layers
    }
    if not errors:
        return
    places = [str(n) for n in range(max(map(len, errors.values())))]
    if len(errors) <= _MOST_LINES:
        series = [Series(name, values, "other") for name, values in errors.items()]
        yield Lines("Error of the attention output", places, "attention layer", series)
    rows = [
        (name, *map(words.number, [*values, *[math.nan] * (len(places) - len(values))]))
        for name, values in errors.items()
    ]
    heads = ("model", *(f"layer {place}" for place in places))
    yield Table("Error of each attention layer's output", heads, rows, detail=True)


def _speed(reports: Sequence[Report]) -> Iterator[Block]:
    yield from _absent(reports, "speed")
    measured = [report for report in reports if report.speed is not None]
    if not measured:
        return
    lengths = sorted({n for report in measured if report.speed for n in report.speed.lengths})
    heads = ("model", *(f"{length} tokens" for length in lengths), "pays from")
    rows = [(r.name, *(_cell(r, n) for n in lengths), _pays(r)) for r in measured]
    machine = measured[0].speed.machine if measured[0].speed else ""
    yield Text(f"One forward of one sample on {machine}; in brackets divided by the stock model's.")
    yield Table("Time of a forward", heads, rows)


def _cell(report: Report, length: int) -> str:
    row: Row | None = report.speed.row(PATCHED, length) if report.speed else None
    if row is None or row.seconds is None:
        return "-"
    ratio = report.speed.ratio(length) if report.speed else None
    return f"{words.milliseconds(row.seconds)} ({words.with_error(ratio)})"


def _pays(report: Report) -> str:
    """From how many tokens on, where that is more than the noise of the measurement."""
    speed = report.speed
    if speed is None or speed.pays_from is None:
        return "-"
    order = speed.order(speed.lengths[-1])
    return "as fast" if order == "alike" else f"{speed.pays_from} tokens"


def _maps(reports: Sequence[Report]) -> Iterator[Block]:
    yield from _absent(reports, "maps")
    figures = []
    for report in reports:
        chosen = _spread(report.maps) if report.maps else []
        if chosen:
            pictures = [Picture(one.cells, map_words(one, where)) for where, one in chosen]
            figures.append(Figure(pictures, report.name, ", ".join(where for where, _ in chosen)))
    if figures:
        yield Text(
            "Who looks (rows) at whom (columns) in the first and the last layer, on one sample, "
            "the mean of the heads; and the rollout through all layers and skip connections. Each "
            "map has its own scale."
        )
        yield Gallery(figures)
    undefined = [
        f"{report.name}: {text}"
        for report in reports
        if report.maps is not None
        for text in report.maps.undefined
    ]
    if undefined:
        yield Bullets(undefined)


def _spread(maps: Maps) -> list[tuple[str, LayerMap]]:
    """The first and the last of the maps, and the rollout, with what to call them."""
    drawn = [(f"layer {n}", one) for n, one in enumerate(maps.layers) if one.undefined is None]
    ends = [drawn[0], drawn[-1]] if len(drawn) > 1 else drawn
    return ends if maps.rollout is None else [*ends, ("rollout", maps.rollout)]


def _diagnosis(reports: Sequence[Report]) -> Iterator[Block]:
    yield from _absent(reports, "diagnosis")
    rows = []
    for report in reports:
        found = report.diagnosis
        if found is None or not found.attention:
            continue
        layers = found.attention
        means = [_mean([layer.mean(name) for layer in layers]) for name in HEAD_SCORES]
        last = found.rank.model[-1] if found.rank else math.nan
        rows.append((report.name, *map(words.number, [*means, last])))
    if rows:
        heads = ("model", *HEAD_SCORES.values(), "residual at the end")
        yield Table("Mean over all heads", heads, rows)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _warnings(reports: Sequence[Report]) -> Iterator[Block]:
    """What is true of all models once, and then the gravest of each."""
    common = [t for t in reports[0].warnings if all(t in other.warnings for other in reports)]
    if common and len(reports) > 1:
        yield Bullets([f"all models: {text}" for text in common])
    rows = []
    for report in reports:
        found = [t for t in report.warnings if t not in common or len(reports) == 1]
        more = len(found) - _MOST_WARNINGS
        shown = "; ".join(found[:_MOST_WARNINGS])
        if shown:
            rows.append((report.name, f"{shown}; and {more} more" if more > 0 else shown))
    if rows:
        yield Text("The gravest of each model; its own report has all.")
        yield Facts(rows)
    elif not common:
        yield Text("There are none.")


def _failed(comparison: Comparison) -> Iterator[Section]:
    if comparison.failed:
        texts = [f"{name}: {reason}" for name, reason in comparison.failed.items()]
        yield Section("failed", "Not examined", [Bullets(texts)])


def _absent(reports: Sequence[Report], part: str) -> Iterator[Block]:
    """Whose part is missing, and why; those with the same reason in one line."""
    reasons: dict[str, list[str]] = {}
    for report in reports:
        if part in report.missing:
            reasons.setdefault(report.missing[part], []).append(report.name)
    if reasons:
        yield Bullets([f"{', '.join(names)}: {why}" for why, names in reasons.items()])


def _method(report: Report) -> Facts:
    rows = [("data", report.data), ("samples", f"{report.samples}")]
    return Facts([*rows, *((name, version) for name, version in report.made.items())])
