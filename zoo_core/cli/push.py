"""`zoo push`: publish a checkpoint directory on the Hub."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zoo_core.cli import output
from zoo_core.cli.hub_options import hub_options, token
from zoo_core.cli.output import Cell

if TYPE_CHECKING:
    from zoo_core.hub.pushing import PushPlan


@click.command("push")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--public", is_flag=True, help="Make a new repository public; it is private else.")
@click.option("--revision", metavar="BRANCH", help="Another branch than main.")
@click.option(
    "--base",
    metavar="OWNER/NAME[@REVISION]",
    help="The stock model that the attention was added to, for the card.",
)
@click.option(
    "--attention-only",
    is_flag=True,
    help="Publish only what the attention added to --base, which zoo pull fetches, too.",
)
@click.option("--message", help="The title of the commit.")
@click.option("--license", help="The Hub's name of a license, for the card.")
@click.option(
    "--speed",
    type=click.Path(path_type=Path),
    help="A file that `zoo bench --save` wrote, for the card.",
)
@click.option("--dry-run", is_flag=True, help="Show files, sizes and card; change nothing.")
@hub_options
@click.option("--json", is_flag=True, help="Print a JSON object.")
def command(
    directory: Path,
    repository: str,
    public: bool,
    revision: str | None,
    base: str | None,
    attention_only: bool,
    message: str | None,
    license: str | None,
    speed: Path | None,
    dry_run: bool,
    endpoint: str | None,
    json: bool,
) -> None:
    """Publish a checkpoint DIRECTORY as one commit, and print the pinned reference.

    Publishing what is there already changes nothing.
    """
    with output.working(f"pushing {directory} to {repository}"):
        from zoo_core.hub.pushing import push

        done = push(
            directory,
            repository,
            private=not public,
            revision=revision,
            holds="attention" if attention_only else "model",
            base=base,
            message=message,
            license=license,
            speed=speed,
            dry_run=dry_run,
            token=token(),
            endpoint=endpoint,
        )
    if not isinstance(done, str):
        _show(done, json=json)
    elif json:
        output.as_json({"ref": done, "changed": done.changed, "row": done.row})
    else:
        output.say(Cell(done, bold=True), "" if done.changed else "  (was there already)")
        output.say(f"\nfor a registry.toml:\n\n{done.row.rstrip()}")


def _show(plan: PushPlan, *, json: bool) -> None:
    if json:
        output.as_json(asdict(plan))
        return
    kind = "private if new" if plan.private else "public if new"
    output.say(Cell(f"{plan.repo}@{plan.revision}", bold=True), f"  ({kind}, nothing was sent)")
    output.table([], [[name, f"{size / 1e6:.3f} MB"] for name, size in plan.files.items()])
    output.say(f"\n{plan.card.rstrip()}")
