"""What stands on the page of one model. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from zoo_core import registry
from zoo_core.checkpoint import calibration
from zoo_core.diagnose.reports import Diagnosis
from zoo_core.fidelity.reports import SCORES, Estimate, Retention
from zoo_core.plan import ranges
from zoo_core.report import findings, heat, words
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
from zoo_core.report.records import PATCHED, STOCK, LayerMap, Report, Speed

FLOOR = "uniform attention"
#: Weights below 0 that are smaller than this share of the largest are rounding.
_ROUNDING = 1e-3


def page(report: Report) -> Page:
    """The whole page of one model."""
    sections = [
        Section("warnings", "Warnings", _warnings(report)),
        Section("model", "What it is", list(_model(report))),
        Section("origin", "Where it came from", list(_origin(report))),
        Section("kept", "What it keeps", list(_kept(report))),
        Section("calibration", "Calibration", _calibration(report)),
        Section("speed", "Speed beside the stock model", list(_speed(report))),
        Section("maps", "Attention maps", list(_maps(report))),
        Section("diagnosis", "Diagnosis", list(_diagnosis(report))),
        Section("method", "How this was measured", [method(report)]),
    ]
    return Page(
        title=report.name,
        subtitle=f"{report.model.model} with {report.attention} attention",
        verdict=findings.verdict(report),
        sections=sections,
        footer=made(report),
    )


def made(report: Report) -> str:
    """With what, and when."""
    about = dict(report.made)
    day = about.pop("date", "")
    tools = ", ".join(f"{name} {version}" for name, version in about.items())
    return f"Made with {tools} on {day}."


def method(report: Report) -> Facts:
    """Data, samples and settings."""
    rows = [("data", report.data), ("samples", f"{report.samples}")]
    rows += [(f"{part}: left out", reason) for part, reason in report.missing.items()]
    rows += [(name, version) for name, version in report.made.items()]
    return Facts(rows)


def absent(report: Report, part: str) -> Text:
    """Why a part is not there, in words."""
    return Text(f"Not measured: {report.missing.get(part, 'no reason is known')}.")


def _warnings(report: Report) -> list[Block]:
    found = report.warnings
    return [Bullets([_sentence(text) for text in found]) if found else Text("There are none.")]


def _model(report: Report) -> Iterator[Block]:
    about, manifest = report.model, report.manifest
    rows = [("class", about.model), ("architecture", about.architecture)]
    if manifest is not None:
        rows.append(("library", f"{manifest.library} {manifest.library_version}".strip()))
    if about.wrapper:
        rows.append(("inside", about.wrapper))
    own = sum(site.parameters for site in about.sites)
    share = words.percent(own / report.parameters) if report.parameters else "-"
    rows.append(("parameters", f"{report.parameters:,}"))
    rows.append(("of these the mechanism's own", f"{own:,} ({share})"))
    yield Facts(rows)
    entries = ("layers", "attention", "options", "own parameters", "ignores")
    yield Table("What runs in each attention layer", entries, list(_entries(report)))
    known = [registry.mechanism(name) for name in report.mechanisms if registry.owners(name)]
    if known:
        heads = ("mechanism", "what it does", "time", "memory", "as a swap", "paper")
        yield Table("The mechanisms", heads, [_mechanism(one) for one in known])


def _entries(report: Report) -> Iterator[tuple[str, ...]]:
    """Layers with the same attention in one row."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for site in report.model.sites:
        options = ", ".join(f"{key}={value}" for key, value in site.options.items())
        key = (site.kind, site.mechanism, options, ", ".join(site.unused))
        groups.setdefault(key, []).append(site)
    for (kind, mechanism, options, unused), sites in groups.items():
        layers = ranges([site.layer for site in sites])
        own = sum(site.parameters for site in sites)
        where = f"cross {layers}" if kind == "cross" else layers
        yield where, mechanism, options or "none", f"{own:,}", unused or "nothing"


def _mechanism(one: Any) -> tuple[str, ...]:
    paper = one.paper
    where = f", arXiv:{paper.arxiv}" if paper and paper.arxiv else ""
    cited = f"{paper.title}, {paper.year}{where}" if paper else "-"
    return one.name, one.summary, _growth(one.time), _growth(one.memory), one.swap, cited


def _growth(text: str) -> str:
    return text.replace("**2", "²").replace("**3", "³").replace("**", "^").replace("*", "·")


