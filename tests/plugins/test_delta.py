"""The delta rule against its recurrence, in chunks, both ways, with padding and with a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo_attention.delta import DELTA
from zoo_core import Context, Site
from zoo_core.errors import OptionError, UnsupportedCall
from zoo_core.nn import fast_weights
from zoo_core.nn.fast_weights import delta_rule

HEADS, WIDTH, BATCH = 2, 4, 3
EVERY_NU = pytest.mark.parametrize("nu", [1, 3], ids=lambda nu: f"nu-{nu}")
LENGTHS = pytest.mark.parametrize("length", [1, 4, 5, 23], ids=lambda n: f"{n}-tokens")


@pytest.fixture(autouse=True)
def _chunks_of_four(monkeypatch) -> None:
    monkeypatch.setattr(fast_weights, "CHUNK", 4)


def build(*, causal: bool = False, **options: object) -> nn.Module:
    torch.manual_seed(1)
    site = Site(heads=HEADS, head_dim=WIDTH, dim=HEADS * WIDTH, causal=causal)
    module = DELTA.factory(site, DELTA.options(**options)).double()
    nn.init.normal_(module.strength.weight)
    return module


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v (B, H, N, D) and the hidden states (B, N, dim)."""
    source = torch.Generator().manual_seed(length)
    shape = (4, BATCH, HEADS, length, WIDTH)
    q, k, v, x = torch.randn(shape, dtype=torch.float64, generator=source)
    return q, k, v, x.transpose(1, 2).flatten(2)


def normalised(x: Tensor, nu: int) -> Tensor:
    """DPFP features (N, M) of x (N, D) that sum to 1."""
    r = torch.cat([x.clamp(min=0), (-x).clamp(min=0)], -1)
    features = torch.cat([r * torch.roll(r, i, -1) for i in range(1, nu + 1)], -1)
    total = features.sum(-1, keepdim=True)
    return torch.where(total > 0, features / total, features)


def recurrent(q: Tensor, k: Tensor, v: Tensor, b: Tensor, nu: int) -> Tensor:
    """One head, q and k (N, D), v (N, E), b (N,): the matrix corrected and read once per token."""
    q, k = normalised(q, nu), normalised(k, nu)
    W = v.new_zeros(v.shape[-1], k.shape[-1])
    outputs = []
    for i in range(len(k)):
        W = W + b[i] * torch.outer(v[i] - W @ k[i], k[i])
        outputs.append(W @ q[i])
    return torch.stack(outputs)


def by_formula(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, *, nu: int, causal: bool
) -> Tensor:
    """All samples and heads of unpadded input; b from x (B, N, inputs)."""
    w, bias = module.strength.weight, module.strength.bias
    out = torch.empty_like(v)
    for sample, head in torch.cartesian_prod(torch.arange(len(q)), torch.arange(HEADS)):
        b = torch.sigmoid(x[sample] @ w[head] + bias[head])
        tokens = (q[sample, head], k[sample, head], v[sample, head], b)
        there = recurrent(*tokens, nu)
        if not causal:
            back = recurrent(*(t.flip(0) for t in tokens), nu).flip(0)
            there = (there + back) / 2
        out[sample, head] = there
    return out


def joined(k: Tensor) -> Tensor:
    """The keys of all heads side by side, (B, N, H * D)."""
    return torch.cat([k[:, head] for head in range(HEADS)], -1)


@LENGTHS
@EVERY_NU
def test_the_causal_form_equals_the_recurrence(length: int, nu: int) -> None:
    module, (q, k, v, _) = build(causal=True, nu=nu), inputs(length)
    got = module(q, k, v, Context(causal=True))
    wanted = by_formula(module, q, k, v, joined(k), nu=nu, causal=True)
    assert_close(got, wanted, rtol=0, atol=1e-12)


@LENGTHS
@EVERY_NU
@pytest.mark.parametrize("source", ["hidden", "keys"])
def test_encoders_take_the_mean_of_both_directions(length: int, nu: int, source: str) -> None:
    module, (q, k, v, x) = build(nu=nu, strength_from=source), inputs(length)
    got = module(q, k, v, Context(hidden=x))
    read = x if source == "hidden" else joined(k)
    wanted = by_formula(module, q, k, v, read, nu=nu, causal=False)
    assert_close(got, wanted, rtol=0, atol=1e-12)


