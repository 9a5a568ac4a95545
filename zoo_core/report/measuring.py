"""`zoo_core.report.examine`: everything a report says about one model, measured."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import zoo_core
from zoo_core.bench.contest import Effort
from zoo_core.checkpoint import adopting, load
from zoo_core.checkpoint.manifest import Manifest
from zoo_core.diagnose.reports import Diagnosis
from zoo_core.diagnose.reports import Part as DiagnosisPart
from zoo_core.errors import OptionError, ZooError
from zoo_core.fidelity import preparing
from zoo_core.fidelity.originals import original_in
from zoo_core.fidelity.reports import Retention
from zoo_core.fidelity.retaining import MINIMUM, retention
from zoo_core.fidelity.samples import Samples, encode
from zoo_core.fidelity.sources import Item, Source, read
from zoo_core.fidelity.training import to_device
from zoo_core.hosts import unwrap
from zoo_core.hub.places import Place
from zoo_core.inspection import inspect
from zoo_core.isolation import one_line
from zoo_core.report.racing import QUICK, race
from zoo_core.report.records import INTERRUPTED, NOT_ASKED, PARTS, Maps, Part, Report, Speed
from zoo_core.report.seeing import see
from zoo_core.telling import Progress, silent

#: "quick" leaves out what takes a backward pass for each layer, or many runs.
Depth = Literal["quick", "full"]
_DIAGNOSED: dict[Depth, tuple[DiagnosisPart, ...]] = {
    "quick": ("attention", "rank", "depth"),
    "full": ("attention", "rank", "lipschitz", "depth", "sensitivity"),
}
_EFFORTS = {"quick": QUICK, "full": Effort()}
_DIAGNOSED_SAMPLES = 8


def examine(
    model: Any,
    data: Any,
    *,
    name: str | None = None,
    parts: Iterable[Part] = PARTS,
    teacher: Any = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    column: str | None = None,
    limit: int = 64,
    batch_size: int = 8,
    effort: Depth = "quick",
    groups: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure a model on at most `limit` samples of some data; it is the same afterwards.

    model: a model, patched or not, a checkpoint directory, or what else zoo.load takes.
    name: what to call it; by default the directory's name, or its class and attention.
    data, teacher, tokenizer, max_length, column: as in `zoo.retention`; data may be a `Source` of
        `read`, and teacher a directory or owner/name@revision: a checkpoint, or stock weights.
    parts: "retention", "speed", "maps" (of one sample), "diagnosis".
    effort: "full" races longer and measures Jacobian norms and sensitivity as well.
    groups: the most rows and columns that a map is shown with. progress: told what is done.

    A part that cannot be measured is None in the report, and `missing` says why; so are those that
    Ctrl-C leaves out once one is done. Raises ZooError for a model or data that cannot be used.
    """
    wanted = _checked(parts, effort)
    tell = progress or silent
    directory = Path(model) if isinstance(model, str | Path) else None
    if directory is not None:
        tell(f"loading {model}")
        model = load(model)
        tokenizer = tokenizer or preparing.from_directory(directory)
    host = unwrap(model)
    if isinstance(teacher, str | Path):
        teacher = original_in(teacher, host)
    if not isinstance(data, Source):
        data = read(data, column=column, limit=limit, seed=seed)
    source = _probed(data)
    samples = encode(source, host, tokenizer=tokenizer, max_length=max_length, minimum=MINIMUM)
    about = inspect(model)
    blank = Report(
        name=name or _name_of(directory),
        model=about,
        manifest=_manifest(directory),
        parameters=sum(parameter.numel() for parameter in host.parameters()),
        data=source.description,
        samples=len(samples),
        made={
            "date": date.today().isoformat(),
            "zoo-core": zoo_core.__version__,
            "torch": str(torch.__version__),
        },
    )
    how = {"tokenizer": tokenizer, "max_length": max_length, "seed": seed}
    job = _Job(host, teacher, source, samples, how, batch_size, effort, groups, tell)
    report = _measured(blank, job, wanted)
    return report if report.name else replace(report, name=f"{about.model}, {report.attention}")


