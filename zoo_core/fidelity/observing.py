"""What a model says about one batch: tokens, pooled embedding, logits, and its inner states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.errors import ZooError
from zoo_core.fidelity.metrics import mean_pool

Batch = Mapping[str, Tensor]


@dataclass(eq=False)
class Observed:
    """The answer to one batch.

    tokens: the model's last hidden states (B, N, dim); mask: bool (B, N), True = real token.
    embedding: (B, dim). logits: (B, classes) or, for each token, (B, N, classes); None without.
    states: what entered the attention layers asked for, (B, N, dim) each, once for every call.
    """

    tokens: Tensor
    mask: Tensor
    embedding: Tensor
    logits: Tensor | None
    states: list[Tensor] = field(default_factory=list)


def observe(
    model: nn.Module, batch: Batch, *, paths: Sequence[str] = (), pooling: str = "mean"
) -> Observed:
    """Run a host model of transformers or timm on one batch.

    paths: attention modules whose inputs to record. pooling: "mean" of the real tokens or "cls",
    the first one; timm's models have their own.
    """
    states: list[Tensor] = []
    with ExitStack() as hooks:
        for path in paths:
            record = _Record(states)
            handle = model.get_submodule(path).register_forward_pre_hook(record, with_kwargs=True)
            hooks.callback(handle.remove)
        seen = _timm(model, batch) if is_timm(model) else _transformers(model, batch, pooling)
    seen.states = states
    return seen


def is_timm(model: nn.Module) -> bool:
    """Whether a model has timm's two halves of a forward."""
    return hasattr(model, "forward_features") and hasattr(model, "forward_head")


def logits_of(model: nn.Module, batch: Batch) -> Any:
    """The logits of any classifier: a tensor, or a pair from a model with two heads."""
    called: Any = model(batch["pixel_values"]) if is_timm(model) else _call(model, batch)
    found = called if isinstance(called, Tensor | tuple) else getattr(called, "logits", None)
    if found is None:
        raise ZooError(f"{type(model).__name__} gives no logits; take a model with a classifier")
    return found


def mask_for(states: Tensor, mask: Tensor) -> Tensor:
    """The mask of these states; images may have other tokens inside than at the end."""
    if mask.shape == states.shape[:2]:
        return mask
    return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The hidden states among the arguments of an attention module of either library."""
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


class _Record:
    """Forward pre-hook that keeps the hidden states a module is called with."""

    def __init__(self, states: list[Tensor]) -> None:
        self.states = states

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.states.append(hidden_of(args, kwargs))


def _timm(model: Any, batch: Batch) -> Observed:
    tokens = model.forward_features(batch["pixel_values"])
    embedding = model.forward_head(tokens, pre_logits=True)
    logits = model.forward_head(tokens) if model.num_classes > 0 else None
    mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    return Observed(tokens, mask, embedding, logits)


def _transformers(model: Any, batch: Batch, pooling: str) -> Observed:
    kept: list[Any] = []
    base = model.base_model
    handle = base.register_forward_hook(lambda module, args, output: kept.append(output))
    try:
        output = _call(model, batch)
    finally:
        handle.remove()
    tokens = kept[-1][0]
    given = batch.get("attention_mask")
    real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    mask = real if given is None or given.dim() != 2 else given.bool()
    embedding = mean_pool(tokens, mask) if pooling == "mean" else _first(tokens, mask)
    return Observed(tokens, mask, embedding, getattr(output, "logits", None))


def _call(model: Any, batch: Batch) -> Any:
    # A cache would take the keys twice where a layer is run beside its twin.
    decoder = getattr(getattr(model, "config", None), "is_decoder", False)
    return model(**batch, **({"use_cache": False} if decoder else {}))


def _first(tokens: Tensor, mask: Tensor) -> Tensor:
    """The first real token of each sample."""
    first = mask.int().argmax(-1)
    return tokens[torch.arange(len(tokens), device=tokens.device), first]
