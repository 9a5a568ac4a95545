"""`zoo native`: whether kernels for this machine are there, and to compile them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from zoo_core.cli import output
from zoo_core.cli.output import Cell


@click.command("native")
@click.option("--build", is_flag=True, help="Compile them; takes about a minute, once.")
@click.option("--json", is_flag=True, help="Print a JSON object.")
def command(build: bool, json: bool) -> None:
    """Show whether native kernels for this machine's CPU are built, or compile them.

    They compute what plain torch does, faster, and are never needed.
    """
    if build:
        _build()
    found = _found()
    if json:
        output.as_json(found)
    else:
        _report(found)


def _build() -> None:
    from zoo_core.errors import NativeError
    from zoo_core.nn import native

    try:
        with output.working("compiling for about a minute"):
            native.build()
    except NativeError as error:
        for note in getattr(error, "__notes__", ()):
            output.say(Cell(note, dim=True), stderr=True)
        raise


def _found() -> dict[str, Any]:
    """What there is, null where it is not. problem: why kernels that are there are not taken."""
    from zoo_core.errors import NativeError
    from zoo_core.nn import native

    place, problem = None, None
    try:
        place = native.place()
    except NativeError as error:
        problem = str(error)
    library = native.built()
    if library is not None:
        problem = native.problem(library)
    return {
        "built": library is not None,
        "taken": library is not None and problem is None,
        "problem": problem,
        "place": place,
        "compiler": native.compiler(),
        "ninja": native.ninja(),
        "obstacle": native.obstacle(),
    }


def _report(found: dict[str, Any]) -> None:
    missing = Cell("none", "yellow")
    rows: list[list[str | Cell]] = [["kernels", _state(found)]]
    if found["place"] is not None:
        rows.append(["place", str(found["place"])])
    rows += [[name, found[name] or missing] for name in ("compiler", "ninja")]
    output.table([], [[Cell(str(name), bold=True), value] for name, value in rows])
    for step in _steps(found):
        output.say()
        output.table([], [[step]])


def _steps(found: dict[str, Any]) -> Iterator[str]:
    """What is wrong, and what can be done about it."""
    if found["problem"] is not None:
        yield found["problem"]
    if found["place"] is not None and not found["taken"]:
        yield f"to compile them: {found['obstacle'] or 'zoo native --build'}"


def _state(found: dict[str, Any]) -> Cell:
    if found["taken"]:
        return Cell("built, and taken where they compute the same", "green")
    if found["built"]:
        return Cell("built, but cannot be loaded", "red")
    return Cell("switched off" if found["place"] is None else "not built", "yellow")
