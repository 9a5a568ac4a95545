"""One mechanism that keeps every rule, and many that each break one; for test_kit_catches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zoo_core import Mechanism, Options, Site, Supports, option
from zoo_core.errors import UnsupportedCall

EVERYTHING = Supports(key_padding=True, causal=True, cross=True, bias=True, weights=True)
PADDING = Supports(key_padding=True)


@dataclass(frozen=True, kw_only=True)
class ToyOptions(Options):
    boost: float = option(1.0, low=0.01)


class Toy(nn.Module):
    """Dense softmax attention with a trainable temperature and a random rotation of q and k."""

    def __init__(self, site: Site, options: ToyOptions) -> None:
        super().__init__()
        self.site, self.options = site, options
        self.temperature = nn.Parameter(torch.ones(site.heads, 1, 1))
        rotation = torch.linalg.qr(torch.randn(site.head_dim, site.head_dim, dtype=torch.float64))[
            0
        ]
        self.register_buffer("rotation", rotation)

    def wide(self, x):
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def scores(self, q, k):
        rotation = self.wide(self.rotation)
        q, k = (self.wide(x).to(rotation.dtype) @ rotation for x in (q, k))
        return q @ k.mT * self.site.scale * self.options.boost * self.wide(self.temperature)

    def seen(self, q, k, ctx):
        length, keys = q.shape[-2], k.shape[-2]
        seen = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=q.device)
        if ctx.key_padding is not None:
            seen = seen & ctx.key_padding[:, None, None]
        if ctx.causal:
            rows = torch.arange(length, device=q.device)[:, None] + ctx.query_offset
            seen = seen & (torch.arange(keys, device=q.device) <= rows)
        return seen

    def hidden(self, x, ctx):
        return (
            x if ctx.key_padding is None else x.masked_fill(~ctx.key_padding[:, None, :, None], 0)
        )

    def attention_map(self, q, k, ctx):
        scores = self.scores(q, self.hidden(k, ctx))
        if ctx.bias is not None:
            scores = scores + ctx.bias
        seen = self.seen(q, k, ctx)
        low = torch.finfo(scores.dtype).min
        return scores.masked_fill(~seen, low).softmax(-1).masked_fill(~seen, 0)

    def weights(self, q, k, ctx):
        return nn.functional.dropout(
            self.attention_map(q, k, ctx), self.site.dropout, self.training
        )

    def forward(self, q, k, v, ctx):
        with torch.autocast(q.device.type, enabled=False):
            weights = self.weights(q, k, ctx)
            return (weights @ self.hidden(v, ctx).to(weights.dtype)).to(v.dtype)


def always_exact(site: Site) -> ToyOptions:
    return ToyOptions()


def record(build: Callable[..., nn.Module] = Toy, **changes: Any) -> Mechanism:
    fields = {
        "name": "toy",
        "summary": "A toy.",
        "family": "test",
        "paper": None,
        "time": "n**2*d",
        "memory": "n**2",
        "supports": EVERYTHING,
        "options": ToyOptions,
        "swap": "exact",
        "factory": build,
        "exact_at": always_exact,
    }
    return Mechanism(**{**fields, **changes})


def inexact(build: Callable[..., nn.Module] = Toy, **changes: Any) -> Mechanism:
    """A toy that only promises to mask padding, so that fewer checks can see what it does wrong."""
    changes = {"supports": PADDING, "exact_at": None, "swap": "approximate", **changes}
    return record(build, **changes)


class IgnoresPadding(Toy):
    def forward(self, q, k, v, ctx):
        return super().forward(q, k, v, replace(ctx, key_padding=None))


class InvertedMask(Toy):
    def forward(self, q, k, v, ctx):
        mask = ctx.key_padding
        return super().forward(q, k, v, replace(ctx, key_padding=None if mask is None else ~mask))


class MultipliesByZero(Toy):
    def hidden(self, x, ctx):
        return x if ctx.key_padding is None else x * ctx.key_padding[:, None, :, None]


class PadsInNormaliser(Toy):
    def seen(self, q, k, ctx):
        return super().seen(q, k, replace(ctx, key_padding=None))


class EmptyRowsNaN(Toy):
    def attention_map(self, q, k, ctx):
        scores = self.scores(q, self.hidden(k, ctx))
        return scores.masked_fill(~self.seen(q, k, ctx), -torch.inf).softmax(-1)


class WindowNaN(Toy):
    """A window of 8 around each token, -inf outside it and at the pads."""

    def attention_map(self, q, k, ctx):
        scores = self.scores(q, self.hidden(k, ctx))
        rows = torch.arange(q.shape[-2])
        near = (rows[:, None] - rows).abs() <= 8
        return scores.masked_fill(~(near & self.seen(q, k, ctx)), -torch.inf).softmax(-1)


class PositionIsIndex(Toy):
    """Later tokens weigh more, counted from the first column instead of the first real token."""

    def scores(self, q, k):
        return super().scores(q, k) + torch.arange(k.shape[-2]) / 10


class LeaksAcrossBatch(Toy):
    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores / scores.detach().abs().amax().clamp_min(1e-3)


class NoisyEval(Toy):
    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores + 1e-12 * torch.randn_like(scores)


class TransientBuffer(Toy):
    def __init__(self, site, options):
        super().__init__(site, options)
        self.register_buffer("tilt", torch.rand(1), persistent=False)

    def scores(self, q, k):
        return super().scores(q, k) * (1 + self.tilt)


class OwnRandomness(Toy):
    def __init__(self, site, options):
        super().__init__(site, options)
        self.rotation.mul_(1 + random.random() / 10)


class Registered(Toy):
    """Works only where its factory has run."""

    ready = False

    def __init__(self, site, options):
        super().__init__(site, options)
        Registered.ready = True

    def forward(self, q, k, v, ctx):
        if not Registered.ready:
            raise RuntimeError("not registered")
        return super().forward(q, k, v, ctx)


class NoBlocks(Toy):
    def forward(self, q, k, v, ctx):
        if q.shape[-2] in (32, 47):
            raise ValueError("the length must not be 32 or 47")
        return super().forward(q, k, v, ctx)


class ValueWidthOfKeys(Toy):
    def forward(self, q, k, v, ctx):
        return super().forward(q, k, v, ctx)[..., : q.shape[-1]]


class ReturnsFp32(Toy):
    def forward(self, q, k, v, ctx):
        return super().forward(q, k, v, ctx).to(torch.float32)


class HalfExponential(Toy):
    """exp without a stabiliser, in the dtype of the input."""

    def attention_map(self, q, k, ctx):
        powers = self.scores(q, self.hidden(k, ctx)).to(q.dtype).exp()
        powers = powers.masked_fill(~self.seen(q, k, ctx), 0)
        return powers / powers.sum(-1, keepdim=True).clamp_min(1e-6)


class HalfSoftmax(Toy):
    """Softmax of large scores in the dtype of the input: the constant cancels, not its rounding."""

    def attention_map(self, q, k, ctx):
        scores = (self.scores(q, self.hidden(k, ctx)) + 30).to(q.dtype)
        seen = self.seen(q, k, ctx)
        low = torch.finfo(scores.dtype).min
        return scores.masked_fill(~seen, low).softmax(-1).masked_fill(~seen, 0)


class PlainTensor(Toy):
    """A tensor that is no buffer stays behind when the module moves to another dtype."""

    def __init__(self, site, options):
        super().__init__(site, options)
        self.tilt = torch.full((1,), 0.5, dtype=torch.float64)

    def _apply(self, function, recurse=True):
        moved = super()._apply(function, recurse)
        if self.rotation.dtype == torch.float32:
            self.tilt = 3 * self.tilt
        return moved

    def scores(self, q, k):
        return super().scores(q, k) * self.tilt.to(q.dtype)


class ReadsValues(Toy):
    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores if float(k.detach().sum()) < 1e9 else scores / 2


class LoopsOverHeads(Toy):
    def forward(self, q, k, v, ctx):
        whole = super().forward(q, k, v, ctx)
        return torch.stack([whole[:, head] * 1 for head in range(q.shape[1])], dim=1)


class GraphBreak(Toy):
    def forward(self, q, k, v, ctx):
        torch._dynamo.graph_break()
        return super().forward(q, k, v, ctx)


class Counts(Toy):
    calls = 0

    def forward(self, q, k, v, ctx):
        self.calls += 1
        return super().forward(q, k, v, ctx)


class MovesParameter(Toy):
    def forward(self, q, k, v, ctx):
        if self.training:
            with torch.no_grad():
                self.temperature.mul_(1.01)
        return super().forward(q, k, v, ctx)


class WrongGradient(Toy):
    def forward(self, q, k, v, ctx):
        return super().forward(q, k.detach() + 0 * k.masked_fill(k.isnan(), 0), v, ctx)


class UnusedParameter(Toy):
    def __init__(self, site, options):
        super().__init__(site, options)
        self.idle = nn.Parameter(torch.ones(3))


class UnusedKeys(Toy):
    """Ignores k without saying so."""

    def forward(self, q, k, v, ctx):
        out = super().forward(q, torch.ones_like(k), v, ctx)
        gate = self.wide(self.temperature) * self.wide(q).mean(-1, keepdim=True).tanh()
        return (out * gate).to(v.dtype)


class DropsInEval(Toy):
    def weights(self, q, k, ctx):
        return nn.functional.dropout(self.attention_map(q, k, ctx), self.site.dropout, True)


class NeverDrops(Toy):
    def weights(self, q, k, ctx):
        return self.attention_map(q, k, ctx)


@dataclass(frozen=True, kw_only=True)
class IdleOptions(ToyOptions):
    idle: int = option(3, low=1)


@dataclass(frozen=True, kw_only=True)
class UnboundedOptions(ToyOptions):
    divisor: int = option(2)


class Divides(Toy):
    def scores(self, q, k):
        return super().scores(q, k) / torch.tensor(float(self.options.divisor))


class Closure(Toy):
    """Patches forward with a function that remembers this very object."""

    def __init__(self, site, options):
        super().__init__(site, options)
        original = super().forward
        self.forward = lambda q, k, v, ctx: original(q, k, v, ctx)


class KeepsGraph(Toy):
    def forward(self, q, k, v, ctx):
        self.last = super().forward(q, k, v, ctx)
        return self.last


class OwnNoise(Toy):
    """Training noise from a generator of its own, which a recompute does not replay."""

    def __init__(self, site, options):
        super().__init__(site, options)
        self.draws = iter(range(1, 10**9))

    def __getstate__(self):
        return {**self.__dict__, "draws": None}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.draws = iter(range(1, 10**9))

    def scores(self, q, k):
        scores = super().scores(q, k)
        return scores * (1 + 0.01 * next(self.draws)) if self.training else scores


class CausalLeak(Toy):
    def seen(self, q, k, ctx):
        return super().seen(q, k, replace(ctx, causal=False))


class CountsAllTokens(Toy):
    """Divides by the number of tokens, the later ones too, whose values it does not look at."""

    def forward(self, q, k, v, ctx):
        mask = torch.ones(1, k.shape[-2]) if ctx.key_padding is None else ctx.key_padding
        count = mask.sum(-1).clamp_min(1)[:, None, None, None]
        return (super().forward(q, k, v, ctx) / count).to(v.dtype)


class IgnoresOffset(Toy):
    def seen(self, q, k, ctx):
        return super().seen(q, k, replace(ctx, query_offset=0))


class CausalBlind(Toy):
    """Hides a token's own key, unless it is the only one."""

    def seen(self, q, k, ctx):
        seen = super().seen(q, k, ctx)
        if not ctx.causal:
            return seen
        rows = torch.arange(q.shape[-2])[:, None] + ctx.query_offset
        others = seen & (torch.arange(k.shape[-2]) != rows)
        return torch.where(others.any(-1, keepdim=True), others, seen)


