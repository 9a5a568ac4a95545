"""`zoo hub`: a Hub of one's own on the loopback interface."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from zoo_core.cli import output

if TYPE_CHECKING:
    from zoo_core.testing.hub import Hub


@click.group("hub")
def command() -> None:
    """Run a Hub for this machine."""


@command.command("serve")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="By default one that is free."
)
def serve(directory: Path, port: int) -> None:
    """Serve the repositories kept in DIRECTORY until Ctrl-C, to this machine only."""
    from zoo_core.testing.hub import serve as run

    def ready(hub: Hub) -> None:
        output.say(f"HF_ENDPOINT={hub.endpoint}")
        output.say(f"HF_TOKEN is one of those in {directory / 'hub.json'}", stderr=True)

    run(directory, port, ready=ready)
