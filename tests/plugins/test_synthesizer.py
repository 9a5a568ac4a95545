from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zoo_core as zoo
from zoo_attention.synthesizer import SYNTHESIZER, SynthesizerOptions
from zoo_core import Context, Site
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import parts

HEADS, WIDTH, MAX_LEN = 2, 8, 16
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=MAX_LEN)
SOURCES = ("random", "factorised", "dense")
KINDS = (*SOURCES, *(f"{source}+content" for source in SOURCES))


def build(**options: object) -> nn.Module:
    torch.manual_seed(1)
    return SYNTHESIZER.factory(SITE, SynthesizerOptions(**options)).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def by_formula(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
) -> Tensor:
    """Token by token, for unpadded input whose queries are the last of the tokens."""
    made, out = module.synthetic, torch.zeros(*q.shape[:-1], v.shape[-1], dtype=v.dtype)
    offset = k.shape[-2] - q.shape[-2]
    share = 1.0 if module.gate is None else torch.sigmoid(module.gate)
    for b, h, row in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        i, query, scores = row + offset, q[b, h, row], []
        for j in range(i + 1 if causal else k.shape[-2]):
            if hasattr(made, "table"):
                synthetic = made.table[h, i, j]
            elif hasattr(made, "columns"):
                synthetic = made.rows[h, i] @ made.columns[h, j]
            else:
                synthetic = query.clamp(min=0) @ made.weight[h, :, j]
            scores.append(share * synthetic + (1 - share) * SITE.scale * (query @ k[b, h, j]))
        out[b, h, row] = torch.stack(scores).softmax(0) @ v[b, h, : len(scores)]
    return out


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_its_formula(kind: str, causal: bool) -> None:
    module = build(kind=kind, rank=3, gate=0.5)
    q, k, v = inputs(7, batch=2)
    wanted = by_formula(module, q, k, v, causal=causal)
    got = module(q, k, v, Context(causal=causal))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_are_ranks_of_real_tokens(kind: str, causal: bool) -> None:
    """Pads on the left, on the right and inside, holding NaN, in one batch."""
    module = build(kind=kind, rank=3, gate=0.5)
    q, k, v = inputs(9, batch=3)
    real = torch.ones(3, 9, dtype=torch.bool)
    real[0, :4] = False
    real[1, -4:] = False
    real[2, 2::3] = False
    hidden = [x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v)]
    got = module(*hidden, Context(key_padding=real, causal=causal))
    for b, mask in enumerate(real):
        wanted = by_formula(module, *(x[b : b + 1, :, mask] for x in (q, k, v)), causal=causal)
        torch.testing.assert_close(got[b : b + 1, :, mask], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scores", [1, 40], ids=lambda n: f"{n}-scores-at-once")
@pytest.mark.parametrize("kind", KINDS)
def test_parts_without_gradients_change_nothing(monkeypatch, kind: str, scores: int) -> None:
    module, (q, k, v) = build(kind=kind, rank=3, gate=0.5), inputs(9, batch=2)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :4] = real[1, 3::2] = False
    monkeypatch.setattr(parts, "SCORES", scores)
    for padding in (None, real):
        ctx = Context(key_padding=padding, causal=True, query_offset=2)
        wanted = module(q[:, :, 2:], k, v, ctx)
        with torch.no_grad():
            got = module(q[:, :, 2:], k, v, ctx)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pads", [0, 3], ids=["no-pads", "3-pads-left"])
@pytest.mark.parametrize("kind", ["factorised", "random+content"])
def test_a_cache_gives_the_rows_of_the_whole(kind: str, pads: int) -> None:
    module = build(kind=kind, gate=0.5)
    q, k, v = inputs(10)
    real = (torch.arange(10) >= pads)[None] if pads else None
    got = module(q[:, :, -2:], k, v, Context(key_padding=real, causal=True, query_offset=8))
    wanted = by_formula(module, q[:, :, -2:], *(x[:, :, pads:] for x in (k, v)), causal=True)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "unused"),
    [("random", {"query", "key"}), ("factorised", {"query", "key"}), ("dense", {"key"})]
    + [(f"{source}+content", set()) for source in SOURCES],
)
def test_what_it_leaves_unused_is_frozen_and_reported(kind: str, unused: set[str]) -> None:
    assert build(kind=kind).unused == unused
    model = zoo.build(
        "bert",
        "synthesizer",
        options={"kind": kind},
        num_hidden_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        vocab_size=64,
    )
    attention = model.encoder.layer[0].attention.self
    frozen = {
        name for name in ("query", "key") if not getattr(attention, name).weight.requires_grad
    }
    assert frozen == unused
    report = str(zoo.inspect(model))
    assert all(name in report for name in unused)
    model(torch.arange(5)[None]).last_hidden_state.square().mean().backward()
    assert not [
        n for n, p in model.encoder.named_parameters() if p.requires_grad and p.grad is None
    ]


def test_factors_of_full_rank_make_any_table() -> None:
    table = build(kind="random")
    factors = build(kind="factorised", rank=MAX_LEN)
    with torch.no_grad():
        factors.synthetic.rows.copy_(table.synthetic.table)
        factors.synthetic.columns.copy_(torch.eye(MAX_LEN).expand(HEADS, -1, -1))
    x = inputs(MAX_LEN)
    torch.testing.assert_close(factors(*x, Context()), table(*x, Context()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_scores_start_with_unit_variance(kind: str) -> None:
    site = Site(heads=4, head_dim=64, dim=256, scale=1 / 8, max_len=128)
    torch.manual_seed(0)
    module = SYNTHESIZER.factory(site, SynthesizerOptions(kind=kind))
    # relu halves the second moment of a symmetric query.
    made = module.synthetic(2**0.5 * torch.randn(1, 4, 128, 64), slice(0, 128), 128)
    assert made.std().item() == pytest.approx(1, rel=0.05)


def test_a_mixture_starts_near_dot_products_and_is_one_when_closed() -> None:
    q, k, v = inputs(MAX_LEN)
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    near, closed = (
        SYNTHESIZER.factory(SITE, options).double()
        for options in (SynthesizerOptions(), SYNTHESIZER.exact_at(SITE))
    )
    torch.testing.assert_close(closed(q, k, v, Context()), wanted, rtol=0, atol=1e-14)
    error = (near(q, k, v, Context()) - wanted).norm() / wanted.norm()
    assert 1e-3 < error.item() < 0.05


def test_a_longer_input_is_refused_with_both_numbers() -> None:
    with pytest.raises(UnsupportedCall, match=rf"at most {MAX_LEN} tokens and got {MAX_LEN + 1}"):
        build()(*inputs(MAX_LEN + 1), Context())
