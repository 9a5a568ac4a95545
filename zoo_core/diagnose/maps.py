"""The attention map of every layer, own or effective, whatever the mechanism."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.attention import Context, Site
from zoo_core.errors import UnsupportedCall
from zoo_core.mechanism import Supports
from zoo_core.nn.softmax import Softmax
from zoo_core.patching import Patch, Stack, adapter_of, stack_of, unwrap
from zoo_core.plan import Layers, select


@torch.no_grad()
def attention_map(
    model: Any, inputs: Any, layers: Layers | None = None, heads: Iterable[int] | None = None
) -> dict[str, Tensor]:
    """Maps of the chosen layers for one batch: site path -> (B, heads, L, S).

    inputs: keyword arguments as a mapping (a tokenizer's output), or one tensor (images).
    layers: 3, "0-3", "self", ... as in `zoo.build`; all by default. heads: all by default.

    A mechanism with an own map gives that. One that is linear in v gives its effective map, found
    by pushing unit values through it. Both fulfil map @ v == output in eval mode. A mechanism that
    is neither raises UnsupportedCall.
    """
    host = unwrap(model)
    _, adapter = adapter_of(host)
    sites = adapter.sites(host)
    chosen = sites if layers is None else select(layers, sites)
    modes = {module: module.training for module in host.modules()}
    calls: dict[str, tuple[nn.Module, Tensor, Tensor, Tensor, Context]] = {}
    with ExitStack() as cleanup:
        cleanup.callback(_set_modes, modes)
        host.eval()
        _watch_stock(host, adapter, sites, cleanup)
        installed = adapter.installed(host)
        for site in chosen:
            module = _with_map(installed[site.path], site)
            hook = module.register_forward_pre_hook(_Record(calls, site.path))
            cleanup.callback(hook.remove)
        model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        maps = {path: _map(*call) for path, call in calls.items()}
    wanted = None if heads is None else list(heads)
    return {path: found if wanted is None else found[:, wanted] for path, found in maps.items()}


def _watch_stock(host: nn.Module, adapter: Any, sites: Sequence[Site], cleanup: ExitStack) -> None:
    """Run stock layers through a softmax module for a while, so that they can be watched too."""
    stack = stack_of(host) or Stack(host, adapter)
    covered = stack.in_force()
    modules: dict[str, nn.Module] = {}
    for site in sites:
        if site.path not in covered and site.obstacle is None:
            modules[site.path] = Softmax(scale=site.scale, dropout=site.dropout)
            modules[site.path].zoo_supports = Softmax.supports  # type: ignore[assignment]
    if modules:
        patch = Patch(host, "", [], modules)
        stack.add(patch)
        cleanup.callback(patch.restore)


def _set_modes(modes: Mapping[nn.Module, bool]) -> None:
    """Give every module its own mode back; `train` would overwrite a mixture."""
    for module, training in modes.items():
        module.training = training


def _with_map(module: nn.Module | None, site: Site) -> nn.Module:
    """Return the module, or raise UnsupportedCall where no map is defined."""
    if module is None:
        raise UnsupportedCall(f"{site.path}: {site.obstacle}; leave this layer out with layers=")
    supports = _supports(module)
    if not (supports.weights or supports.linear_in_v):
        raise UnsupportedCall(
            f"{site.path}: {type(module).__name__} has no attention map, its output is not linear "
            "in the values; leave this layer out with layers="
        )
    return module


def _supports(module: nn.Module) -> Supports:
    supports: Supports = module.zoo_supports  # type: ignore[assignment]
    return supports


class _Record:
    """Forward pre-hook that keeps what a mechanism was called with."""

    def __init__(self, calls: dict[str, Any], path: str) -> None:
        self.calls, self.path = calls, path

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self.calls[self.path] = (module, *arguments)


def _map(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    if _supports(module).weights:
        own: Tensor = module.attention_map(q, k, ctx)  # type: ignore[operator]
        return own
    return effective_map(module, q, k, v, ctx)


def effective_map(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """Columns of the map (B, H, L, S), v.shape[-1] at a time: the outputs for unit values."""
    keys, width = v.shape[-2], v.shape[-1]
    columns = []
    for start in range(0, keys, width):
        unit = torch.eye(keys, width, dtype=v.dtype, device=v.device).roll(start, 0)
        # Rolled past the last key, the unit rows of absent keys would wrap to the first ones.
        unit[:, keys - start :] = 0
        columns.append(module(q, k, unit.expand_as(v).contiguous(), ctx))
    return torch.cat(columns, -1)[..., :keys]