def _origin(report: Report) -> Iterator[Block]:
    rows = [*_source(report.model.source), *_manifest(report), *_loaded(report.model.loaded)]
    if rows:
        yield Facts(rows)
    if report.manifest is None and report.model.source is None:
        yield Text("The model was in memory when it was measured: no hashes of files vouch for it.")
    elif report.manifest is not None and not report.manifest.files:
        yield Text("The checkpoint was written by stock tools, which keep no hashes of its files.")


def _source(source: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if source is None:
        return
    yield "pulled from", f"{source['repo']} at {source['commit']}, {source['endpoint']}"
    if source.get("base"):
        yield "added to", str(source["base"])
    yield from ((f"sha256 of {name}", digest) for name, digest in source["files"].items())


def _manifest(report: Report) -> Iterator[tuple[str, str]]:
    manifest = report.manifest
    if manifest is None:
        return
    for name, file in manifest.files.items():
        yield f"sha256 of {name}", f"{file.sha256} ({words.megabytes(file.size)})"
    if manifest.base is not None:
        base = manifest.base
        yield "derives from", f"{base.repo} at {base.commit}, weights {base.sha256}"
    if manifest.created_with:
        tools = ", ".join(f"{name} {version}" for name, version in manifest.created_with.items())
        yield "written with", tools
    for entry in manifest.attention:
        owner = f"{entry['distribution']} {entry['version']}".strip()
        yield f"plugin of {entry['mechanism']}", owner or "none, it was registered by hand"


def _loaded(loaded: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if loaded is None:
        return
    source = PurePath(str(loaded["source"]))
    place = f"a local folder, {source.name}" if source.is_absolute() else str(source)
    yield "pretrained weights", f"{place}, {words.plural(loaded['loaded'], 'tensor')} loaded"
    for name in ("new", "unused", "resized"):
        if tensors := loaded.get(name):
            shown = ", ".join(tensors[:5]) + (", ..." if len(tensors) > 5 else "")
            yield f"{name} tensors", f"{len(tensors)}: {shown}"


def _kept(report: Report) -> Iterator[Block]:
    found = report.retention
    if found is None:
        yield absent(report, "retention")
        return
    yield Text(
        "The model beside its original on the same samples. The floor is the same model whose "
        "attention layers only average what they may see: what a swap keeps lies above it."
    )
    rows = [
        Range(SCORES[name][0], score.value, score.low, score.high, score.floor)
        for name, score in found.scores.items()
        if score.stock == 1
    ]
    yield Ranges("Kept of the original", rows, 1.0, "original", FLOOR)
    yield scores_table(found)
    yield from _by_layer(found)


def scores_table(found: Retention) -> Table:
    """All scores of one model."""
    rows = [_score(SCORES[name][0], score) for name, score in found.scores.items()]
    if found.probe is not None:
        rows.append(_score("accuracy of a linear probe", found.probe))
    heads = ("score", "kept", "95 % interval", FLOOR, "original")
    return Table(f"Scores on {found.samples} samples", heads, rows)


def _score(label: str, score: Estimate) -> tuple[str, ...]:
    ends = (words.number(score.floor), words.number(score.stock))
    return label, words.number(score.value), words.interval(score.low, score.high), *ends


def _by_layer(found: Retention) -> Iterator[Block]:
    if not found.layers:
        yield Text("By layer nothing can be said: the two models are built differently.")
        return
    places = [str(number) for number in range(len(found.layers))]
    for title, scores in (
        ("Error of the attention output", [layer.error for layer in found.layers]),
        ("Cosine of the tokens that enter", [layer.cosine for layer in found.layers]),
    ):
        ours = Series(
            "this model",
            [score.value for score in scores],
            band=[(score.low, score.high) for score in scores],
        )
        floor = Series(FLOOR, [score.floor for score in scores], "floor")
        yield Lines(title, places, "attention layer", [ours, floor])
    rows = [
        (
            layer.path,
            words.number(layer.error.value),
            words.interval(layer.error.low, layer.error.high),
            words.number(layer.error.floor),
            words.number(layer.cosine.value),
            words.number(layer.cosine.floor),
        )
        for layer in found.layers
    ]
    heads = ("layer", "error", "95 % interval", "its floor", "cosine of its input", "its floor")
    yield Table("By layer", heads, rows, detail=True)


def _calibration(report: Report) -> list[Block]:
    result = report.model.calibration
    if result is None:
        return [Text("The attention was not calibrated.")]
    rows = calibration.scores(result)
    blocks: list[Block] = [Text(f"The attention was {calibration.sentence(result)}.")]
    if rows:
        heads = ("score", "before", "after", FLOOR)
        blocks.append(Table("What the calibration won, on samples held out", heads, rows))
    return blocks


def _speed(report: Report) -> Iterator[Block]:
    speed = report.speed
    if speed is None:
        yield absent(report, "speed")
        return
    yield Text(f"One forward of one sample, by turns with the stock model, on {speed.machine}.")
    yield from map(Text, _pays(speed))
    lengths = speed.lengths
    if len(lengths) > 1:
        places = [str(length) for length in lengths]
        series = [
            Series("this model", _milliseconds(speed, PATCHED)),
            Series("stock model", _milliseconds(speed, STOCK), "stock"),
        ]
        yield Lines("Time of a forward, ms", places, "tokens", series, logarithmic=True)
    heads = ("tokens", "this model", "stock model", "time ratio", "memory", "stock memory")
    yield Table("Time and working memory", heads, [_speed_row(speed, n) for n in lengths])


def _pays(speed: Speed) -> Iterator[str]:
    """From which length on it is faster, where that is more than noise."""
    longest = speed.lengths[-1]
    order = speed.order(longest)
    if order == "slower":
        yield f"Up to {longest} tokens the stock model is faster."
    elif order == "alike":
        yield f"At {longest} tokens both are as fast, within the noise of the measurement."
    elif order == "faster" and speed.pays_from is None:
        yield f"At {longest} tokens it is faster than the stock model."
    elif order == "faster" and speed.pays_from is not None:
        yield f"It is faster than the stock model from {speed.pays_from} tokens on."


def _milliseconds(speed: Speed, name: str) -> list[float]:
    rows = [speed.row(name, length) for length in speed.lengths]
    return [row.seconds * 1e3 if row and row.seconds else math.nan for row in rows]


def _speed_row(speed: Speed, length: int) -> tuple[str, ...]:
    ours, stock = speed.row(PATCHED, length), speed.row(STOCK, length)
    times = [words.milliseconds(row.seconds if row else None) for row in (ours, stock)]
    peaks = [words.megabytes(row.peak if row else None) for row in (ours, stock)]
    return str(length), *times, words.with_error(speed.ratio(length)), *peaks


def _maps(report: Report) -> Iterator[Block]:
    maps = report.maps
    if maps is None:
        yield absent(report, "maps")
        return
    figures = [
        map_figure(one, f"layer {n}") for n, one in enumerate(maps.layers) if one.undefined is None
    ]
    if maps.rollout is not None:
        figures.append(map_figure(maps.rollout, "rollout"))
    if figures:
        yield Text(
            "Who looks (rows) at whom (columns), on one sample, the mean of the heads, padding "
            "left out. Each map has its own scale. Where tokens are many they are joined into "
            "groups. The effective map of a mechanism without weights may hold negative numbers."
        )
        if maps.rollout is not None:
            yield Text(
                "The rollout follows the maps through all layers and skip connections: how much of "
                "each token that enters (columns) reaches each token that leaves (rows)."
            )
        yield Gallery(figures)
    if maps.undefined:
        yield Bullets([_sentence(text) for text in maps.undefined])


def map_figure(one: LayerMap, title: str) -> Figure:
    """The picture of one layer, and that over the image where there is one."""
    pictures = [Picture(one.cells, map_words(one, title))]
    if one.over_image is not None:
        seen = f"What the class token looks at in the image, {title}; most at {_place(one)}"
        pictures.append(Picture(one.over_image, seen))
    most, lowest = heat.peak(one.cells), heat.least(one.cells)
    facts = [one.mechanism, f"largest {words.number(most)}"]
    if -lowest > _ROUNDING * most:
        facts.append(f"lowest {words.number(lowest)}")
    if not math.isnan(one.near):
        facts.append(f"{words.percent(one.near)} within 2 tokens")
    facts.append(f"{words.percent(one.prefix)} on the prefix")
    return Figure(pictures, title, ", ".join(facts))


def map_words(one: LayerMap, title: str) -> str:
    """A map for those who do not see it."""
    rows, columns = len(one.cells), len(one.cells[0]) if one.cells else 0
    size = f"{one.queries} queries by {one.keys} keys"
    joined = f" in {rows} by {columns} groups" if (rows, columns) != (one.queries, one.keys) else ""
    near = "" if math.isnan(one.near) else f", {words.percent(one.near)} of the weight near by"
    return f"Attention map of {title}, {one.mechanism}: {size}{joined}{near}"


def _place(one: LayerMap) -> str:
    cells = one.over_image or ()
    best = max((value, r, c) for r, row in enumerate(cells) for c, value in enumerate(row))
    return f"row {best[1] + 1} of {len(cells)}, column {best[2] + 1} of {len(cells[0])}"


#: Score of a head -> what the page calls it.
HEAD_SCORES = {
    "uniformity": "uniformity",
    "effective_rank": "effective rank",
    "distance": "distance",
    "prefix": "on prefix",
    "separators": "on separators",
    "agreement": "heads agree",
    "error": "error to softmax",
    "saturated": "saturated",
}


def _diagnosis(report: Report) -> Iterator[Block]:
    found = report.diagnosis
    if found is None:
        yield absent(report, "diagnosis")
        return
    yield Text(
        "Uniformity 0 = a query looks at one key, 1 = at all alike. Effective rank: how many "
        "different rows a map has. Distance: how far a head looks, in tokens, or patches of an "
        "image. Error: against exact softmax attention on the same queries, keys and values."
    )
    if found.attention:
        yield from _heads(found)
    yield from _by_depth(found)
    if found.depth is not None:
        one = found.depth
        yield Text(
            f"The embedding ({one.embedding}) has rank {one.rank} in a width of {one.dim}, of "
            f"which effectively {one.effective_rank:.0f} are used. The model has {one.depth} "
            f"layers; {one.suggested_depth:.0f} would match a width of {one.width} ({one.basis})."
        )


def _heads(found: Diagnosis) -> Iterator[Block]:
    names = tuple(HEAD_SCORES)
    layers = found.attention or ()
    rows = [
        (str(n), layer.mechanism, *(words.number(layer.mean(name)) for name in names))
        for n, layer in enumerate(layers)
    ]
    heads = ("layer", "attention", *HEAD_SCORES.values())
    yield Table("Attention by layer, mean of the heads", heads, rows)
    each = [
        (f"{n}, head {h}", *(words.number(getattr(head, name)) for name in names))
        for n, layer in enumerate(layers)
        for h, head in enumerate(layer.heads)
    ]
    yield Table("Attention by head", ("layer", *HEAD_SCORES.values()), each, detail=True)


def _by_depth(found: Diagnosis) -> Iterator[Block]:
    rank = found.rank
    if rank is not None:
        series = [Series("in the model", rank.model)]
        if rank.with_skip:
            series.append(Series("without MLPs", rank.with_skip, "stock"))
        if rank.with_mlp:
            series.append(Series("without skips", rank.with_mlp, "other"))
        if rank.attention_only:
            series.append(Series("attention only", rank.attention_only, "floor"))
        places = [str(number) for number in range(len(rank.model))]
        title = "Rank collapse: how different tokens are, 1 = most"
        yield Lines(title, places, "what enters layer", series, logarithmic=True)
    columns: list[tuple[str, Sequence[float]]] = []
    if rank is not None:
        columns.append(("residual", rank.model))
    if found.lipschitz is not None:
        columns.append(("Jacobian norm", [one.norm for one in found.lipschitz]))
        bounds = [math.nan if one.bound is None else one.bound for one in found.lipschitz]
        columns.append(("certified bound", bounds))
    if found.sensitivity is not None:
        columns.append(("sensitivity", (*found.sensitivity.by_depth, found.sensitivity.output)))
    if columns:
        depth = max(len(values) for _, values in columns)
        rows = [
            (str(n), *(words.number(v[n]) if n < len(v) else "-" for _, v in columns))
            for n in range(depth)
        ]
        heads = ("what enters layer", *(name for name, _ in columns))
        yield Table("By depth", heads, rows, detail=True)


def _sentence(text: str) -> str:
    """With a full stop; a first letter that names a tensor stays as it is."""
    first = text.split(" ", 1)[0]
    start = text if set("._/") & set(first) else text[:1].upper() + text[1:]
    return start if start.endswith(".") else f"{start}."
