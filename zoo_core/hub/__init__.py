"""Publish checkpoints to the Hugging Face Hub and bring them back, pinned and checked.

The only package that imports huggingface_hub. What the Hub or an endpoint in its place answers is
believed only once it is checked: names, sizes and hashes are those of one commit, or an error.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zoo_core.hub.reference import PinnedRef, Reference, Source

if TYPE_CHECKING:
    from zoo_core.hub.pulling import pull as pull
    from zoo_core.hub.pushing import push as push
    from zoo_core.hub.verifying import verify as verify

# No submodule has the name of a verb: importing it would put the module in the verb's place.
_HOMES = {
    "pull": "zoo_core.hub.pulling",
    "push": "zoo_core.hub.pushing",
    "verify": "zoo_core.hub.verifying",
}

__all__ = ["PinnedRef", "Reference", "Source", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
