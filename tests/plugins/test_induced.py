from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.induced import INDUCED, InducedOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=64)


def build(points: int = 4) -> nn.Module:
    """A module in float64 whose offsets are no longer zero."""
    torch.manual_seed(1)
    module = INDUCED.factory(SITE, InducedOptions(points=points)).double().eval()
    nn.init.normal_(module.offsets)
    return module


def inputs(queries: int, keys: int | None = None, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    keys = queries if keys is None else keys
    shapes = [(batch, HEADS, n, WIDTH) for n in (queries, keys, keys)]
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return q, k, v


def by_loop(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Point by point, then query by query."""
    out = torch.zeros_like(q)
    for b in range(len(q)):
        for h in range(HEADS):
            keys, values = [], []
            for point, offset in zip(module.points[h], module.offsets[h], strict=True):
                weights = (k[b, h] @ point * SITE.scale).softmax(0)
                keys.append(weights @ k[b, h] + offset)
                values.append(weights @ v[b, h])
            for i in range(q.shape[-2]):
                weights = (torch.stack(keys) @ q[b, h, i] * SITE.scale).softmax(0)
                out[b, h, i] = weights @ torch.stack(values)
    return out


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (9, 9), (2, 7)])
def test_it_computes_its_formula(queries: int, keys: int) -> None:
    module = build()
    q, k, v = inputs(queries, keys, batch=2)
    wanted = by_loop(module, q, k, v)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


def test_permuted_tokens_give_permuted_outputs() -> None:
    module = build()
    q, k, v = inputs(20, batch=2)
    order = torch.randperm(20)
    got = module(*(x[:, :, order] for x in (q, k, v)), Context(prefix=1))
    wanted = module(q, k, v, Context(prefix=1))[:, :, order]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_sets_of_different_sizes_share_a_batch_in_any_order() -> None:
    """Reported against the authors' code, which takes no mask; two masks at once gave NaN."""
    module = build()
    q, k, v = inputs(20, batch=3)
    real = torch.stack([(torch.arange(20) < size)[torch.randperm(20)] for size in (3, 7, 20)])
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    got = module(q, k, v, Context(key_padding=real))
    for b, mask in enumerate(real):
        wanted = by_loop(module, *(x[b : b + 1, :, mask] for x in (q, k, v)))
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)


def test_the_map_has_the_rank_of_the_points() -> None:
    q, k, _ = inputs(20)
    weights = build(points=3).attention_map(q, k, Context())
    assert torch.linalg.matrix_rank(weights).tolist() == [[3, 3]]
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, HEADS, 20).double())


def test_points_that_single_out_a_key_each_give_softmax_attention() -> None:
    q, _, v = inputs(WIDTH)
    k = torch.eye(WIDTH, dtype=torch.float64).expand(1, HEADS, -1, -1)
    module = INDUCED.factory(SITE, InducedOptions(points=WIDTH)).double()
    with torch.no_grad():
        module.points.copy_(1e3 * k[0])
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


def test_it_starts_without_offsets_and_with_points_of_unit_variance() -> None:
    torch.manual_seed(0)
    site = Site(heads=4, head_dim=64, dim=256, max_len=512)
    module = INDUCED.factory(site, InducedOptions(points=64))
    assert (module.offsets == 0).all()
    assert module.points.std().item() == pytest.approx(1, rel=0.02)
    first = nn.functional.normalize(module.points[0], dim=-1)
    torch.testing.assert_close(first @ first.mT, torch.eye(64), rtol=0, atol=1e-5)
