"""Watching the attention layers of a model: what each is called with, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.attention import Context, Site
from zoo_core.errors import UnsupportedCall
from zoo_core.hosts import adapter_of
from zoo_core.inspection import inspect
from zoo_core.mechanism import Supports
from zoo_core.modes import evaluating
from zoo_core.nn import masks
from zoo_core.nn.softmax import Softmax
from zoo_core.patching import Patch, Stack, stack_of
from zoo_core.plan import Layers, select


@dataclass(frozen=True, eq=False)
class Call:
    """One call of one attention layer.

    mechanism: its name, or "stock". q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) and
    out (B, H, L, E), as the mechanism got and gave them.
    """

    site: Site
    mechanism: str
    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    ctx: Context
    out: Tensor

    @property
    def where(self) -> str:
        """The layer and what runs there, for messages."""
        return f"{self.site.path} ({self.mechanism})"

    @property
    def supports(self) -> Supports:
        """What the mechanism promises."""
        return supports_of(self.module)

    @property
    def real_keys(self) -> Tensor:
        """Bool (B, S), True = real token."""
        mask = self.ctx.key_padding
        if mask is not None:
            return mask
        return torch.ones(len(self.k), self.k.shape[-2], dtype=torch.bool, device=self.k.device)

    @property
    def real_queries(self) -> Tensor:
        """Bool (B, L): in self-attention the last L keys, in cross-attention all."""
        if self.site.kind == "self":
            return self.real_keys[:, -self.q.shape[-2] :]
        return torch.ones(len(self.q), self.q.shape[-2], dtype=torch.bool, device=self.q.device)

    @property
    def prefix_keys(self) -> Tensor:
        """Bool (B, S): the first `prefix` real tokens of each sample."""
        real = self.real_keys
        return real & (masks.rank(real) < self.ctx.prefix)

    @property
    def grid(self) -> tuple[int, ...] | None:
        """The layout of the tokens after the prefix, None where it is unknown."""
        tokens = self.k.shape[-2] - self.ctx.prefix
        for grid in (self.ctx.grid, self.site.grid):
            if grid is not None and tokens == torch.Size(grid).numel():
                return tuple(grid)
        return None


class Scratch:
    """A carry that reads what a forward wrote and keeps what is written now to itself."""

    def __init__(self, kept: Any) -> None:
        self._kept = kept
        self._own: dict[str, Any] = {}

    def get(self, key: str | None) -> Any:
        """What the site `key` wrote, here or in the forward."""
        return self._own[key] if key in self._own else self._kept.get(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._own[key] = value


def supports_of(module: nn.Module) -> Supports:
    """What the patch was told that a mechanism promises."""
    supports: Supports = module.zoo_supports  # type: ignore[assignment]
    return supports


def chosen_sites(host: nn.Module, layers: Layers | None) -> list[Site]:
    """The sites that `layers` names; without it all that a mechanism could take over.

    Raises UnsupportedCall where a layer is asked for that cannot be watched.
    """
    _, adapter = adapter_of(host)
    sites = adapter.sites(host)
    if layers is None:
        return [site for site in sites if site.obstacle is None]
    chosen = select(layers, sites)
    for site in chosen:
        if site.obstacle is not None:
            raise UnsupportedCall(f"{site.path}: {site.obstacle}; leave it out with layers=")
    return chosen


def mechanism_names(host: nn.Module) -> dict[str, str]:
    """Site path -> short name of the mechanism, or "stock".

    Raises PatchError where the model no longer runs what its patches say.
    """
    return {site.path: site.mechanism.rpartition("/")[2] for site in inspect(host).sites}


@dataclass(frozen=True, eq=False)
class Watch:
    """What is being watched: the modules and mechanisms by site path, and their calls so far."""

    modules: dict[str, nn.Module]
    names: dict[str, str]
    calls: list[Call]
    hooks: ExitStack

    def stop(self) -> None:
        """Keep no more calls, so that the modules can be run again to look at them."""
        self.hooks.close()


@contextmanager
def watched(host: nn.Module, sites: Sequence[Site]) -> Iterator[Watch]:
    """Keep every call of these layers while the block runs, or until `stop`.

    Stock layers run `Softmax` meanwhile, which is bit-identical. The model is in evaluation mode
    for that time; hooks, patches and modes are as they were afterwards, whatever happens.
    """
    _, adapter = adapter_of(host)
    names = mechanism_names(host)
    running = adapter.installed(host)
    with ExitStack() as cleanup:
        cleanup.enter_context(evaluating(host))
        stock = {site.path: _softmax(site) for site in sites if running[site.path] is None}
        if stock:
            patch = Patch(host, "", [], stock)
            (stack_of(host) or Stack(host, adapter)).add(patch)
            # Laying a patch stack anew undoes what a tool (PEFT) put in a mechanism's place.
            cleanup.callback(_put_back, host, running)
            cleanup.callback(patch.restore)
            _put_back(host, running)
        modules = {site.path: stock.get(site.path) or running[site.path] for site in sites}
        found = {path: module for path, module in modules.items() if module is not None}
        watch = Watch(found, names, [], cleanup.enter_context(ExitStack()))
        for site in sites:
            recorder = _Recorder(site, names[site.path], watch.calls)
            watch.hooks.callback(found[site.path].register_forward_hook(recorder).remove)
        yield watch


def _softmax(site: Site) -> nn.Module:
    module = Softmax(scale=site.scale, dropout=site.dropout).eval()
    module.zoo_supports = Softmax.supports  # type: ignore[assignment]
    return module


def _put_back(host: nn.Module, running: Mapping[str, nn.Module | None]) -> None:
    for path, module in running.items():
        if module is not None:
            host.get_submodule(path).zoo = module


class _Recorder:
    """Forward hook of a mechanism."""

    def __init__(self, site: Site, mechanism: str, calls: list[Call]) -> None:
        self.site, self.mechanism, self.calls = site, mechanism, calls

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> None:
        q, k, v, ctx = arguments
        if ctx.carry is not None:
            # To run the mechanism again later must not disturb the forward's own state.
            ctx = replace(ctx, carry=Scratch(ctx.carry))
        self.calls.append(Call(self.site, self.mechanism, module, q, k, v, ctx, out))
