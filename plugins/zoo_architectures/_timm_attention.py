"""What runs inside a patched timm model: the attention class, and the state of one forward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from zoo_architectures._carry import Carry
from zoo_core.attention import Context, Site, refusal
from zoo_core.errors import UnsupportedCall
from zoo_core.mechanism import Supports

# The children of timm's Attention (1.0.21 to 1.0.31) that ZooAttention.forward accounts for.
KNOWN_CHILDREN = frozenset("qkv q_norm k_norm attn_drop norm gate proj proj_drop".split())


class WriteOnce(Carry):
    """A carry into which each site writes once."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Raise UnsupportedCall on a second write: a recompute would read what came later."""
        if key in self._state:
            raise UnsupportedCall(
                f"{key} ran twice in one forward, but this mechanism hands state from layer to "
                "layer; do not checkpoint its blocks, and start each forward at the images"
            )
        super().__setitem__(key, value)


class Frame:
    """What the sites of one model share during one forward; the next forward replaces it.

    grid: (rows, cols) of the patches of this call. carry: state from site to site.
    A copy or pickle of the model gets one empty frame, shared by all sites of the copy.
    """

    def __init__(self) -> None:
        self.grid: tuple[int, int] | None = None
        self.carry: Carry | None = None

    def __reduce__(self) -> tuple[type[Frame], tuple[()]]:
        return Frame, ()


@dataclass(frozen=True, eq=False)
class BeginForward:
    """Forward pre-hook of the patch embedding, where every way through a timm ViT begins.

    grid, carry: which of the two the installed mechanisms read.
    """

    model: nn.Module
    frame: Frame
    grid: bool
    carry: bool

    def __call__(self, embed: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Fill the frame, or raise UnsupportedCall before anything is computed."""
        if self.model.grad_checkpointing and torch.is_grad_enabled():
            self._refuse_checkpointing()
        if self.carry:
            self.frame.carry = WriteOnce()
        if self.grid:
            rows, cols = embed.dynamic_feat_size(args[0].shape[-2:])
            self.frame.grid = (rows, cols)

    def _refuse_checkpointing(self) -> None:
        """A recompute during backward would see the frame of a later forward: wrong gradients."""
        if self.carry:
            raise UnsupportedCall(
                "this mechanism hands state from layer to layer, which timm's gradient "
                "checkpointing would recompute wrongly; call model.set_grad_checkpointing(False)"
            )
        if self.grid and self.model.dynamic_img_size:
            raise UnsupportedCall(
                "this mechanism reads the grid of each image, which gradient checkpointing with "
                "dynamic_img_size could mix up; call model.set_grad_checkpointing(False) or build "
                "the model with a fixed img_size"
            )


class ZooAttention(Attention):
    """timm's Attention with `self.zoo` in the place of softmax.

    Never constructed: `TimmAdapter.install` gives this class to an existing module, which keeps
    its identity, hooks, children and keys, and sets the three attributes below.
    """

    zoo: nn.Module
    zoo_site: Site
    zoo_frame: Frame

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **unexpected: Any,
    ) -> Tensor:
        """Map x (B, N, dim) to (B, N, dim); attn_mask broadcasts to (B, H, N, N), as in timm."""
        if unexpected:
            raise UnsupportedCall(
                f"{self.zoo_site.path} was called with {', '.join(unexpected)}, which this bridge "
                "does not know; it supports timm 1.0.21 to 1.0.31"
            )
        # Same operations in the same order as timm's, so that softmax stays bit-identical.
        gate = getattr(self, "gate", None)
        gate = gate(x).sigmoid() if gate is not None else None
        shape = (*x.shape[:2], 3, self.num_heads, self.head_dim)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        y = self.zoo(q, k, v, self._context(x, q, attn_mask, is_causal))
        y = self.norm(y.transpose(1, 2).flatten(2))
        if gate is not None:
            y = y * gate
        return self.proj_drop(self.proj(y))

    def _context(self, x: Tensor, q: Tensor, mask: Tensor | None, is_causal: bool) -> Context:
        supports: Supports = self.zoo.zoo_supports
        if mask is not None and is_causal:
            raise self._refuse("attn_mask and is_causal together are ambiguous")
        try:
            key_padding, bias = read_mask(mask, q, supports)
        except UnsupportedCall as error:
            raise self._refuse(str(error)) from None
        ctx = Context(
            key_padding=key_padding,
            bias=bias,
            causal=is_causal,
            grid=self._grid(x.shape[1], supports),
            prefix=self.zoo_site.prefix,
            hidden=x if "hidden" in supports.needs else None,
            projections=self._projections() if "projections" in supports.needs else None,
            carry=self._carry() if "carry" in supports.needs else None,
        )
        if reason := refusal(supports, ctx, queries=x.shape[1], keys=x.shape[1]):
            raise self._refuse(reason)
        return ctx

    def _refuse(self, reason: str) -> UnsupportedCall:
        """An error that says where. A compiled block that read its path would not serve others."""
        return UnsupportedCall(f"{self.zoo_site.path} ({type(self.zoo).__name__}): {reason}")

    def _grid(self, tokens: int, supports: Supports) -> tuple[int, int] | None:
        """The grid of this call; None where it is unknown or tokens were dropped from it."""
        if supports.grid == "ignored":
            return None
        grid = self.zoo_frame.grid
        if grid is not None and self.zoo_site.prefix + math.prod(grid) == tokens:
            return grid
        if supports.grid == "required":
            raise self._refuse(
                f"it needs the grid of its {tokens} tokens, and the last images gave {grid}; "
                "call the model with images and without patch dropout, not its blocks"
            )
        return None

    def _carry(self) -> Carry:
        if self.zoo_frame.carry is None:
            raise self._refuse(
                "it reads state of earlier layers; call the model with images, not its blocks"
            )
        return self.zoo_frame.carry

    def _projections(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Views of the rows of the fused qkv, and the output projection."""
        weights = self.qkv.weight.chunk(3)
        biases = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)
        named = dict(zip(("query", "key", "value"), zip(weights, biases, strict=True), strict=True))
        return {**named, "out": (self.proj.weight, self.proj.bias)}


