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

from zoo_core.nn import gpu, kernels
from zoo_core.nn.feature_maps import FeatureMap
from zoo_core.nn.parts import cut

#: Tokens that are handled at once: their scores cost more the more they are, their products less.
CHUNK = 64

#: Heads of all samples that are handled at once without gradients.
HEADS = 32


def delta_rule(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    strengths: Tensor,
    *,
    like: Tensor | None = None,
) -> Tensor:
    """Write and read all tokens in order, from W = 0: (B, H, N, E).

    queries, keys (B, H, N, M), values (B, H, N, E); strengths b (B, H, N, 1), where 0 leaves W as
    it was. All in one dtype, fp32 or fp64, with autocast off. W stays bounded for b |k|^2 <= 2.
    like: what the caller was given; where `gpu` has a kernel for such tensors, that computes it.
    """
    if like is not None:
        out = gpu.delta_rule(queries, keys, values, strengths, like=like)
        if out is not None:
            return out
    q, k, v, b = _chunks(queries, keys, values, strengths)
    written, states = _write(_system(k, b), k, v)
    return _joined((q @ k.mT).tril() @ written + q @ states, values)


def delta_rule_both_ways(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    strengths: Tensor,
    *,
    like: Tensor | None = None,
) -> Tensor:
    """The mean of `delta_rule` from left to right and from right to left."""
    if like is not None:
        out = gpu.delta_rule_both_ways(queries, keys, values, strengths, like=like)
        if out is not None:
            return out
    q, k, v, b = _chunks(queries, keys, values, strengths)
    system, scores = _system(k, b), q @ k.mT
    there, states = _write(system, k, v)
    back, states_back = _write(system.mT, k, v, backwards=True)
    out = scores.tril() @ there + scores.triu() @ back + q @ (states + states_back)
    return _joined(out / 2, values)


def delta_rule_in_parts(
    phi: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strengths: Tensor,
    *,
    offset: int | None,
) -> Tensor:
    """`delta_rule` of queries L that start after `offset` keys, or both ways if None: (B, H, L, E).

    Without gradients, chunk by chunk with features and states of its own, which so stay in the
    cache. q (B, H, L, D), k (B, H, S, D), v (B, H, S, E), the latter two zero at padding;
    phi: (..., D) to (..., M), in the dtype of the strengths.
    """
    out = v.new_empty(v.shape[0], q.shape[-2], v.shape[1], v.shape[-1]).transpose(1, 2)
    for heads in _groups(q):
        tokens = (x[:, heads] for x in (q, k, v, strengths))
        if offset is None:
            _both_ways(out[:, heads], phi, *tokens)
        else:
            _one_way(out[:, heads], phi, *tokens, offset=offset)
    return out


def _groups(q: Tensor) -> list[slice]:
    """Heads of q (B, H, L, D) to work on at a time: many to call few products, yet for a cache."""
    batch, heads = q.shape[:2]
    return cut(heads, HEADS // batch)


def _spans(start: int, stop: int) -> list[slice]:
    return [slice(at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)]


def _one_way(
    out: Tensor,
    phi: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strengths: Tensor,
    *,
    offset: int,
) -> None:
    """Write to out (B, H, L, E) what the queries read from left to right."""
    state: Tensor | None = None
    for span in (*_spans(0, offset), *_spans(offset, offset + q.shape[-2])):
        keys, values, b = _of_chunk(phi, k, v, strengths, span)
        read = state
        written, state = _step(_system(keys, b), keys, values, state)
        if span.start >= offset:
            own = slice(span.start - offset, span.stop - offset)
            queries = phi(q[..., own, :].to(b.dtype)).flatten(0, 1)
            found = _read(queries, (queries @ keys.mT).tril_(), written, read)
            out[..., own, :] = found.view(*out.shape[:2], *found.shape[1:])


def _both_ways(
    out: Tensor, phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, strengths: Tensor
) -> None:
    """Write to out (B, H, N, E) the mean of what the queries read from either side."""
    state: Tensor | None = None
    kept = []
    for span in _spans(0, k.shape[-2]):
        keys, values, b = _of_chunk(phi, k, v, strengths, span)
        queries = phi(q[..., span, :].to(b.dtype)).flatten(0, 1)
        system, scores = _system(keys, b), queries @ keys.mT
        read = state
        written, state = _step(system, keys, values, state)
        found = _read(queries, scores.tril(), written, read)
        kept.append((span, queries, keys, values, system, scores, found))
    state = None
    while kept:
        span, queries, keys, values, system, scores, found = kept.pop()
        read = state
        written, state = _step(system.mT, keys, values, state)
        found = found.add_(_read(queries, scores.triu_(), written, read)).div_(2)
        out[..., span, :] = found.view(*out.shape[:2], *found.shape[1:])


def _of_chunk(
    phi: FeatureMap, k: Tensor, v: Tensor, strengths: Tensor, span: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of keys (G, W, M), values (G, W, E) and strengths (G, W, 1) of the tokens there."""
    k, v, b = (x[..., span, :].to(strengths.dtype) for x in (k, v, strengths))
    return phi(k).flatten(0, 1), v.flatten(0, 1), b.flatten(0, 1)


def _step(
    system: Tensor, keys: Tensor, values: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What a chunk adds, U (G, W, E), and W^T behind it (G, M, E), from that before it.

    state: W^T, None for zeros.
    """
    if state is None:
        written = system @ values
        return written, keys.mT @ written
    written = system @ torch.baddbmm(values, keys, state, alpha=-1)
    return written, torch.baddbmm(state, keys.mT, written)


def _read(queries: Tensor, scores: Tensor, written: Tensor, state: Tensor | None) -> Tensor:
    """What queries (G, W, M) find, (G, W, E): what their chunk added, and what was there."""
    own = scores @ written
    return own if state is None else own.baddbmm_(queries, state)


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
        added, state = _step(solve, keys, values, state)
        written.append(added)
    return torch.stack(written[::step], 1), torch.stack(states[::step], 1)
