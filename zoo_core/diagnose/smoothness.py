"""How much an attention layer may amplify a change: of its input (Lipschitz), of its parameters.

Lipschitz: Kim, Papamakarios, Mnih, "The Lipschitz Constant of Self-Attention", 2021,
arXiv:2006.04710; Dasoulas, Scaman, Virmaux, "Lipschitz Normalization for Self-Attention Layers",
2021, arXiv:2103.04886.
Sensitivity: Davis, Gu, Choromanski, Dao, Re, Finn, Liang, "Catformer: Designing Stable
Transformers via Sensitivity Analysis", 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zoo_core.diagnose.replay import Layer, named, replayed, widened
from zoo_core.diagnose.reports import LipschitzScore, Sensitivity
from zoo_core.errors import UnsupportedCall
from zoo_core.fidelity.observing import observe
from zoo_core.patching import seeded

#: Relative step of the difference quotient; in double precision it costs about 1e-9 of accuracy.
_STEP = 1e-6


def jacobian_norm(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    iterations: int = 50,
    tolerance: float = 1e-3,
    seed: int = 0,
) -> float:
    """The largest singular value of the Jacobian of `function` at x, by power iteration.

    Of x (..., ) in double precision. J v is a central difference and J^T u a backward pass, so that
    every mechanism that trains can be measured, fused kernels included. A lower bound until it
    converges: iteration ends when the value moves by less than `tolerance`.
    """
    point = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        out = function(point)
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    direction = direction / direction.norm()
    step = _STEP * max(float(x.norm()), 1e-12)
    found = 0.0
    for _ in range(iterations):
        with torch.no_grad():
            up, down = function(x + step * direction), function(x - step * direction)
            change = (up - down) / (2 * step)
        size = float(change.norm())
        if not size > 0:
            return size
        (back,) = torch.autograd.grad(out, point, change / size, retain_graph=True)
        length = float(back.norm())
        if not length > 0 or abs(length - found) <= tolerance * length:
            return max(length, size)
        found, direction = length, back / length
    return found


def lipschitz(
    model: Any,
    inputs: Mapping[str, Tensor] | Tensor,
    *,
    iterations: int = 50,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[LipschitzScore]:
    """The norm of each self-attention layer's Jacobian at what enters it, and a bound if any.

    inputs: a batch, whose first sample is taken. norm: of the map from the tokens (N, dim) that
    enter to what the output projection gives; a lower bound on the layer's Lipschitz constant.
    bound: what a mechanism that has `lipschitz_bound` certifies for this number of tokens; a
    mechanism that keeps its layer below a `contraction` has that as its bound.
    """
    scores = lipschitz_by_layer(model, inputs, iterations=iterations, seed=seed, progress=progress)
    return list(scores)


def lipschitz_by_layer(
    model: Any,
    inputs: Mapping[str, Tensor] | Tensor,
    *,
    iterations: int = 50,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Iterator[LipschitzScore]:
    """The same, each layer as soon as it is measured."""
    batch = named(inputs)
    first = {name: _only_real(x[:1], batch) for name, x in batch.items()}
    with replayed(model, first) as replay:
        for layer in replay.layers:
            yield _score(layer, iterations, seed, progress)


def _score(
    layer: Layer, iterations: int, seed: int, progress: Callable[[str], None] | None
) -> LipschitzScore:
    if progress is not None:
        progress(f"Jacobian of {layer.where}")
    norm = jacobian_norm(layer, layer.state, iterations=iterations, seed=seed)
    return LipschitzScore(layer.site.path, layer.mechanism, norm, _bound(layer))


def _bound(layer: Layer) -> float | None:
    mechanism: Any = layer.tap.inner
    if not hasattr(mechanism, "lipschitz_bound"):
        return None
    contraction = getattr(mechanism, "contraction", None)
    if contraction is not None:
        return float(contraction)
    count = layer.state.shape[1]
    try:
        return float(mechanism.lipschitz_bound(count, layer.tap.context().projections))
    except UnsupportedCall:
        return None


def _only_real(x: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The first sample without its padding."""
    mask = inputs.get("attention_mask")
    if mask is None or x.dim() < 2 or x.shape[1] != mask.shape[1]:
        return x
    return x[:, mask[0].bool()]


def sensitivity(
    model: Any,
    inputs: Mapping[str, Tensor] | Tensor,
    *,
    size: float = 1e-3,
    trials: int = 3,
    seed: int = 0,
) -> Sensitivity:
    """How much the states of a model move when all its parameters do, by depth.

    Every parameter tensor is moved by noise of `size` times its own root mean square, so that one
    of zeros stays. The numbers are the relative change of the states divided by `size`, averaged
    over trials: 1 = a change of the parameters changes the states as much. Runs on a copy in double
    precision.
    """
    with replayed(model, inputs) as replay, seeded(seed), torch.no_grad():
        twin, paths = replay.model, [layer.site.path for layer in replay.layers]
        batch = widened(inputs)
        before = [layer.state for layer in replay.layers]
        before = [*before, replay.last]
        masks = [replay.mask_of(state) for state in before]
        parameters = list(twin.parameters())
        kept = [parameter.clone() for parameter in parameters]
        totals = [0.0] * len(before)
        for _ in range(trials):
            for parameter, value in zip(parameters, kept, strict=True):
                noise = torch.randn(value.shape, dtype=value.dtype).to(value.device)
                parameter.copy_(value + size * value.square().mean().sqrt() * noise)
            seen = observe(twin, batch, paths=list(dict.fromkeys(paths)))
            after = [*seen.states, seen.tokens]
            for n, (old, new, mask) in enumerate(zip(before, after, masks, strict=True)):
                totals[n] += float((new - old)[mask].norm() / old[mask].norm()) / size
    means = [total / trials for total in totals]
    return Sensitivity(size=size, by_depth=tuple(means[:-1]), output=means[-1])
