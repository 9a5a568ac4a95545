"""`zoo build`: build a patched model and write it as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from zoo_core.cli import output, targets
from zoo_core.cli.options import model_options
from zoo_core.cli.references import host, is_patched, opened, tokenizer_beside


@click.command("build")
@click.argument("architecture")
@click.option("--attention", metavar="NAME", help="A mechanism or preset. Default: softmax.")
@model_options
@click.option(
    "--pretrained",
    is_flag=False,
    flag_value="",
    metavar="[REF]",
    help="Load weights: the family's default, or a directory, or owner/name@revision.",
)
@click.option(
    "--softmax-where-faster",
    is_flag=True,
    help="Keep softmax where --max-length is too short for the attention to pay; see zoo why.",
)
@click.option("--seed", type=int, help="Seed of everything random in the build.")
@click.option(
    "-o",
    "--output",
    "directory",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    callback=targets.checkpoint,
    help="The checkpoint directory to write.",
)
@click.option("--json", is_flag=True, help="Print the manifest as JSON.")
def command(
    architecture: str,
    attention: str | None,
    options: dict[str, Any],
    layers: str | None,
    task: str | None,
    max_length: int | None,
    model_kwargs: dict[str, Any],
    pretrained: str | None,
    softmax_where_faster: bool,
    seed: int | None,
    directory: Path,
    json: bool,
) -> None:
    """Build ARCHITECTURE with another attention and write it to a directory.

    ARCHITECTURE is a family (bert), family:variant (vit:vit_tiny_patch16_224) or a preset; or stock
    weights, of which config.json tells the family: a directory, or owner/name@revision on the Hub.
    A directory of a patched model, as save_pretrained and Trainer write it, becomes a checkpoint.
    """
    for source in (architecture, pretrained):
        if source and directory.exists() and directory.resolve() == Path(source).resolve():
            raise click.UsageError(
                f"{directory} is what the model is built from, and would be lost; name another -o"
            )
    with output.working(f"building {architecture}"):
        from zoo_core.builder import build
        from zoo_core.checkpoint import save

        if is_patched(architecture):
            if given := _given():
                raise click.UsageError(
                    f"{architecture} holds a patched model, which is written as it is; leave "
                    f"{given[0]} out, or name stock weights"
                )
            model, tokenizer = opened(architecture, None)
        else:
            family, weights = host(architecture)
            if weights and pretrained is not None:
                raise click.UsageError(
                    f"{architecture} has weights of its own; leave --pretrained out"
                )
            model = build(
                family,
                attention,
                options=options or None,
                layers=layers,
                pretrained=weights or pretrained or pretrained is not None,
                task=task,
                max_length=max_length,
                seed=seed,
                softmax_where_faster=softmax_where_faster,
                **model_kwargs,
            )
            tokenizer = tokenizer_beside(model)
        manifest = save(model, directory, tokenizer=tokenizer)
    if json:
        output.as_json(manifest.as_dict())
        return
    from zoo_core.cli.inspect import report

    report(manifest)
    output.say(f"\nwritten to {directory}")


def _given() -> list[str]:
    """The options on the command line that say how to build."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in (None, "architecture", "directory", "json")
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
