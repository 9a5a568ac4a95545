"""The inputs of the kit: sites, options, contexts and padded layouts, all small and seeded.

A Setting is a mechanism with one choice of options, causality and grid; it builds a Probe (the
module or modules under test) and makes Calls (the tensors and Context of one forward).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo_core.attention import Context, Site
from zoo_core.errors import ZooError
from zoo_core.mechanism import Mechanism, Options
from zoo_core.testing.conformance import ConformanceFailure

MAX_LEN = 48


class Carry(dict[str | None, Any]):
    """The per-forward state of a stand-in host."""


class Probe(nn.Module):
    """A mechanism as a host runs it: a fresh carry for each forward, sites one after the other.

    A mechanism that hands state on, or shares it between sites, is built at two sites; the output
    is then the mean of both, which keeps zeros, linearity and equality with softmax.
    """

    def __init__(self, sites: Sequence[nn.Module], *, carries: bool) -> None:
        super().__init__()
        self.sites = nn.ModuleList(sites)
        self.carries = carries

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: Context,
        *,
        recompute: bool = False,
        alike: bool = True,
    ) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        recompute: run each site under non-reentrant gradient checkpointing.
        alike: all sites see the same queries, else each its own, as in a model.
        """
        ctx = self._with_carry(ctx)
        outputs = []
        for number, site in enumerate(self.sites, 1):
            inputs = (q if alike else q * number, k, v, ctx)
            outputs.append(
                checkpoint(site, *inputs, use_reentrant=False) if recompute else site(*inputs)
            )
        return torch.stack(outputs).mean(0) if len(outputs) > 1 else outputs[0]

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The mean of the sites' maps (B, H, L, S)."""
        ctx = self._with_carry(ctx)
        maps = []
        for site in self.sites:
            module: Any = site
            maps.append(module.attention_map(q, k, ctx))
            if self.carries:
                module(q, k, k, ctx)
        return torch.stack(maps).mean(0)

    def _with_carry(self, ctx: Context) -> Context:
        return replace(ctx, carry=Carry()) if self.carries else ctx

    @property
    def unused(self) -> frozenset[str]:
        """The projections that no site uses."""
        sets = [frozenset(getattr(site, "unused", frozenset())) for site in self.sites]
        return frozenset.intersection(*sets)


