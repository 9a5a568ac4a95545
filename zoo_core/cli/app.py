"""The `zoo` command: one module of this package per verb, imported when that verb is asked for.

Click rather than Typer: Typer 0.29 imports pydantic and builds a validator for every parameter of
every verb, which alone takes longer than `zoo list` may.
"""

from __future__ import annotations

from importlib import import_module

import click

import zoo_core

VERBS = (
    "list",
    "show",
    "why",
    "build",
    "inspect",
    "plugins",
    "new",
    "push",
    "pull",
    "verify",
    "registry",
    "bench",
    "native",
    "calibrate",
    "evaluate",
    "diagnose",
    "report",
    "hub",
)


class Verbs(click.Group):
    """A group whose commands are the `command` of the module of the same name."""

    def list_commands(self, context: click.Context) -> list[str]:
        """The verbs in the order of the help."""
        return list(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import a verb."""
        if name not in VERBS:
            return None
        command: click.Command = import_module(f"zoo_core.cli.{name}").command
        return command


@click.group(cls=Verbs, name="zoo", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(zoo_core.__version__, prog_name="zoo-core", message="%(prog)s %(version)s")
def app() -> None:
    """Attention mechanisms as plugins, patched into real models."""
