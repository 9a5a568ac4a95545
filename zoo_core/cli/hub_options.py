"""Which Hub a verb talks to. The token is no option: it would stay in the history of a shell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_ENDPOINT = click.option(
    "--endpoint",
    metavar="URL",
    help="Another Hub than HF_ENDPOINT; its token is taken from ZOO_HUB_TOKEN.",
)
_OFFLINE = click.option("--offline", is_flag=True, help="Take everything from the cache.")


def hub_options(command: F) -> F:
    """Add --endpoint."""
    return _ENDPOINT(command)


def cache_options(command: F) -> F:
    """Add --endpoint and --offline."""
    return _ENDPOINT(_OFFLINE(command))


def token() -> str | None:
    """The token for another Hub; huggingface_hub finds the one for its own by itself."""
    import os

    return os.environ.get("ZOO_HUB_TOKEN") or None