def read_mask(
    mask: Tensor | None, q: Tensor, supports: Supports
) -> tuple[Tensor | None, Tensor | None]:
    """Split timm's attn_mask into key padding, bool (B, N), and bias, float; one of them is None.

    mask: bool (True = may be attended) or float (added to the scores), broadcastable to
        (B, H, N, N) for q (B, H, N, D). Only (B or 1, 1, 1, N) can be read as padding.
    Raises UnsupportedCall for another shape or dtype, or a bias the mechanism does not support.
    """
    if mask is None:
        return None, None
    batch, heads, tokens, _ = q.shape
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    full = (batch, heads, tokens, tokens)
    fits = len(shape) == 4 and all(m in (1, n) for m, n in zip(shape, full, strict=True))
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise UnsupportedCall(
            f"attn_mask is {mask.dtype} of shape {tuple(mask.shape)}; it must be bool "
            f"(True = may be attended) or float, and broadcastable to {full}"
        )
    mask = mask.reshape(shape)
    by_key = shape[1] == shape[2] == 1
    if by_key and mask.dtype == torch.bool:
        return mask[:, 0, 0].expand(batch, tokens), None
    if supports.bias:
        return None, mask if mask.is_floating_point() else _additive(mask, q.dtype)
    if by_key and supports.key_padding:
        return _real(mask)[:, 0, 0].expand(batch, tokens), None
    raise UnsupportedCall(
        f"this mechanism cannot apply a mask of shape {shape}; pass a padding mask "
        f"({batch}, 1, 1, {tokens}), bool, True = real (a NaFlexVit builds one if created with "
        "use_key_only_attn_mask=True), or patch a mechanism with supports.bias"
    )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))


def _real(mask: Tensor) -> Tensor:
    """Read an additive padding mask: 0 = real, the dtype's minimum or -inf = padding, no others."""
    real = mask == 0
    readable = (real | (mask <= torch.finfo(mask.dtype).min / 2)).all()
    message = "a float padding mask may hold 0 and -inf only for this mechanism"
    if torch.compiler.is_compiling():
        torch._assert_async(readable, message)
    elif not bool(readable):
        raise UnsupportedCall(message)
    return real
