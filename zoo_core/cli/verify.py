"""`zoo verify`: check every byte of a checkpoint without loading it."""

from __future__ import annotations

import click

from zoo_core.cli import output
from zoo_core.cli.hub_options import cache_options, token
from zoo_core.cli.output import Cell
from zoo_core.cli.references import checkpoint, is_here
from zoo_core.hub.places import asking_the_hub


@click.command("verify")
@click.argument("reference", metavar="DIRECTORY|OWNER/NAME[@REVISION]", callback=checkpoint)
@cache_options
@click.option("--json", is_flag=True, help="Print a JSON object.")
def command(reference: str, endpoint: str | None, offline: bool, json: bool) -> None:
    """Check a checkpoint directory, or a checkpoint on the Hub, against all its hashes.

    Exits with 1 where anything is not as it should be. Plugins need not be installed.
    """
    with output.working(f"verifying {reference}"):
        problems = _problems(reference, endpoint, offline)
    if json:
        output.as_json({"valid": not problems, "problems": problems})
    elif problems:
        output.table([], [[Cell("no", "red"), problem] for problem in problems])
    else:
        output.say(Cell("yes", "green"), f"  {reference} is what it says")
    if problems:
        raise SystemExit(1)


def _problems(reference: str, endpoint: str | None, offline: bool) -> list[str]:
    if is_here(reference):
        from zoo_core.checkpoint import verify as verify_directory

        return verify_directory(reference)
    from zoo_core.hub.verifying import verify

    with asking_the_hub(reference):
        return verify(reference, token=token(), endpoint=endpoint, offline=offline)
