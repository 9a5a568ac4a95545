"""What a model is: its class, its size, what runs in its layers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zoo_core import registry, words
from zoo_core.plan import ranges
from zoo_core.report.blocks import Block, Facts, Table
from zoo_core.report.records import Report


def model(report: Report) -> Iterator[Block]:
    """The facts, what runs in each layer, and what these mechanisms are."""
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
    return one.name, one.summary, words.growth(one.time), words.growth(one.memory), one.swap, cited
