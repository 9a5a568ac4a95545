"""The record of a transformers family from one row, without importing torch.

Other distributions make theirs with it too; `zoo new --architecture` writes such a row.
"""

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
    """Make one Architecture of what transformers' attention interface carries.

    default: repository of the pretrained weights. tiny: config of the smallest model, for tests.
    family: package (module under transformers.models), stem (class prefix, "Bert") and
    self_attention (class name of the attention modules); where they differ from BERT's also
    cross_attention, projections (attribute names of the query, key and value Linears), out (path of
    the output Linear from the attention module), prefix (leading tokens outside a grid),
    position_offset (rows of the position table before position 0), image, repeats (layers share
    one attention module).
    """

    def adapter() -> TransformersAdapter:
        from zoo_architectures._transformers import TransformersAdapter
        from zoo_architectures._transformers_families import Family

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
