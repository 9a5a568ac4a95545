"""What a diagnosis says: numbers by layer and head, tables, JSON, and warnings in plain words.

Imports no torch, so that a report can be read where nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Literal

from zoo_core.plain import finite, paragraph, table
from zoo_core.plan import ranges, together
from zoo_core.words import layer_numbers, number

#: What a diagnosis is made of, in this order; each is a field of the report.
Part = Literal["attention", "rank", "lipschitz", "depth", "sensitivity"]

#: The scores of a head that tables show, and what they call them; JSON has all.
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

FP16_MOST = 65504.0
DEAD, SATURATED, RESTING, ALIKE, COLLAPSED = 0.02, 0.9, 0.9, 0.95, 1e-3


@dataclass(frozen=True)
class HeadScore:
    """One head, averaged over the real queries of all samples. NaN: not defined there.

    entropy: of what a query looks at, in nats; uniformity: the same as a share of the most it
        could be, 0 = one key, 1 = all keys alike. Effective maps count by the size of numbers.
    effective_rank: exp of the entropy of the map's singular values as shares.
    distance: how far it looks, in tokens; on a grid in patches.
    prefix, separators: share of the weight on prefix tokens (CLS) and on separators.
    agreement: overlap of its map with the other heads' on average, 1 = the same.
    error: relative error of its output against exact softmax attention on the same q, k, v.
    share: size of its output relative to the average head of the layer.
    saturated: share of queries that give one key more than 0.99 of the weight.
    largest: largest number among q, k, v, q . k and the output; fp16 ends at 65504.
    broken: share of output numbers that are NaN or infinite; fp16_broken: of the mechanism run in
        fp16 on the same input.
    """

    entropy: float
    uniformity: float
    effective_rank: float
    distance: float
    prefix: float
    separators: float
    agreement: float
    error: float
    share: float
    saturated: float
    largest: float
    broken: float
    fp16_broken: float

    def warnings(self) -> Iterator[str]:
        """What is wrong with it, in words; the numbers stand in its fields."""
        if self.broken > 0:
            yield "NaN or infinity in the output"
        if self.fp16_broken > 0:
            yield "breaks in fp16; use bf16"
        elif self.largest > FP16_MOST:
            yield "numbers that overflow in fp16; use bf16"
        if self.share < DEAD:
            yield f"dead, its output is below {DEAD:.0%} of the average head's"
        if self.saturated > SATURATED:
            yield f"saturated, over {SATURATED:.0%} of the queries look at one key"
        # NaN, where there are no separators, counts for nothing here.
        idle = sum(x for x in (self.prefix, self.separators) if not math.isnan(x))
        if idle > RESTING:
            yield f"resting, over {RESTING:.0%} of the weight lies on the prefix and separators"


@dataclass(frozen=True)
class AttentionScore:
    """One attention layer. without_map: why scores of the map are missing, in words."""

    path: str
    mechanism: str
    heads: tuple[HeadScore, ...]
    without_map: str | None = None

    def mean(self, name: str) -> float:
        """A score averaged over the heads."""
        values: list[float] = [getattr(head, name) for head in self.heads]
        return sum(values) / len(values)


@dataclass(frozen=True)
class Collapse:
    """Residual ratio by depth, 1 = tokens differ, 0 = all alike; see `rank_collapse`.

    with_skip, attention_only: without MLPs; empty where tokens are dropped on the way. with_mlp:
        without skips; empty where a layer has no MLP that could be told from the rest as well.
    """

    model: tuple[float, ...]
    with_skip: tuple[float, ...]
    attention_only: tuple[float, ...]
    with_mlp: tuple[float, ...] = ()


@dataclass(frozen=True)
class LipschitzScore:
    """The Jacobian norm of one layer, and the bound its mechanism certifies, or None."""

    path: str
    mechanism: str
    norm: float
    bound: float | None


@dataclass(frozen=True)
class Sensitivity:
    """Relative change of what enters each layer, and of the output, for one of the parameters.

    size: relative size of the noise; the numbers are divided by it.
    """

    size: float
    by_depth: tuple[float, ...]
    output: float


@dataclass(frozen=True)
class DepthAdvice:
    """Rank of the embedding and a depth to match. An extrapolation, see `zoo_core.diagnose.depth`.

    width: min(dim, rank). bottlenecks: layers whose heads are together narrower than the model.
    """

    embedding: str
    dim: int
    rank: int
    effective_rank: float
    width: int
    depth: int
    suggested_depth: float
    bottlenecks: tuple[str, ...]
    basis: str = (
        "extrapolation: ln(width) = 5.039 + 0.0555 depth was fitted to causal language models"
    )


@dataclass(frozen=True)
class Diagnosis:
    """The report of `zoo.diagnose.measure`. A part that was not asked for or not done is None.

    samples: how many, described by `data`. unfinished: parts that an interruption left out or cut
        off; of one that was cut off, what was measured until then is there.
    """

    model: str
    data: str
    samples: int
    attention: tuple[AttentionScore, ...] | None = None
    rank: Collapse | None = None
    lipschitz: tuple[LipschitzScore, ...] | None = None
    depth: DepthAdvice | None = None
    sensitivity: Sensitivity | None = None
    unfinished: tuple[str, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """What to look at, in plain words, each with its layer and mechanism."""
        found = [*_about_heads(self.attention or ())]
        if self.rank is not None and self.rank.model[-1] < COLLAPSED:
            found.append(f"rank collapse: the last states are alike to {self.rank.model[-1]:.1e}")
        for one in self.lipschitz or ():
            if one.bound is not None and one.norm > one.bound * (1 + 1e-6):
                found.append(
                    f"{one.path} ({one.mechanism}): its Jacobian norm {one.norm:.4g} is above the "
                    f"bound {one.bound:.4g} that it certifies"
                )
        if self.depth is not None and self.depth.rank < self.depth.dim:
            found.append(
                f"{self.depth.embedding} has rank {self.depth.rank} in a width of {self.depth.dim}"
            )
        if self.unfinished:
            found.append(f"interrupted before these were done: {', '.join(self.unfinished)}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON object; what is not a number is null."""
        plain: dict[str, Any] = finite({**asdict(self), "warnings": self.warnings})
        return plain

    @property
    def by_depth(self) -> list[tuple[str, Sequence[float]]]:
        """What goes by depth, of what was measured: what it is, and a number for each layer.

        Of what enters it; some say something of the output too, in one number more.
        """
        columns: list[tuple[str, Sequence[float]]] = []
        if self.rank is not None:
            columns += [
                ("residual", self.rank.model),
                ("no MLPs", self.rank.with_skip),
                ("no skips", self.rank.with_mlp),
                ("attention only", self.rank.attention_only),
            ]
        if self.lipschitz is not None:
            bounds = [math.nan if one.bound is None else one.bound for one in self.lipschitz]
            columns += [("Jacobian norm", [one.norm for one in self.lipschitz])]
            columns += [("certified bound", bounds)]
        if self.sensitivity is not None:
            by_depth = (*self.sensitivity.by_depth, self.sensitivity.output)
            columns.append(("sensitivity", by_depth))
        return [(name, values) for name, values in columns if values]

    def depth_table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """`by_depth` as headings and rows; no rows where there is nothing."""
        columns = self.by_depth
        values = zip_longest(*(found for _, found in columns), fillvalue=math.nan)
        rows = [(str(n), *map(number, row)) for n, row in enumerate(values)]
        return ("what enters layer", *(name for name, _ in columns)), rows

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Tables and warnings for a terminal of so many columns; None: every line is whole."""
        texts = [f"warning: {text}" for text in self.warnings] or ["no warnings"]
        heads, rows = self.depth_table()
        parts = [
            paragraph(f"{self.model} on {self.samples} samples of {self.data}", width),
            self._attention_lines(width),
            table(heads, rows, width) if rows else [],
            [line for text in self._about_depth() for line in paragraph(text, width)],
            [line for text in texts for line in paragraph(text, width)],
        ]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _attention_lines(self, width: int | None) -> list[str]:
        """A line for each layer, with its path where there is room, else with its number."""
        if not self.attention:
            return []
        paths = [layer.path for layer in self.attention]
        heads = ("mechanism", *HEAD_SCORES.values())
        rows = [
            (layer.mechanism, *(number(layer.mean(name)) for name in HEAD_SCORES))
            for layer in self.attention
        ]
        what = "attention, mean of heads"
        whole = table((what, *heads), _named(paths, rows))
        numbers = layer_numbers(paths)
        if width is None or max(map(len, whole)) <= width:
            lines = whole
        elif numbers is None:
            lines = table((what, *heads), _named(paths, rows), width)
        else:
            title = paragraph(f"{together(paths)}, mean of heads", width)
            lines = [*title, *table(("layer", *heads), _named(numbers, rows), width)]
        reasons = by_reason((layer.path, layer.without_map) for layer in self.attention)
        return [*lines, *(line for text in reasons for line in paragraph(text, width))]

    def _about_depth(self) -> list[str]:
        if self.depth is None:
            return []
        one = self.depth
        return [
            f"{one.embedding}: rank {one.rank} of {one.dim}, effectively {one.effective_rank:.1f}; "
            f"{one.depth} layers, {one.suggested_depth:.1f} would match a width of {one.width} "
            f"({one.basis})",
            *one.bottlenecks,
        ]


def _about_heads(layers: Sequence[AttentionScore]) -> Iterator[str]:
    """Warnings of heads, those that say the same of several layers in one."""
    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    for layer in layers:
        for place, head in enumerate(layer.heads):
            for text in head.warnings():
                places = found.setdefault((layer.mechanism, text), {})
                places.setdefault(layer.path, []).append(place)
        if len(layer.heads) > 1 and layer.mean("agreement") > ALIKE:
            text = "the heads of a layer all look at the same"
            found.setdefault((layer.mechanism, text), {})[layer.path] = []
    for (mechanism, text), places in found.items():
        yield f"{together(list(places))} ({mechanism}){_which(list(places.values()))}: {text}"


def _which(heads: Sequence[Sequence[int]]) -> str:
    """Which heads of some layers; nothing where whole layers are meant."""
    first, count = heads[0], sum(map(len, heads))
    if any(other != first for other in heads):
        return f", {count} heads"
    return f", head{'s' * (len(first) > 1)} {ranges(first)}" if first else ""


def by_reason(reasons: Iterable[tuple[str, str | None]]) -> list[str]:
    """Paths and why there is nothing to say of them, or None: `layer.0-5.self: why`.

    Those that say the same share a line.
    """
    found: dict[str, list[str]] = {}
    for path, why in reasons:
        if why is not None:
            found.setdefault(why, []).append(path)
    return [f"{together(paths)}: {why}" for why, paths in found.items()]


def _named(names: Sequence[object], rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows that begin with a name each."""
    for name, row in zip(names, rows, strict=True):
        yield str(name), *row
