"""Whether models can take what they are given, told in words before anything is changed.

The models are the one that is measured or trained, first, and its teacher, where that is another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.errors import ZooError
from zoo_core.fidelity import preparing
from zoo_core.fidelity.observing import Batch, is_timm
from zoo_core.hosts import adapter_of

# What models raise for inputs that they are not made for.
_REFUSALS = (AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def check_kind(kind: str, models: Sequence[nn.Module], description: str) -> None:
    """Raise ZooError for images that a model of texts gets, or the other way round."""
    for who, model in zip(("", "the teacher, "), models, strict=False):
        wanted = "images" if _sees_images(model) else "texts"
        if (kind == "images") != (wanted == "images"):
            name = f"{who}{type(model).__name__}"
            raise ZooError(f"{name}{',' if who else ''} takes {wanted}; {description} holds {kind}")


def longest(models: Sequence[nn.Module], max_length: int | None) -> int:
    """The longest text in tokens: as asked, and at most what all models can see.

    Raises ZooError for a length that one of them cannot.
    """
    limits = [preparing.seen_by(model) for model in models]
    if max_length is not None and not 1 <= max_length <= limits[0]:
        raise ZooError(
            f"max_length={max_length} must be between 1 and {limits[0]}, all the model sees"
        )
    shortest = min(limits)
    if max_length is not None and max_length > shortest:
        raise ZooError(
            f"max_length={max_length} is too long for the teacher, which sees {shortest} tokens, "
            f"the model {limits[0]}; pass max_length={shortest} (--max-length {shortest}), or a "
            "teacher that sees as much"
        )
    return max_length or shortest


def check_ids(
    inputs: Sequence[Mapping[str, Tensor]], models: Sequence[nn.Module], description: str
) -> None:
    """Raise ZooError for tokens that a model has no embedding of."""
    ids = torch.cat([one["input_ids"] for one in inputs])
    low, high = int(ids.min()), int(ids.max())
    hints = (
        ("the model", "use the tokenizer of the model"),
        ("the teacher", "pass a teacher that has the tokenizer of the model"),
    )
    for (who, hint), model in zip(hints, models, strict=False):
        vocabulary = _vocabulary(model)
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            raise ZooError(
                f"{description}: input_ids from {low} to {high} do not fit {who}, which knows "
                f"{vocabulary} tokens; {hint}"
            )


@contextmanager
def taking(who: str, model: nn.Module, batch: Batch) -> Iterator[None]:
    """Say in words, as ZooError, what a model makes of a batch that it cannot take."""
    try:
        yield
    except ZooError:
        raise
    except _REFUSALS as error:
        shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in batch.items())
        size = preparing.image_size_of(model) if "pixel_values" in batch else None
        wanted = f"; it takes images of {size}, bring them to that size" if size else ""
        inside = "; pass the model that is inside it" if isinstance(error, TypeError) else ""
        raise ZooError(
            f"{who} cannot take a batch of shape {shapes}{wanted}{inside} "
            f"({type(model).__name__}: {error})"
        ) from error


def _vocabulary(model: Any) -> int | None:
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(embeddings, "num_embeddings", None)


def _sees_images(model: nn.Module) -> bool:
    _, adapter = adapter_of(model)
    return is_timm(model) or any(site.grid for site in adapter.sites(model))
