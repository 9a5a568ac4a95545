"""Callbacks for where verbs that take minutes write: checked before they start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from zoo_core import targets
from zoo_core.errors import ZooError

Callback = Callable[[click.Context, click.Parameter, Path | None], Path | None]


def _callback(check: Callable[[Path], object]) -> Callback:
    """A callback that raises BadParameter where `check` raises ZooError."""

    def parse(
        context: click.Context, parameter: click.Parameter, value: Path | None
    ) -> Path | None:
        try:
            if value is not None:
                check(value)
        except ZooError as error:
            raise click.BadParameter(str(error)) from error
        return value

    return parse


def _checkpoint(value: Path) -> None:
    from zoo_core.checkpoint.atomic import check_target

    targets.check_folder(value)
    check_target(value)


def _page(value: Path) -> None:
    from zoo_core.report.rendering import SUFFIXES

    targets.check_file(value, SUFFIXES)


def _picture(value: Path) -> None:
    targets.check_file(value, targets.FORMATS)
    targets.figure_class()


#: A directory that is there or can be made.
folder = _callback(targets.check_folder)
#: Such a directory, without weights that a checkpoint would take the place of.
checkpoint = _callback(_checkpoint)
#: A file of any name.
file = _callback(targets.check_file)
#: A page of `zoo report`.
page = _callback(_page)
#: A picture that matplotlib can write.
picture = _callback(_picture)
#: The same, or two where there is no suffix.
pictures = _callback(targets.check_picture)
