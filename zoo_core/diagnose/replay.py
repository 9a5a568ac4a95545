"""Single attention layers of a model as functions of their input, on a copy in double precision.

Everything here runs on the copy, so that the model itself is never touched.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.attention import Context, Site
from zoo_core.diagnose.feed_forward import FeedForward, Run, feed_forward
from zoo_core.diagnose.watching import Scratch, mechanism_names, supports_of
from zoo_core.errors import ZooError
from zoo_core.fidelity.observing import hidden_of, mask_for, observe
from zoo_core.hosts import adapter_of, unwrap
from zoo_core.nn.softmax import Softmax
from zoo_core.patching import Patch, Stack, stack_of


@dataclass(frozen=True, eq=False)
class Layer:
    """One call of one self-attention layer, to be called again with other inputs.

    state: (B, N, dim), what entered it. Called with x (B, N, dim) it gives (B, N, dim): attention
    and output projection, without normalisation, skip connection or MLP.
    """

    site: Site
    mechanism: str
    host: nn.Module
    tap: Tap
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    @property
    def where(self) -> str:
        """The layer and what runs there, for messages."""
        return f"{self.site.path} ({self.mechanism})"

    @property
    def state(self) -> Tensor:
        """What entered the layer in the model, (B, N, dim)."""
        return hidden_of(*self.arguments)

    def __call__(self, x: Tensor) -> Tensor:
        """Run the layer on another input."""
        args, kwargs = self.arguments
        args, kwargs = (x, *args[1:]) if args else args, dict(kwargs)
        if not args:
            kwargs["hidden_states"] = x
        try:
            self.host(*args, **kwargs)
        except ZooError:
            raise
        except Exception as error:
            raise ZooError(f"{self.where} cannot be run by itself: {error}") from error
        return self.tap.projected()


@dataclass(frozen=True, eq=False)
class Replay:
    """The self-attention layers of one forward, in order.

    model: the copy. last: its last hidden states. mask: bool (B, N), True = real token.
    feed_forwards: the MLP after each layer, None where none was found.
    """

    model: nn.Module
    layers: list[Layer]
    feed_forwards: list[FeedForward | None]
    last: Tensor
    mask: Tensor

    def mask_of(self, x: Tensor) -> Tensor:
        """The mask that fits these states; some image models add or drop tokens."""
        return mask_for(x, self.mask)


class Tap(nn.Module):
    """A mechanism that remembers its last answer and asks for the output projection as well."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        promised = supports_of(inner)
        self.needs = promised.needs
        self.zoo_supports = replace(promised, needs=promised.needs | {"projections"})
        self.answer: tuple[Tensor, Context] | None = None

    @property
    def unused(self) -> frozenset[str]:
        """The projections that the mechanism ignores."""
        return frozenset(getattr(self.inner, "unused", frozenset()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        given = ctx if "projections" in self.needs else replace(ctx, projections=None)
        if self.answer is not None and ctx.carry is not None:
            given = replace(given, carry=Scratch(ctx.carry))
        out: Tensor = self.inner(q, k, v, given)
        self.answer = out, ctx
        return out

    def projected(self) -> Tensor:
        """The last answer through the output projection, (B, L, dim)."""
        out, ctx = self._last()
        if ctx.projections is None:
            raise ZooError("this host hands its projections to no mechanism")
        weight, bias = ctx.projections["out"]
        return nn.functional.linear(out.transpose(1, 2).flatten(2), weight, bias)

    def context(self) -> Context:
        """The context of the last call."""
        return self._last()[1]

    def _last(self) -> tuple[Tensor, Context]:
        if self.answer is None:
            raise ZooError("this layer has not run")
        return self.answer


@contextmanager
def replayed(model: Any, inputs: Mapping[str, Tensor] | Tensor) -> Iterator[Replay]:
    """Run a copy of the model in double precision once, and hand out its layers.

    inputs: a batch as a tokenizer makes it, or images as a mapping or a tensor.
    Raises ZooError where the model has no self-attention that can be run by itself.
    """
    host = unwrap(model)
    names = mechanism_names(host)
    twin = copy.deepcopy(host).double().eval().requires_grad_(False)
    _, adapter = adapter_of(twin)
    running = adapter.installed(twin)
    sites = [s for s in adapter.sites(twin) if s.kind == "self" and s.obstacle is None]
    if not sites:
        raise ZooError(f"{type(host).__name__} has no self-attention layer that can be replayed")
    taps = {site.path: Tap(running[site.path] or _softmax(site)) for site in sites}
    (stack_of(twin) or Stack(twin, adapter)).add(Patch(twin, "", [], dict(taps)))
    layers: list[Layer] = []
    runs: dict[int, list[Run]] = {}
    with ExitStack() as hooks:
        for name, linear in _linears_outside(twin, sites):

            def note(module: Any, args: tuple[Any, ...], name: str = name) -> None:
                runs.setdefault(len(layers) - 1, []).append(Run(name, module, args[0]))

            hooks.callback(linear.register_forward_pre_hook(note).remove)
        for site in sites:
            module = twin.get_submodule(site.path)

            def keep(
                module: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                site: Site = site,
            ) -> None:
                found = Layer(site, names[site.path], module, taps[site.path], (args, kwargs))
                layers.append(found)

            handle = module.register_forward_pre_hook(keep, with_kwargs=True)
            hooks.callback(handle.remove)
        with torch.no_grad():
            seen = observe(twin, widened(inputs))
    found = [feed_forward(twin, runs.pop(number, ())) for number in range(len(layers))]
    yield Replay(twin, layers, found, seen.tokens, seen.mask)


def _linears_outside(host: nn.Module, sites: list[Site]) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that belong to no attention layer, with their names."""
    inside = tuple(f"{site.path}." for site in sites)
    for name, module in host.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith(inside):
            yield name, module


def _softmax(site: Site) -> nn.Module:
    module = Softmax(scale=site.scale)
    module.zoo_supports = Softmax.supports  # type: ignore[assignment]
    return module


def named(inputs: Mapping[str, Tensor] | Tensor) -> dict[str, Tensor]:
    """A batch as a mapping; a tensor is images."""
    return {"pixel_values": inputs} if isinstance(inputs, Tensor) else dict(inputs)


def widened(inputs: Mapping[str, Tensor] | Tensor) -> dict[str, Tensor]:
    """A batch in double precision."""
    batch = named(inputs)
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
