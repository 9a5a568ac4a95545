"""Examine installed plugins: do they load, are their records sound, do they keep the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from zoo_core import catalogue, plugins, registry
from zoo_core.distributions import normalise
from zoo_core.errors import UnknownName, did_you_mean
from zoo_core.isolation import ForeignError, Isolation
from zoo_core.plugins import Failure, Plugin

if TYPE_CHECKING:
    from zoo_core.testing.conformance import Check, Outcome


@dataclass
class Examination:
    """What was found out about one entry point.

    failures: what keeps it, or one of its catalogues, from loading. outcomes: its checks.
    remarks: what is allowed but costs its users something, such as a contested name.
    """

    plugin: Plugin
    failures: list[Failure]
    remarks: list[str]
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def broken(self) -> list[Outcome]:
        """The checks that failed."""
        return [outcome for outcome in self.outcomes if outcome.failure]

    @property
    def passed(self) -> bool:
        """Whether nothing failed. A plugin that is left out passes: it was asked not to load."""
        return not (self.failures or self.broken)

    def as_dict(self) -> dict[str, Any]:
        """The examination as a JSON object."""
        plugin = self.plugin
        return {
            "distribution": plugin.distribution,
            "version": plugin.version,
            "entry": plugin.entry,
            "value": plugin.value,
            "passed": self.passed,
            "failures": [{"phase": one.phase, "reason": one.reason} for one in self.failures],
            "blocked": list(plugin.blocked),
            "remarks": self.remarks,
            "checks": [outcome.as_dict() for outcome in self.outcomes],
        }


def examine(
    distribution: str | None = None,
    *,
    quick: bool = False,
    progress: Callable[[str], None] = lambda doing: None,
) -> Iterator[Examination]:
    """Examine the plugins of one distribution, or all, one entry point after the other.

    quick: only the checks that take seconds. progress: is told each check before it runs.
    Raises UnknownName for a distribution without plugins.
    """
    catalogues = catalogue.load().failures
    for plugin in _chosen(distribution):
        unread = [catalogues[path] for path in plugin.catalogues if path in catalogues]
        found = Examination(plugin, [*plugin.failures, *unread], _remarks(plugin))
        for record, checks in _checks(plugin, quick=quick):
            for check in checks:
                progress(f"{record.qualified} {check.id}")
                found.outcomes.append(_outcome(record, check))
        yield found


def _chosen(distribution: str | None) -> list[Plugin]:
    installed = plugins.installed()
    if distribution is None:
        return list(installed)
    chosen = [one for one in installed if one.distribution == normalise(distribution)]
    if not chosen:
        hint = did_you_mean(distribution, {one.distribution for one in installed})
        raise UnknownName(
            f"no installed distribution {distribution!r} has plugins{hint}; see `zoo plugins`"
        )
    return chosen


def _remarks(plugin: Plugin) -> list[str]:
    remarks = list(plugin.notes)
    contested = {
        "mechanisms": registry.contested(),
        "architectures": registry.contested(kind="architectures"),
    }
    for kind, names in contested.items():
        for record in getattr(plugin, kind):
            if record.name in names:
                remarks.append(
                    f"another distribution offers {record.name!r} too; users must write "
                    f"{record.qualified!r}"
                )
    offers = plugin.mechanisms or plugin.architectures or plugin.catalogues
    if not (offers or plugin.failures or plugin.blocked or _listens(plugin)):
        remarks.append("offers nothing: its hooks return empty lists")
    return remarks


def _listens(plugin: Plugin) -> bool:
    return plugin.hooks is not None and bool(plugin.hooks.zoo_patched.get_hookimpls())


def _checks(plugin: Plugin, *, quick: bool) -> Iterator[tuple[Any, list[Check[Any]]]]:
    """Each record and its checks; torch is imported only where there are any."""
    if not (plugin.mechanisms or plugin.architectures):
        return
    from zoo_core.testing import architecture_checks, mechanism_checks

    for mechanism in plugin.mechanisms:
        yield mechanism, mechanism_checks(mechanism, quick=quick, combinations=not quick)
    for architecture in plugin.architectures:
        yield architecture, architecture_checks(architecture, quick=quick, combinations=not quick)


def _outcome(record: Any, check: Check[Any]) -> Outcome:
    """Run one check; even a plugin that exits the process only fails it."""
    from zoo_core.testing import ConformanceFailure, Outcome, run_checks

    outcome: Outcome
    with Isolation() as isolation:
        try:
            outcome = isolation.attempt(partial(next, run_checks(record, [check])))
        except ForeignError as error:
            failure = ConformanceFailure("", "no exception", str(error))
            failure.subject, failure.check = record.qualified, check
            outcome = Outcome(record.qualified, check, failure, 0.0)
    return outcome
