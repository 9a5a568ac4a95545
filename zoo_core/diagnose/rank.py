"""Rank collapse: how fast attention makes all tokens alike, with and without skip connections.

    res(X) = X - 1 mean(X),   ratio = |res(X)| / |X|,   |X| = sqrt(|X|_1 |X|_inf)

Without skip connections the ratio falls doubly exponentially with depth: its exponent about
triples with each layer.

Dong, Cordonnier, Loukas, "Attention is Not All You Need: Pure Attention Loses Rank Doubly
Exponentially with Depth", 2021, arXiv:2103.03404.
Deviations: the mean is taken instead of the best rank-one part, which is at most a factor from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo_core.diagnose.feed_forward import FeedForward
from zoo_core.diagnose.replay import Layer, Replay, replayed
from zoo_core.diagnose.reports import Collapse
from zoo_core.nn.precision import sum_dtype


@torch.no_grad()
def residual_ratio(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """How far the tokens of x (B, N, dim) are from all being alike: (B,), 0 = all alike.

    mask: bool (B, N), True = real token. Padding counts neither for the mean nor for the norms.
    """
    x = x.to(sum_dtype(x))
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    x = x.masked_fill(~mask[..., None], 0)
    mean = x.sum(1, keepdim=True) / mask.sum(1).clamp(min=1)[:, None, None]
    residual = (x - mean).masked_fill(~mask[..., None], 0)
    size = _norm(x)
    return torch.where(size > 0, _norm(residual) / size.clamp(min=1e-300), 0)


def effective_rank(singular: Tensor) -> Tensor:
    """exp of the entropy of singular values (..., n) as shares, (...): the rank really used."""
    shares = singular / singular.sum(-1, keepdim=True).clamp(min=1e-30)
    rank: Tensor = torch.special.entr(shares).sum(-1).exp()
    return rank


@torch.no_grad()
def ratios(
    x: Tensor,
    layers: Sequence[Callable[[Tensor], Tensor]],
    *,
    mask: Tensor | None = None,
    skip: bool = False,
    sizes: Sequence[Tensor] | None = None,
) -> list[float]:
    """The ratio of x (B, N, dim) and after each of the layers, averaged over samples.

    skip: each layer's input is added to what it gives. sizes: (B, 1, 1) for each layer, the norm
    to which its input is scaled first.
    """
    found = [float(residual_ratio(x, mask).mean())]
    for number, layer in enumerate(layers):
        if sizes is not None:
            x = x * (sizes[number] / _size(x, mask).clamp(min=1e-300))
        x = x + layer(x) if skip else layer(x)
        found.append(float(residual_ratio(x, mask).mean()))
    return found


def rank_collapse(model: Any, inputs: Mapping[str, Tensor] | Tensor) -> Collapse:
    """The residual ratio by depth: in the model, and with skips, MLPs or both removed.

    model: what enters each attention layer, and the last hidden states. The others take what
    enters the first layer through the attention layers with their skips, with their MLPs, or
    alone, all without normalisation; each part is fed tokens of the same size as in the model,
    which changes no ratio and keeps it where it was trained. One more number than layers each.
    Runs on a copy in double precision.
    """
    with replayed(model, inputs) as replay:
        return collapse_of(replay)


def collapse_of(replay: Replay) -> Collapse:
    """The same from the layers of a forward that was made."""
    states = [layer.state for layer in replay.layers]
    mask = replay.mask_of(states[0])
    in_model = [residual_ratio(s, replay.mask_of(s)).mean() for s in (*states, replay.last)]
    model = tuple(map(float, in_model))
    if any(state.shape != states[0].shape for state in states):
        # Tokens were dropped or merged on the way: no state can go through all layers.
        return Collapse(model, (), ())
    sizes = [_size(state, mask) for state in states]
    return Collapse(
        model=model,
        with_skip=tuple(ratios(states[0], replay.layers, mask=mask, skip=True, sizes=sizes)),
        attention_only=tuple(ratios(states[0], replay.layers, mask=mask, sizes=sizes)),
        with_mlp=tuple(_with_mlp(replay, sizes, mask)),
    )


def _with_mlp(replay: Replay, sizes: Sequence[Tensor], mask: Tensor) -> list[float]:
    """The ratios through attention and MLPs without skips; none where a layer has no MLP."""
    blocks = []
    for layer, mlp in zip(replay.layers, replay.feed_forwards, strict=True):
        if mlp is None or mlp.state.shape != layer.state.shape:
            return []
        blocks.append(_Block(layer, mlp, mask))
    return ratios(replay.layers[0].state, blocks, mask=mask, sizes=sizes)


@dataclass(frozen=True, eq=False)
class _Block:
    """An attention layer and its MLP, which is fed tokens of the size that it saw in the model."""

    layer: Layer
    mlp: FeedForward
    mask: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        wanted, given = _size(self.mlp.state, self.mask), _size(x, self.mask)
        return self.mlp(x * (wanted / given.clamp(min=1e-300)))


def _size(x: Tensor, mask: Tensor | None) -> Tensor:
    """Root of the sum of squares of the real tokens, (B, 1, 1)."""
    kept = x if mask is None else x.masked_fill(~mask[..., None], 0)
    size: Tensor = torch.linalg.vector_norm(kept, dim=(1, 2), keepdim=True)
    return size


def _norm(x: Tensor) -> Tensor:
    """sqrt(|X|_1 |X|_inf) of each matrix, (B,)."""
    sizes = x.abs()
    return (sizes.sum(1).amax(-1) * sizes.sum(2).amax(-1)).sqrt()
