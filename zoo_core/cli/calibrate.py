"""`zoo calibrate`: heal a checkpoint's swapped attention on one's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zoo_core.cli import options, output, targets
from zoo_core.cli.output import Cell
from zoo_core.cli.references import checkpoint, opened
from zoo_core.cli.setting_options import setting_options
from zoo_core.cli.teachers import teacher_of
from zoo_core.errors import OptionError
from zoo_core.fidelity.settings import Settings
from zoo_core.plain import terminal_width


@click.command("calibrate")
@click.argument("model", callback=checkpoint)
@click.argument("data")
@options.data_options
@click.option(
    "--packed", is_flag=True, help="Join texts into rows of the maximal length; no padding."
)
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    callback=targets.checkpoint,
    help="The checkpoint directory to write.",
)
@click.option(
    "--resume",
    "checkpoint",
    type=click.Path(file_okay=False, path_type=Path),
    callback=targets.folder,
    help="A directory for the state; a run that was killed goes on from there.",
)
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=targets.picture,
    help="Draw it by layer.",
)
@setting_options(Settings)
@click.option("--json", is_flag=True, help="Print the report as JSON.")
def command(
    model: str,
    data: str,
    teacher: str | None,
    tokenizer: str | None,
    max_length: int | None,
    column: str | None,
    packed: bool,
    target: Path,
    checkpoint: Path | None,
    picture: Path | None,
    json: bool,
    **settings: Any,
) -> None:
    """Train the attention of the checkpoint MODEL to answer as the stock one did, on DATA.

    MODEL is a checkpoint directory, or owner/name@revision on the Hub. DATA is a text file (one
    text a line), a folder of images, or, for the `datasets` library, a .csv, .tsv, .json, .jsonl or
    .parquet file, a folder of these, or a name. The result is another checkpoint, with the report
    in its manifest.
    """
    from zoo_core.checkpoint import save
    from zoo_core.fidelity.calibration import calibrate
    from zoo_core.fidelity.processes import Processes

    try:
        Settings(**settings)
    except OptionError as error:
        raise click.UsageError(str(error)) from error
    with output.working(f"loading {model}"):
        pupil, known = opened(model, tokenizer)
        original = teacher_of(pupil, teacher)
    report = calibrate(
        pupil,
        data,
        teacher=original,
        tokenizer=known,
        max_length=max_length,
        packed=packed,
        column=column,
        checkpoint=checkpoint,
        **settings,
    )
    if not Processes.here().is_main:
        return
    save(pupil, target, tokenizer=known)
    if json:
        output.as_json(report.as_dict())
    else:
        output.say(report.text(terminal_width()))
        output.say("\nwritten to ", Cell(str(target), bold=True))
    if picture is not None:  # last: what cannot be drawn must not cost the report
        report.picture(picture)
