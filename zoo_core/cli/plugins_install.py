"""`zoo plugins install` and `zoo plugins uninstall`: print the installer's command, then run it."""

from __future__ import annotations

import shlex

import click

from zoo_core.cli import output
from zoo_core.cli.output import Cell


@click.command("install")
@click.argument("what", metavar="NAME|REQUIREMENT|PATH")
def install(what: str) -> None:
    """Install a plugin into the current environment.

    NAME may be a mechanism that the catalogue knows; a requirement is what pip takes, such as
    'zoo-hydra>=0.1'; a path has a separator in it, such as ./zoo-hydra.
    """
    from zoo_core import installing

    command = installing.install_command(what)
    before = installing.plugin_distributions()
    _run(command)
    added = sorted(installing.plugin_distributions() - before)
    for name in added:
        output.say(Cell(name, bold=True), f" {installing.version(name)} is installed")
        output.say(f"  check it with: zoo plugins doctor {name}")
    if not added:
        output.warn("No plugin is new: what was installed adds none, or updates one.")


@click.command("uninstall")
@click.argument("distribution")
def uninstall(distribution: str) -> None:
    """Remove a plugin's distribution from the current environment."""
    from zoo_core import installing

    _run(installing.uninstall_command(distribution))


def _run(command: list[str]) -> None:
    from zoo_core import installing

    output.say(Cell("$ ", dim=True), shlex.join(command))
    installing.run(command)
