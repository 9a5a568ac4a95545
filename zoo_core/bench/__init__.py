"""How fast, how big, how it grows: mechanisms and whole models against softmax and the floor.

    from zoo_core import bench
    cases = bench.sweep(length=[512, 1024, 2048], mode=["forward", "backward"])
    rows = list(bench.measure(["linformer", "local"], cases))
    bench.scalings(rows), bench.break_evens(rows)

`zoo bench` on the command line. torch is imported when something is measured, not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zoo_core.bench.cases import Case, sweep

if TYPE_CHECKING:
    from zoo_core.bench.baseline import compare as compare
    from zoo_core.bench.baseline import load as load
    from zoo_core.bench.baseline import save as save
    from zoo_core.bench.contest import Effort as Effort
    from zoo_core.bench.layers import measure as measure
    from zoo_core.bench.machine import describe_machine as describe_machine
    from zoo_core.bench.models import measure_models as measure_models
    from zoo_core.bench.plots import plot as plot
    from zoo_core.bench.readme import markdown as markdown
    from zoo_core.bench.rows import Ratio as Ratio
    from zoo_core.bench.rows import Row as Row
    from zoo_core.bench.scaling import break_evens as break_evens
    from zoo_core.bench.scaling import scalings as scalings

_HOMES = {
    "Effort": "contest",
    "Ratio": "rows",
    "Row": "rows",
    "break_evens": "scaling",
    "compare": "baseline",
    "describe_machine": "machine",
    "load": "baseline",
    "markdown": "readme",
    "measure": "layers",
    "measure_models": "models",
    "plot": "plots",
    "save": "baseline",
    "scalings": "scaling",
}

__all__ = ["Case", "sweep", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo_core.bench' has no attribute {name!r}")
    return getattr(import_module(f"zoo_core.bench.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
