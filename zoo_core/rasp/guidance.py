"""Heads supervised by selectors: a loss between attention maps and the patterns of a program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from zoo_core.attention import Context
from zoo_core.diagnose.maps import find_map, has_map, undefined
from zoo_core.errors import OptionError, PatchError, UnsupportedCall
from zoo_core.hosts import adapter_of, unwrap
from zoo_core.patching import stack_of
from zoo_core.rasp.selectors import Selector


class Guide:
    """Watches the attention of a patched model, whatever its mechanism, while the `with` lasts.

        with rasp.Guide(model) as guide:
            loss = model(ids, mask, labels=labels).loss + guide.loss(trace.layers)

    Maps carry gradients. A mechanism's own map is taken where it has one, else its effective one,
    for which it runs again: ask for `zoo.auxiliary_loss` before. Noise of training (dropout,
    sampling) is drawn anew for a map.
    Raises PatchError where a layer runs stock attention, and UnsupportedCall where a mechanism has
    no map at all.
    """

    def __init__(self, model: Any) -> None:
        host = unwrap(model)
        stack = stack_of(host)
        running = stack.in_force() if stack else {}
        self._modules: list[nn.Module] = []
        for site in adapter_of(host)[1].sites(host):
            if site.kind == "self":
                if site.path not in running:
                    raise PatchError(
                        f'{site.path} runs stock attention; zoo.patch(model, "softmax") makes the '
                        "same one that can be watched"
                    )
                self._modules.append(_with_map(running[site.path], site.path))
        self._calls: dict[int, tuple[Tensor, Tensor, Tensor, Context]] = {}
        self._hooks: list[Any] = []
        self._looking = False

    def __enter__(self) -> Self:
        for layer, module in enumerate(self._modules):
            self._hooks.append(module.register_forward_pre_hook(partial(self._keep, layer)))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._calls.clear()

    def _keep(self, layer: int, module: nn.Module, call: tuple[Any, ...]) -> None:
        # For its effective map a module is run by us, not by the host.
        if not self._looking:
            self._calls[layer] = (call[0], call[1], call[2], call[3])

    def maps(self, layers: int | None = None) -> list[Tensor]:
        """The map of each of the first `layers` layers in the last forward, (B, H, L, S).

        What was watched is forgotten by it, so that one forward gives one set of maps.
        """
        layers = len(self._modules) if layers is None else layers
        if len(self._calls) < layers:
            raise OptionError(
                f"{len(self._calls)} layers ran since the last look, {layers} are asked for; run "
                "the model first, and give it as many layers as there are"
            )
        self._looking = True
        try:
            return [
                find_map(module, *self._calls.pop(layer))
                for layer, module in enumerate(self._modules[:layers])
            ]
        finally:
            self._looking = False
            self._calls.clear()

    def loss(self, layers: Sequence[Sequence[Selector]]) -> Tensor:
        """How far the heads are from the patterns, a scalar: 0 where every map is its pattern.

        layers: for each layer the selectors of its first heads; more heads or layers stay free.
        The mean over heads of `mismatch`.
        """
        maps = self.maps(len(layers))
        losses = []
        for number, (found, wanted) in enumerate(zip(maps, layers, strict=True)):
            if len(wanted) > found.shape[1]:
                raise OptionError(
                    f"layer {number} has {found.shape[1]} heads, the program takes {len(wanted)}"
                )
            losses += [mismatch(found[:, head], one) for head, one in enumerate(wanted)]
        return torch.stack(losses).mean()


def mismatch(found: Tensor, selector: Selector) -> Tensor:
    """Squared distance of a head's map (B, N, N) from the selector's weights, a scalar.

    Summed over keys, averaged over the queries that take something; the others are free. Unlike a
    divergence it needs neither positive weights nor rows that sum to 1, which not all maps have.
    """
    wanted = selector.weights(found.dtype)
    asked = selector.mask.any(-1)
    rows = (found - wanted).square().sum(-1).masked_fill(~asked, 0)
    return rows.sum() / asked.sum().clamp_min(1)


def _with_map(module: nn.Module, path: str) -> nn.Module:
    if not has_map(module):
        why = undefined(type(module).__name__)
        raise UnsupportedCall(f"{path}: {why}; its heads cannot be guided")
    return module
