"""The whole plugin surface: four hooks. A plugin implements those it needs, with `hookimpl`.

Hooks return records. The host calls each plugin by itself, so that it knows where a record comes
from and one failing plugin silences nobody.

A hook or an argument that is to go is marked for pluggy, `hookspec(warn_on_impl=...)` or
`warn_on_impl_args={...}`, with a DeprecationWarning that says what to do instead. The host repeats
it once, with the name of the plugin that still uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from torch import nn

    from zoo_core.architecture import Architecture
    from zoo_core.mechanism import Mechanism
    from zoo_core.patching import Patch

PROJECT = "zoo_core"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def zoo_mechanisms() -> Iterable[Mechanism]:  # type: ignore[empty-body]
    """Return the attention mechanisms this plugin offers."""


@hookspec
def zoo_architectures() -> Iterable[Architecture]:  # type: ignore[empty-body]
    """Return the model families this plugin can build and patch."""


@hookspec
def zoo_catalogues() -> Iterable[Path]:  # type: ignore[empty-body]
    """Return paths of registry.toml files to add to the catalogue."""


@hookspec
def zoo_patched(model: nn.Module, patch: Patch) -> None:
    """Called after `patch` was applied to `model`; for logging and bookkeeping."""
