"""Fast weights: a matrix that is written to and read token by token, computed in chunks.

The delta rule replaces what the matrix W held for a key by a share b of a new value:

    W_i = W_{i-1} + b_i (v_i - W_{i-1} k_i) k_i^T,    o_i = W_i q_i

What token i adds, u_i = b_i (v_i - W_{i-1} k_i), depends on what those before it added. Within a
chunk that is a triangular system,

    U = P (V - K W^T),   P = (I + tril(diag(b) K K^T, -1))^-1 diag(b),

so that only W, one matrix per chunk, is carried from chunk to chunk. From right to left P^T stands
in place of P, so that both directions share the costly part.

Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", 2024, arXiv:2406.06484.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo_core.nn import kernels

#: Tokens that are handled at once: their scores cost more the more they are, their products less.
CHUNK = 64


def delta_rule(queries: Tensor, keys: Tensor, values: Tensor, strengths: Tensor) -> Tensor:
    """Write and read all tokens in order, from W = 0: (B, H, N, E).

    queries, keys (B, H, N, M), values (B, H, N, E); strengths b (B, H, N, 1), where 0 leaves W as
    it was. All in one dtype, fp32 or fp64, with autocast off. W stays bounded for b |k|^2 <= 2.
    """
    q, k, v, b = _chunks(queries, keys, values, strengths)
    written, states = _write(_system(k, b), k, v)
    return _joined((q @ k.mT).tril() @ written + q @ states, values)


def delta_rule_both_ways(
    queries: Tensor, keys: Tensor, values: Tensor, strengths: Tensor
) -> Tensor:
    """The mean of `delta_rule` from left to right and from right to left."""
    q, k, v, b = _chunks(queries, keys, values, strengths)
    system, scores = _system(k, b), q @ k.mT
    there, states = _write(system, k, v)
    back, states_back = _write(system.mT, k, v, backwards=True)
    out = scores.tril() @ there + scores.triu() @ back + q @ (states + states_back)
    return _joined(out / 2, values)


def _chunks(*tokens: Tensor) -> tuple[Tensor, ...]:
    """Each of (B, H, N, D) as (B * H, C, W, D), with zeros in place of missing tokens."""
    size = min(CHUNK, tokens[0].shape[-2])
    return tuple(kernels.chunks(x, x.shape[-2], size=size).flatten(0, 1) for x in tokens)


def _joined(x: Tensor, values: Tensor) -> Tensor:
    """Undo `_chunks` of tokens of the shape of `values`."""
    return kernels.joined(torch.unflatten(x, 0, values.shape[:2]), values.shape[-2])


def _system(k: Tensor, b: Tensor) -> Tensor:
    """P for each chunk of keys k (G, C, W, M) with strengths b (G, C, W, 1): (G, C, W, W)."""
    # The solver reads nothing on and above the diagonal, and takes that for ones.
    system: Tensor = torch.linalg.solve_triangular(
        b * (k @ k.mT), b.squeeze(-1).diag_embed(), upper=False, unitriangular=True
    )
    return system


def _write(
    system: Tensor, k: Tensor, v: Tensor, *, backwards: bool = False
) -> tuple[Tensor, Tensor]:
    """What every chunk adds, U (G, C, W, E), and W^T before it, (G, C, M, E).

    A loop over the chunks, which depend on each other; from the last to the first if `backwards`.
    """
    state = k.new_zeros(k.shape[0], k.shape[-1], v.shape[-1])
    step = -1 if backwards else 1
    written, states = [], []
    chunks = (x.unbind(1)[::step] for x in (system, k, v))
    for solve, keys, values in zip(*chunks, strict=True):
        states.append(state)
        written.append(solve @ torch.baddbmm(values, keys, state, alpha=-1))
        state = torch.baddbmm(state, keys.mT, written[-1])
    return torch.stack(written[::step], 1), torch.stack(states[::step], 1)
