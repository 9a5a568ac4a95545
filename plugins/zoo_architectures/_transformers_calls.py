"""What runs inside a patched transformers model: mask function, attention function, hooks.

Importing this module registers the name "zoo" with transformers, once, for both interfaces: an
attention function alone would have its padding dropped in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from zoo_architectures._carry import Carry
from zoo_core.attention import Context, refusal
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import softmax

NAME = "zoo"


def key_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The padding mask bool (B, S), None when all tokens are real; never N x N if avoidable.

    Only plain causal and bidirectional masks with a cache that grows can be told by a padding
    mask. Everything else (packed, sliding, static cache) comes back as the host's own dense mask,
    which the attention function turns into a bias or refuses.
    """
    bidirectional = mask_function is bidirectional_mask_function
    causal = mask_function is causal_mask_function
    grows = isinstance(q_offset, int) and kv_offset == 0 and kv_length == q_offset + q_length
    if not (bidirectional or (causal and grows)):
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            attention_mask,
            **kwargs,
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    if (missing := kv_length - mask.shape[-1]) > 0:
        mask = nn.functional.pad(mask, (0, missing))
    if not (torch.compiler.is_compiling() or torch.jit.is_tracing()) and bool(mask.all()):
        return None
    return mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run `module.zoo`, or stock softmax where a partial patch left the layer alone.

    query (B, H, L, D), key and value (B, H, S, D) -> (B, L, H, D) and the map or None.
    """
    if not hasattr(module, "zoo"):
        raise UnsupportedCall(
            f"{type(module).__name__} says attention 'zoo' but was not patched: the directory was "
            "saved from a patched model; load it with zoo.load, not with from_pretrained"
        )
    if kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None:
        raise UnsupportedCall(f"{type(module).__name__}: softcap and position bias are not handled")
    ctx = _context(module, query, key, attention_mask, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if module.zoo is None:
        output = softmax.attend(query, key, value, ctx, scale=scale, dropout=dropout)
    else:
        length, keys = query.shape[-2], key.shape[-2]
        if reason := refusal(module.zoo.zoo_supports, ctx, queries=length, keys=keys):
            # Read only here: a compiled layer whose path is read would be compiled for itself.
            raise UnsupportedCall(f"{module.zoo_site.path} ({type(module.zoo).__name__}): {reason}")
        output = module.zoo(query, key, value, ctx)
    weights = _weights(module, query, key, ctx, scale) if _wants_weights(module, kwargs) else None
    return output.transpose(1, 2).contiguous(), weights


def _context(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, extras: dict[str, Any]
) -> Context:
    site = module.zoo_site
    dense = mask is not None and mask.ndim == 4
    # A dense mask already says what is causal; a decoder's cache comes before the first query.
    causal = site.causal and site.kind == "self" and not dense
    return Context(
        key_padding=mask if mask is not None and not dense else None,
        bias=_additive(mask, query.dtype) if dense else None,
        causal=causal,
        query_offset=key.shape[-2] - query.shape[-2] if causal else 0,
        grid=extras.get("zoo_grid"),
        prefix=site.prefix,
        hidden=extras.get("zoo_hidden"),
        times=extras.get("zoo_times"),
        projections=module.zoo_projections() if _needs(module, "projections") else None,
        carry=extras.get("zoo_carry"),
    )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A 4-D mask as an additive bias: bool True = keep, float is added, anything else refused."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
    if mask.is_floating_point():
        return mask
    raise UnsupportedCall(
        f"a 4-D attention mask of dtype {mask.dtype} is ambiguous; pass bool (True = keep) or a "
        "float mask to add to the scores"
    )


def _needs(module: nn.Module, extra: str) -> bool:
    return module.zoo is not None and extra in module.zoo.zoo_supports.needs


def _wants_weights(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("output_attentions")
    return bool(module.config.output_attentions if asked is None else asked)


def _weights(module: nn.Module, query: Tensor, key: Tensor, ctx: Context, scale: float) -> Tensor:
    if module.zoo is None:
        return softmax.weights(query, key, ctx, scale=scale)
    supports = module.zoo.zoo_supports
    if not supports.weights:
        hint = "zoo.attention_map(model, inputs) computes the effective one"
        if not supports.linear_in_v:
            hint = "nor has zoo.attention_map, as its output is not linear in the values"
        raise UnsupportedCall(
            f"output_attentions: {type(module.zoo).__name__} at {module.zoo_site.path} never "
            f"builds a map; {hint}"
        )
    return module.zoo.attention_map(query, key, ctx)


def add_hidden(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of an attention module: hand on its input as `zoo_hidden` (B, L, dim)."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return args, {**kwargs, "zoo_hidden": hidden}


@dataclass(frozen=True)
class AddExtras:
    """Forward pre-hook of the base model: adds what the installed mechanisms read.

    patch: the (rows, cols) size of an image patch in pixels, None for text.
    """

    needs: frozenset[str]
    patch: tuple[int, int] | None

    def __call__(
        self, model: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the arguments with zoo_carry, zoo_grid and zoo_times added."""
        extras: dict[str, Any] = {}
        if "carry" in self.needs:
            _refuse_reentrant(model)
            extras["zoo_carry"] = Carry()
        if "times" in self.needs:
            extras["zoo_times"] = kwargs.pop("times", None)
        if self.patch is not None:
            pixels = args[0] if args else kwargs["pixel_values"]
            extras["zoo_grid"] = tuple(
                size // patch for size, patch in zip(pixels.shape[-2:], self.patch, strict=True)
            )
        return args, {**kwargs, **extras}


def _refuse_reentrant(model: nn.Module) -> None:
    """Reentrant checkpointing cuts the gradient through what layers hand to each other."""
    if not (model.training and torch.is_grad_enabled()):
        return
    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            function = getattr(layer, "_gradient_checkpointing_func", None)
            if getattr(function, "keywords", {}).get("use_reentrant", True):
                raise UnsupportedCall(
                    "this mechanism hands state from layer to layer, which reentrant gradient "
                    "checkpointing would cut; pass use_reentrant=False in "
                    "gradient_checkpointing_kwargs"
                )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, key_mask)
