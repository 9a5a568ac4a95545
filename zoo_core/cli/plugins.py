"""`zoo plugins`: what each distribution adds, what failed and why, and what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo_core.cli import output
from zoo_core.cli.output import Cell
from zoo_core.cli.plugins_doctor import doctor
from zoo_core.cli.plugins_install import install, uninstall
from zoo_core.words import plural

if TYPE_CHECKING:
    from zoo_core.plugins import Failure, Plugin


@click.group("plugins", invoke_without_command=True)
@click.option(
    "--format",
    "layout",
    type=click.Choice(("table", "json", "requirements")),
    default="table",
    help="requirements: lines for `pip install -r`.",
)
@click.option("--json", is_flag=True, help="The same as --format json.")
@click.pass_context
def command(context: click.Context, layout: str, json: bool) -> None:
    """Show installed plugins: what each adds, what failed and why, what is left out."""
    if context.invoked_subcommand is not None:
        return
    from zoo_core.plugins import discovery

    found = discovery()
    if layout == "requirements":
        _requirements(found.plugins)
    elif json or layout == "json":
        failures = _catalogue_failures()
        output.as_json([_row(plugin, failures) for plugin in found.plugins])
    else:
        _report(found.plugins)
    for line in found.policy.unmatched():
        output.warn(line)


for subcommand in (install, uninstall, doctor):
    command.add_command(subcommand)


def _requirements(found: Sequence[Plugin]) -> None:
    from zoo_core.distributions import requirement

    for distribution in sorted({plugin.distribution for plugin in found} - {""}):
        click.echo(requirement(distribution))


def _row(plugin: Plugin, catalogue_failures: Mapping[Path, Failure]) -> dict[str, Any]:
    return {
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry": plugin.entry,
        "value": plugin.value,
        "mechanisms": [record.name for record in plugin.mechanisms],
        "architectures": [record.name for record in plugin.architectures],
        "catalogues": [str(path) for path in plugin.catalogues],
        "failures": [
            {"phase": failure.phase, "reason": failure.reason}
            for failure in _failures(plugin, catalogue_failures)
        ],
        "blocked": list(plugin.blocked),
        "notes": list(plugin.notes),
    }


def _failures(plugin: Plugin, catalogue_failures: Mapping[Path, Failure]) -> list[Failure]:
    """What failed while it loaded, and when its catalogues were read."""
    read = [catalogue_failures[path] for path in plugin.catalogues if path in catalogue_failures]
    return [*plugin.failures, *read]


def _catalogue_failures() -> Mapping[Path, Failure]:
    """Empty, with a line on stderr, where the user's own catalogue cannot be read."""
    from zoo_core import catalogue
    from zoo_core.errors import CatalogueError

    try:
        return catalogue.load().failures
    except CatalogueError as error:
        output.warn(str(error))
        return {}


def _report(found: Sequence[Plugin]) -> None:
    if not found:
        output.warn("No installed distribution has entry points of the group zoo_core.plugins.")
        return
    by_distribution = groupby(found, lambda plugin: (plugin.distribution, plugin.version))
    output.table(
        ["distribution", "version", "adds"],
        [
            [Cell(distribution, bold=True), version, "\n".join(_adds(list(group))) or "nothing"]
            for (distribution, version), group in by_distribution
        ],
    )
    failures = _catalogue_failures()
    failed = [(p, f"{f.phase}: {f.reason}") for p in found for f in _failures(p, failures)]
    _section("failed", "red", failed)
    _section("left out", "yellow", [(p, reason) for p in found for reason in p.blocked])
    _section("noted", "cyan", [(p, note) for p in found for note in p.notes])


def _adds(group: Sequence[Plugin]) -> Iterator[str]:
    """One line for each kind of record: how many, and their names."""
    kinds = {
        "mechanism": [record.name for plugin in group for record in plugin.mechanisms],
        "architecture": [record.name for plugin in group for record in plugin.architectures],
        "catalogue": [path.name for plugin in group for path in plugin.catalogues],
    }
    for noun, names in kinds.items():
        if names:
            yield f"{plural(len(names), noun)}: {', '.join(sorted(names))}"


def _section(title: str, colour: str, remarks: Sequence[tuple[Plugin, str]]) -> None:
    """What is to be said of single entry points; those with the same remark share it."""
    if not remarks:
        return
    output.say(Cell(f"\n{title}", colour, bold=True))
    shared: dict[tuple[str, str], list[Plugin]] = {}
    for plugin, remark in remarks:
        origin = f"{plugin.distribution} {plugin.version}"
        shared.setdefault((origin, remark), []).append(plugin)
    for (origin, remark), group in shared.items():
        names = [plugin.entry for plugin in group]
        entries = f"{names[0]} = {group[0].value}" if len(group) == 1 else ", ".join(names)
        output.table([], [[" ", Cell(f"{origin}, {entries}", bold=True)], [" ", f"  {remark}"]])
