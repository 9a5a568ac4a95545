"""`zoo pull`: bring a checkpoint into the cache, and see that it loads."""

from __future__ import annotations

import click

from zoo_core.cli import output
from zoo_core.cli.hub_options import cache_options, token
from zoo_core.cli.output import Cell
from zoo_core.words import plural


@click.command("pull")
@click.argument("reference", metavar="OWNER/NAME[@REVISION]")
@cache_options
@click.option("--require-pin", is_flag=True, help="Refuse a branch or a tag, which can move.")
@click.option("--json", is_flag=True, help="Print the report of zoo.inspect as JSON.")
def command(
    reference: str, endpoint: str | None, offline: bool, require_pin: bool, json: bool
) -> None:
    """Fetch a checkpoint, check every byte, load it, and print its pinned reference.

    The name of a checkpoint of the catalogue will do, too.
    """
    with output.working(f"pulling {reference}"):
        from zoo_core.hub.pulling import pull
        from zoo_core.inspection import inspect

        model = pull(
            reference,
            token=token(),
            endpoint=endpoint,
            offline=offline,
            require_pin=require_pin,
        )
        report = inspect(model)
    if json:
        output.as_json(report.as_dict())
        return
    source = report.source or {}
    output.say(Cell(f"{source['repo']}@{source['commit']}", bold=True))
    output.say(f"{report.model}, {report.architecture}, {plural(len(report.sites), 'site')}")
    output.table([], [[name, Cell(sha256, dim=True)] for name, sha256 in source["files"].items()])
