from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.low_rank_band import LOW_RANK_BAND, LowRankBandOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=128)

# Bands of 16 tokens or less are computed in blocks from 65 tokens on, below that as a whole.
WHOLE, BLOCKED = 20, 90
PATHS = pytest.mark.parametrize("length", [WHOLE, BLOCKED], ids=["as-a-whole", "in-blocks"])


def build(*, gate: float | None = None, **options: object) -> nn.Module:
    """A module in float64; both gates at `gate`, or wide apart from one another."""
    torch.manual_seed(1)
    module = LOW_RANK_BAND.factory(SITE, LowRankBandOptions(**options)).double().eval()
    logits = [-1.0, 2.0] if gate is None else [gate, gate]
    with torch.no_grad():
        module.gate.copy_(torch.tensor(logits)[:, None, None])
    return module


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def by_formula(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, band: int, prefix: int = 0
) -> Tensor:
    """Both parts dense, for tokens none of which is padding."""
    length = q.shape[-2]
    sees = [
        [abs(i - j) <= band or i < prefix or j < prefix for j in range(length)]
        for i in range(length)
    ]
    scores = (q @ k.mT * SITE.scale).masked_fill(~torch.tensor(sees), -torch.inf)
    U = module.anchors
    low = (q @ U.mT * SITE.scale).softmax(-1) @ (U @ k.mT * SITE.scale).softmax(-1)
    share = 1 / (1 + (-module.gate).exp())
    return ((1 - share) * scores.softmax(-1) + share * low) @ v


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("length", [1, 2, WHOLE, 64, 65, BLOCKED])
def test_it_computes_its_formula(length: int, prefix: int) -> None:
    module = build(band=5, rank=3)
    q, k, v = inputs(length, batch=2)
    got = module(q, k, v, Context(prefix=prefix))
    torch.testing.assert_close(got, by_formula(module, q, k, v, 5, prefix), rtol=0, atol=1e-12)


@PATHS
def test_distance_counts_real_tokens_only(length: int) -> None:
    """Pads on the left, on the right and inside, holding NaN, in one batch."""
    module = build(band=3, rank=3)
    q, k, v = inputs(length, batch=3)
    real = torch.ones(3, length, dtype=torch.bool)
    real[0, :9] = False
    real[1, -9:] = False
    real[2, 4::5] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    got = module(q, k, v, Context(key_padding=real, prefix=2))
    for b, mask in enumerate(real):
        wanted = by_formula(module, *(x[b : b + 1, :, mask] for x in (q, k, v)), 3, 2)
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)


@PATHS
def test_with_the_gate_closed_a_key_moves_its_band_alone(length: int) -> None:
    q, k, v = inputs(length)
    module, moved = build(band=3, gate=-40.0), v.clone()
    moved[:, :, 10] += 1
    change = module(q, k, moved, Context()) - module(q, k, v, Context())
    rows = (change.abs().amax((0, 1, 3)) > 1e-12).nonzero().flatten().tolist()
    assert rows == list(range(7, 14))


def test_with_the_gate_open_the_map_has_the_rank_of_the_anchors() -> None:
    q, k, _ = inputs(WHOLE)
    weights = build(band=3, rank=3, gate=40.0).attention_map(q, k, Context())
    assert torch.linalg.matrix_rank(weights, tol=1e-10).tolist() == [[3, 3]]
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, HEADS, WHOLE).double())


@PATHS
def test_gradients_are_those_of_the_formula(length: int) -> None:
    module = build(band=5, rank=3)
    leaves = [*(x.requires_grad_() for x in inputs(length, batch=2)), *module.parameters()]
    got = module(*leaves[:3], Context(prefix=1)).square().sum()
    wanted = by_formula(module, *leaves[:3], 5, 1).square().sum()
    pairs = zip(*(torch.autograd.grad(x, leaves) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_it_starts_near_the_band() -> None:
    share = LOW_RANK_BAND.factory(SITE, LowRankBandOptions()).gate.sigmoid()
    torch.testing.assert_close(share, torch.full((HEADS, 1, 1), 0.119), rtol=0, atol=1e-3)


@pytest.mark.parametrize("length", [1, 17, 128], ids=lambda n: f"{n}-tokens")
def test_a_band_that_spans_all_is_softmax_attention(length: int) -> None:
    q, k, v = inputs(length)
    module = LOW_RANK_BAND.factory(SITE, LOW_RANK_BAND.exact_at(SITE)).double()
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)
