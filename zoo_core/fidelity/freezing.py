"""Freezing: layers that have converged stop training, first to last, and are computed only once.

    change_l = | |g_l|_1 - |g_l|_1 of the epoch before | / |g_l|_1 of the epoch before
    frozen <- frozen + the longest run of layers behind it whose change is below the median of the
              layers not frozen, at most alpha * (layers - frozen)

PipeTransformer: Automated Elastic Pipelining for Distributed Training of Transformers, Chaoyang He,
Shen Li, Mahdi Soltanolkotabi, Salman Avestimehr, 2021, arXiv 2102.03161.

*Deviations:* |g_l|_1 is the mean over an epoch's steps of the L1 norm of the layer's gradient, not
the norm of the epoch's summed gradient, which would take a copy of the model. The authors' program
freezes the first layer above the median too, without a bound alpha; the paper's text, which has the
bound, asks for the layer of smallest gradient norm. The pipeline does not shrink as layers freeze.
*Exact when:* no layer is frozen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from statistics import median
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from zoo_core.errors import DoesNotFit, OptionError
from zoo_core.fidelity.activations import ActivationCache, Replay
from zoo_core.hosts import adapter_of, unwrap
from zoo_core.nn.auxiliary import losses_in


class FreezeSchedule(Protocol):
    """Says how many layers are frozen from the next epoch on."""

    def frozen_after(
        self, epoch: int, frozen: int, layers: int, changes: Sequence[float] | None
    ) -> int:
        """epoch: the one that ends, from 0. changes: of each layer's gradient norm, None in it."""


@dataclass(frozen=True, kw_only=True)
class FreezeConverged:
    """Freezes what has converged.

    alpha: the largest share of the layers still training that one epoch may freeze.
    """

    alpha: float = 1 / 3

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise OptionError(f"alpha={self.alpha} must be above 0 and at most 1")

    def frozen_after(
        self, epoch: int, frozen: int, layers: int, changes: Sequence[float] | None
    ) -> int:
        """See FreezeSchedule."""
        rest = [] if changes is None else changes[frozen:]
        if not rest:
            return frozen
        middle = median(rest)
        converged = sum(1 for _ in takewhile(lambda change: change < middle, rest))
        return frozen + min(converged, math.floor(self.alpha * (layers - frozen)))


@dataclass(frozen=True)
class FreezeByHand:
    """Freezes as planned: `plan[e]` layers after epoch e, the last entry from there on."""

    plan: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.plan or min(self.plan) < 0 or list(self.plan) != sorted(self.plan):
            raise OptionError(f"plan={self.plan} must be numbers of layers that never fall")

    def frozen_after(
        self, epoch: int, frozen: int, layers: int, changes: Sequence[float] | None
    ) -> int:
        """See FreezeSchedule."""
        return self.plan[min(epoch, len(self.plan) - 1)]


class Freezing:
    """Freezes the converged prefix of a model in training; a plain loop tells it what happens.

        with Freezing(model, cache=ActivationCache()) as freezing:
            for epoch in range(epochs):
                for batch in batches:
                    ...
                    loss.backward()
                    freezing.observe()
                    optimizer.step()
                freezing.end_epoch()

    Frozen are the first layers and what comes before them (embeddings), with every tensor they
    share with other parts (a tied output matrix, one projection for all layers). They run in
    evaluation mode, without dropout, and add no auxiliary loss.

    model: a host of the zoo, or a wrapper that holds one; patched or not.
    cache: skip the frozen layers for samples seen since anything of them last changed (a redraw,
        loaded weights, a patch, autocast); None: compute them in every forward. FSDP gathers
        weights anew in each forward, so that there nothing is ever skipped.

    Raises DoesNotFit where layers share their module and under DistributedDataParallel, which
    waits for every gradient unless told not to; with a cache, for decoders, compiled models, and
    mechanisms that carry state from layer to layer.
    """

    def __init__(
        self,
        model: Any,
        schedule: FreezeSchedule | None = None,
        *,
        cache: ActivationCache | None = None,
    ) -> None:
        host = unwrap(model)
        self.parts = Parts.of(host)
        self.schedule = FreezeConverged() if schedule is None else schedule
        _check_wrapper(model)
        self.frozen = 0
        self._replay: Replay | None = None
        if cache is not None:
            check = partial(_check_cacheable, model, host)
            check()
            self._replay = Replay(self.parts.base, cache, check)
        self._epoch = 0
        self._norms = _Norms(self.parts.layers)
        self._held: list[Parameter] = []
        self._hooks: list[Any] = []
        self._quiet: list[nn.Module] = []

    def observe(self) -> None:
        """Look at the gradients; between backward and the optimiser's step."""
        self._norms.add()

    def end_epoch(self) -> int:
        """Let the schedule decide; how many layers are frozen from now on."""
        changes = self._norms.changes()
        layers = len(self.parts.layers)
        wanted = self.schedule.frozen_after(self._epoch, self.frozen, layers, changes)
        self._epoch += 1
        if wanted > layers:
            raise OptionError(f"the schedule freezes {wanted} layers; this model has {layers}")
        if wanted > self.frozen:
            self._freeze(wanted)
        return self.frozen

    def thaw(self) -> None:
        """Let everything train again that did before, and leave the model without hooks."""
        if self._replay is not None:
            self._replay.remove()
            self._replay = None
        for hook in self._hooks:
            hook.remove()
        for parameter in self._held:
            parameter.requires_grad_(True)
        for module in self._quiet:
            module.train(self.parts.base.training)
        self._hooks, self._held, self._quiet = [], [], []
        self.frozen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.thaw()

    def _freeze(self, count: int) -> None:
        chosen = self.parts.prefix(count)
        parameters = [*self.parts.loose, *(p for one in chosen for p in one.parameters())]
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                parameter.grad = None
                self._held.append(parameter)
        for module in chosen[len(self._quiet) :]:
            self._hooks.append(module.register_forward_pre_hook(_evaluate))
            self._hooks.append(module.register_forward_hook(_drop_auxiliary_losses))
        self._quiet = chosen
        self.frozen = count
        if self._replay is not None:
            self._replay.skip(self.parts.layers[:count], self.parts.stem)