@LENGTHS
@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("heads", [1, 6, 32], ids=lambda n: f"{n}-heads-at-once")
def test_parts_without_gradients_change_nothing(
    monkeypatch, length: int, causal: bool, heads: int
) -> None:
    monkeypatch.setattr(fast_weights, "HEADS", heads)
    module, (q, k, v, x) = build(causal=causal, nu=2), inputs(length)
    real = torch.ones(BATCH, length, dtype=torch.bool)
    real[0, : length // 2] = False
    for cached in {0, length // 3} if causal else {0}:
        ctx = Context(key_padding=real, causal=causal, query_offset=cached, hidden=x)
        wanted = module(q[:, :, cached:], k, v, ctx)
        with torch.no_grad():
            got = module(q[:, :, cached:], k, v, ctx)
        assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 64], ids=lambda n: f"chunks-of-{n}")
def test_the_size_of_a_chunk_changes_nothing(monkeypatch, chunk: int) -> None:
    """Unlike features, these keys are of any sign and length 1."""
    q, k, v, x = inputs(23)
    k, b = k / k.norm(dim=-1, keepdim=True), x[:, None, :, :1].sigmoid().expand(-1, HEADS, -1, -1)
    wanted = delta_rule(q, k, v, b)
    monkeypatch.setattr(fast_weights, "CHUNK", chunk)
    assert_close(delta_rule(q, k, v, b), wanted, rtol=0, atol=1e-12)


def test_a_value_replaces_what_its_key_held() -> None:
    """With orthonormal keys and full strength the last value of a key is read back exactly."""
    keys = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 0, 1, 3]][None, None]
    _, _, values, _ = inputs(6)
    values = values[:1, :1]
    ones = torch.ones(1, 1, 6, 1, dtype=torch.float64)
    got = delta_rule(keys[:, :, -1:].expand_as(keys), keys, values, ones)[:, :, -1]
    assert_close(got, values[:, :, 5], rtol=0, atol=1e-14)
    for query, last in ((0, 3), (1, 4), (2, 2)):
        asked = torch.eye(4, dtype=torch.float64)[query].expand_as(keys)
        got = delta_rule(asked, keys, values, ones)[:, :, -1]
        assert_close(got, values[:, :, last], rtol=0, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_padding_never_touches_the_memory(causal: bool) -> None:
    """Left, right and inside, in one batch, holding NaN."""
    module, (q, k, v, x) = build(causal=causal, nu=2), inputs(14)
    real = torch.ones(BATCH, 14, dtype=torch.bool)
    real[0, :5] = False
    real[1, -3:] = False
    real[2, 4:7] = False
    holes = ~real[:, None, :, None]
    k, v = (y.masked_fill(holes, torch.nan) for y in (k, v))
    x = x.masked_fill(~real[..., None], torch.nan)
    got = module(q, k, v, Context(key_padding=real, causal=causal, hidden=x))
    for i, mask in enumerate(real):
        alone = [y[i : i + 1, :, mask] for y in (q, k, v)]
        ctx = Context(causal=causal, hidden=x[i : i + 1, mask])
        assert_close(got[i : i + 1, :, mask], module(*alone, ctx), rtol=0, atol=1e-12)


@pytest.mark.parametrize("queries", [1, 3, 9])
def test_tokens_after_a_cache_continue_the_recurrence(queries: int) -> None:
    module, (q, k, v, _) = build(causal=True), inputs(17)
    got = module(q[:, :, -queries:], k, v, Context(causal=True, query_offset=17 - queries))
    wanted = by_formula(module, q, k, v, joined(k), nu=1, causal=True)
    assert_close(got, wanted[:, :, -queries:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_gradients_are_those_of_the_recurrence(causal: bool) -> None:
    module, tensors = build(causal=causal, nu=2), inputs(11)
    q, k, v, x = (tensor.requires_grad_() for tensor in tensors)
    got = module(q, k, v, Context(causal=causal, hidden=x))
    read = joined(k) if causal else x
    wanted = by_formula(module, q, k, v, read, nu=2, causal=causal)
    leaves = [q, k, v, *module.parameters()] + ([] if causal else [x])
    pairs = zip(
        *(torch.autograd.grad(o.square().sum(), leaves) for o in (got, wanted)), strict=True
    )
    for ours, theirs in pairs:
        assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_a_decoder_cannot_read_hidden_states() -> None:
    with pytest.raises(OptionError, match="cache keeps keys"):
        build(causal=True, strength_from="hidden")


def test_hidden_states_must_match_the_keys() -> None:
    q, k, v, x = inputs(9)
    for hidden in (None, x[:, :-1]):
        with pytest.raises(UnsupportedCall, match="strength_from='keys'"):
            build()(q, k, v, Context(hidden=hidden))
