"""What loading pretrained weights gave; kept on the model as `model.zoo_loaded`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """Names of tensors that were loaded, are new, or found no place in the model.

    resized: position embeddings that were resampled to another grid.
    """

    source: str
    loaded: int
    new: tuple[str, ...]
    unused: tuple[str, ...]
    resized: tuple[str, ...] = ()
