"""What loading pretrained weights gave; kept on the model as `model.zoo_loaded`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zoo_core.errors import CheckpointError


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


def patched(source: str) -> CheckpointError:
    """What to raise where stock weights are asked for, and a patched model is there."""
    shell = f" (`zoo build {source} -o ANOTHER`)" if Path(source).is_dir() else ""
    return CheckpointError(
        f"{source} holds a patched model; use zoo.load({source!r}) instead{shell}"
    )