class IgnoresBias(Toy):
    def attention_map(self, q, k, ctx):
        return super().attention_map(q, k, replace(ctx, bias=None))


class SquareOnly(Toy):
    def forward(self, q, k, v, ctx):
        if q.shape[-2] != k.shape[-2] and not ctx.causal:
            raise RuntimeError("L must equal S")
        return super().forward(q, k, v, ctx)


class SquaresValues(Toy):
    def forward(self, q, k, v, ctx):
        return super().forward(q, k, v * v.abs(), ctx)


class SquaresScores(Toy):
    def scores(self, q, k):
        return super().scores(q, k) * 1.001


class WrongMap(Toy):
    def weights(self, q, k, ctx):
        return super().weights(q, k, ctx) / 2


class NeedsGrid(Toy):
    """The weight of a value follows its row on the grid."""

    def grid(self, v, ctx):
        if ctx.grid is None:
            raise UnsupportedCall("a grid is needed")
        return ctx.grid

    def forward(self, q, k, v, ctx):
        rank = torch.arange(v.shape[-2])[None]
        if ctx.key_padding is not None:
            rank = ctx.key_padding.cumsum(-1) - 1
        row = (rank - ctx.prefix).clamp_min(0) // self.grid(v, ctx)[1]
        return super().forward(q, k, v * (1 + row[:, None, :, None] / 16).to(v.dtype), ctx)


