from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.sparse_transformer import SPARSE_TRANSFORMER, SparseTransformerOptions
from zoo_core import Context, Site
from zoo_core.plan import plan, rules

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=128)

# Up to three strides are computed under a dense mask.
STRIDE = 8
PATHS = pytest.mark.parametrize("length", [22, 83], ids=["as-a-whole", "in-parts"])
DIRECTIONS = pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
PATTERNS = pytest.mark.parametrize("pattern", ["strided", "fixed"])


def build(stride: int | None = STRIDE, **options: object) -> nn.Module:
    options = SparseTransformerOptions(stride=stride, **options)
    return SPARSE_TRANSFORMER.factory(SITE, options).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def sees(i: int, j: int, pattern: str, stride: int, summary: int) -> bool:
    if pattern == "strided":
        return abs(i - j) < stride or abs(i - j) % stride == 0
    return i // stride == j // stride or j % stride in range(stride - summary, stride)


def edges(
    length: int,
    pattern: str,
    *,
    stride: int = STRIDE,
    summary: int = 1,
    prefix: int = 0,
    causal: bool = False,
) -> Tensor:
    rows = [
        [sees(i, j, pattern, stride, summary) or min(i, j) < prefix for j in range(length)]
        for i in range(length)
    ]
    seen = torch.tensor(rows)
    return seen.tril() if causal else seen


def by_formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return (q @ k.mT * SITE.scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v


@DIRECTIONS
@PATTERNS
@pytest.mark.parametrize("prefix", [0, 2], ids=["no-prefix", "prefix-2"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 83])
def test_it_computes_its_formula(length: int, prefix: int, pattern: str, causal: bool) -> None:
    q, k, v = inputs(length)
    module = build(pattern=pattern)
    module.short = module.few = 0
    wanted = by_formula(q, k, v, edges(length, pattern, prefix=prefix, causal=causal))
    got = module(q, k, v, Context(prefix=prefix, causal=causal))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@PATHS
@pytest.mark.parametrize("summary", [1, 3])
def test_summaries_are_seen_by_all(length: int, summary: int) -> None:
    q, k, v = inputs(length)
    module = build(pattern="fixed", summary=summary)
    seen = edges(length, "fixed", summary=summary)
    got = module(q, k, v, Context())
    torch.testing.assert_close(got, by_formula(q, k, v, seen), rtol=0, atol=1e-12)
    weights = module.attention_map(q, k, Context())
    assert torch.equal(weights > 0, seen.expand_as(weights))


@pytest.mark.parametrize(
    ("pattern", "stride", "sparsity"), [("fixed", 32, 0.727), ("strided", 17, 0.708)]
)
def test_published_sparsities(pattern: str, stride: int, sparsity: float) -> None:
    """SparseBERT prints 72.7 % for fixed at 128 tokens, and 70.4 % for strided at no known l."""
    q, k, _ = inputs(128)
    weights = build(stride, pattern=pattern).attention_map(q, k, Context())
    assert (weights == 0).double().mean().item() == pytest.approx(sparsity, abs=6e-4)


def test_the_stride_is_the_root_of_the_longest_input_unless_given() -> None:
    site = replace(SITE, max_len=512)
    found = SPARSE_TRANSFORMER.factory(site, SparseTransformerOptions())
    assert found.stride == 23
    assert SPARSE_TRANSFORMER.factory(replace(SITE, max_len=1), SparseTransformerOptions())


@PATTERNS
def test_a_stride_beyond_the_longest_input_is_cut_to_it(pattern: str) -> None:
    assert build(500, pattern=pattern, summary=900).stride == 128


@pytest.mark.parametrize(("stride", "cut"), [(500, 128), (8, 8), (None, None)])
def test_the_plan_shows_the_stride_and_the_summary_that_are_built(
    stride: int | None, cut: int | None
) -> None:
    asked = {"stride": stride, "summary": 900}
    step = plan(rules("sparse_transformer", options=asked), [SITE]).steps[0]
    built = SPARSE_TRANSFORMER.factory(SITE, step.requested)
    assert step.options.stride == cut
    assert step.options.summary == built.summary == built.stride


@PATHS
@PATTERNS
def test_the_prefix_can_be_left_local(length: int, pattern: str) -> None:
    q, k, v = inputs(length)
    got = build(pattern=pattern, global_prefix=False)(q, k, v, Context(prefix=3))
    torch.testing.assert_close(got, by_formula(q, k, v, edges(length, pattern)), rtol=0, atol=1e-12)


@PATHS
@PATTERNS
@DIRECTIONS
def test_blocks_and_strides_count_real_tokens_only(length: int, pattern: str, causal: bool) -> None:
    """Pads on the left, on the right and inside, holding NaN, in one batch."""
    q, k, v = inputs(length, batch=3)
    real = torch.ones(3, length, dtype=torch.bool)
    real[0, :9] = False
    real[1, 5:] = False
    real[2, 4::5] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    got = build(pattern=pattern)(q, k, v, Context(key_padding=real, prefix=2, causal=causal))
    for b, mask in enumerate(real):
        alone = [x[b : b + 1, :, mask] for x in (q, k, v)]
        wanted = by_formula(*alone, edges(int(mask.sum()), pattern, prefix=2, causal=causal))
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)


@PATTERNS
@pytest.mark.parametrize("queries", [1, 40])
def test_a_cache_gives_the_rows_of_the_whole(queries: int, pattern: str) -> None:
    q, k, v = inputs(83)
    ctx = Context(causal=True, query_offset=83 - queries)
    got = build(pattern=pattern)(q[:, :, -queries:], k, v, ctx)
    wanted = by_formula(q, k, v, edges(83, pattern, causal=True))[:, :, -queries:]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@PATTERNS
def test_gradients_are_those_of_the_formula(pattern: str) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(83, batch=2))
    got = build(pattern=pattern)(q, k, v, Context(prefix=1)).square().sum()
    wanted = by_formula(q, k, v, edges(83, pattern, prefix=1)).square().sum()
    pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [SPARSE_TRANSFORMER.exact_at(SITE), SparseTransformerOptions(pattern="fixed", summary=12)],
    ids=["one-stride", "all-summaries"],
)
@pytest.mark.parametrize("length", [1, 17, 128], ids=lambda n: f"{n}-tokens")
def test_its_limits_are_softmax_attention(length: int, options: SparseTransformerOptions) -> None:
    q, k, v = inputs(length)
    module = SPARSE_TRANSFORMER.factory(SITE, options).double()
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)
