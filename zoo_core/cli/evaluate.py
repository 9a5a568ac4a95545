"""`zoo evaluate`: how much of the original a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path

import click

from zoo_core.cli import options, output, targets
from zoo_core.cli.references import checkpoint, opened
from zoo_core.cli.teachers import teacher_of
from zoo_core.plain import terminal_width


@click.command("evaluate")
@click.argument("model", callback=checkpoint)
@click.argument("data")
@options.data_options
@click.option(
    "--labels",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text file with one label a line, for a probe; a dataset brings its own.",
)
@options.samples(256, least=4)
@options.batch_size(8)
@click.option("--pooling", type=click.Choice(["mean", "cls"]), default="mean", show_default=True)
@options.seed
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=targets.picture,
    help="Draw it by layer.",
)
@click.option("--json", is_flag=True, help="Print the report as JSON.")
def command(
    model: str,
    data: str,
    teacher: str | None,
    tokenizer: str | None,
    max_length: int | None,
    column: str | None,
    labels: Path | None,
    limit: int,
    batch_size: int,
    pooling: str,
    seed: int,
    picture: Path | None,
    json: bool,
) -> None:
    """Measure on DATA how much of the original the checkpoint MODEL keeps.

    Every score stands beside that of uniform attention, the floor, and that of the original. MODEL
    is a checkpoint directory, or owner/name@revision on the Hub. DATA is a text file (one text a
    line), a folder of images, or, for the `datasets` library, a .csv, .tsv, .json, .jsonl or
    .parquet file, a folder of these, or a name.
    """
    with output.working(f"measuring {model}"):
        from zoo_core.fidelity.retaining import retention
        from zoo_core.fidelity.sources import lines

        measured, known = opened(model, tokenizer)
        report = retention(
            measured,
            teacher_of(measured, teacher),
            data,
            labels=None if labels is None else lines(labels),
            tokenizer=known,
            max_length=max_length,
            batch_size=batch_size,
            limit=limit,
            column=column,
            pooling=pooling,
            seed=seed,
        )
    if json:
        output.as_json(report.as_dict())
    else:
        output.say(report.text(terminal_width()))
    if picture is not None:  # last: what cannot be drawn must not cost the report
        report.picture(picture)
