"""Makes the record of a transformers family from its row, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zoo_core import Architecture

if TYPE_CHECKING:
    from zoo_architectures._transformers import TransformersAdapter


def transformers_row(
    name: str,
    *,
    aliases: tuple[str, ...] = (),
    summary: str,
    default: str,
    tiny: Mapping[str, Any] | None = None,
    **family: Any,
) -> Architecture:
    """Make one Architecture; `family` are the fields of `_transformers.Family`."""

    def adapter() -> TransformersAdapter:
        from zoo_architectures._transformers import Family, TransformersAdapter

        return TransformersAdapter(
            Family(default=default, tiny=tuple((tiny or {}).items()), **family)
        )

    return Architecture(
        name=name,
        aliases=aliases,
        library="transformers",
        summary=summary,
        default=default,
        adapter=adapter,
    )
