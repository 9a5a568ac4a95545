"""The calls that are raced: a mechanism at one site, fused softmax, and what both run on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo_core.attention import Context, Site, refuse_unsupported
from zoo_core.bench.cases import Case
from zoo_core.errors import BenchError, DoesNotFit
from zoo_core.mechanism import Mechanism, Options
from zoo_core.patching import seeded
from zoo_core.plan import obstacles

_PREFIX = 1  # A CLS, as most hosts have.


@dataclass(frozen=True, eq=False)
class Inputs:
    """What every competitor of a case is given. q, k, v: (B, H, N, D), independent and normal.

    key_padding: bool (B, N), True = real token, or None where no token is padding.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    key_padding: Tensor | None

    @classmethod
    def of(cls, case: Case) -> Inputs:
        """The same at every call with this case."""
        with seeded(0):
            q, k, v = (
                _normal(case, (case.batch, case.heads, case.length, case.width)).requires_grad_()
                for _ in range(3)
            )
        real = torch.tensor(case.real_tokens, device=case.device)
        mask = torch.arange(case.length, device=case.device) < real[:, None]
        return cls(case, q, k, v, mask if case.padded else None)

    @property
    def bytes(self) -> int:
        """What has to be read and written at the least.

        Forward: q, k, v and the output once. Backward: q, k, v, the output's gradient and theirs.
        """
        tensors = 4 + (7 if self.case.mode == "backward" else 0)
        return tensors * self.q.numel() * self.q.element_size()

    def context(self, mechanism: Mechanism) -> Context:
        """The mask, and the extras that this mechanism reads."""
        case, needs, scale = self.case, mechanism.supports.needs, self.case.dim**-0.5
        tokens = (case.batch, case.length)
        with seeded(1):
            hidden = _normal(case, (*tokens, case.dim)) if "hidden" in needs else None
            weights = (
                {role: (_normal(case, (case.dim, case.dim)) * scale, None) for role in _ROLES}
                if "projections" in needs
                else None
            )
            times = torch.rand(tokens, device=case.device).cumsum(-1) if "times" in needs else None
        return Context(
            key_padding=self.key_padding,
            grid=_grid(mechanism, case),
            prefix=_prefix(mechanism),
            hidden=hidden,
            projections=weights,
            times=times,
        )


_ROLES = ("query", "key", "value", "out")


@dataclass(eq=False)
class Work:
    """One competitor's computation: `function()` gives the output.

    leaves: what the backward differentiates to. modules: to put in training or eval mode.
    compiled: the same function through torch.compile, where the mode asks for it.
    like: of which shape and dtype the output has to be; None where nobody asks.
    """

    name: str
    function: Callable[[], Any]
    leaves: tuple[Tensor, ...]
    modules: tuple[nn.Module, ...] = ()
    compiled: Callable[[], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    like: Tensor | None = None

    def call(self, mode: str) -> Callable[[], Any]:
        """What is timed, counted and measured in a mode; runs once to warm up.

        Raises BenchError where no gradient can be had, and for another output than `like`.
        """
        for module in self.modules:
            module.train(mode == "backward")
        if mode == "backward":
            return self._forward_and_backward()
        function = self.compiled or self.function

        def call() -> Any:
            with torch.no_grad():
                return function()

        self._check(call())
        return call

    def eager(self, mode: str) -> Callable[[], Any]:
        """The same without compilation."""
        return replace(self, compiled=None).call(mode)

    def _check(self, out: Any) -> None:
        """What is fast since it is not attention to all that was asked wins nothing."""
        if self.like is not None and (out.shape, out.dtype) != (self.like.shape, self.like.dtype):
            raise BenchError(
                f"{self.name}: its output is {tuple(out.shape)} of {out.dtype}; it must be "
                f"{tuple(self.like.shape)} of {self.like.dtype}"
            )

    def _forward_and_backward(self) -> Callable[[], Any]:
        function, leaves = self.function, self.leaves
        out = _first(function())
        self._check(out)
        if not out.requires_grad:
            raise BenchError(
                f"{self.name}: its output has no gradient, so that there is no "
                "backward to measure; use --mode forward"
            )
        gradient = torch.randn_like(out)

        def call() -> Any:
            return torch.autograd.grad(_first(function()), leaves, gradient, allow_unused=True)

        call()
        return call


def softmax(inputs: Inputs) -> Work:
    """Fused softmax attention, the reference, with the mask as hosts pass it."""
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.key_padding
    seen = None if mask is None else mask[:, None, None, :]
    return Work("sdpa", lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=seen), (q, k, v))


def fitted(mechanism: Mechanism, options: Options, case: Case) -> Options:
    """The options clamped to the case, as a plan does."""
    return options.clamped(_site(mechanism, case))


def attend(mechanism: Mechanism, options: Options, inputs: Inputs) -> Work:
    """A mechanism at one site. Raises a ZooError in whose words it does not fit.

    One that carries state from layer to layer is measured at its second site, given what the
    first one carries on.
    """
    case, supports, name = inputs.case, mechanism.supports, mechanism.name
    site, ctx = _site(mechanism, case), inputs.context(mechanism)
    if reasons := obstacles(mechanism, site):
        raise DoesNotFit("; ".join(reasons), reasons)
    refuse_unsupported(supports, ctx, where=name, queries=case.length, keys=case.length)
    options = options.clamped(site)
    with seeded(0), torch.device("cpu"):
        modules = [_place(mechanism.factory(site, options), case)]
        if "carry" in supports.needs:
            second = replace(site, path="bench.1", layer=1, previous=site.path)
            modules.append(_place(mechanism.factory(second, options), case))
    q, k, v = inputs.q, inputs.k, inputs.v
    if len(modules) == 2:
        ctx = replace(ctx, carry={})
        with torch.no_grad():
            modules[0](q, k, v, ctx)
    module = modules[-1]
    leaves = tuple(parameter for parameter in module.parameters() if parameter.requires_grad)
    work = Work(name, lambda: module(q, k, v, ctx), (q, k, v, *leaves), tuple(modules))
    work.options, work.like = options.as_dict(), v
    if case.mode == "compiled":
        compiled = torch.compile(module, fullgraph=True, dynamic=False)
        work.compiled = lambda: compiled(q, k, v, ctx)
    return work


def _site(mechanism: Mechanism, case: Case) -> Site:
    return Site(
        path="bench.0",
        layers=2,
        dim=case.dim,
        heads=case.heads,
        head_dim=case.width,
        scale=case.width**-0.5,
        max_len=case.length,
        grid=_grid(mechanism, case),
        prefix=_prefix(mechanism),
    )


def _prefix(mechanism: Mechanism) -> int:
    return 0 if mechanism.supports.grid == "required" else _PREFIX


def _grid(mechanism: Mechanism, case: Case) -> tuple[int, int] | None:
    """As square as can be, for a mechanism that needs one; the others run on text."""
    if mechanism.supports.grid != "required":
        return None
    rows = max(r for r in range(1, int(case.length**0.5) + 1) if case.length % r == 0)
    return rows, case.length // rows


def _place(module: nn.Module, case: Case) -> nn.Module:
    return module.to(device=case.device, dtype=getattr(torch, case.dtype))


def _normal(case: Case, shape: tuple[int, ...]) -> Tensor:
    """Drawn on the CPU, so that every device gets the same."""
    return torch.randn(shape).to(device=case.device, dtype=getattr(torch, case.dtype))


def _first(output: Any) -> Tensor:
    """The tensor that a module gives, by itself or ahead of others."""
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first
