"""The conformance kit: the rules every plugin keeps, checked alike for first and third parties.

Under pytest, one test for each record and check, with ids like "linformer-rule2-truncation":

    @zoo_core.testing.parametrize_mechanisms("my_attention")
    def test_conformance(mechanism, check):
        check(mechanism)

    @zoo_core.testing.parametrize_architectures("my_family")
    def test_conformance(architecture, check):
        check(architecture)

Without pytest, as `zoo plugins doctor` does:

    for outcome in run_checks(mechanism, mechanism_checks(mechanism)):
        print(outcome.check.id, outcome.failure or "passed")

The checks load on first use, so that `zoo_core.testing.hub` can be had without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo_core.testing.conformance import Check as Check
    from zoo_core.testing.conformance import ConformanceFailure as ConformanceFailure
    from zoo_core.testing.conformance import Outcome as Outcome
    from zoo_core.testing.conformance import run_checks as run_checks
    from zoo_core.testing.parametrize import parametrize_architectures as parametrize_architectures
    from zoo_core.testing.parametrize import parametrize_mechanisms as parametrize_mechanisms
    from zoo_core.testing.suite import ARCHITECTURE_CHECKS as ARCHITECTURE_CHECKS
    from zoo_core.testing.suite import CHECKS as CHECKS
    from zoo_core.testing.suite import architecture_checks as architecture_checks
    from zoo_core.testing.suite import mechanism_checks as mechanism_checks

_HOMES = {
    "ARCHITECTURE_CHECKS": "suite",
    "CHECKS": "suite",
    "Check": "conformance",
    "ConformanceFailure": "conformance",
    "Outcome": "conformance",
    "architecture_checks": "suite",
    "mechanism_checks": "suite",
    "parametrize_architectures": "parametrize",
    "parametrize_mechanisms": "parametrize",
    "run_checks": "conformance",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo_core.testing' has no attribute {name!r}")
    return getattr(import_module(f"zoo_core.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