class GuessesGrid(NeedsGrid):
    def grid(self, v, ctx):
        return ctx.grid or (int(v.shape[-2] ** 0.5),) * 2


class PrefixIsFirstColumns(Toy):
    """Gives the prefix more weight, but looks for it in the first columns."""

    def forward(self, q, k, v, ctx):
        first = torch.arange(v.shape[-2]) < ctx.prefix
        return super().forward(q, k, v * (1 + first[:, None]).to(v.dtype), ctx)


class FixedUnchecked(Toy):
    def __init__(self, site, options):
        super().__init__(site, options)
        self.position = nn.Parameter(torch.linspace(0.5, 1, site.max_len))

    def forward(self, q, k, v, ctx):
        places = q.shape[-2] if ctx.key_padding is None else ctx.key_padding.shape[-1]
        ranks = torch.arange(places)[None]
        if ctx.key_padding is not None:
            ranks = (ctx.key_padding.cumsum(-1) - 1).clamp_min(0)
        position = self.wide(self.position)[ranks.clamp_max(len(self.position) - 1)]
        out = super().forward(q, k, v, ctx)
        return out * position[:, None, :, None].to(out.dtype)


class FixedRefused(FixedUnchecked):
    def forward(self, q, k, v, ctx):
        if ctx.key_padding is None and q.shape[-2] > len(self.position):
            raise UnsupportedCall(f"{q.shape[-2]} tokens, at most {len(self.position)}")
        return super().forward(q, k, v, ctx)


class CarriesMap(Toy):
    """Mixes the previous site's map into its own."""

    def __init__(self, site, options):
        super().__init__(site, options)
        self.mix = nn.Parameter(torch.tensor(0.3)) if site.previous else None

    def attention_map(self, q, k, ctx):
        own = super().attention_map(q, k, ctx)
        before = ctx.carry.get(self.site.previous)
        if before is not None:
            share = self.wide(self.mix)
            own = (1 - share) * own + share * before
        ctx.carry[self.site.path] = own
        return own


class KeepsLastMap(Toy):
    """Mixes in the map of the last forward, if it has the same shape."""

    last = None

    def attention_map(self, q, k, ctx):
        own = super().attention_map(q, k, ctx)
        before, self.last = self.last, own.detach()
        return own if before is None or before.shape != own.shape else (own + before) / 2
