"""A page about a model that can be sent to a colleague: what it is, what it keeps, what to fear.

    from zoo_core import report
    report.examine("my-checkpoint", "texts.txt").write("report.html")
    zoo.compare([first, second], "texts.txt").write("comparison.html")

Importing it loads no torch; each name loads its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo_core.report.comparing import compare as compare
    from zoo_core.report.measuring import examine as examine
    from zoo_core.report.records import Comparison as Comparison
    from zoo_core.report.records import Report as Report

_HOMES = {
    "Comparison": "records",
    "Report": "records",
    "compare": "comparing",
    "examine": "measuring",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo_core.report' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
