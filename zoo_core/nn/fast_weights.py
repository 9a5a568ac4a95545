"""Fast weights: a matrix that is written to and read token by token, computed in chunks.

The delta rule replaces what the matrix W held for a key by a share b of a new value:

    W_i = W_{i-1} + b_i (v_i - W_{i-1} k_i) k_i^T,    o_i = W_i q_i

What token i adds, u_i = b_i (v_i - W_{i-1} k_i), depends on what those before it added. Within a
chunk that is a triangular system,

    (I + tril(diag(b) K K^T, -1)) U = diag(b) (V - K W^T),

so that only W, one matrix per chunk, is carried from chunk to chunk.

Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", 2024, arXiv:2406.06484.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo_core.nn import kernels


def delta_rule(queries: Tensor, keys: Tensor, values: Tensor, strengths: Tensor) -> Tensor:
    """Write and read all tokens in order, from W = 0: (B, H, N, E).

    queries, keys (B, H, N, M), values (B, H, N, E); strengths b (B, H, N, 1), where 0 leaves W as
    it was. All in one dtype, fp32 or fp64, with autocast off. W stays bounded for b |k|^2 <= 2.
    """
    length, width = values.shape[-2:]
    q, k, v, b = (kernels.chunks(x, length) for x in (queries, keys, values, strengths))
    # The solver reads nothing on and above the diagonal, and takes that for ones.
    solved = torch.linalg.solve_triangular(
        (b * k) @ k.mT, b * torch.cat([v, k], -1), upper=False, unitriangular=True
    )
    fresh, replaced = solved[..., :width], solved[..., width:]
    states = _states(k, fresh, replaced)
    written = fresh - replaced @ states
    return kernels.joined((q @ k.mT).tril() @ written + q @ states, length)


def _states(k: Tensor, fresh: Tensor, replaced: Tensor) -> Tensor:
    """W^T before each chunk, (B, H, C, M, E): a loop over the chunks, which depend on each other.

    k (B, H, C, W, M); fresh (B, H, C, W, E) is what a chunk adds to W = 0, and replaced
    (B, H, C, W, M) what it takes away for each unit that W holds.
    """
    state = k.new_zeros(*k.shape[:2], k.shape[-1], fresh.shape[-1])
    states = [state]
    chunks = (x[:, :, :-1].unbind(2) for x in (k, fresh, replaced))
    for keys, added, taken in zip(*chunks, strict=True):
        state = state + keys.mT @ (added - taken @ state)
        states.append(state)
    return torch.stack(states, 2)
