"""The native kernels of `rounds` and `hashing` against plain torch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from zoo_core.nn import choice, hashing, rounds
from zoo_core.nn.hashing import Windows

pytestmark = pytest.mark.usefixtures("native_kernels")

BATCH, HEADS, ROUNDS, NUMBER = 3, 2, 3, 5


def rows(length: int, width: int) -> Tensor:
    """(BATCH, HEADS, length, width) as hosts store it, tokens before heads."""
    return torch.randn(BATCH, length, HEADS, width).transpose(1, 2)


def padding(length: int) -> Tensor:
    """Three samples: one full, one with gaps, one that is nothing else."""
    real = torch.ones(BATCH, length, dtype=torch.bool)
    real[1, ::3] = False
    real[2] = False
    return real


def windows(length: int, real: Tensor | None, chunk: int) -> Windows:
    """By chance: rounds overlap."""
    queries, keys = torch.randint(NUMBER, (2, BATCH, HEADS, ROUNDS, length))
    return hashing.windows(queries, keys, real, number=NUMBER, chunk=chunk, before=1, after=0)


def attended(
    tensors: list[Tensor], seen: Windows, upstream: Tensor, *, plain: bool, spare_self: bool
) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    with choice.plain_only() if plain else nullcontext():
        out = rounds.attend(*leaves, seen, scale=0.3, spare_self=spare_self)
        return [out, *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("spare_self", [False, True], ids=["all", "no-self"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("chunk", [4, 24, 80], ids=lambda n: f"chunks-of-{n}")
@pytest.mark.parametrize("length", [1, 3, 47, 80, 131], ids=lambda n: f"{n}-tokens")
def test_the_kernel_gives_what_plain_torch_does(
    length: int, chunk: int, padded: bool, spare_self: bool
) -> None:
    torch.manual_seed(0)
    real = padding(length) if padded else None
    shown = torch.ones(BATCH, length, dtype=torch.bool) if real is None else real
    shown = shown[:, None, :, None]
    seen = windows(length, real, chunk)
    tensors = [rows(length, width) * shown for width in (16, 16, 32)]
    upstream = rows(length, 32) * shown
    ours, theirs = (
        attended(tensors, seen, upstream, plain=plain, spare_self=spare_self)
        for plain in (False, True)
    )
    for got, wanted in zip(ours, theirs, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got * shown, wanted * shown, rtol=1e-5, atol=1e-5)


def test_the_kernel_reads_rows_of_any_layout() -> None:
    torch.manual_seed(0)
    q, k, v = (rows(47, 32) for _ in range(3))
    seen = windows(47, None, 8)
    wanted = rounds.attend(q, k, v, seen, scale=0.3)
    others = q.mT.contiguous().mT, k.contiguous(), v[:1].expand(BATCH, -1, -1, -1)
    torch.testing.assert_close(rounds.attend(*others[:2], v, seen, scale=0.3), wanted)
    same = rounds.attend(q, k, others[2], seen, scale=0.3)
    torch.testing.assert_close(same[:1], wanted[:1])


def test_a_second_derivative_is_that_of_plain_torch() -> None:
    torch.manual_seed(0)
    tensors = [rows(13, 16).requires_grad_() for _ in range(3)]
    seen = windows(13, None, 4)

    def slopes() -> tuple[Tensor, ...]:
        out = rounds.attend(*tensors, seen, scale=0.3, spare_self=True)
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), tensors)

    ours = slopes()
    with choice.plain_only():
        theirs = slopes()
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("number", [1, 5, 8], ids=lambda n: f"{n}-buckets")
@pytest.mark.parametrize("length", [1, 7, 32, 75], ids=lambda n: f"{n}-tokens")
def test_buckets_and_windows_are_the_same(length: int, number: int, padded: bool) -> None:
    torch.manual_seed(0)
    real = padding(length) if padded else None
    rotations = torch.randn(HEADS, ROUNDS, 16, -(-number // 2))
    x, y = rows(length, 16), rows(length, 16)
    x[:, :, ::3] = 0  # as near to every direction

    def found(shared: bool) -> list[Tensor | None]:
        queries = hashing.buckets(x, rotations, number)
        keys = queries if shared else hashing.buckets(y, rotations, number)
        seen = hashing.windows(queries, keys, real, number=number, chunk=8, before=1, after=1)
        return [queries, keys, *vars(seen).values()]

    for shared in (False, True):
        ours = found(shared)
        with choice.plain_only():
            theirs = found(shared)
        for got, wanted in zip(ours, theirs, strict=True):
            if got is None or wanted is None:
                assert got is wanted
            else:
                assert torch.equal(got, wanted)
