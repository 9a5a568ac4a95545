"""The original of a patched model, from a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from zoo_core.builder import build
from zoo_core.checkpoint import adopting, layout, load
from zoo_core.patching import adapter_of, unwrap


def original_in(directory: str | Path, pupil: Any) -> nn.Module:
    """A checkpoint, or stock weights as transformers saves them, of the pupil's architecture.

    Raises ZooError where the directory holds neither.
    """
    directory = Path(directory)
    if layout.find(directory, layout.MANIFEST) or adopting.read_config(directory):
        return load(directory)
    architecture, _ = adapter_of(unwrap(pupil))
    return build(architecture.qualified, pretrained=str(directory)).eval()
