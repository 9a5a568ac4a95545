"""Rule 10: where a mechanism says it equals softmax attention, it does, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo_core.mechanism import Mechanism
from zoo_core.testing.cases import Call, Setting, run
from zoo_core.testing.compare import expect, expect_close
from zoo_core.testing.conformance import rule
from zoo_core.testing.layouts import layouts, spread

LENGTH = 24


@rule(10, applies=lambda mechanism: mechanism.exact_at is not None or mechanism.swap == "exact")
def check_exact_limit(mechanism: Mechanism) -> None:
    """At the options of exact_at it equals softmax attention: padded, causal, cross, biased too."""
    for setting in _limits(mechanism):
        probe = setting.build()
        for call in _calls(setting):
            out, wanted = run(probe, call), dense_softmax(call, setting.scale)
            rows = call.real
            expect_close(out[..., rows, :], wanted[..., rows, :], call, "dense softmax attention")


def dense_softmax(call: Call, scale: float) -> Tensor:
    """Softmax attention as its formula reads, query by query; every query must see a key."""
    ctx, length, keys = call.ctx, call.q.shape[-2], call.k.shape[-2]
    rows = []
    for i in range(length):
        scores = scale * torch.einsum("bhd,bhsd->bhs", call.q[:, :, i], call.k)
        if ctx.bias is not None:
            scores = scores + ctx.bias.expand(*scores.shape[:2], length, keys)[:, :, i]
        seen = torch.ones(call.q.shape[0], 1, keys, dtype=torch.bool)
        if ctx.causal:
            seen = seen & (torch.arange(keys) <= i + ctx.query_offset)
        if ctx.key_padding is not None:
            seen = seen & ctx.key_padding[:, None]
        peak = scores.masked_fill(~seen, -1e300).amax(-1, keepdim=True)
        powers = (scores - peak).exp().masked_fill(~seen, 0)
        share = powers / powers.sum(-1, keepdim=True)
        rows.append(torch.einsum("bhs,bhse->bhe", share, call.v))
    return torch.stack(rows, dim=2)


def _limits(mechanism: Mechanism) -> list[Setting]:
    """The exact settings: plain, causal, cross and on a grid, where the mechanism has them."""
    supports = mechanism.supports
    if mechanism.exact_at is None:
        expect(False, "", 'an exact_at, since swap is "exact"', "None")
        return []
    required = supports.grid == "required"
    plain = Setting(mechanism, mechanism.options(), "", grid=required, max_len=LENGTH)
    wanted = [plain]
    wanted += [plain.but(causal=True)] if supports.causal else []
    wanted += [plain.but(kind="cross")] if supports.cross else []
    wanted += [plain.but(grid=True)] if supports.grid == "optional" else []
    found = []
    for setting in wanted:
        options = mechanism.exact_at(setting.site)
        if options is not None:
            form = "causal" if setting.causal else setting.kind
            label = f"exact_at -> {options!r}, {form}"
            found.append(setting.but(options=options, label=label))
    return found


def _calls(setting: Setting) -> list[Call]:
    """Calls of several lengths, with padding, a cache, a bias where they are promised."""
    supports = setting.mechanism.supports
    if setting.kind == "cross":
        calls = [setting.call(5, keys=17), setting.call(17, keys=5), setting.call(1, keys=1)]
    else:
        calls = [setting.call(n, batch=2) for n in (1, 7, LENGTH)]
    if supports.key_padding:
        short = setting.call(13, keys=13 if setting.kind == "cross" else None)
        calls += [spread(short, mask, where) for where, mask in layouts(13).items()]
    if setting.causal:
        calls.append(decode(setting.call(17), 3))
    if supports.bias:
        calls += [with_bias(call) for call in calls]
    return calls


def decode(call: Call, queries: int) -> Call:
    """The last `queries` rows of a self-attention call against all its keys, as with a cache."""
    offset = call.k.shape[-2] - queries
    hidden, times = call.ctx.hidden, call.ctx.times
    return call.but(
        f"the last {queries} queries with a cache of {offset}",
        q=call.q[..., offset:, :],
        query_offset=offset,
        hidden=None if hidden is None else hidden[:, offset:],
        times=None if times is None else times[:, offset:],
    )


def with_bias(call: Call) -> Call:
    """The call with a random additive bias (1, H, L, S)."""
    shape = (1, call.q.shape[1], call.q.shape[-2], call.k.shape[-2])
    source = torch.Generator().manual_seed(11)
    bias = torch.randn(shape, generator=source, dtype=torch.float64).to(call.q.dtype)
    return call.but("an additive bias", bias=bias)
