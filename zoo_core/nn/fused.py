"""Torch's fused softmax on a CPU, called by its own name: it also tells the denominators.

That name is private to torch, so that callers need another way where `has` says no.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
_HAS_KERNEL = hasattr(_ATEN, _KERNEL) and hasattr(_ATEN, f"{_KERNEL}_backward")


def has(q: Tensor, v: Tensor) -> bool:
    """Whether the kernel can be called for q (..., D) and v (..., E)."""
    return _HAS_KERNEL and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention (B, H, L, E), and the logs of its denominators (B, H, L).

    q (B, H, L, D), k (B, H, S, D), v (B, H, S, E), E = D. bias: added to the scores, in q's dtype,
    broadcastable to (B, H, L, S). Autograd does not know the derivative of the logs.
    """
    out, mass = getattr(_ATEN, _KERNEL)(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    return out, mass


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mass: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from that of the output, and what `attend` gave for it."""
    grads: tuple[Tensor, Tensor, Tensor] = getattr(_ATEN, f"{_KERNEL}_backward")(
        grad, q, k, v, out, mass, 0.0, False, attn_mask=bias, scale=scale
    )
    return grads
