"""`zoo report`: one page about a model, or several side by side, to send to a colleague."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zoo_core.checkpoint.calibration import trained_by
from zoo_core.cli import options, output, targets
from zoo_core.cli.output import Cell
from zoo_core.cli.references import checkpoints, tokenizer_of
from zoo_core.cli.teachers import NEEDED
from zoo_core.errors import ZooError
from zoo_core.plain import terminal_width
from zoo_core.report.records import PARTS, Part
from zoo_core.targets import check_file
from zoo_core.telling import told


@click.command("report")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True, callback=checkpoints)
@click.option("--data", required=True, help="A text file, a folder of images, or a dataset.")
@click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=targets.page,
    help="The page to write, .html or .md. Default: report.html, unless it is printed.",
)
@options.data_options
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
@options.samples(64, least=4)
@options.batch_size(8)
@options.seed
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

    if target is None and not (json or markdown):
        target = check_file("report.html")
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
        output.say(found.text(terminal_width()))
    if target is not None:
        output.say("written to ", Cell(str(target), bold=True), stderr=json or markdown)
    for one in [found] if len(models) == 1 else found.reports:
        train = trained_by(one.model.calibration or {}) or "mechanism"
        if teacher is None and "retention" in how["parts"] and train != "mechanism":
            output.warn(f"{one.name}: {NEEDED.format(train=train)}")
    if found.interrupted:
        raise ZooError("interrupted: what was not done by then is missing")
