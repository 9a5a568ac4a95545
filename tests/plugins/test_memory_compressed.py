from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.memory_compressed import MEMORY_COMPRESSED, MemoryCompressedOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=64)


def build(**options: object) -> nn.Module:
    """A module in float64 whose convolution has left the mean that it starts from."""
    torch.manual_seed(1)
    module = MEMORY_COMPRESSED.factory(SITE, MemoryCompressedOptions(**options)).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def inputs(queries: int, keys: int | None = None, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    keys = queries if keys is None else keys
    shapes = [(batch, HEADS, n, WIDTH) for n in (queries, keys, keys)]
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return q, k, v


def made_one(tokens: Tensor, mix: Tensor | None, head: int) -> Tensor:
    """One row for the tokens (n, D) of a block."""
    total = torch.zeros(tokens.shape[-1], dtype=tokens.dtype)
    for t, token in enumerate(tokens):
        total = total + token
        if mix is not None:
            total = total + token @ mix[head, t]
    return total / len(tokens)


def by_loop(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, prefix: int = 0, causal: bool = False
) -> Tensor:
    """Query by query, each over its own list of keys; none of the tokens is padding."""
    out, keys, factor = torch.zeros_like(q), k.shape[-2], module.factor
    for b in range(len(q)):
        for h in range(HEADS):
            for row in range(q.shape[-2]):
                i = row + keys - q.shape[-2]
                seen: list[tuple[Tensor, Tensor]] = [
                    (k[b, h, j], v[b, h, j]) for j in range(prefix)
                ]
                for start in range(prefix, keys, factor):
                    block = range(start, min(start + factor, keys))
                    if causal and i < block[-1] + 1:
                        seen += [(k[b, h, j], v[b, h, j]) for j in block if j <= i]
                        continue
                    parts = ((k, module.mix_keys), (v, module.mix_values))
                    seen.append(tuple(made_one(x[b, h, block], mix, h) for x, mix in parts))
                if module.null_key:
                    seen.append((torch.zeros(WIDTH).double(), torch.zeros(WIDTH).double()))
                rows, values = (torch.stack(x) for x in zip(*seen, strict=True))
                out[b, h, row] = (rows @ q[b, h, row] * SITE.scale).softmax(0) @ values
    return out


@pytest.mark.parametrize("null_key", [False, True], ids=["no-null-key", "null-key"])
@pytest.mark.parametrize("pool", ["conv", "mean"])
@pytest.mark.parametrize(("length", "prefix"), [(1, 0), (1, 1), (8, 2), (9, 0)])
def test_it_computes_its_formula(pool: str, length: int, prefix: int, null_key: bool) -> None:
    module = build(factor=3, pool=pool, null_key=null_key)
    q, k, v = inputs(length, batch=2)
    wanted = by_loop(module, q, k, v, prefix)
    torch.testing.assert_close(module(q, k, v, Context(prefix=prefix)), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("null_key", [False, True], ids=["no-null-key", "null-key"])
@pytest.mark.parametrize("factor", [1, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 9])
def test_the_causal_form_computes_its_formula(length: int, factor: int, null_key: bool) -> None:
    module = build(factor=factor, null_key=null_key)
    q, k, v = inputs(length, batch=2)
    wanted = by_loop(module, q, k, v, causal=True)
    torch.testing.assert_close(module(q, k, v, Context(causal=True)), wanted, rtol=0, atol=1e-12)


class TestCausal:
    @pytest.mark.parametrize("queries", [1, 4, 12])
    @pytest.mark.parametrize("pads", [0, 2], ids=["no-pads", "2-pads-left"])
    def test_a_cache_gives_the_rows_of_the_whole(self, queries: int, pads: int) -> None:
        module = build(factor=3, null_key=True)
        q, k, v = inputs(13)
        mask = (torch.arange(13) >= pads)[None]
        ctx = Context(key_padding=mask, causal=True, query_offset=13 - queries)
        got = module(q[:, :, -queries:], k, v, ctx)
        wanted = by_loop(module, *(x[:, :, pads:] for x in (q, k, v)), causal=True)
        rows = min(queries, 13 - pads)
        torch.testing.assert_close(got[:, :, -rows:], wanted[:, :, -rows:], rtol=0, atol=1e-12)

    def test_a_later_token_of_the_same_block_is_not_seen(self) -> None:
        module = build(factor=4)
        q, k, v = inputs(9)
        other = [x.clone() for x in (k, v)]
        for x in other:
            x[:, :, 6] += 1
        change = module(q, *other, Context(causal=True)) - module(q, k, v, Context(causal=True))
        assert change.abs().amax((0, 1, 3)).nonzero().flatten().tolist() == [6, 7, 8]

    def test_gradients_are_those_of_the_loop(self) -> None:
        module = build(factor=3)
        leaves = [*(x.requires_grad_() for x in inputs(8)), *module.parameters()]
        got = module(*leaves[:3], Context(causal=True)).square().sum()
        wanted = by_loop(module, *leaves[:3], causal=True).square().sum()
        pairs = zip(*(torch.autograd.grad(x, leaves) for x in (got, wanted)), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


class TestPadding:
    @pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
    def test_blocks_hold_a_samples_own_real_tokens(self, causal: bool) -> None:
        """Pads on the left, on the right and inside, holding NaN, in one batch."""
        module = build(factor=3)
        q, k, v = inputs(11, batch=3)
        real = torch.ones(3, 11, dtype=torch.bool)
        real[0, :4] = False
        real[1, -4:] = False
        real[2, 1::3] = False
        q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
        prefix = 0 if causal else 2
        got = module(q, k, v, Context(key_padding=real, causal=causal, prefix=prefix))
        for b, mask in enumerate(real):
            alone = [x[b : b + 1, :, mask] for x in (q, k, v)]
            wanted = by_loop(module, *alone, prefix, causal)
            torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)

    def test_the_null_key_is_no_real_key(self) -> None:
        q, k, v = inputs(6)
        none = torch.zeros(1, 6, dtype=torch.bool)
        assert (build(null_key=True)(q, k, v, Context(key_padding=none)) == 0).all()


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_the_convolution_starts_as_the_mean(causal: bool) -> None:
    q, k, v = inputs(10)
    conv, mean = (
        MEMORY_COMPRESSED.factory(SITE, MemoryCompressedOptions(pool=pool)).double()
        for pool in ("conv", "mean")
    )
    ctx = Context(causal=causal)
    assert torch.equal(conv(q, k, v, ctx), mean(q, k, v, ctx))


def test_queries_of_another_sequence() -> None:
    module = build(factor=3)
    q, k, v = inputs(5, 8)
    wanted = by_loop(module, q, k, v)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
def test_a_factor_of_one_is_softmax_attention(causal: bool) -> None:
    q, k, v = inputs(20)
    module = MEMORY_COMPRESSED.factory(SITE, MEMORY_COMPRESSED.exact_at(SITE)).double()
    scores = q @ k.mT * SITE.scale
    if causal:
        scores = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
    got = module(q, k, v, Context(causal=causal))
    torch.testing.assert_close(got, scores.softmax(-1) @ v, rtol=0, atol=1e-12)
