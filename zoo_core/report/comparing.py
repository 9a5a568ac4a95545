"""zoo.compare: several models side by side on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from torch import nn

from zoo_core.errors import OptionError, ZooError
from zoo_core.fidelity.sources import read
from zoo_core.report.measuring import examine
from zoo_core.report.records import INTERRUPTED, PARTS, Comparison, Part, Report


def compare(
    models: Sequence[Any] | Mapping[str, Any],
    data: Any,
    *,
    parts: Iterable[Part] = PARTS,
    column: str | None = None,
    limit: int = 64,
    groups: int = 32,
    seed: int = 0,
    on_report: Callable[[Report], None] | None = None,
    progress: Callable[[str], None] | None = None,
    **how: Any,
) -> Comparison:
    """Examine several models on the same samples: retention, speed, maps and diagnosis of each.

    models: a list, or a mapping from the name that the comparison shows. Each is a model, a
        checkpoint directory, or a function without arguments that gives one when its turn comes,
        so that not all are in memory at once; or the `Report` of one that was examined before on
        the same data, which is taken as it is.
    data, parts, limit and the others: as in `zoo_core.report.examine`.
    on_report: called with each report as soon as it is there.

    A model that cannot be examined is named in `failed`, with the reason; the others go on. Ctrl-C
    keeps the models that are done, and the finished parts of the one at work; `failed` names the
    rest. Raises ZooError for data that cannot be used.
    """
    pairs = models.items() if isinstance(models, Mapping) else enumerate(models, 1)
    named: dict[str | int, Any] = dict(pairs)
    if not named:
        raise OptionError("there are no models to compare")
    source = read(data, column=column, limit=limit, seed=seed)
    how = {"parts": list(parts), "limit": limit, "groups": groups, "seed": seed, **how}
    labels = [key if isinstance(key, str) else f"model {key}" for key in named]
    reports: list[Report] = []
    failed: dict[str, str] = {}
    for number, (label, (key, model)) in enumerate(zip(labels, named.items(), strict=True)):
        name = key if isinstance(key, str) else None
        try:
            made = model() if _is_recipe(model) else model
            if isinstance(made, Report):
                report = replace(made, name=name or made.name)
            else:
                tell = partial(_tell, progress, label)
                report = examine(made, source, name=name, progress=tell, **how)
        except ZooError as error:
            failed[label] = str(error)
            continue
        except KeyboardInterrupt:
            if not reports:
                raise
            failed |= dict.fromkeys(labels[number:], INTERRUPTED)
            break
        reports.append(_renamed(report, {known.name for known in reports}))
        if on_report:
            on_report(reports[-1])
        if report.interrupted and not isinstance(made, Report):
            failed |= dict.fromkeys(labels[number + 1 :], INTERRUPTED)
            break
    if not reports:
        raise ZooError("; ".join(f"{label}: {reason}" for label, reason in failed.items()))
    return Comparison(tuple(reports), failed)


def _is_recipe(model: Any) -> bool:
    """Whether it makes a model rather than being or holding one, as a pipeline does."""
    return callable(model) and not isinstance(model, nn.Module) and not hasattr(model, "model")


def _renamed(report: Report, taken: set[str]) -> Report:
    """The report under a name that no other has."""
    names = (f"{report.name} ({n})" if n > 1 else report.name for n in count(1))
    return replace(report, name=next(name for name in names if name not in taken))


def _tell(progress: Callable[[str], None] | None, label: str, text: str) -> None:
    if progress:
        progress(f"{label}: {text}")
