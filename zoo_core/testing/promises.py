"""What Supports says: every True holds, and every False is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zoo_core.attention import Context, Site, refuse_unsupported
from zoo_core.mechanism import Mechanism
from zoo_core.plan import obstacles
from zoo_core.testing.cases import Call, Probe, run, settings
from zoo_core.testing.compare import changed, expect, expect_close, expect_finite
from zoo_core.testing.conformance import refused, rule
from zoo_core.testing.layouts import layouts, spread
from zoo_core.testing.limits import decode, with_bias
from zoo_core.testing.training import perturb


@rule(None, applies=lambda mechanism: mechanism.supports.causal)
def check_causal(mechanism: Mechanism) -> None:
    """causal=True: no output depends on a later token, and each depends on its own key."""
    for setting in settings(mechanism):
        if not setting.causal:
            continue
        probe = setting.build()
        for length, cut in ((2, 1), (17, 9), (33, 32)):
            call = setting.call(length)
            future = (torch.arange(length) >= cut)[:, None]
            later = call.map(_disturb(future), f"other values from token {cut} on")
            got, before = run(probe, later), run(probe, call)
            expect_close(got[..., :cut, :], before[..., :cut, :], later, f"rows before {cut} as is")
            move = _disturb((torch.arange(length) == cut)[:, None])
            own = call.but(f"another key and value at token {cut}", k=move(call.k), v=move(call.v))
            seen = changed(run(probe, own)[..., cut, :], before[..., cut, :])
            expect(seen, own, f"row {cut} to change, since it sees its own key", "the same output")


@rule(None, applies=lambda mechanism: mechanism.supports.causal)
def check_causal_alone(mechanism: Mechanism) -> None:
    """causal=True: the first tokens get alone what they get before others, however many."""
    for setting in settings(mechanism):
        if not setting.causal or setting.grid:
            continue
        probe, call = setting.build(), setting.call(33)
        whole = run(probe, call)
        for count in (1, 9, 32):
            first = call.map(_cut(count), f"the first {count} of 33 tokens")
            expect_close(run(probe, first), whole[..., :count, :], first, "their rows of all 33")


@rule(None, applies=lambda mechanism: mechanism.supports.causal)
def check_causal_cache(mechanism: Mechanism) -> None:
    """causal=True: the last queries against a cache get what the whole sequence gives them."""
    for setting in settings(mechanism):
        if not setting.causal:
            continue
        probe, call = setting.build(), setting.call(17)
        whole = run(probe, call)
        for queries in (1, 3, 16):
            step = decode(call, queries)
            expect_close(
                run(probe, step), whole[..., -queries:, :], step, "the whole sequence's rows"
            )


@rule(None, applies=lambda mechanism: mechanism.supports.cross)
def check_cross(mechanism: Mechanism) -> None:
    """cross=True: any number of queries and keys; padded keys change nothing."""
    for setting in settings(mechanism):
        if setting.causal:
            continue
        cross = setting.but(kind="cross")
        if refused(cross.build):
            continue
        probe = cross.build()
        for queries, keys in ((1, 1), (1, 17), (17, 1), (5, 17), (17, 5)):
            call = cross.call(queries, keys=keys, batch=2)
            out = run(probe, call)
            expect_finite(out, call, "outputs")
            if mechanism.supports.key_padding:
                for where, mask in layouts(keys).items():
                    padded = spread(call, mask, where, fill="NaN")
                    expect_close(run(probe, padded), out, padded, "the output without padding")


@rule(None, applies=lambda mechanism: mechanism.supports.bias)
def check_bias(mechanism: Mechanism) -> None:
    """bias=True: an additive bias acts, in every broadcastable shape, and -1e9 hides a key."""
    for setting in settings(mechanism):
        probe, call = setting.build(), setting.call(17, batch=2)
        biased = with_bias(call)
        bias = biased.ctx.bias
        if bias is None:
            raise TypeError("with_bias gives a bias")
        out = run(probe, biased)
        expect(changed(out, run(probe, call)), biased, "another output", "the output without bias")
        whole = biased.but("expanded to (B, H, L, S)", bias=bias.expand(2, -1, -1, -1))
        expect_close(run(probe, whole), out, whole, "the output with a (1, H, L, S) bias")
        single = biased.but("one head's bias for all", bias=bias[:, :1])
        same = single.but(bias=bias[:, :1].expand_as(bias))
        expect_close(run(probe, single), run(probe, same), single, "the same as when expanded")
        _expect_bias_hides(probe, call)


def _expect_bias_hides(probe: Probe, call: Call) -> None:
    bias = torch.zeros(1, 1, 17, 17, dtype=call.q.dtype)
    bias[..., 5] = -1e9
    hidden = call.but("key 5 hidden by a bias of -1e9", bias=bias)
    rows = torch.arange(17) != 5
    at = (~rows)[:, None]
    moved = hidden.but("its key and value changed", k=_disturb(at)(call.k), v=_disturb(at)(call.v))
    got, wanted = run(probe, moved), run(probe, hidden)
    expect_close(got[..., rows, :], wanted[..., rows, :], moved, "the output as before")


@rule(None, applies=lambda mechanism: mechanism.supports.weights)
def check_weights(mechanism: Mechanism) -> None:
    """weights=True: attention_map(q, k, ctx) @ v equals the forward, with zeros at padded keys."""
    for setting in settings(mechanism):
        probe = setting.build()
        calls = [setting.call(n, batch=2) for n in (1, 17)]
        if mechanism.supports.key_padding:
            mask = layouts(13)["7 pads scattered"]
            calls.append(spread(setting.call(13), mask, "7 pads scattered"))
        for call in calls:
            weights = probe.attention_map(call.q, call.k, call.ctx)
            shape = (*call.q.shape[:-1], call.k.shape[-2])
            expect(weights.shape == shape, call, f"a map of shape {shape}", str(weights.shape))
            rows = call.real
            if call.ctx.key_padding is not None:
                at_pads = weights[..., rows, :][..., ~call.ctx.key_padding[0]]
                zeros = torch.zeros_like(at_pads)
                expect_close(at_pads, zeros, call, "a map that is zero at padded keys")
            out, got = run(probe, call)[..., rows, :], (weights @ call.v)[..., rows, :]
            expect_close(got, out, call, "map @ v = forward", tolerance=1e-7)


@rule(None)
def check_linear_in_v(mechanism: Mechanism) -> None:
    """linear_in_v=True: f(a v + b w) = a f(v) + b f(w) at fixed q and k; False: somewhere not."""
    linear = mechanism.supports.linear_in_v
    unlike = []
    for setting in settings(mechanism):
        probe, call = setting.build(), setting.call(17, batch=2)
        perturb(probe)
        other = setting.call(17, batch=2, seed=1).v
        got = run(probe, call.but("2 v - 3 w", v=2 * call.v - 3 * other))
        wanted = 2 * run(probe, call) - 3 * run(probe, call.but(v=other))
        if linear:
            expect_close(got, wanted, call, "f(2 v - 3 w) = 2 f(v) - 3 f(w)", tolerance=1e-7)
        unlike.append(changed(got, wanted))
    expect(linear or any(unlike), "every setting", "an output not linear in v", "a linear one")


@rule(None)
def check_refusals(mechanism: Mechanism) -> None:
    """What is not promised is refused in words: by the plan where it is known, else by the call."""
    supports = mechanism.supports
    grid = (4, 6) if supports.grid == "required" else None
    known = {
        "causal": (supports.causal, Site(causal=True, grid=grid)),
        "cross": (supports.cross, Site(kind="cross", grid=grid)),
        "grid": (supports.grid != "required", Site(grid=None)),
    }
    for promise, (held, site) in known.items():
        reasons = obstacles(mechanism, site)
        expect(held == (not reasons), promise, "a reason if and only if not promised", str(reasons))
    brought = {
        "key_padding": (Context(key_padding=torch.ones(1, 4, dtype=torch.bool)), 4),
        "causal": (Context(causal=True), 4),
        "bias": (Context(bias=torch.zeros(1, 1, 4, 4)), 4),
        "cross": (Context(), 3),
    }
    for promise, (ctx, queries) in brought.items():
        error = refused(
            lambda: refuse_unsupported(supports, ctx, where="layers.0", queries=queries, keys=4)  # noqa: B023
        )
        held = getattr(supports, promise)
        expect(held == (error is None), promise, "a ZooError iff not promised", str(error))


@rule(None)
def check_grid(mechanism: Mechanism) -> None:
    """A grid acts if and only if it is not ignored; where it is required no grid is refused."""
    grid, setting = mechanism.supports.grid, settings(mechanism)[0]
    probe, call = setting.build(), setting.call(13)
    if grid == "required":
        error = refused(lambda: probe(call.q, call.k, call.v, replace(call.ctx, grid=None)))
        expect(error is not None, call.but("no grid"), "a ZooError", "an output")
    acts = False
    for setting in settings(mechanism):
        if setting.grid or grid == "ignored":
            probe, call = setting.build(), setting.call(13)
            wide, high = (call.but(f"grid {g}", prefix=1, grid=g) for g in ((3, 4), (4, 3)))
            acts = acts or changed(run(probe, wide), run(probe, high))
    expected = "the same output" if grid == "ignored" else "another output"
    expect(acts == (grid != "ignored"), "grid (3, 4) and (4, 3)", expected, "the contrary")


def _cut(count: int) -> Callable[[Tensor], Tensor]:
    """A function that keeps the first tokens of a (..., N, width) or (B, N) tensor."""
    return lambda x: x[..., :count, :] if x.dim() > 2 else x[:, :count]


def _disturb(rows: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that changes the rows (N, 1) True of a (..., N, width) or (B, N) tensor."""

    def apply(x: Tensor) -> Tensor:
        mask = rows if x.dim() > 2 else rows[:, 0]
        return torch.where(mask, 5 - 3 * x.flip(-1), x)

    return apply