@dataclass(frozen=True, eq=False)
class Parts:
    """A host taken apart.

    base: what is called with the inputs. stem: its modules before the layers; loose: parameters
    it holds itself (tokens, positions), which belong to the stem. layers: in order.
    """

    base: nn.Module
    stem: list[nn.Module]
    loose: list[Parameter]
    layers: list[nn.Module]

    @classmethod
    def of(cls, host: nn.Module) -> Parts:
        """Find them from the places of the attention modules. Raises DoesNotFit."""
        _, adapter = adapter_of(host)
        sites = adapter.sites(host)
        if any(site.calls > 1 for site in sites):
            raise DoesNotFit(
                f"{type(host).__name__} runs one layer many times; its first ones cannot be frozen "
                "by themselves"
            )
        layers = list(dict.fromkeys(_layer_around(host, site.path) for site in sites))
        base = getattr(host, "base_model", host)
        stem: list[nn.Module] = []
        for child in base.children():
            if any(module in layers for module in child.modules()):
                break
            stem.append(child)
        return cls(base, stem, list(base.parameters(recurse=False)), layers)

    def prefix(self, count: int) -> list[nn.Module]:
        """The stem and the first layers."""
        return [*self.stem, *self.layers[:count]]


@dataclass(eq=False)
class _Norms:
    """L1 norms of the gradients of layers, summed over the steps of an epoch."""

    layers: Sequence[nn.Module]
    sums: Tensor | None = None
    steps: int = 0
    last: list[float] | None = field(default=None)

    def add(self) -> None:
        """Add the gradients that are there now."""
        norms = [
            get_total_norm([p.grad for p in layer.parameters() if p.grad is not None], norm_type=1)
            for layer in self.layers
        ]
        device = norms[-1].device
        now = torch.stack([norm.to(device) for norm in norms]).detach()
        self.sums = now if self.sums is None else self.sums + now
        self.steps += 1

    def changes(self) -> list[float] | None:
        """End an epoch; relative changes since the one before, None in the first one."""
        if self.sums is None:
            return None
        means = (self.sums / self.steps).tolist()
        last, self.last = self.last, means
        self.sums, self.steps = None, 0
        if last is None:
            return None
        return [abs(a - b) / b if b else 0.0 for a, b in zip(means, last, strict=True)]


def _layer_around(host: nn.Module, path: str) -> nn.Module:
    """The member of the outermost list of modules that holds an attention module."""
    module: nn.Module = host
    for name in path.split("."):
        parent, module = module, module.get_submodule(name)
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            return module
    raise DoesNotFit(f"{path} of {type(host).__name__} is in no list of layers")


def _check_wrapper(model: Any) -> None:
    parallel = isinstance(model, nn.parallel.DistributedDataParallel)
    if parallel and not model.find_unused_parameters:
        raise DoesNotFit(
            "DistributedDataParallel waits for the gradients of layers that are frozen later; "
            "make it with find_unused_parameters=True"
        )


def _check_cacheable(model: Any, host: nn.Module) -> None:
    if hasattr(model, "_orig_mod") or any(one._compiled_call_impl for one in host.modules()):
        raise DoesNotFit("a compiled model cannot skip layers; freeze without a cache")
    _, adapter = adapter_of(host)
    if any(site.causal for site in adapter.sites(host)):
        raise DoesNotFit("the activations of a decoder are not cached; freeze without a cache")
    for module in adapter.installed(host).values():
        if "carry" in getattr(getattr(module, "zoo_supports", None), "needs", ()):
            raise DoesNotFit(
                f"{type(module).__name__} carries state from layer to layer, which skipped layers "
                "would not; freeze without a cache"
            )


def _evaluate(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook: whoever called train() on the model, a frozen part is not in training."""
    if module.training:
        module.eval()


def _drop_auxiliary_losses(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook: a loss that no longer teaches anyone would be all a skipped layer leaves."""
    for loss in losses_in(module):
        loss.begin()
