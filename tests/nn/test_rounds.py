from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zoo_core.nn import hashing, rounds
from zoo_core.nn.hashing import Windows

HEADS, ROUNDS, WIDTH = 3, 3, 4


def inputs(length: int, batch: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (batch, HEADS, length, WIDTH)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for _ in range(3)]


def windows(length: int, real: Tensor | None = None, batch: int = 1) -> Windows:
    """Windows of 8 keys for 4 queries, by chance: rounds overlap, but not by much."""
    torch.manual_seed(1)
    queries, keys = torch.randint(4, (2, batch, HEADS, ROUNDS, length))
    return hashing.windows(queries, keys, real, number=4, chunk=4, before=1, after=0)


def padded(length: int) -> Tensor:
    """Two samples: one has some padding, the other is nothing else."""
    real = torch.ones(2, length, dtype=torch.bool)
    real[0, ::3] = False
    real[1] = False
    return real


@pytest.mark.parametrize("spare_self", [False, True], ids=["all", "no-self"])
@pytest.mark.parametrize("length", [1, 3, 8, 13, 30], ids=lambda n: f"{n}-tokens")
def test_it_is_softmax_over_every_key_seen_in_any_round(length: int, spare_self: bool) -> None:
    (q, k, v), seen = inputs(length), windows(length)
    scores = (q @ k.mT * 0.7).masked_fill(~seen.dense(), -torch.inf)
    if spare_self:
        own = torch.eye(length, dtype=torch.bool) & (seen.dense().sum(-1, keepdim=True) > 1)
        scores = scores.masked_fill(own, -torch.inf)
    wanted = scores.softmax(-1) @ v
    got = rounds.attend(q, k, v, seen, scale=0.7, spare_self=spare_self)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spare_self", [False, True], ids=["all", "no-self"])
@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("few", [False, True], ids=["at-once", "few-at-a-time"])
def test_both_ways_give_the_same_output_and_gradients(
    few: bool, padding: bool, spare_self: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:  # one head, and two of the eight chunks, at a time
        monkeypatch.setattr(rounds, "KEPT", 1)
        monkeypatch.setattr(rounds, "COPIED", 2 * 8 * 2 * WIDTH)
    real = padded(30) if padding else None
    tensors, seen = inputs(30, batch=2), windows(30, real, batch=2)
    tensors = [x.detach() if real is None else x * real[:, None, :, None] for x in tensors]
    tensors = [x.detach().requires_grad_() for x in tensors]
    fused, plain = (
        form(*tensors, seen, scale=0.7, spare_self=spare_self)
        for form in (rounds.attend, rounds.plain)
    )
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-12)
    upstream = torch.randn_like(plain)
    for ours, theirs in zip(
        *(torch.autograd.grad(out, tensors, upstream) for out in (fused, plain)), strict=True
    ):
        if real is not None:  # there is no say what they are at padding, but that they are finite
            assert ours.isfinite().all()
            ours, theirs = ours * real[:, None, :, None], theirs * real[:, None, :, None]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("spare_self", [False, True], ids=["all", "no-self"])
def test_a_second_derivative_is_that_of_single_operations(spare_self: bool) -> None:
    """Of a loss linear in the output, and with keys that are made from the queries."""
    (q, _, v), seen = inputs(13), windows(13)
    weights = torch.randn_like(v)

    def slope(form: Callable[..., Tensor], **how: bool) -> list[Tensor]:
        out = form(q, q.sin(), v, seen, scale=0.7, spare_self=spare_self)
        return list(torch.autograd.grad((out * weights).sum(), (q, v), **how))

    once, twice, wanted = (
        slope(rounds.attend),
        slope(rounds.attend, create_graph=True),
        slope(rounds.plain, create_graph=True),
    )
    torch.testing.assert_close(twice, once, rtol=0, atol=1e-11)
    squares = (sum(x.square().sum() for x in slopes) for slopes in (twice, wanted))
    ours, theirs = (torch.autograd.grad(x, (q, v)) for x in squares)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
def test_compiled_without_gradients_it_gives_the_same_at_any_length(padding: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(rounds.attend, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for length in (13, 30):
            real = padded(length) if padding else None
            (q, k, v), seen = inputs(length, batch=2), windows(length, real, batch=2)
            wanted = rounds.attend(q, k, v, seen, scale=0.7)
            assert torch.equal(compiled(q, k, v, seen, scale=0.7), wanted)


def test_what_the_compiler_is_told_of_the_operation_is_true() -> None:
    tensors, seen = [x.detach() for x in inputs(13, 2)], windows(13, padded(13), 2)
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]  # as hosts do
    torch.library.opcheck(rounds._compiled, (*tensors, *vars(seen).values(), 0.7, False))


def test_tokens_that_fill_up_the_last_chunk_add_nothing_to_gradients() -> None:
    (q, k, v), seen = inputs(5), windows(5)
    out = rounds.attend(q, k, v, seen, scale=1.0)
    wanted = (q @ k.mT).masked_fill(~seen.dense(), -torch.inf).softmax(-1) @ v
    first = torch.zeros_like(out)
    first[:, :, 0] = 1
    pairs = zip(*(torch.autograd.grad(x, (q, k, v), first) for x in (out, wanted)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
