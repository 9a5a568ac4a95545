"""What was found out about one model, and about several; as JSON, Markdown or one page of HTML.

Imports no torch, so that a report can be read where nothing is computed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from zoo_core.bench.rows import Ratio, Row
from zoo_core.checkpoint.manifest import Manifest
from zoo_core.diagnose.reports import Diagnosis, by_reason
from zoo_core.fidelity.reports import Retention
from zoo_core.plain import finite, paragraph

if TYPE_CHECKING:
    from zoo_core.inspection import ModelReport
    from zoo_core.report.blocks import Page

#: What is measured, in this order; each is a field of the report.
Part = Literal["retention", "speed", "maps", "diagnosis"]
PARTS: tuple[Part, ...] = get_args(Part)

STOCK, PATCHED = "stock", "patched"
#: Why a part is missing.
NOT_ASKED = "not asked for"
INTERRUPTED = "interrupted before it was done"
#: Ratios of times this close to 1 mean nothing, whatever their error.
NOISE = 0.03

Cells = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Speed:
    """The model beside itself with its stock attention, by length.

    rows: "stock" and "patched" of each length. machine: what they were measured on, in one line.
    pays_from: from how many tokens on the patched one is faster, in words, or None.
    """

    rows: tuple[Row, ...]
    machine: str
    pays_from: str | None

    def row(self, name: str, length: int) -> Row | None:
        """One competitor at one length."""
        return next((r for r in self.rows if (r.name, r.case.length) == (name, length)), None)

    @property
    def lengths(self) -> list[int]:
        """The lengths, growing."""
        return sorted({row.case.length for row in self.rows})

    def ratio(self, length: int) -> Ratio | None:
        """Time of the patched model divided by that of the stock one, in the same rounds."""
        row = self.row(PATCHED, length)
        return row.ratios.get(STOCK) if row else None

    def memory(self, length: int) -> float | None:
        """Working memory of the patched model divided by that of the stock one."""
        ours, stock = self.row(PATCHED, length), self.row(STOCK, length)
        return ours.peak / stock.peak if ours and stock and ours.peak and stock.peak else None

    def order(self, length: int) -> Literal["faster", "slower", "alike"] | None:
        """How the patched model compares, where the difference is more than the noise."""
        found = self.ratio(length)
        if found is None:
            return None
        if abs(found.value - 1) <= max(NOISE, 2 * found.error):
            return "alike"
        return "faster" if found.value < 1 else "slower"


@dataclass(frozen=True)
class LayerMap:
    """The map of one attention layer on one sample, the mean of its heads; or their rollout.

    queries, keys: real tokens. cells: the map, tokens joined into groups where they are many.
    near: share of the weight at most two tokens away, NaN in cross-attention; prefix: on CLS.
    over_image: what CLS sees of each patch, or None. undefined: why there is no map, in words.
    """

    path: str
    mechanism: str
    queries: int = 0
    keys: int = 0
    cells: Cells = ()
    near: float = math.nan
    prefix: float = math.nan
    over_image: Cells | None = None
    undefined: str | None = None


@dataclass(frozen=True)
class Maps:
    """The maps of every attention layer on one sample.

    rollout: what reaches the last layer's tokens through all layers and skip connections, or None
        where a layer has no map, or one that is not square.
    """

    layers: tuple[LayerMap, ...]
    rollout: LayerMap | None = None

    @property
    def undefined(self) -> list[str]:
        """Why layers have no map, in words; layers that say the same together."""
        return by_reason((one.path, one.undefined) for one in self.layers)


class Paged(ABC):
    """What has a page can be written as one."""

    @abstractmethod
    def page(self) -> Page:
        """The content of the page."""

    @abstractmethod
    def text(self, width: int | None = None) -> str:
        """The gist for a terminal of so many columns; None: every line is whole."""

    def __str__(self) -> str:
        return self.text()

    def html(self) -> str:
        """One self-contained page."""
        from zoo_core.report.rendering import html

        return html(self.page())

    def markdown(self) -> str:
        """The same for a model card: sections from `##` on, without pictures and long tables."""
        from zoo_core.report.rendering import markdown

        return markdown(self.page())

    def write(self, path: str | Path) -> Path:
        """Write the page, or Markdown where the path ends in .md. Raises ZooError."""
        from zoo_core.report.rendering import write

        return write(self.page(), path)


@dataclass(frozen=True)
class Report(Paged):
    """Everything about one model. A part that was not measured is None, and `missing` says why.

    model: what zoo.inspect says. manifest: of the directory it was loaded from, if any.
    parameters: their number. data, samples: what it was measured on. made: the day, and with what.
    """

    name: str
    model: ModelReport
    manifest: Manifest | None
    parameters: int
    data: str
    samples: int
    made: Mapping[str, str]
    retention: Retention | None = None
    speed: Speed | None = None
    maps: Maps | None = None
    diagnosis: Diagnosis | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def mechanisms(self) -> list[str]:
        """The qualified names of what runs, in the order of the layers."""
        return list(dict.fromkeys(site.mechanism for site in self.model.sites))

    @property
    def attention(self) -> str:
        """The short names of what runs, in words."""
        return " and ".join(name.rpartition("/")[2] for name in self.mechanisms)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C left something out."""
        unfinished = self.diagnosis is not None and bool(self.diagnosis.unfinished)
        return unfinished or INTERRUPTED in self.missing.values()

    @property
    def warnings(self) -> list[str]:
        """What to look at, in plain words."""
        from zoo_core.report.findings import warnings

        return warnings(self)

    def page(self) -> Page:
        """The content of the page."""
        from zoo_core.report.sections import page

        return page(self)

    def text(self, width: int | None = None) -> str:
        """The verdict and the warnings for a terminal of so many columns."""
        page = self.page()
        warnings = [f"warning: {text}" for text in self.warnings]
        texts = (page.title, page.subtitle, "", *page.verdict, *warnings)
        return "\n".join(line for text in texts for line in paragraph(text, width))

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON object, without the cells of the maps; NaN becomes null."""
        speed = self.speed
        plain: dict[str, Any] = finite(
            {
                "name": self.name,
                "model": self.model.as_dict(),
                "manifest": self.manifest.as_dict() if self.manifest else None,
                "parameters": self.parameters,
                "data": self.data,
                "samples": self.samples,
                "made": dict(self.made),
                "retention": self.retention.as_dict() if self.retention else None,
                "speed": speed and {**asdict(speed), "rows": [row.as_dict() for row in speed.rows]},
                "maps": None if self.maps is None else _without_cells(self.maps),
                "diagnosis": self.diagnosis.as_dict() if self.diagnosis else None,
                "missing": dict(self.missing),
                "warnings": self.warnings,
            }
        )
        return plain


@dataclass(frozen=True)
class Comparison(Paged):
    """Several models on the same data. failed: models that could not be examined, and why."""

    reports: tuple[Report, ...]
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C left something out."""
        return INTERRUPTED in self.failed.values() or any(one.interrupted for one in self.reports)

    def page(self) -> Page:
        """The content of the page."""
        from zoo_core.report.side_by_side import page

        return page(self)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        reports = [report.as_dict() for report in self.reports]
        return {"models": reports, "failed": dict(self.failed)}

    def text(self, width: int | None = None) -> str:
        """The overview for a terminal of so many columns."""
        from zoo_core.report.side_by_side import overview

        return "\n".join(overview(self.reports).lines(width))


def _without_cells(maps: Maps) -> dict[str, Any]:
    def plain(one: LayerMap) -> dict[str, Any]:
        return {k: v for k, v in asdict(one).items() if k not in ("cells", "over_image")}

    rollout = None if maps.rollout is None else plain(maps.rollout)
    return {"layers": [plain(one) for one in maps.layers], "rollout": rollout}
