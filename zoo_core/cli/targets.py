"""Where verbs that take minutes write what they find: checked before they start."""

from __future__ import annotations

import os
from pathlib import Path

import click

from zoo_core.errors import ZooError


def folder(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """A callback for a directory that is there or can be made. Raises BadParameter."""
    if value is not None:
        whole = value.absolute()
        _check_folder(next(one for one in (whole, *whole.parents) if one.exists()), value)
    return value


def picture(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """A callback for a picture that matplotlib can write. Raises BadParameter, or ZooError."""
    if value is None:
        return None
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ZooError("pictures need matplotlib: pip install 'zoo-core[plots]'") from error
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if value.suffix[1:].lower() not in known:
        raise click.BadParameter(f"{value} must end with one of .{', .'.join(known)}")
    _check_folder(value.absolute().parent, value)
    return value


def _check_folder(place: Path, target: Path) -> None:
    if not place.is_dir():
        kind = "is a file" if place.exists() else "is not there, make it first"
        raise click.BadParameter(f"{target} cannot be written: {place} {kind}")
    if not os.access(place, os.W_OK):
        raise click.BadParameter(f"{target} cannot be written: no permission for {place}")