@dataclass(frozen=True, eq=False)
class Call:
    """The input of one forward.

    note: what failures say of it. cross: whether the keys are another sequence than the queries.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    ctx: Context
    note: str
    cross: bool = False

    def __str__(self) -> str:
        shapes = f"q {tuple(self.q.shape)}, k {tuple(self.k.shape)}, v {tuple(self.v.shape)}"
        return f"{self.note}; {str(self.q.dtype).removeprefix('torch.')}, {shapes}"

    @property
    def real(self) -> Tensor:
        """Which queries are real tokens, (L,) bool, where all samples have the same mask."""
        mask = self.ctx.key_padding
        if mask is None or self.cross:
            return torch.ones(self.q.shape[-2], dtype=torch.bool)
        return mask[0, -self.q.shape[-2] :]

    def but(self, note: str = "", **changes: Any) -> Call:
        """A copy with other tensors (q, k, v) or Context fields, and a longer note."""
        tensors = {name: changes.pop(name) for name in ("q", "k", "v") if name in changes}
        note = f"{self.note}, {note}" if note else self.note
        return replace(self, ctx=replace(self.ctx, **changes), note=note, **tensors)

    def map(self, function: Callable[[Tensor], Tensor], note: str = "") -> Call:
        """A copy with `function` applied to every floating input but the bias."""
        ctx = self.ctx
        hidden = None if ctx.hidden is None else function(ctx.hidden)
        times = None if ctx.times is None else function(ctx.times)
        tensors = {name: function(getattr(self, name)) for name in ("q", "k", "v")}
        return self.but(note, hidden=hidden, times=times, **tensors)

    def to(self, dtype: torch.dtype) -> Call:
        """A copy in another dtype."""
        call = self.map(lambda x: x.to(dtype))
        bias = None if call.ctx.bias is None else call.ctx.bias.to(dtype)
        return call.but(bias=bias, projections=_cast(call.ctx.projections, dtype))

    def leaves(self) -> tuple[Call, dict[str, Tensor]]:
        """A copy whose q, k, v (and hidden) collect gradients, and those tensors by name."""
        inputs = {name: getattr(self, name).detach().requires_grad_() for name in ("q", "k", "v")}
        if self.ctx.hidden is not None:
            inputs["hidden"] = self.ctx.hidden.detach().requires_grad_()
        return self.but(**inputs), inputs


def run(probe: Probe, call: Call, **how: Any) -> Tensor:
    """Call the probe; a crash or an output of the wrong shape is a ConformanceFailure."""
    try:
        out = probe(call.q, call.k, call.v, call.ctx, **how)
    except Exception as error:
        raised = f"{type(error).__name__}: {str(error)[:1500]}"
        raise ConformanceFailure(str(call), "an output", raised) from error
    shape = (*call.q.shape[:-1], call.v.shape[-1])
    if not isinstance(out, Tensor) or out.shape != shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ConformanceFailure(str(call), f"a tensor of shape {shape}", str(got))
    return out


@dataclass(frozen=True)
class Setting:
    """One way to build and call a mechanism; every check runs over a few of them."""

    mechanism: Mechanism
    options: Options
    label: str
    causal: bool = False
    grid: bool = False
    kind: Literal["self", "cross"] = "self"
    heads: int = 2
    head_dim: int = 8
    max_len: int = MAX_LEN
    dropout: float = 0.0
    prefix: int = 1

    @property
    def dim(self) -> int:
        """The model's width."""
        return self.heads * self.head_dim

    @property
    def scale(self) -> float:
        """The factor on q @ k.T."""
        return float(self.head_dim**-0.5)

    @property
    def site(self) -> Site:
        """The first site."""
        return Site(
            path="layers.0",
            layers=2,
            kind=self.kind,
            dim=self.dim,
            heads=self.heads,
            head_dim=self.head_dim,
            scale=self.scale,
            dropout=self.dropout,
            max_len=self.max_len,
            causal=self.causal,
            grid=(4, 6) if self.grid else None,
            prefix=self._prefix,
        )

    def but(self, **changes: Any) -> Setting:
        """A copy with other fields."""
        return replace(self, **changes)

    def build(self, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Probe:
        """Call the factory under a seed of its own; the probe is in eval mode."""
        first = self.site
        second = replace(first, path="layers.1", layer=1, previous=first.path)
        carries = "carry" in self.mechanism.supports.needs
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            modules = [self._construct(first)]
            if carries or first.shared:
                modules.append(self._construct(second))
        return Probe(modules, carries=carries).to(dtype).eval()

    def _construct(self, site: Site) -> nn.Module:
        module = self.mechanism.factory(site, self.options.clamped(site))
        if not isinstance(module, nn.Module):
            got = type(module).__name__
            raise ConformanceFailure(self.label, "an nn.Module from the factory", got)
        return module

    def call(
        self,
        length: int,
        *,
        keys: int | None = None,
        batch: int = 1,
        width: int | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> Call:
        """Random inputs of L = `length` queries; keys: S, L unless given; width: E, D unless given.

        q, k and v are projections of `hidden`, as in a host, so that mechanisms which project
        again see what belongs together.
        """
        source = torch.Generator().manual_seed(1000 * seed + length)
        projections = self._projections(width or self.head_dim)
        hidden = _normal((batch, length, self.dim), source)
        memory = hidden if keys is None else _normal((batch, keys, self.dim), source)
        q, k, v = (
            self._split(inputs @ projections[name][0].mT)
            for name, inputs in (("query", hidden), ("key", memory), ("value", memory))
        )
        needs = self.mechanism.supports.needs
        steps = torch.rand((batch, length), generator=source, dtype=torch.float64)
        prefix, grid = self._layout(length)
        ctx = Context(
            causal=self.causal,
            grid=grid,
            prefix=prefix,
            hidden=hidden if "hidden" in needs else None,
            times=steps.cumsum(-1) if "times" in needs else None,
            projections=projections if "projections" in needs else None,
        )
        return Call(q, k, v, ctx, self.label, cross=keys is not None).to(dtype)

    @property
    def _prefix(self) -> int:
        return 0 if self.causal else self.prefix

    def _split(self, x: Tensor) -> Tensor:
        """(B, N, H * D) -> (B, H, N, D)."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def _layout(self, length: int) -> tuple[int, tuple[int, int] | None]:
        """The prefix and the grid of a call of this many tokens, as square as can be."""
        if not self.grid:
            return self._prefix, None
        prefix = min(self.prefix, length - 1)
        cells = length - prefix
        rows = max(r for r in range(1, int(cells**0.5) + 1) if cells % r == 0)
        return prefix, (rows, cells // rows)

    def _projections(self, width: int) -> dict[str, tuple[Tensor, Tensor | None]]:
        """The weights (out, in) of a stand-in host, the same for every call of a setting."""
        source = torch.Generator().manual_seed(7)
        inner, wide = self.dim, self.heads * width
        shapes = {"query": (inner, inner), "key": (inner, inner), "value": (wide, inner)}
        weights = {name: _normal(shape, source) for name, shape in shapes.items()}
        weights["out"] = _normal((inner, wide), source)
        return {name: (w * w.shape[1] ** -0.5, None) for name, w in weights.items()}


def settings(mechanism: Mechanism) -> list[Setting]:
    """Every way in which the checks run a mechanism: its option sets, causal and on a grid too."""
    supports = mechanism.supports
    required = supports.grid == "required"
    found = []
    for label, options in option_sets(mechanism).items():
        plain = Setting(mechanism, options, label, grid=required)
        found.append(plain)
        if supports.grid == "optional":
            found.append(plain.but(label=f"{label}, on a grid", grid=True))
        if supports.causal:
            found.append(plain.but(label=f"{label}, causal", causal=True))
    return [found[0], *(setting for setting in found[1:] if _builds(setting))]


def main_settings(mechanism: Mechanism) -> list[Setting]:
    """The settings with small options: for the checks that take long."""
    options = small(mechanism)
    return [setting for setting in settings(mechanism) if setting.options == options]


def option_sets(mechanism: Mechanism) -> dict[str, Options]:
    """The default options, small sizes, and each other choice of every discrete option."""
    base = small(mechanism)
    sets = [mechanism.options(), base]
    for spec in fields(mechanism.options):
        sets += [
            changed
            for value in _discrete(spec.metadata, getattr(base, spec.name))
            if (changed := replaced(base, spec.name, value)) is not None
        ]
    return {describe(options): options for options in dict.fromkeys(sets)}


def small(mechanism: Mechanism) -> Options:
    """Default options with every size cut to 4, so that 48 tokens are many.

    At the default sizes a short test input often falls into a limit where nothing is approximated.
    """
    options = mechanism.options()
    for spec in fields(options):
        value = getattr(options, spec.name)
        sized = type(value) is int and value > 8
        if not (sized or (value is None and spec.metadata.get("at_most"))):
            continue
        for size in (4, 8, spec.metadata.get("low")):
            smaller = None if size is None else replaced(options, spec.name, size)
            if smaller and _builds(Setting(mechanism, smaller, "", grid=_needs_grid(mechanism))):
                options = smaller
                break
    return options


def describe(options: Options) -> str:
    """Options in a failure: "default options" or those that differ from the default."""
    default = type(options)().as_dict()
    chosen = {n: v for n, v in options.as_dict().items() if v != default[n]}
    if not chosen:
        return "default options"
    return "options " + ", ".join(f"{name}={value!r}" for name, value in chosen.items())


def replaced(options: Options, name: str, value: object) -> Options | None:
    """Options with one value changed, None where that is refused."""
    try:
        return replace(options, **{name: value})
    except ZooError:
        return None


def _builds(setting: Setting) -> bool:
    """Whether the factory accepts a setting; combinations may be refused in words."""
    try:
        setting.build()
    except ZooError:
        return False
    return True


def _needs_grid(mechanism: Mechanism) -> bool:
    return mechanism.supports.grid == "required"


def _discrete(metadata: Mapping[str, Any], value: object) -> list[object]:
    """The other values of an option that has few."""
    choices = metadata.get("choices") or ((True, False) if isinstance(value, bool) else ())
    return [choice for choice in choices if choice != value]


def _cast(projections: Any, dtype: torch.dtype) -> Any:
    if projections is None:
        return None
    return {
        name: (weight.to(dtype), None if bias is None else bias.to(dtype))
        for name, (weight, bias) in projections.items()
    }


def _normal(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=source, dtype=torch.float64)
