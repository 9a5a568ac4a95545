"""Attention through random features: the drawn directions, and the estimate without overflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from zoo_core import Context
from zoo_core.nn import fused, kernels, random_features

SCALE = 0.3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def directions() -> Tensor:
    torch.manual_seed(0)
    return random_features.orthogonal(11, 4).double()


def reference(w: Tensor, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """The estimate pair by pair, each weight by logsumexp over the features."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            seen = [
                j
                for j in range(k.shape[2])
                if (ctx.key_padding is None or ctx.key_padding[b, j])
                and (not ctx.causal or j <= i + ctx.query_offset)
            ]
            if not seen:
                continue
            x, y = q[b, :, i] * SCALE**0.5, k[b][:, seen] * SCALE**0.5
            logs = (x @ w.T)[:, None] + y @ w.T - y.square().sum(-1, keepdim=True) / 2
            out[b, :, i] = (logs.logsumexp(-1).softmax(-1)[:, None] @ v[b][:, seen])[:, 0]
    return out


PADDING = torch.ones(3, 13, dtype=torch.bool)
PADDING[0, :6] = PADDING[1, 3:8] = PADDING[2] = False

CASES = {
    "all real": (13, Context()),
    "padded": (13, Context(key_padding=PADDING)),
    "causal": (13, Context(causal=True)),
    "causal, padded": (13, Context(causal=True, key_padding=PADDING)),
    "one token after a cache": (1, Context(causal=True, query_offset=12, key_padding=PADDING)),
    "six tokens after a cache": (6, Context(causal=True, query_offset=7)),
    "more queries than keys": (20, Context(causal=True)),
}


