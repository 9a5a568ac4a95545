from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.lsh import LSH, LSHOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=64)


def build(**options: int) -> nn.Module:
    torch.manual_seed(1)
    options = {"rounds": 3, "buckets": 6, "chunk": 4, **options}
    return LSH.factory(SITE, LSHOptions(**options)).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def bucket(x: Tensor, rotation: Tensor, number: int) -> int:
    turned = [(x @ column).item() for column in rotation.T]
    turned = [*turned, *(-score for score in turned)][:number]
    return turned.index(max(turned))


def sees(module: nn.Module, q: Tensor, k: Tensor, head: int) -> list[set[int]]:
    """The keys that each query sees in any round, for one head of one unpadded sample."""
    n, chunk = len(q), module.chunk
    size = min(3 * chunk, n)
    found: list[set[int]] = [set() for _ in range(n)]
    for rotation in module.rotations[head]:
        of_query, of_key = (
            [bucket(x, rotation, module.buckets) for x in y] for y in (q, k - k.mean(0))
        )
        queries = sorted(range(n), key=of_query.__getitem__)
        keys = sorted(range(n), key=of_key.__getitem__)
        for start in range(0, n, chunk):
            middle = min(start + chunk // 2, n - 1)
            b = of_query[queries[middle]]
            share = (middle - sum(x < b for x in of_query) + 0.5) / of_query.count(b)
            place = sum(x < b for x in of_key) + int(share * of_key.count(b) + 1e-9)
            first = max(0, min(place - chunk // 2 - chunk, n - size))
            for i in queries[start : start + chunk]:
                found[i] |= set(keys[first : first + size])
    return found


def by_formula(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query by query, softmax over the union of what it sees, for one unpadded sample."""
    out = torch.zeros_like(v)
    for h in range(HEADS):
        for i, seen in enumerate(sees(module, q[0, h].detach(), k[0, h].detach(), h)):
            keys = sorted(seen)
            out[0, h, i] = (k[0, h, keys] @ q[0, h, i] * SITE.scale).softmax(-1) @ v[0, h, keys]
    return out


@pytest.mark.parametrize("options", [{}, {"rounds": 1}, {"chunk": 5, "buckets": 3}], ids=str)
@pytest.mark.parametrize("length", [1, 3, 12, 13, 30, 41], ids=lambda n: f"{n}-tokens")
def test_it_attends_to_the_union_of_its_windows(length: int, options: dict[str, int]) -> None:
    module, (q, k, v) = build(**options), inputs(length)
    wanted = by_formula(module, q, k, v)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_formula() -> None:
    module, (q, k, v) = build(), (x.requires_grad_() for x in inputs(30))
    got = module(q, k, v, Context()).square().sum()
    wanted = by_formula(module, q, k, v).square().sum()
    pairs = zip(*(torch.autograd.grad(x, (q, k, v)) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_chunks_are_those_of_the_samples_own_tokens() -> None:
    """Pads on the left, on the right and inside, holding NaN, and a sample of nothing else."""
    module, (q, k, v) = build(), inputs(40, batch=5)
    real = torch.ones(5, 40, dtype=torch.bool)
    real[0, :5] = False
    real[1, 17:] = False
    real[2, 2::4] = False
    real[3, 1:] = False
    real[4] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    got = module(q, k, v, Context(key_padding=real))
    for b, mask in enumerate(real[:4]):
        wanted = by_formula(module, *(x[b : b + 1, :, mask] for x in (q, k, v)))
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)
    assert (got[4] == 0).all()


def test_a_query_finds_the_key_that_it_points_at() -> None:
    """Keys are the queries in another order: hashing must bring each pair together."""
    q, _, _ = inputs(64)
    k = q[:, :, torch.randperm(64)]
    best = (q @ k.mT).argmax(-1, keepdim=True)
    weights = build(rounds=8, chunk=4).attention_map(q, k, Context())
    found = (weights.gather(-1, best) > 0).double().mean().item()
    assert found > 0.9
    assert (weights > 0).double().mean().item() < 0.75


def test_a_mean_common_to_all_keys_changes_nothing() -> None:
    q, k, v = inputs(50)
    shift = torch.linspace(-20, 20, WIDTH, dtype=torch.float64)
    module = build()
    got, wanted = module(q, k + shift, v, Context()), module(q, k, v, Context())
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("length", [1, 17, 64], ids=lambda n: f"{n}-tokens")
@pytest.mark.parametrize("buckets", [1, 16])
def test_a_chunk_that_holds_all_is_softmax_attention(length: int, buckets: int) -> None:
    q, k, v = inputs(length)
    chunk = LSH.exact_at(SITE).chunk
    got = build(chunk=chunk, buckets=buckets)(q, k, v, Context())
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
