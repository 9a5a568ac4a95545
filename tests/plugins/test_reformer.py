from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.reformer import REFORMER, ReformerOptions
from zoo_core import Context, Site

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=64)


def build(**options: int) -> nn.Module:
    torch.manual_seed(1)
    options = {"rounds": 3, "buckets": 6, "chunk": 4, **options}
    return REFORMER.factory(SITE, ReformerOptions(**options)).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    q, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(2))
    return q, v


def sees(module: nn.Module, q: Tensor, head: int) -> list[set[int]]:
    """The tokens that each query sees in any round, for one head of one unpadded sample."""
    n, chunk = len(q), module.chunk
    found: list[set[int]] = [set() for _ in range(n)]
    for rotation in module.rotations[head]:
        turned = torch.cat([q @ rotation, -q @ rotation], -1)[:, : module.buckets]
        order = sorted(range(n), key=turned.argmax(-1).tolist().__getitem__)
        chunks = [order[start : start + chunk] for start in range(0, n, chunk)]
        for c, own in enumerate(chunks):
            before = chunks[c - 1] if c else (chunks[1] if len(chunks) > 1 else [])
            # The last chunk may be short; its window begins earlier by as much.
            missing = chunk - len(own) if c else 0
            earlier = chunks[c - 2][chunk - missing :] if c > 1 and missing else []
            for i in own:
                found[i] |= {*own, *before, *earlier}
    return found


def by_formula(module: nn.Module, q: Tensor, v: Tensor) -> Tensor:
    """Query by query, softmax over the union of what it sees, for one unpadded sample."""
    out = torch.zeros_like(v)
    for h in range(HEADS):
        for i, seen in enumerate(sees(module, q[0, h].detach(), h)):
            keys = sorted(seen - {i}) or [i]
            scores = [q[0, h, i] @ q[0, h, j] / q[0, h, j].norm() for j in keys]
            out[0, h, i] = torch.stack(scores).softmax(-1) @ v[0, h, keys]
    return out


@pytest.mark.parametrize("options", [{}, {"rounds": 1}, {"chunk": 5, "buckets": 3}], ids=str)
@pytest.mark.parametrize("length", [1, 2, 8, 13, 30, 41], ids=lambda n: f"{n}-tokens")
def test_it_attends_to_its_chunk_and_the_one_before(length: int, options: dict[str, int]) -> None:
    module, (q, v) = build(**options), inputs(length)
    wanted = by_formula(module, q, v)
    torch.testing.assert_close(module(q, q, v, Context()), wanted, rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_formula() -> None:
    module, (q, v) = build(), (x.requires_grad_() for x in inputs(30))
    got, wanted = module(q, q, v, Context()).square().sum(), by_formula(module, q, v).square().sum()
    pairs = zip(*(torch.autograd.grad(x, (q, v)) for x in (got, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_chunks_are_those_of_the_samples_own_tokens() -> None:
    """Pads on the left, on the right and inside, holding NaN, and a sample of nothing else."""
    module, (q, v) = build(), inputs(40, batch=5)
    real = torch.ones(5, 40, dtype=torch.bool)
    real[0, :5] = False
    real[1, 17:] = False
    real[2, 2::4] = False
    real[3, 1:] = False
    real[4] = False
    q, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, v))
    got = module(q, q, v, Context(key_padding=real))
    for b, mask in enumerate(real[:4]):
        wanted = by_formula(module, *(x[b : b + 1, :, mask] for x in (q, v)))
        torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)
    assert (got[4] == 0).all()


@pytest.mark.parametrize("length", [2, 17, 64], ids=lambda n: f"{n}-tokens")
def test_one_chunk_is_full_attention_with_shared_queries_and_keys(length: int) -> None:
    q, v = inputs(length)
    scores = q @ nn.functional.normalize(q, dim=-1).mT
    scores.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    got = build(chunk=64)(q, q, v, Context())
    torch.testing.assert_close(got, scores.softmax(-1) @ v, rtol=0, atol=1e-12)


def test_it_reads_no_keys() -> None:
    q, v = inputs(30)
    nothing = torch.full_like(q, torch.nan)
    assert torch.equal(build()(q, nothing, v, Context()), build()(q, q, v, Context()))
    assert build().unused == {"key"}
