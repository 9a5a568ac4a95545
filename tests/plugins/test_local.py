from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.local import LOCAL, LocalOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=128)

# Windows of 16 tokens or less are computed in blocks from 65 tokens on, below that as a whole.
WHOLE, BLOCKED = 40, 100
PATHS = pytest.mark.parametrize("length", [WHOLE, BLOCKED], ids=["as-a-whole", "in-blocks"])


def build(**options: object) -> nn.Module:
    return LOCAL.factory(SITE, LocalOptions(**options)).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def sees(i: int, j: int, window: int, prefix: int, causal: bool = False) -> bool:
    near = abs(i - j) <= window or i < prefix or j < prefix
    return near and (j <= i or not causal)


def by_formula(
    q: Tensor, k: Tensor, v: Tensor, window: int, prefix: int = 0, causal: bool = False
) -> Tensor:
    """Dense attention of the last L of S tokens, none of them padding."""
    keys, offset = k.shape[-2], k.shape[-2] - q.shape[-2]
    rows = range(offset, keys)
    mask = torch.tensor([[sees(i, j, window, prefix, causal) for j in range(keys)] for i in rows])
    scores = (q @ k.mT * SITE.scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


class TestReach:
    @PATHS
    @pytest.mark.parametrize("window", [1, 3, 16])
    def test_a_key_moves_the_rows_at_most_window_away(self, length: int, window: int) -> None:
        q, k, v = inputs(length)
        module, moved = build(window=window), v.clone()
        moved[:, :, 30] += 1
        change = module(q, k, moved, Context()) - module(q, k, v, Context())
        rows = change.abs().amax((0, 1, 3)).nonzero().flatten().tolist()
        assert rows == list(range(30 - window, min(30 + window + 1, length)))

    @PATHS
    @pytest.mark.parametrize("prefix", [0, 1, 2, 5])
    def test_the_prefix_sees_and_is_seen_by_all(self, length: int, prefix: int) -> None:
        q, k, v = inputs(length)
        weights = build(window=3).attention_map(q, k, Context(prefix=prefix))
        out = build(window=3)(q, k, v, Context(prefix=prefix))
        torch.testing.assert_close(out, by_formula(q, k, v, 3, prefix), rtol=0, atol=1e-12)
        wanted = torch.tensor(
            [[sees(i, j, 3, prefix) for j in range(length)] for i in range(length)]
        )
        assert torch.equal(weights > 0, wanted.expand_as(weights))

    @PATHS
    def test_the_prefix_can_be_left_local(self, length: int) -> None:
        q, k, v = inputs(length)
        out = build(window=3, global_prefix=False)(q, k, v, Context(prefix=2))
        torch.testing.assert_close(out, by_formula(q, k, v, 3), rtol=0, atol=1e-12)

    @pytest.mark.parametrize(("window", "prefix"), [(7, 0), (6, 1)])
    def test_its_published_sparsity(self, window: int, prefix: int) -> None:
        """88.6 % of 128 x 128 weights are zero, as SparseBERT reports for Longformer."""
        q, k, _ = inputs(128)
        weights = build(window=window).attention_map(q, k, Context(prefix=prefix))
        assert (weights == 0).double().mean().item() == pytest.approx(0.886, abs=5e-4)


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("prefix", [0, 2], ids=["no-prefix", "prefix-2"])
@pytest.mark.parametrize("length", [1, 2, 17, 64, 65, 79, 80, 81, 101])
def test_it_computes_its_formula_at_any_length(length: int, prefix: int, causal: bool) -> None:
    q, k, v = inputs(length, batch=2)
    got = build(window=5)(q, k, v, Context(prefix=prefix, causal=causal))
    wanted = by_formula(q, k, v, 5, prefix, causal)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [100, 129, 200], ids=lambda w: f"window-{w}")
def test_windows_wider_than_the_largest_block(window: int) -> None:
    q, k, v = inputs(700)
    got = build(window=window)(q, k, v, Context(prefix=1))
    torch.testing.assert_close(got, by_formula(q, k, v, window, 1), rtol=0, atol=1e-12)


class TestPadding:
    @PATHS
    @pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
    def test_distance_counts_real_tokens_only(self, length: int, causal: bool) -> None:
        """Pads on the left, on the right and inside, holding NaN, in one batch."""
        q, k, v = inputs(length, batch=3)
        real = torch.ones(3, length, dtype=torch.bool)
        real[0, :9] = False
        real[1, -9:] = False
        real[2, 4::5] = False
        q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
        got = build(window=3)(q, k, v, Context(key_padding=real, prefix=2, causal=causal))
        for b, mask in enumerate(real):
            alone = [x[b : b + 1, :, mask] for x in (q, k, v)]
            wanted = by_formula(*alone, 3, 2, causal)
            torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("real", [0, 1, 3])
    def test_windows_full_of_padding(self, real: int) -> None:
        q, k, v = (x.requires_grad_() for x in inputs(BLOCKED, batch=2))
        mask = torch.arange(BLOCKED) < torch.tensor([[BLOCKED], [real]])
        out = build(window=8)(q, k, v, Context(key_padding=mask, prefix=1))
        out.sum().backward()
        assert out.isfinite().all()
        assert all(x.grad.isfinite().all() for x in (q, k, v))
        if real == 0:
            assert (out[1] == 0).all()

    def test_a_prefix_longer_than_the_sample(self) -> None:
        q, k, v = inputs(BLOCKED)
        mask = (torch.arange(BLOCKED) < 3)[None]
        got = build(window=1)(q, k, v, Context(key_padding=mask, prefix=5))
        wanted = by_formula(*(x[:, :, :3] for x in (q, k, v)), window=3)
        torch.testing.assert_close(got[:, :, :3], wanted, rtol=0, atol=1e-12)


class TestDecoder:
    @pytest.mark.parametrize("queries", [1, 5, 30])
    @pytest.mark.parametrize("pads", [0, 7], ids=["no-pads", "7-pads-left"])
    def test_a_cache_gives_the_rows_of_the_whole(self, queries: int, pads: int) -> None:
        q, k, v = inputs(BLOCKED)
        mask = (torch.arange(BLOCKED) >= pads)[None]
        ctx = Context(key_padding=mask, causal=True, query_offset=BLOCKED - queries)
        got = build(window=4)(q[:, :, -queries:], k, v, ctx)
        wanted = by_formula(*(x[:, :, pads:] for x in (q, k, v)), window=4, causal=True)
        torch.testing.assert_close(got, wanted[:, :, -queries:], rtol=0, atol=1e-12)


@PATHS
def test_gradients_are_those_of_the_formula(length: int) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(length, batch=2))
    got = build(window=5)(q, k, v, Context(prefix=1)).square().sum()
    wanted = by_formula(q, k, v, 5, 1).square().sum()
    pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 17, 128], ids=lambda n: f"{n}-tokens")
def test_a_window_that_spans_all_is_softmax_attention(length: int) -> None:
    q, k, v = inputs(length)
    module = LOCAL.factory(SITE, LOCAL.exact_at(SITE)).double()
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)
