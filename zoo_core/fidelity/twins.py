"""Second views of one model: the same tensors, other attention.

The teacher of a self-distillation and the floor of a report are the model itself with stock or
uniform attention. A twin has modules of its own, so that hooks, modes and patches of the model stay
as they are, but no weights of its own, except for those that training is about to change.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from zoo_core.attention import Site
from zoo_core.hosts import adapter_of
from zoo_core.nn.softmax import Softmax
from zoo_core.patching import Patch, Stack, stack_of


def stock_twin(host: nn.Module, *, own: Iterable[Tensor] = ()) -> nn.Module:
    """A view of a host model with stock attention everywhere, in evaluation mode.

    own: the tensors it gets copies of; all others are the host's own.
    Its attention layers run `Softmax`, which is bit-identical to the stock attention and takes
    the same arguments as a patched layer.
    """
    twin = _shared_copy(host, {id(tensor) for tensor in own})
    _cover(twin, None, scaled=True)
    return twin


def uniform_twin(host: nn.Module, paths: Collection[str]) -> nn.Module:
    """A view of a host model that only averages what it may see in the layers `paths`: the floor.

    The other layers have stock attention.
    """
    twin = _shared_copy(host, ())
    _cover(twin, paths, scaled=False)
    return twin


def patched_paths(host: nn.Module) -> list[str]:
    """The attention layers where a patch is in force, in order; all if there is no patch."""
    _, adapter = adapter_of(host)
    sites = [site for site in adapter.sites(host) if site.obstacle is None]
    installed = adapter.installed(host)
    patched = [site.path for site in sites if installed[site.path] is not None]
    return patched or [site.path for site in sites]


def alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether two hosts have the same attention layers, so that one can be fed the other's."""
    if type(first) is not type(second):
        return False
    _, adapter = adapter_of(first)
    layouts = [
        [(site.path, site.dim, site.heads, site.head_dim) for site in adapter.sites(host)]
        for host in (first, second)
    ]
    return layouts[0] == layouts[1]


def _cover(twin: nn.Module, paths: Collection[str] | None, *, scaled: bool) -> None:
    """Put softmax or uniform attention into the layers `paths` (None: all that can be replaced)."""
    _, adapter = adapter_of(twin)
    modules: dict[str, nn.Module] = {
        site.path: _module(site, scaled=scaled)
        for site in adapter.sites(twin)
        if (site.obstacle is None if paths is None else site.path in paths)
    }
    Stack(twin, adapter).add(Patch(twin, "", [], modules))
    twin.eval()


def _module(site: Site, *, scaled: bool) -> nn.Module:
    # Scores of zero are what uniform attention is: masks, biases and prefixes stay in force.
    module = Softmax(scale=site.scale if scaled else 0.0)
    module.zoo_supports = Softmax.supports  # type: ignore[assignment]
    return module


def _shared_copy(host: nn.Module, own: Collection[int]) -> nn.Module:
    """Copy the modules and take the patches off; tensors are shared, but for the ids in `own`."""
    flags = [(parameter, parameter.requires_grad) for parameter in host.parameters()]
    tensors = (*host.parameters(), *host.buffers())
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors if id(tensor) not in own}
    twin = copy.deepcopy(host, memo)
    if (stack := stack_of(twin)) is not None:
        stack.clear()
    # Taking a patch off thaws the projections it had frozen, which are the host's own.
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    return twin
