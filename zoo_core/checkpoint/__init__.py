"""Checkpoint directories: write them atomically, read them strictly.

A directory holds README.md, config.json for stock tools, safetensors weights, and zoo.json, the
manifest, which is what zoo.load goes by. Nothing in it is ever executed or imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zoo_core.checkpoint.checking import verify
from zoo_core.checkpoint.manifest import Base, FileRecord, Manifest, read_manifest

if TYPE_CHECKING:
    from zoo_core.checkpoint.loading import load as load
    from zoo_core.checkpoint.loading import load_directory as load_directory
    from zoo_core.checkpoint.saving import save as save

# These need torch; the rest does not, so that `zoo verify` is quick.
_HOMES = {
    "load": "zoo_core.checkpoint.loading",
    "load_directory": "zoo_core.checkpoint.loading",
    "save": "zoo_core.checkpoint.saving",
}

__all__ = ["Base", "FileRecord", "Manifest", "read_manifest", "verify", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
