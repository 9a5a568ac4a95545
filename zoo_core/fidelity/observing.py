"""What a model says about one batch: tokens, pooled embedding, logits, and its inner states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.errors import OptionError, ZooError
from zoo_core.fidelity.metrics import mean_pool
from zoo_core.fidelity.sharding import whole
from zoo_core.patching import stack_of

Batch = Mapping[str, Tensor]

POOLINGS = ("mean", "cls")


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
    Raises OptionError for another pooling. Without gradients, where nothing else would notice, also
    ZooError for an answer that holds NaN or infinity; a loss that does is told by who trains.
    """
    if pooling not in POOLINGS:
        raise OptionError(f"pooling={pooling!r} must be one of {', '.join(map(repr, POOLINGS))}")
    states: list[Tensor] = []
    with ExitStack() as hooks:
        for path in paths:
            record = _Record(states)
            handle = model.get_submodule(path).register_forward_pre_hook(record, with_kwargs=True)
            hooks.callback(handle.remove)
        seen = _timm(model, batch) if is_timm(model) else _transformers(model, batch, pooling)
    seen.states = states
    if not torch.is_grad_enabled():
        check_finite(_described(model), model, batch, (seen.embedding, seen.logits))
    return seen


def check_finite(
    who: str, model: nn.Module, batch: Batch, answers: Iterable[Tensor | None]
) -> None:
    """Raise ZooError where answers to a batch hold NaN or infinity, saying whose and, if seen, why.

    Padded tokens may hold anything, so that the batch's hidden states are not looked at.
    """
    if all(_is_finite(answer) for answer in answers if answer is not None):
        return
    tensors = (*model.named_parameters(), *model.named_buffers())
    if data := next((name for name, one in batch.items() if not _is_finite(one)), None):
        why = f"the data do too, in {data!r}; leave such samples out"
    elif bad := next((name for name, one in tensors if not _is_finite(whole(one))), None):
        why = f"its {bad!r} does too; load its weights again, or lower the rates it was trained at"
    else:
        why = "its weights and the data do not, so that numbers grew too large for its dtype"
    raise ZooError(f"the output of {who} holds NaN or infinity: {why}")


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _described(model: nn.Module) -> str:
    """Which model this is: a teacher is measured as a twin, whose one patch has no name."""
    stack = stack_of(model)
    names = {entry["mechanism"]: None for entry in stack.attention()} if stack else {}
    role = "the model" if names or stack is None else "the teacher"
    return f"{role} ({type(model).__name__} with {' and '.join(names) or 'stock'} attention)"


def is_timm(model: nn.Module) -> bool:
    """Whether a model has timm's two halves of a forward."""
    return hasattr(model, "forward_features") and hasattr(model, "forward_head")


def logits_of(model: nn.Module, batch: Batch) -> Any:
    """The logits of any classifier: a tensor, or a pair from a model with two heads."""
    called: Any = model(batch["pixel_values"]) if is_timm(model) else _call(model, batch)
    found = called if isinstance(called, Tensor | tuple) else getattr(called, "logits", None)
    if found is None or getattr(model, "num_classes", 1) == 0:  # timm then gives its embedding
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
