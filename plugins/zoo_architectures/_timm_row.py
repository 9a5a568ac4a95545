"""Makes the record of a timm family, without importing torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo_core import Architecture

if TYPE_CHECKING:
    from zoo_architectures._timm import TimmAdapter


def timm_row(name: str, *, summary: str, default: str) -> Architecture:
    """Make one Architecture; `_timm_config.family_of` tells which timm models are of it."""

    def adapter() -> TimmAdapter:
        from zoo_architectures._timm import TimmAdapter

        return TimmAdapter(name, default)

    return Architecture(
        name=name, library="timm", summary=summary, default=default, adapter=adapter
    )
