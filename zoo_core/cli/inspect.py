"""`zoo inspect`: what a checkpoint is, read from its manifest alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zoo_core.cli import output
from zoo_core.cli.hub_options import cache_options, token
from zoo_core.cli.output import Cell
from zoo_core.cli.references import checkpoint, is_here
from zoo_core.hub.places import asking_the_hub

if TYPE_CHECKING:
    from zoo_core.checkpoint import Manifest


@click.command("inspect")
@click.argument("reference", metavar="DIRECTORY|OWNER/NAME[@REVISION]", callback=checkpoint)
@cache_options
@click.option("--json", is_flag=True, help="Print the manifest as JSON.")
def command(reference: str, endpoint: str | None, offline: bool, json: bool) -> None:
    """Show what a checkpoint holds: model, attention by layer, options, files.

    Weights are neither read nor fetched. A directory written by save_pretrained of a patched model
    will do.
    """
    if is_here(reference):
        manifest = _read(Path(reference))
    else:
        with output.working(f"looking up {reference}"), asking_the_hub(reference):
            manifest = _fetched(reference, endpoint, offline)
    if json:
        output.as_json(manifest.as_dict())
    else:
        report(manifest)


def _read(directory: Path) -> Manifest:
    from zoo_core.checkpoint import adopting

    return adopting.read(directory)


def _fetched(reference: str, endpoint: str | None, offline: bool) -> Manifest:
    from zoo_core.hub.client import Client
    from zoo_core.hub.reference import look_up
    from zoo_core.hub.snapshot import open_snapshot

    client = Client(endpoint=endpoint, token=token(), offline=offline)
    return open_snapshot(client, look_up(reference)).manifest


def report(manifest: Manifest) -> None:
    """Print a manifest for people."""
    output.say(
        Cell(manifest.model_class, bold=True),
        Cell(f"  {manifest.architecture}, {manifest.library} {manifest.library_version}", dim=True),
    )
    facts: list[tuple[str, str]] = [("holds", manifest.holds)]
    facts += [
        ("file", f"{name}  {file.size / 1e6:.1f} MB") for name, file in manifest.files.items()
    ]
    if manifest.base:
        facts.append(("base", f"{manifest.base.repo} at {manifest.base.commit}"))
    if manifest.created_with:
        made = ", ".join(f"{name} {version}" for name, version in manifest.created_with.items())
        facts.append(("made with", made))
    output.table([], [[Cell(label, dim=True), value] for label, value in facts])
    output.say()
    if manifest.attention:
        output.table(["layers", "mechanism", "options", "from"], map(_entry, manifest.attention))
    else:
        output.say("stock attention in every layer")
    if manifest.calibration is not None:
        _calibrated(manifest.calibration)


def _calibrated(result: Mapping[str, Any]) -> None:
    from zoo_core.checkpoint import calibration

    output.say(f"\n{calibration.sentence(result)}")
    if rows := calibration.scores(result):
        output.table(["score", "before", "after", "uniform"], rows)


def _entry(entry: Mapping[str, Any]) -> list[str | Cell]:
    from zoo_core import registry
    from zoo_core.plan import ranges

    options = ", ".join(f"{key}={value}" for key, value in entry["options"].items())
    kind = "cross " if entry.get("kind") == "cross" else ""
    origin = f"{entry['distribution']} {entry['version']}".strip() or "a notebook"
    name = "/".join(filter(None, (entry["distribution"], entry["mechanism"])))
    known = bool(registry.owners(name))
    return [
        f"{kind}{ranges(entry['layers'])}",
        Cell(entry["mechanism"], bold=True),
        options or "none",
        origin if known else Cell(f"{origin} (not installed)", "yellow"),
    ]
