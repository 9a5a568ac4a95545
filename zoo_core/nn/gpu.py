"""Kernels written for GPUs that stand in for plain torch where they compute the same.

flash-linear-attention's (`pip install 'zoo-core[gpu]'`) for causal kernel attention and for the
delta rule, torch's flex_attention for windows. They are chosen at run time: for bfloat16 on CUDA
with widths that are multiples of 16 and at most 256, outside compiled code, if the package is
there. Everything else takes the plain path, and so does everything within `choice.plain_only()`.
Neither the number of tokens nor what a batch holds has a say in it, so that padding changes no
choice.

Each function here gives None where the plain path is to be taken. Kernels sum in fp32, as the plain
path does; their features and the results of their products are rounded to bfloat16, which the plain
path keeps in fp32. That shows most in the gradients of queries of kernel attention, where what the
normaliser cancels is large. float16 is left out: the sums over many tokens exceed its range. A
kernel tunes its blocks when it first runs, so that another process may round differently.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.errors import UnsupportedCall
from zoo_core.isolation import describe
from zoo_core.nn import choice

#: Widths of features and values: what tensor cores multiply at once, and what a kernel can hold.
STEP, WIDEST = 16, 256

#: Tokens in a block of flex_attention's masks.
BLOCK = 128


def suits(x: Tensor, *widths: int) -> bool:
    """Whether a kernel may stand in for tensors like x, (..., any of these widths)."""
    return (
        # Compiled code fuses by itself, and kernels of others would break its graph.
        not torch.compiler.is_compiling()
        and choice.kernels_allowed()
        and x.is_cuda
        and x.dtype is torch.bfloat16
        and all(width % STEP == 0 and width <= WIDEST for width in widths)
    )


@cache
def kernel(module: str, name: str) -> Callable[..., Any] | None:
    """A function of an optional package, None without it. Warns of one that cannot be imported."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:
        package = module.partition(".")[0]
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or missing.partition(".")[0] != package:
            warnings.warn(
                f"{package} is installed and cannot be used, so that plain torch takes its place: "
                f"{describe(error)}",
                stacklevel=2,
            )
        return None
    return found


def causal_product(queries: Tensor, keys: Tensor, values: Tensor, *, like: Tensor) -> Tensor | None:
    """`kernels.causal_product` with offset 0, of as many queries as keys.

    like: the values as the caller was given them, whose device, dtype and width decide.
    """
    if not suits(like, queries.shape[-1], like.shape[-1]):
        return None
    product = kernel("fla.ops.linear_attn", "chunk_linear_attn")
    if product is None:
        return None
    width = values.shape[-1]
    # The backward takes no odd width, as values with a column of ones have.
    padded = F.pad(values, (0, -width % STEP))
    tokens = (_tokens_first(x, like.dtype) for x in (queries, keys, padded))
    out, _ = product(*tokens, scale=1.0, normalize=False)
    return _once(out.transpose(1, 2)[..., :width].to(values.dtype))


def delta_rule(
    queries: Tensor, keys: Tensor, values: Tensor, strengths: Tensor, *, like: Tensor
) -> Tensor | None:
    """`fast_weights.delta_rule`. like: as in `causal_product`."""
    if not suits(like, queries.shape[-1], like.shape[-1]):
        return None
    rule = kernel("fla.ops.delta_rule", "chunk_delta_rule")
    if rule is None:
        return None
    q, k, v, b = (_tokens_first(x, like.dtype) for x in (queries, keys, values, strengths))
    out, _ = rule(q, k, v, b.squeeze(-1), scale=1.0)
    return _once(out.transpose(1, 2).to(values.dtype))


def delta_rule_both_ways(
    queries: Tensor, keys: Tensor, values: Tensor, strengths: Tensor, *, like: Tensor
) -> Tensor | None:
    """`fast_weights.delta_rule_both_ways`. like: as in `causal_product`."""
    tokens = (queries, keys, values, strengths)
    there = delta_rule(*tokens, like=like)
    if there is None:
        return None
    back = delta_rule(*(x.flip(-2) for x in tokens), like=like)
    return None if back is None else (there + back.flip(-2)) / 2


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    *,
    reach: int,
    prefix: int,
    causal: bool,
    scale: float,
) -> Tensor | None:
    """`Window.attend_front` with stride 1 and without dropout, by flex_attention."""
    alike = q.dtype == k.dtype == v.dtype
    if not alike or not suits(q, q.shape[-1], v.shape[-1]) or kernel("triton", "jit") is None:
        return None
    length = q.shape[-2]
    if missing := -length % BLOCK:
        q, k, v = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v))
    if real is None:
        real = torch.full((len(k),), length, device=k.device)
    mask = _window_mask(k, real, reach=reach, prefix=prefix, causal=causal)
    out: Tensor = _flex_attention()(q, k, v, block_mask=mask, scale=scale)
    return _once(out[:, :, :length])


@cache
def _flex_attention() -> Callable[..., Any]:
    """Compiled, for any length: by itself it would make all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


def _window_mask(k: Tensor, real: Tensor, *, reach: int, prefix: int, causal: bool) -> Any:
    """The BlockMask of a window for keys (B, H, a multiple of BLOCK, D).

    Its blocks follow from the window: to find them by asking for every pair of tokens would take
    the time and memory that the window saves.
    """
    from torch.nn.attention.flex_attention import BlockMask

    # As tensors: as numbers each window would be compiled anew.
    near, first = (torch.full((), number, device=k.device) for number in (reach, prefix))

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = ((i - j).abs() <= near) | (j < first)
        seen = seen & (j <= i) if causal else seen | (i < first)
        return seen & (j < real[b])

    block = torch.arange(k.shape[-2] // BLOCK, device=k.device)
    i, j = block[:, None], block
    leading = -(-prefix // BLOCK)
    # Two blocks that are neighbours hold tokens at distance 1.
    seen = ((i - j).abs() * BLOCK - (BLOCK - 1) <= reach) | (j < leading)
    seen = seen & (j <= i) if causal else seen | (i < leading)
    order = seen.int().argsort(dim=-1, descending=True, stable=True)
    number, index = (x.int()[None, None] for x in (seen.sum(-1), order))
    return BlockMask.from_kv_blocks(number, index, BLOCK_SIZE=BLOCK, mask_mod=sees)


def _tokens_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, N, D) as (B, N, H, D); one copy, be it to another dtype or not."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).contiguous()


def _once(x: Tensor) -> Tensor:
    """x, whose gradient refuses to be differentiated."""
    once: Tensor = _Once.apply(x)
    return once


class _Once(torch.autograd.Function):
    """Kernels know no second derivative, and would leave it out in silence."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # only where the graph of the gradient is to be made
            raise UnsupportedCall(
                "the kernel that computed this attention has no second derivative; compute it, "
                "and its gradients, `with zoo_core.nn.choice.plain_only():`"
            )
        return grads[0]
