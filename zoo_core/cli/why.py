"""`zoo why`: whether an attention fits an architecture, and if not, every reason."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from zoo_core.cli import output
from zoo_core.cli.options import model_options
from zoo_core.cli.output import Cell
from zoo_core.cli.references import host


@click.command("why")
@click.argument("architecture")
@click.argument("attention")
@model_options
@click.option("--json", is_flag=True, help="Print a JSON object.")
def command(
    architecture: str,
    attention: str,
    options: dict[str, Any],
    layers: str | None,
    task: str | None,
    max_length: int | None,
    model_kwargs: dict[str, Any],
    json: bool,
) -> None:
    """Say why ATTENTION cannot be patched into ARCHITECTURE, or from how many tokens on it pays.

    ARCHITECTURE is what zoo build takes. Nothing is built and no weights are fetched. Exits with 1
    where it does not fit.
    """
    with output.working(f"planning {architecture} with {attention}"):
        from zoo_core.plan import answer

        family, weights = host(architecture)
        found = answer(
            family,
            attention,
            options=options or None,
            layers=layers,
            pretrained=weights or False,
            task=task,
            max_length=max_length,
            **model_kwargs,
        )
    if json:
        output.as_json({"fits": not found.reasons, **asdict(found)})
    elif found.reasons:
        output.table([], [[Cell("no", "red"), reason] for reason in found.reasons])
    else:
        output.say(Cell("yes", "green"), f"  {attention} fits {architecture}")
        output.table([], [[Cell("note", "yellow"), note] for note in found.notes])
    if found.reasons:
        raise SystemExit(1)
