"""Where files go that took minutes to make: checked before, and pictures written after."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zoo_core.errors import ZooError

#: What pictures are written as.
FORMATS = (".png", ".svg", ".pdf")


def check_file(path: str | Path, suffixes: Iterable[str] | None = None) -> Path:
    """Give `path` back where a file can be put there, in the place of one or where none is.

    suffixes: those it may end with; None: any. Raises ZooError saying why it cannot.
    """
    path = Path(path)
    if suffixes is not None and path.suffix.lower() not in (known := tuple(suffixes)):
        raise ZooError(f"{path} must end with one of {', '.join(known)}")
    if path.is_dir():
        raise _refused(path, "it is a directory, name a file in it")
    if path.exists() and not path.is_file():
        raise _refused(path, "it is no regular file")
    _check_writable(path, path.absolute().parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise _refused(path, "no permission to change it")
    return path


def check_folder(path: str | Path) -> Path:
    """Give `path` back where a directory is or can be made. Raises ZooError saying why not."""
    path = Path(path)
    whole = path.absolute()
    _check_writable(path, next(one for one in (whole, *whole.parents) if one.exists()))
    return path


def check_picture(path: str | Path) -> list[Path]:
    """The files of a picture: one, or a PNG and an SVG where `path` has no suffix.

    Raises ZooError where they cannot be written, or nothing can be drawn.
    """
    path = Path(path)
    files = [path] if path.suffix else [path.with_name(f"{path.name}{end}") for end in FORMATS[:2]]
    figure_class()
    return [check_file(file, FORMATS) for file in files]


def figure_class() -> Any:
    """Matplotlib's Figure, which has its own canvas: no display, no global state.

    Raises ZooError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ZooError("pictures need matplotlib: pip install 'zoo-core[plots]'") from error
    return Figure


def save_figure(figure: Any, path: str | Path) -> Path:
    """Write a figure. Raises ZooError where it cannot be."""
    path = check_file(path, FORMATS)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    return path


def _check_writable(path: Path, folder: Path) -> None:
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "is no directory, make it first"
        raise _refused(path, f"{folder} {why}")
    if not os.access(folder, os.W_OK):
        raise _refused(path, f"no permission for {folder}")


def _refused(path: Path, why: str) -> ZooError:
    return ZooError(f"{path} could not be written: {why}")
