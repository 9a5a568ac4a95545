"""The zoo's own model families: one small row file each, and a bridge for each library."""

from __future__ import annotations

from collections.abc import Iterable

from zoo_architectures import albert, bert, deit, distilbert, hf_vit, modernbert, vit
from zoo_core import Architecture, hookimpl

ROWS = (
    *albert.ROWS,
    *bert.ROWS,
    *deit.ROWS,
    *distilbert.ROWS,
    *hf_vit.ROWS,
    *modernbert.ROWS,
    *vit.ROWS,
)


@hookimpl
def zoo_architectures() -> Iterable[Architecture]:
    """Offer every family; libraries are imported when a family's adapter is asked for."""
    return ROWS
