"""One pytest test for each record and check. Imports pytest only when a test module asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zoo_core import registry
from zoo_core.architecture import Architecture
from zoo_core.errors import UnknownName
from zoo_core.mechanism import Mechanism
from zoo_core.testing.conformance import Check, Subject
from zoo_core.testing.suite import architecture_checks, mechanism_checks

if TYPE_CHECKING:
    import pytest


def parametrize_mechanisms(
    *chosen: str | Mechanism,
    quick: bool = False,
    combinations: bool = True,
    expected_failures: Mapping[str, str] | None = None,
) -> pytest.MarkDecorator:
    """Give a test `mechanism` and `check`, with ids like "linformer-rule2-truncation".

    chosen: patterns of installed mechanisms ("linformer", "my-plugin/*"), or records; all installed
        ones if left out.
    quick, combinations: as in `mechanism_checks`.
    expected_failures: test id -> why the rule cannot hold; these must fail, or the test does.
    Raises UnknownName for a pattern or an expected failure that names nothing.
    """
    records = _records(chosen, registry.mechanisms)
    checks = [(m, mechanism_checks(m, quick=quick, combinations=combinations)) for m in records]
    return _parametrize("mechanism", checks, expected_failures)


def parametrize_architectures(
    *chosen: str | Architecture,
    quick: bool = False,
    combinations: bool = True,
    expected_failures: Mapping[str, str] | None = None,
) -> pytest.MarkDecorator:
    """Give a test `architecture` and `check`, with ids like "bert-promises-restore".

    The arguments are those of `parametrize_mechanisms`. An architecture must be installed or
    registered, since models are patched and loaded by its name.
    """
    records = _records(chosen, registry.architectures)
    checks = [(a, architecture_checks(a, quick=quick, combinations=combinations)) for a in records]
    return _parametrize("architecture", checks, expected_failures)


def _records(
    chosen: Sequence[str | Subject], find: Callable[[str], list[Subject]]
) -> list[Subject]:
    """The records that patterns name, in order and once each."""
    found: dict[str, Subject] = {}
    for one in chosen or ("*",):
        records = find(one) if isinstance(one, str) else [one]
        if not records:
            raise UnknownName(f"nothing installed matches {one!r}; see `zoo list`")
        found.update({record.qualified: record for record in records})
    return list(found.values())


def _parametrize(
    argument: str,
    records: Sequence[tuple[Subject, Sequence[Check[Subject]]]],
    expected_failures: Mapping[str, str] | None,
) -> pytest.MarkDecorator:
    import pytest

    reasons = dict(expected_failures or {})
    cases: list[Any] = []
    for record, checks in records:
        for check in checks:
            name = f"{record.name}-{check.id}"
            reason = reasons.pop(name, None)
            marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
            cases.append(pytest.param(record, check, id=name, marks=marks))
    if reasons:
        raise UnknownName(f"expected failures that name no test: {', '.join(reasons)}")
    return pytest.mark.parametrize((argument, "check"), cases)