def _measured(report: Report, job: _Job, parts: list[Part]) -> Report:
    """The report with its parts filled in, or with the reasons why not."""
    missing: dict[str, str] = {part: NOT_ASKED for part in PARTS if part not in parts}
    for number, part in enumerate(parts):
        job.tell(part)
        try:
            report = replace(report, **{part: getattr(job, part)()})
        except KeyboardInterrupt:
            if number == 0:
                raise
            missing |= dict.fromkeys(parts[number:], INTERRUPTED)
            break
        except ZooError as error:
            missing[part] = one_line(str(error))
        except Exception as error:  # Whatever a plugin makes of being measured; the rest goes on.
            missing[part] = one_line(f"it failed with {type(error).__name__}: {error}")
    return replace(report, missing=missing)


@dataclass(eq=False)
class _Job:
    """One examination; a method for each part."""

    host: nn.Module
    teacher: Any
    source: Source
    samples: Samples
    how: dict[str, Any]
    batch_size: int
    effort: Depth
    groups: int
    tell: Progress

    def retention(self) -> Retention:
        """What is kept of the original, beside the floor."""
        items, batch_size = self.source.items, self.batch_size
        found = retention(self.host, self.teacher, items, batch_size=batch_size, **self.how)
        return replace(found, data=self.source.description)

    def speed(self) -> Speed:
        """Time and memory beside the stock attention."""
        effort = _EFFORTS[self.effort]
        reads_text = self.samples.length(0) > 0
        return race(self.host, reads_text=reads_text, effort=effort, progress=self.tell)

    def maps(self) -> Maps:
        """The maps of one sample, that of median length, and their rollout."""
        order = sorted(range(len(self.samples)), key=self.samples.length)
        batch = self.samples.batch(order[len(order) // 2 :][:1])
        batch = to_device(batch, next(self.host.parameters()).device)
        return see(self.host, batch, groups=self.groups, progress=self.tell)

    def diagnosis(self) -> Diagnosis:
        """What the heads do, and what the theory warns of."""
        from zoo_core.diagnose import measure

        found = measure(
            self.host,
            self.source.items,
            parts=_DIAGNOSED[self.effort],
            limit=_DIAGNOSED_SAMPLES,
            batch_size=min(4, self.batch_size),
            progress=self.tell,
            **self.how,
        )
        return replace(found, data=self.source.description)


def _checked(parts: Iterable[Part], effort: str) -> list[Part]:
    """The parts in the order of the report."""
    wanted = set(parts)
    if unknown := sorted(wanted - set(PARTS)):
        raise OptionError(f"a report has no part {unknown[0]!r} (has: {', '.join(PARTS)})")
    if effort not in _DIAGNOSED:
        raise OptionError(f"effort={effort!r} must be one of {', '.join(_DIAGNOSED)}")
    return [part for part in PARTS if part in wanted]


def _probed(source: Source) -> Source:
    """Labels ask for a probe, and are left out where there can be none."""
    counts = Counter(map(str, (item.label for item in source.items)))
    labelled = all(item.label is not None for item in source.items)
    possible = len(counts) > 1 and min(counts.values()) > 1 and importlib.util.find_spec("sklearn")
    if labelled and possible:
        return source
    return source._replace(items=[Item(item.value) for item in source.items])


def _name_of(place: Path | None) -> str:
    """What a directory, or owner/name@revision on the Hub, is called on the page."""
    if place is None or place.is_dir():
        return "" if place is None else place.absolute().name
    return str(place).partition("@")[0]


def _manifest(directory: Path | None) -> Manifest | None:
    if directory is None or not directory.is_dir():
        return None
    return adopting.read(directory) if Place(directory).is_checkpoint else None
