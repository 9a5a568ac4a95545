"""`zoo new`: a plugin distribution to start from."""

from __future__ import annotations

from pathlib import Path

import click

from zoo_core.cli import output
from zoo_core.cli.output import Cell


@click.command("new")
@click.argument("name")
@click.option("--architecture", is_flag=True, help="A model family instead of a mechanism.")
def command(name: str, architecture: bool) -> None:
    """Write a complete plugin into the folder NAME: card, mechanism, tests, README, CI.

    NAME is that of the distribution, such as my-attention. What is in it works, and passes the
    tests; put yours in its place.
    """
    from zoo_core import scaffold

    kind: scaffold.Kind = "architecture" if architecture else "mechanism"
    folder = scaffold.create(name, Path.cwd(), kind=kind)
    output.say("wrote ", Cell(f"{folder.name}/", bold=True))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        output.say(f"  {path.relative_to(folder)}")
    output.say("\nnext:")
    output.say(f"  cd {folder.name} && pip install -e '.[test]' && pytest")
