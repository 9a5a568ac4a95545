"""What the heads of a model do, and what the theory warns of. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from zoo_core import words
from zoo_core.diagnose.reports import HEAD_SCORES, Diagnosis
from zoo_core.report.blocks import Block, Lines, Series, Table, Text
from zoo_core.report.records import Report
from zoo_core.report.sections.wording import absent


def diagnosis(report: Report) -> Iterator[Block]:
    """Scores of heads, what goes by depth, and the depth that would match."""
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
    heads, rows = found.depth_table()
    if rows:
        yield Table("By depth", heads, rows, detail=True)
