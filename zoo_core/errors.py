"""The errors that cross the API. Every message says what is wrong, where, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ZooError(Exception):
    """Base of every error that zoo_core raises on purpose."""


class UnknownName(ZooError, LookupError):
    """A mechanism, architecture, preset or option that nothing registered."""


class ContestedName(ZooError, LookupError):
    """A short name that two distributions claim; use the qualified `distribution/name`."""


class OptionError(ZooError, ValueError):
    """An option that does not exist, has the wrong type or is out of its bounds."""


class RecordError(ZooError, ValueError):
    """A record that a plugin filled in wrongly."""


class PluginError(ZooError):
    """A plugin that failed to load, raised only where the user asked for it (ZOO_STRICT=1)."""


class DoesNotFit(ZooError, ValueError):
    """A mechanism that cannot run on these sites. `reasons` lists every obstacle, in words."""

    def __init__(self, message: str, reasons: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class PatchError(ZooError):
    """A model that cannot be patched, restored or inspected as asked."""


class UnsupportedCall(ZooError):
    """A forward call that the patched attention refuses rather than compute something wrong."""


class CheckpointError(ZooError):
    """A checkpoint that is missing, damaged, tampered with, or of a newer schema."""


class HubError(ZooError):
    """A Hub that cannot be reached, refuses, or answers what cannot be trusted."""


class CatalogueError(ZooError, ValueError):
    """A registry.toml that breaks the schema or redefines a name."""


class BenchError(ZooError, ValueError):
    """A measurement that cannot be made, drawn, saved or compared as asked."""


class NativeError(ZooError):
    """Native kernels that cannot be compiled here."""


def check_length(name: str, tokens: int, most: int) -> None:
    """Raise UnsupportedCall where a mechanism sized for `most` tokens gets more."""
    if tokens > most:
        raise UnsupportedCall(
            f"{name} was built for at most {most} tokens and got {tokens}; "
            "truncate the input or build the model with a larger max_length"
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the names nearest to `name`, or an empty string."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
