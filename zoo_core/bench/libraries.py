"""Public libraries that have the same mechanisms: brought in, and what they cannot do, in words.

Imports none of them, and no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zoo_core.errors import BenchError
from zoo_core.isolation import describe

Options = Mapping[str, Any]

#: Of the pseudo-inverse in transformers' Nystromformer.
_ITERATIONS = 6


def imported(module: str, name: str, install: str) -> Any:
    """A public implementation's module. Raises BenchError in words that start with its name."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = "" if error.name == module.split(".")[0] else f" ({error} is missing)"
        raise BenchError(f"{name}: is not installed{missing}; {install}") from None
    except Exception as error:
        raise BenchError(f"{name}: cannot be imported: {describe(error)}") from error


@contextmanager
def building(name: str) -> Iterator[None]:
    """Raise BenchError in words that start with a name, whatever building raises."""
    try:
        yield
    except BenchError as error:
        raise BenchError(f"{name}: {error}") from None
    except Exception as error:
        raise BenchError(f"{name}: could not be built: {describe(error)}") from error


def check_nystrom(length: int, options: Options) -> None:
    """Raise BenchError where transformers' Nystromformer cannot do the mechanism's work."""
    divides(length, options["landmarks"], "the landmarks")
    if length == options["landmarks"]:
        raise BenchError(f"is plain softmax at {length} tokens")
    if options["iterations"] != _ITERATIONS:
        own = options["iterations"]
        raise BenchError(f"always iterates {_ITERATIONS} times, the mechanism {own} times")


def check_yoso(options: Options) -> None:
    """Raise BenchError where transformers' Yoso cannot do the mechanism's work."""
    if options["form"] != "expectation":
        raise BenchError("samples only with its CUDA kernel")


def divides(length: int, part: int, what: str) -> None:
    """Raise BenchError where a length is no multiple of a part."""
    if length % part:
        raise BenchError(f"{length} tokens are no multiple of {what}, {part}")
