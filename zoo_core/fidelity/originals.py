"""The original of a patched model, from a directory or from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from zoo_core.builder import build
from zoo_core.checkpoint import load
from zoo_core.hosts import adapter_of, unwrap
from zoo_core.hub.places import find_place


def original_in(reference: str | Path, pupil: Any) -> nn.Module:
    """A checkpoint, or stock weights as transformers saves them, of the pupil's architecture.

    reference: a directory, or "owner/name@revision".
    Raises ZooError where it holds neither.
    """
    if find_place(reference).is_checkpoint:
        return load(reference)
    architecture, _ = adapter_of(unwrap(pupil))
    return build(architecture.qualified, pretrained=str(reference)).eval()