@pytest.mark.parametrize("width", [4, 5], ids=["as wide as keys", "wider"])
@pytest.mark.parametrize(("queries", "ctx"), CASES.values(), ids=CASES)
def test_attend_equals_the_estimate_pair_by_pair(
    monkeypatch, directions, queries, ctx, width
) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    q, k = normal(3, 2, queries, 4), normal(3, 2, 13, 4, seed=1)
    v = normal(3, 2, 13, width, seed=2)
    monkeypatch.setattr(random_features, "CHUNKS", 2)
    got = random_features.attend(directions, q, k, v, ctx, scale=SCALE)
    assert_close(got, reference(directions, q, k, v, ctx), rtol=0, atol=1e-12)
    with torch.no_grad():
        in_parts = random_features.attend(directions, q, k, v, ctx, scale=SCALE)
    assert_close(in_parts, got, rtol=0, atol=1e-12)
    dense = random_features.weights(directions, q, k, ctx, scale=SCALE)
    assert_close(dense @ v, got, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ctx", [Context(), Context(key_padding=PADDING)], ids=["full", "padded"])
def test_compiled_without_gradients_it_gives_the_same_at_any_length(directions, ctx) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        random_features.attend, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    k, v = normal(3, 2, 13, 4, seed=1), normal(3, 2, 13, 4, seed=2)
    with torch.no_grad():
        for queries in (13, 6):
            inputs = directions, normal(3, 2, queries, 4), k, v, ctx
            wanted = random_features.attend(*inputs, scale=SCALE)
            assert_close(compiled(*inputs, scale=SCALE), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_are_those_of_the_dense_map(monkeypatch, directions, causal) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    x = [normal(3, 2, 13, 4, seed=seed).requires_grad_() for seed in range(3)]
    q, k, v = x
    ctx = Context(causal=causal, key_padding=PADDING)
    out = random_features.attend(directions, q, k, v, ctx, scale=SCALE)
    dense = random_features.weights(directions, q, k, ctx, scale=SCALE) @ v
    got = torch.autograd.grad(out.square().sum(), x)
    wanted = torch.autograd.grad(dense.square().sum(), x)
    for mine, theirs in zip(got, wanted, strict=True):
        assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_second_derivatives_are_those_of_the_dense_map(monkeypatch, directions) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    x, v = normal(3, 2, 13, 4).requires_grad_(), normal(3, 2, 13, 4, seed=1)
    ctx, upstream = Context(causal=True, key_padding=PADDING), normal(3, 2, 13, 4, seed=2)
    found = []
    for out in (
        random_features.attend(directions, x, x.sin(), v, ctx, scale=SCALE),
        random_features.weights(directions, x, x.sin(), ctx, scale=SCALE) @ v,
    ):
        (slope,) = torch.autograd.grad(out, x, upstream, create_graph=True)
        found.append((slope, *torch.autograd.grad(slope.square().sum(), x)))
    assert_close(found[0], found[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_features_far_beyond_the_range_of_exp_lose_nothing(causal) -> None:
    # At 6 * randn the features of width 64 reach exp(60) and exp(-200): infinity and zero in fp32.
    torch.manual_seed(0)
    w = random_features.orthogonal(64, 64)
    x = [size * normal(1, 2, 40, 64, seed=seed) for seed, size in enumerate((6, 6, 1))]
    ctx = Context(causal=causal)
    single = [tensor.float().requires_grad_() for tensor in x]
    got = random_features.attend(w, *single, ctx, scale=0.125)
    wanted = random_features.weights(w.double(), *x[:2], ctx, scale=0.125) @ x[2]
    assert_close(got.double(), wanted, rtol=0, atol=1e-4)
    got.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in single)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kernel", ["with masses", "without"])
def test_keys_far_from_the_origin_lose_nothing_in_training(causal, kernel, monkeypatch) -> None:
    """What all keys have in common cancels; a key at the origin would have no share beside them."""
    if kernel == "without":
        monkeypatch.setattr(fused, "has", lambda q, v: False)
    torch.manual_seed(0)
    w = random_features.orthogonal(64, 64)
    q, k, v = (normal(1, 2, 40, 64, seed=seed) for seed in range(3))
    k = k + 100 * F.normalize(normal(1, 2, 1, 64, seed=3), dim=-1)
    ctx, gradient = Context(causal=causal), normal(1, 2, 40, 64, seed=4)
    single = [x.float().requires_grad_() for x in (q, k, v)]
    double = [x.requires_grad_() for x in (q, k, v)]
    got = random_features.attend(w, *single, ctx, scale=0.125)
    wanted = random_features.weights(w.double(), *double[:2], ctx, scale=0.125) @ double[2]
    assert_close(got.double(), wanted, rtol=0, atol=1e-3)
    found = torch.autograd.grad(got, single, gradient.float())
    for ours, theirs in zip(found, torch.autograd.grad(wanted, double, gradient), strict=True):
        assert_close(ours.double(), theirs, rtol=0, atol=2e-3 * theirs.abs().max().item())


def test_a_later_key_cannot_drown_earlier_ones() -> None:
    # Earlier keys so large that their features are e^-300, and one later key with features near 1:
    # stabilised by a maximum over all positions, the earlier outputs would become 0 / 0.
    torch.manual_seed(0)
    w = random_features.orthogonal(64, 16)
    q, k, v = (normal(1, 1, 12, 16, seed=seed).float() for seed in range(3))
    k = k / k.norm(dim=-1, keepdim=True) * 25
    later = k.clone()
    later[..., 8, :] = w[0]
    before, after = (
        random_features.attend(w, q, keys, v, Context(causal=True), scale=1.0)[..., :8, :]
        for keys in (k, later)
    )
    assert before.std(-2).min() > 1e-3
    assert_close(after, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rows", "width"), [(1, 4), (4, 4), (11, 4), (3, 8)])
def test_directions_are_orthogonal_within_blocks(rows: int, width: int) -> None:
    w = random_features.orthogonal(rows, width, norms="sqrt_d")
    assert w.shape == (rows, width)
    for block in w.split(width):
        assert_close(block @ block.T, width * torch.eye(len(block)), rtol=0, atol=1e-5)


def test_chi_directions_have_the_moments_of_gaussian_vectors() -> None:
    torch.manual_seed(0)
    w = random_features.orthogonal(8 * 4000, 8)
    assert_close(w.mean(0), torch.zeros(8), rtol=0, atol=0.03)
    assert_close(w.T @ w / len(w), torch.eye(8), rtol=0, atol=0.03)
    lengths = w.square().sum(-1)
    assert_close(lengths.mean(), torch.tensor(8.0), rtol=0.02, atol=0)
    assert_close(lengths.var(), torch.tensor(16.0), rtol=0.1, atol=0)  # of chi^2 with 8 degrees


def test_directions_have_no_preferred_sign() -> None:
    # QR by itself gives the diagonal of each block a sign of its own.
    torch.manual_seed(0)
    blocks = random_features.orthogonal(4 * 4000, 4, norms="sqrt_d").unflatten(0, (-1, 4))
    assert_close(blocks.mean(0), torch.zeros(4, 4), rtol=0, atol=0.05)
