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
from zoo_core.report.records import PARTS, Comparison, Part, Report


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
        so that not all are in memory at once.
    data, parts, limit and the others: as in `zoo_core.report.examine`.
    on_report: called with each report as soon as it is there.

    A model that cannot be examined is named in `failed`, with the reason; the others go on. Ctrl-C
    keeps the models that are done. Raises ZooError for data that cannot be used.
    """
    pairs = models.items() if isinstance(models, Mapping) else enumerate(models, 1)
    named: dict[str | int, Any] = dict(pairs)
    if not named:
        raise OptionError("there are no models to compare")
    source = read(data, column=column, limit=limit, seed=seed)
    how = {"parts": list(parts), "limit": limit, "groups": groups, "seed": seed, **how}
    reports: list[Report] = []
    failed: dict[str, str] = {}
    for key, model in named.items():
        name = key if isinstance(key, str) else None
        label = f"model {key}" if name is None else name
        try:
            made = model() if _is_recipe(model) else model
            tell = partial(_tell, progress, label)
            report = examine(made, source, name=name, progress=tell, **how)
        except ZooError as error:
            failed[label] = str(error)
        except KeyboardInterrupt:
            if not reports:
                raise
            failed[label] = "interrupted before it and those after it were done"
            break
        else:
            reports.append(_renamed(report, {known.name for known in reports}))
            if on_report:
                on_report(reports[-1])
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
