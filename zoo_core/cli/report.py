"""`zoo report`: one page about a model, or several side by side, to send to a colleague."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zoo_core.cli import output
from zoo_core.cli.data_options import data_options
from zoo_core.cli.output import Cell
from zoo_core.cli.references import checkpoints, tokenizer_of
from zoo_core.cli.teachers import NEEDED
from zoo_core.errors import ZooError
from zoo_core.report.records import PARTS, Part
from zoo_core.telling import told


@click.command("report")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True, callback=checkpoints)
@click.option("--data", required=True, help="A text file, a folder of images, or a dataset.")
@click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page to write, .html or .md. Default: report.html, unless it is printed.",
)
@data_options
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    help="What to measure; may be repeated. Default: everything.",
)
@click.option(
    "--effort",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="Full: longer races, Jacobian norms and sensitivity.",
)
@click.option("--limit", type=click.IntRange(min=4), default=64, show_default=True, help="Samples.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", is_flag=True, help="Print the report as JSON.")
@click.option("--markdown", is_flag=True, help="Print the report as Markdown, for a model card.")
def command(
    models: tuple[str, ...],
    data: str,
    target: Path | None,
    teacher: str | None,
    tokenizer: str | None,
    parts: tuple[Part, ...],
    json: bool,
    markdown: bool,
    **how: Any,
) -> None:
    """Write one self-contained page about MODEL, measured on some data.

    MODEL is a checkpoint directory, or owner/name@revision on the Hub; several are put side by
    side. The page says what the model is, where it came from, what it keeps of the original beside
    the floor, how fast it is beside the stock model, what its attention looks like, and what to
    fear. Ctrl-C keeps what is done.
    """
    if json and markdown:
        raise click.UsageError("--json and --markdown cannot both be printed")
    from zoo_core.report import compare, examine
    from zoo_core.report.rendering import check_writable

    if target is None and not (json or markdown):
        target = Path("report.html")
    if target is not None:
        check_writable(target)
    how |= {"parts": parts or PARTS, "teacher": teacher}
    if tokenizer is not None:
        how["tokenizer"] = tokenizer_of(tokenizer, needed=True)
    found: Any
    with told("measuring") as progress:
        if len(models) == 1:
            found = examine(models[0], data, progress=progress, **how)
        else:
            found = compare(models, data, progress=progress, **how)
    if target is not None:
        found.write(target)
    if json:
        output.as_json(found.as_dict())
    elif markdown:
        output.say(found.markdown())
    else:
        output.say(str(found))
    if target is not None:
        output.say("written to ", Cell(str(target), bold=True), stderr=json or markdown)
    for one in [found] if len(models) == 1 else found.reports:
        train = (one.model.calibration or {}).get("train", "mechanism")
        if teacher is None and "retention" in how["parts"] and train != "mechanism":
            output.warn(f"{one.name}: {NEEDED.format(train=train)}")
    if found.interrupted:
        raise ZooError("interrupted: what was not done by then is missing")
