"""`zoo diagnose`: what each attention head does, and what the theory warns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from zoo_core.cli import options, output, targets
from zoo_core.cli.references import checkpoint, opened
from zoo_core.diagnose.reports import Part
from zoo_core.errors import ZooError
from zoo_core.plain import terminal_width

_PARTS = get_args(Part)


@click.command("diagnose")
@click.argument("model", callback=checkpoint)
@click.option("--data", required=True, help="A text file, a folder of images, or a dataset.")
@click.option(
    "--part",
    "parts",
    type=click.Choice(_PARTS),
    multiple=True,
    help="What to measure; may be repeated. Default: everything.",
)
@click.option("--layers", help="Layers whose heads are looked at: 3, 0-3, 4-, self. Default: all.")
@options.tokenizer
@options.max_length
@options.column
@options.samples(16)
@options.batch_size(4)
@options.seed
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=targets.pictures,
    help="Draw the maps of one sample: .png or .svg, both without a suffix.",
)
@click.option("--json", is_flag=True, help="Print the report as JSON.")
def command(
    model: str,
    data: str,
    parts: tuple[Part, ...],
    tokenizer: str | None,
    limit: int,
    batch_size: int,
    picture: Path | None,
    json: bool,
    **how: Any,
) -> None:
    """Measure the attention of the checkpoint MODEL on some data.

    MODEL is a checkpoint directory, or owner/name@revision on the Hub. Every head: entropy, rank,
    reach, agreement, error against softmax, and what may break. By depth: rank collapse, Jacobian
    norms with the bounds that mechanisms certify, sensitivity; and the rank of the embedding with a
    suggested depth. Ctrl-C keeps the parts that are done.
    """
    from zoo_core.diagnose.illustrating import illustrate
    from zoo_core.diagnose.measuring import measure

    with output.working(f"loading {model}"):
        loaded, how["tokenizer"] = opened(model, tokenizer)
    report = measure(loaded, data, parts=parts or _PARTS, limit=limit, batch_size=batch_size, **how)
    if json:
        output.as_json(report.as_dict())
    else:
        output.say(report.text(terminal_width()))
    if report.unfinished:
        raise ZooError(f"interrupted before these were done: {', '.join(report.unfinished)}")
    if picture is not None:
        for file in illustrate(loaded, data, picture, **how):
            output.say(f"drawn in {file}", stderr=True)
