from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.bigbird import BIGBIRD, BigBirdOptions, attention
from zoo_core import Context, Site
from zoo_core.plan import plan, rules

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=128)

# Blocks of 4: up to (2 + 3) * 4 tokens are computed under a dense mask.
BLOCK = 4
PATHS = pytest.mark.parametrize("length", [19, 75], ids=["as-a-whole", "in-blocks"])
DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])


def build(seed: int = 1, site: Site = SITE, **options: int) -> nn.Module:
    torch.manual_seed(seed)
    options = {"block": BLOCK, **options}
    return BIGBIRD.factory(site, BigBirdOptions(**options)).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def drawn(module: nn.Module, head: int, block: int, blocks: int, causal: bool) -> list[int]:
    """One block from each of equal stretches of a circle of those outside the window."""
    candidates = [b for b in range(blocks) if abs(b - block) > module.window]
    if causal:
        candidates = [b for b in candidates if b < block]
    *shares, first = module.draws[head, block % module.draws.shape[1]].double() / 2**31
    begin = int(first * len(candidates))
    circle = candidates[begin:] + candidates[:begin]
    found = []
    for s, share in enumerate(shares):
        stretch = circle[len(circle) * s // len(shares) : len(circle) * (s + 1) // len(shares)]
        if stretch:
            found.append(stretch[int(share * len(stretch))])
    return found


def edges(module: nn.Module, length: int, prefix: int = 0, causal: bool = False) -> Tensor:
    """Who sees whom, (H, N, N), block by block."""
    size, blocks = module.block, -(-length // module.block)
    seen = torch.zeros(HEADS, blocks * size, blocks * size, dtype=torch.bool)
    for head in range(HEADS):
        for b in range(blocks):
            near = range(max(b - module.window, 0), min(b + module.window + 1, blocks))
            for other in [*near, *drawn(module, head, b, blocks, causal)]:
                seen[head, b * size : (b + 1) * size, other * size : (other + 1) * size] = True
    hubs = max(prefix, module.hubs)
    seen = seen[:, :length, :length]
    seen[:, :hubs] = seen[:, :, :hubs] = True
    return seen.tril() if causal else seen


def by_formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT * SITE.scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v


@DIRECTIONS
@pytest.mark.parametrize("prefix", [0, 1, 6])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 0, "random": 2}, {"global_tokens": 0, "random": 5}],
    ids=["default", "no-window", "no-globals"],
)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 22, 75])
def test_it_computes_its_formula(
    length: int, options: dict[str, int], prefix: int, causal: bool
) -> None:
    q, k, v = inputs(length)
    module = build(**options)
    module.short = module.few = 0
    wanted = by_formula(q, k, v, edges(module, length, prefix, causal))
    got = module(q, k, v, Context(prefix=prefix, causal=causal))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@DIRECTIONS
@pytest.mark.parametrize("rows", [1, 32], ids=lambda rows: f"{rows}_rows")
def test_parts_without_gradients_change_nothing(monkeypatch, rows: int, causal: bool) -> None:
    module, (q, k, v) = build(), inputs(75, batch=3)
    real = torch.ones(3, 75, dtype=torch.bool)
    real[0, :9] = real[1, 40:] = False
    ctx = Context(key_padding=real, prefix=2, causal=causal)
    wanted = module(q.requires_grad_(), k, v, ctx)
    monkeypatch.setattr(attention, "ROWS", rows)
    with torch.no_grad():
        # As hosts lay it out, and as it comes here.
        hosts = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        for tensors in ((q, k, v), hosts):
            torch.testing.assert_close(module(*tensors, ctx), wanted, rtol=0, atol=1e-12)


@PATHS
def test_the_map_shows_the_blocks(length: int) -> None:
    q, k, _ = inputs(length)
    module = build()
    weights = module.attention_map(q, k, Context(prefix=2))
    assert torch.equal(weights > 0, edges(module, length, 2)[None])


