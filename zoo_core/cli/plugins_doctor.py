"""`zoo plugins doctor`: what an author has to repair, and what users should know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from zoo_core.cli import output
from zoo_core.cli.output import Cell
from zoo_core.telling import told
from zoo_core.words import plural

if TYPE_CHECKING:
    from zoo_core.doctor import Examination


@click.command("doctor")
@click.argument("distribution", required=False)
@click.option("--quick", is_flag=True, help="Only the checks that take seconds.")
@click.option("--json", is_flag=True, help="Print a JSON array, one object for each entry point.")
def doctor(distribution: str | None, quick: bool, json: bool) -> None:
    """Check installed plugins: that they load, what they say, and the rules they must keep.

    All plugins, or those of DISTRIBUTION. Exits with 1 where anything failed.
    """
    from zoo_core.doctor import examine

    found = []
    with told("loading plugins") as progress:
        for examination in examine(distribution, quick=quick, progress=progress):
            found.append(examination)
            if not json:
                _report(examination)
    if json:
        output.as_json([examination.as_dict() for examination in found])
    else:
        _summary(found)
    if not all(examination.passed for examination in found):
        raise SystemExit(1)


def _report(examination: Examination) -> None:
    plugin = examination.plugin
    origin = f"{plugin.distribution} {plugin.version}, {plugin.entry} = {plugin.value}"
    output.say(Cell(origin, bold=True))
    for failure in examination.failures:
        output.say("  ", Cell("failed", "red"), f" at {failure.phase}: {failure.reason}")
    for reason in plugin.blocked:
        output.say("  ", Cell("left out", "yellow"), f": {reason}")
    for remark in examination.remarks:
        output.say("  ", Cell("noted", "cyan"), f": {remark}")
    ran = Counter(one.subject for one in examination.outcomes)
    broken = Counter(one.subject for one in examination.broken)
    for subject, count in ran.items():
        if broken[subject]:
            told = f" {subject} fails {broken[subject]} of {_checks(count)}"
            output.say("  ", Cell("failed", "red"), told)
        else:
            output.say("  ", Cell("ok", "green"), f" {subject} passes {_checks(count)}")
    for outcome in examination.broken:
        heading, *lines = str(outcome.failure).splitlines()
        output.say("  ", Cell("failed", "red"), f" {heading}")
        for line in lines:
            output.say(f"  {line}")


def _summary(found: Sequence[Examination]) -> None:
    checks = [outcome for one in found for outcome in one.outcomes]
    broken = sum(outcome.failure is not None for outcome in checks)
    unloaded = sum(bool(one.failures) for one in found)
    output.say()
    if broken or unloaded:
        parts = [f"{broken} of {_checks(len(checks))} failed"] if broken else []
        parts += [f"{plural(unloaded, 'plugin')} did not load whole"] if unloaded else []
        output.say(Cell("; ".join(parts), "red"))
    else:
        output.say(Cell(f"{_checks(len(checks))} passed, nothing failed", "green"))


def _checks(count: int) -> str:
    return plural(count, "check")
