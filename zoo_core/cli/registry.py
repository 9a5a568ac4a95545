"""`zoo registry`: check the catalogues, and add checkpoints to one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zoo_core.cli import output, targets
from zoo_core.cli.hub_options import hub_options, token
from zoo_core.cli.output import Cell
from zoo_core.words import plural

if TYPE_CHECKING:
    from zoo_core.catalogue import Preset


@click.group("registry")
def command() -> None:
    """Check registry.toml files, or add a checkpoint to one."""


@command.command("check")
@click.option("--online", is_flag=True, help="Ask the Hub for each checkpoint, too.")
@hub_options
@click.option("--json", is_flag=True, help="Print a JSON object.")
def check(online: bool, endpoint: str | None, json: bool) -> None:
    """Check all catalogues in force: schema, names, presets; with --online the checkpoints.

    These are the shipped one, those of plugins, and those that ZOO_REGISTRY lists.
    """
    from zoo_core import catalogue

    merged = catalogue.load()
    problems = [f"{path}: {why.reason}" for path, why in merged.failures.items()]
    with output.working("checking presets"):
        for preset in merged.presets.values():
            problems += [f"[presets.{preset.name}] {reason}" for reason in _obstacles(preset)]
    if online:
        with output.working("asking for checkpoints"):
            for name in merged.checkpoints:
                problems += [f"[checkpoints.{name}] {reason}" for reason in _gone(name, endpoint)]
    counts = {
        "plugins": len(merged.plugins),
        "presets": len(merged.presets),
        "checkpoints": len(merged.checkpoints),
    }
    if json:
        output.as_json({"valid": not problems, "problems": problems, **counts})
    elif problems:
        output.table([], [[Cell("no", "red"), problem] for problem in problems])
    else:
        found = ", ".join(plural(count, kind[:-1]) for kind, count in counts.items())
        output.say(Cell("yes", "green"), f"  {found}")
    if problems:
        raise SystemExit(1)


@command.command("add")
@click.argument("reference", metavar="OWNER/NAME[@REVISION]")
@click.option(
    "--to",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=targets.file,
    required=True,
    help="The registry.toml; made where there is none.",
)
@click.option("--name", default="", help="The short name; by default made from the repository's.")
@hub_options
def add(reference: str, path: Path, name: str, endpoint: str | None) -> None:
    """Pin a checkpoint of the Hub in a registry.toml: its commit and the hashes of its files."""
    from zoo_core.hub.verifying import pin

    name = _free_name(reference, path, name)
    with output.working(f"looking at {reference}"):
        pinned = pin(reference, name=name, token=token(), endpoint=endpoint)
    _append(path, pinned.row)
    output.say(Cell(pinned, bold=True), f"  is in {path}:\n\n{pinned.row.rstrip()}")


def _free_name(reference: str, path: Path, name: str) -> str:
    """The name of the new row. Raises ZooError for one that the file cannot take."""
    from zoo_core import catalogue
    from zoo_core.errors import CatalogueError
    from zoo_core.hub.reference import look_up, short_name
    from zoo_core.toml import RECORD

    chosen = name or short_name(look_up(reference).repo)
    if not RECORD.pattern.fullmatch(chosen):
        raise CatalogueError(
            f"{chosen!r} cannot be the name of a checkpoint; give --name {RECORD.words} "
            "(letters a-z, digits, '_', a letter first)"
        )
    rows = catalogue.parse(path).checkpoints if path.exists() else {}
    if chosen in rows:
        raise CatalogueError(
            f"{path} has a checkpoint {chosen!r} already, {rows[chosen].repo}@"
            f"{rows[chosen].revision}; give another --name, or delete that table first"
        )
    return chosen


def _append(path: Path, row: str) -> None:
    """Add a table to a file, unless the file would then break the schema."""
    from zoo_core import catalogue

    before = path.read_text(encoding="utf-8") if path.exists() else ""
    gap = "\n" if before.endswith("\n") else "\n\n"
    added = f"{gap if before else 'schema = 1' + gap}{row}"
    catalogue.parse(path, before + added)
    with path.open("a", encoding="utf-8") as file:
        file.write(added)


def _obstacles(preset: Preset) -> list[str]:
    from zoo_core.errors import ZooError
    from zoo_core.plan import why

    try:
        return list(
            why(
                preset.architecture,
                preset.attention,
                max_length=preset.max_length,
                **preset.model_kwargs,
            )
        )
    except ZooError as error:
        return [str(error)]


def _gone(name: str, endpoint: str | None) -> list[str]:
    from zoo_core.errors import ZooError
    from zoo_core.hub.verifying import pin

    try:
        pin(name, token=token(), endpoint=endpoint)
    except ZooError as error:
        return [str(error)]
    return []
