"""What the kernels give, in shape and layout: all that a compiler has to know of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register() -> None:
    """Tell compilers, once the kernels are loaded."""
    for name, shapes in _SHAPES.items():
        torch.library.register_fake(f"zoo_core::{name}", shapes)


def _host_layout(like: Tensor, width: int) -> Tensor:
    """As many tokens as `like` (B, H, N, ...), stored as hosts do, tokens before heads."""
    batch, heads, length, _ = like.shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _softmax(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The output, and the logs of its denominators."""
    return _host_layout(q, v.shape[-1]), q.new_empty(q.shape[:3])


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(_host_layout(x, x.shape[-1]) for x in (q, k, v))


def _linear(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output, its denominators and the memory."""
    width = v.shape[-1]
    memory = q.new_empty(*q.shape[:2], q.shape[-1], width + 1)
    return _host_layout(q, width), q.new_empty(*q.shape[:3], 1), memory


def _dpfp(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, nu: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_linear`, the memory in one row."""
    width = v.shape[-1]
    memory = q.new_empty(*q.shape[:2], 2 * nu * q.shape[-1] * (width + 1))
    return _host_layout(q, width), q.new_empty(*q.shape[:3], 1), memory


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    real: Tensor | None,
    nu: int,
    offset: int,
    both: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output; what each key found missing, and the last states, if they are to be kept."""
    batch, heads, length, features = q.shape
    width = v.shape[-1]

    def kept(rows: int) -> Tensor:
        return q.new_empty(batch if keep else 0, heads, 2 if both else 1, rows, width)

    return _host_layout(q, width), kept(offset + length), kept(2 * nu * features)


def _delta_backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(_host_layout(x, x.shape[-1]) for x in inputs[:4])


def _clusters(
    x: Tensor, real: Tensor | None, number: int, iterations: int, sample: int
) -> tuple[Tensor, Tensor]:
    """The cluster of each token, and the means."""
    batch, heads, length, width = x.shape
    index = x.new_empty(batch, heads, length, dtype=torch.int64)
    return index, x.new_empty(batch, heads, number, width)


def _clustered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    index: Tensor,
    means: Tensor,
    topk: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """The output; top keys, share, rest and mass of each cluster, and each query's own mass."""
    of_cluster, width = means.shape[:3], v.shape[-1]
    top = q.new_empty(*of_cluster, topk, dtype=torch.int32)
    share, rest, mass = (q.new_empty(*of_cluster, *more) for more in ((), (width,), ()))
    return _host_layout(q, width), top, share, rest, mass, q.new_empty(q.shape[:3])


def _sines(x: Tensor, shape: list[int], halves: Tensor, *others: Any) -> Tensor:
    noise = others[2]
    return _host_layout(x, noise.shape[-1])


def _sines_backward(
    grad: Tensor, x: Tensor, shape: list[int], halves: Tensor, *others: Any
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and of all else in one row for each head."""
    axes, heads, _, of_axis = halves.shape
    size = (2 + axes) * of_axis + x.shape[-1]
    return _host_layout(x, x.shape[-1]), x.new_empty([heads, size])


def _buckets(turned: Tensor, number: int) -> Tensor:
    batch, heads, length, rounds, _ = turned.shape
    return turned.new_empty(batch, heads, rounds, length, dtype=torch.int64)


def _windows(
    queries: Tensor,
    keys: Tensor | None,
    key_padding: Tensor | None,
    number: int,
    size: int,
    width: int,
    before: int,
) -> tuple[Tensor | None, ...]:
    """The fields of `hashing.Windows`."""
    *rounds, length = queries.shape
    chunks = (length + size - 1) // size
    query = queries.new_empty(*rounds, chunks, size)
    key = queries.new_empty(*rounds, chunks, width)
    real = None if key_padding is None else key.new_empty(key.shape, dtype=torch.bool)
    row, place, first = (queries.new_empty(queries.shape) for _ in range(3))
    return query, key, real, row, place, first


_SHAPES: dict[str, Callable[..., Any]] = {
    "tiles": _softmax,
    "tiles_backward": _gradients,
    "rounds_native": _softmax,
    "rounds_native_backward": _gradients,
    "linear": _linear,
    "linear_backward": _gradients,
    "dpfp": _dpfp,
    "dpfp_backward": _gradients,
    "delta": _delta,
    "delta_backward": _delta_backward,
    "clusters": _clusters,
    "clustered": _clustered,
    "clustered_backward": _gradients,
    "sines": _sines,
    "sines_backward": _sines_backward,
    "buckets": _buckets,
    "windows": _windows,
}