class TestRandomBlocks:
    def seen(self, module: nn.Module, length: int) -> Tensor:
        """Random blocks of each block, (H, R, random)."""
        q, k, _ = inputs(length)
        weights = module.attention_map(q, k, Context())[0]
        blocks = (weights > 0).unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)).any(4).any(2)
        number = length // BLOCK
        far = (torch.arange(number)[:, None] - torch.arange(number)).abs() > 1
        return (blocks & far)[:, 1:]

    def test_each_block_sees_as_many_and_together_they_reach_everywhere(self) -> None:
        seen = self.seen(build(global_tokens=0), 128)
        assert (seen.sum(-1) == 3).all()
        assert seen.any(0).any(0).all()
        assert not torch.equal(seen[0], seen[1])

    def test_all_blocks_are_equally_likely(self) -> None:
        """3 of the 13 blocks outside the window, within 3 deviations over 2,000 heads."""
        site = Site(heads=2000, head_dim=1, dim=2000, max_len=64)
        module = build(site=site, global_tokens=0)
        q = torch.zeros(1, 2000, 64, 1)
        seen = module.attention_map(q, q, Context())[0, :, 32, ::BLOCK] > 0
        share = seen.double().mean(0)
        wanted = torch.full((16,), 3 / 13, dtype=torch.float64)
        wanted[7:10] = 1
        torch.testing.assert_close(share, wanted, rtol=0, atol=0.03)

    def test_the_seed_decides_and_the_buffer_keeps(self) -> None:
        q, k, v = inputs(75)
        first, other = build(seed=1), build(seed=2)
        assert torch.equal(first(q, k, v, Context()), build(seed=1)(q, k, v, Context()))
        assert not torch.equal(first(q, k, v, Context()), other(q, k, v, Context()))
        other.load_state_dict(first.state_dict(), strict=True)
        assert torch.equal(first(q, k, v, Context()), other(q, k, v, Context()))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_change_of_dtype_moves_no_block(self, dtype: torch.dtype) -> None:
        module = build()
        assert torch.equal(copy.deepcopy(module).to(dtype).draws, module.draws)


@PATHS
@DIRECTIONS
def test_blocks_count_real_tokens_only(length: int, causal: bool) -> None:
    """Pads on the left, on the right and inside, holding NaN, in one batch."""
    q, k, v = inputs(length, batch=4)
    real = torch.ones(4, length, dtype=torch.bool)
    real[0, :9] = False
    real[1, 5:] = False
    real[2, 4::5] = False
    real[3] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    module = build()
    got = module(q, k, v, Context(key_padding=real, prefix=2, causal=causal))
    for b, mask in enumerate(real[:3]):
        alone = [x[b : b + 1, :, mask] for x in (q, k, v)]
        wanted = by_formula(*alone, edges(module, int(mask.sum()), 2, causal))
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)
    hidden = [x.masked_fill(~real[:, None, :, None], 0) for x in (q, k, v)]
    out = module(*hidden, Context(key_padding=real, prefix=2, causal=causal))
    assert (out[3] == 0).all()


@pytest.mark.parametrize("queries", [1, 30])
def test_a_cache_gives_the_rows_of_the_whole(queries: int) -> None:
    q, k, v = inputs(75)
    module = build()
    ctx = Context(causal=True, query_offset=75 - queries)
    got = module(q[:, :, -queries:], k, v, ctx)
    wanted = by_formula(q, k, v, edges(module, 75, causal=True))[:, :, -queries:]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_inputs_beyond_max_len_use_the_draws_again() -> None:
    q, k, v = inputs(300)
    module = build()
    wanted = by_formula(q, k, v, edges(module, 300))
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


@DIRECTIONS
def test_gradients_are_those_of_the_formula(causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(75, batch=2))
    module = build()
    got = module(q, k, v, Context(prefix=2, causal=causal)).square().sum()
    wanted = by_formula(q, k, v, edges(module, 75, 2, causal)).square().sum()
    pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [BIGBIRD.exact_at(SITE), BigBirdOptions(block=8, random=16), BigBirdOptions(block=8, window=9)],
    ids=["one-block", "all-random", "wide-window"],
)
@pytest.mark.parametrize("length", [1, 17, 80], ids=lambda n: f"{n}-tokens")
def test_its_limits_are_softmax_attention(length: int, options: BigBirdOptions) -> None:
    q, k, v = inputs(length)
    module = BIGBIRD.factory(SITE, options).double()
    module.short = 0
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("block", "blocks"), [(500, 1), (48, 3)])
def test_the_plan_shows_the_blocks_that_are_built(block: int, blocks: int) -> None:
    asked = {"block": block, "window": 777, "random": 888, "global_tokens": 999}
    step = plan(rules("bigbird", options=asked), [SITE]).steps[0]
    built = BIGBIRD.factory(SITE, step.requested)
    assert step.options == BigBirdOptions(
        block=min(block, 128), window=blocks, random=blocks, global_tokens=128
    )
    assert step.options.as_dict() == {
        "block": built.block,
        "window": built.window,
        "random": built.random,
        "global_tokens": built.hubs,
    }


@DIRECTIONS
def test_inputs_longer_than_it_was_built_for_draw_again_from_all_of_their_blocks(causal) -> None:
    module = build(site=replace(SITE, max_len=32))
    q, k, v = inputs(301)
    wanted = by_formula(q, k, v, edges(module, 301, causal=causal))
    got = module(q, k, v, Context(causal=causal))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
