"""Products and additions, and bytes, against numbers counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from zoo_core.bench import counting

CPU = torch.device("cpu")
B, H, N, D = 2, 3, 40, 8


def tensors(*, gradients: bool) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, N, D, generator=source, requires_grad=gradients) for _ in range(3)]


def test_products_of_matrices_are_counted() -> None:
    a, b = torch.ones(5, 7), torch.ones(7, 11)
    assert counting.flops(lambda: (a @ b).exp().sum()) == 2 * 5 * 7 * 11


@pytest.mark.parametrize("mask", [None, torch.ones(N, N, dtype=torch.bool)], ids=["plain", "mask"])
def test_fused_attention_is_counted_as_its_two_products(mask) -> None:
    q, k, v = tensors(gradients=False)
    attend = F.scaled_dot_product_attention
    assert counting.flops(lambda: attend(q, k, v, attn_mask=mask)) == 2 * 2 * B * H * N * N * D


def test_its_backward_is_counted_as_five_more() -> None:
    q, k, v = tensors(gradients=True)

    def call() -> None:
        out = F.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(out.sum(), (q, k, v))

    assert counting.flops(call) == 7 * 2 * B * H * N * N * D


def test_gradients_to_leaves_are_counted_in_the_backward() -> None:
    q, k, _ = tensors(gradients=True)
    assert counting.flops(lambda: torch.autograd.grad((q @ k.mT).sum(), (q, k))) == (
        3 * 2 * B * H * N * N * D
    )


def test_the_peak_is_what_lives_at_once() -> None:
    def call() -> torch.Tensor:
        first = torch.ones(1000)
        second = first.exp()  # 8000 bytes live
        del first
        third = second.exp()  # again 8000
        del second
        return third

    assert counting.peak_bytes(call, CPU) == 8000


def test_memory_from_before_is_not_counted_nor_is_its_release() -> None:
    held = [torch.ones(10_000)]

    def call() -> torch.Tensor:
        held.clear()
        return torch.ones(500)

    assert counting.peak_bytes(call, CPU) == 2000


def test_what_the_backward_keeps_is_counted() -> None:
    x = torch.ones(1000, requires_grad=True)

    def call() -> None:
        kept = x.exp()  # 4000, kept for its own backward
        torch.autograd.grad(kept.exp().sum(), x)  # + 4000, and gradients

    assert counting.peak_bytes(call, CPU) >= 12000


def test_buffers_inside_a_kernel_are_counted() -> None:
    q, k, v = tensors(gradients=False)
    output = B * H * N * D * 4
    peak = counting.peak_bytes(lambda: F.scaled_dot_product_attention(q, k, v), CPU)
    assert output < peak < output + 8 * B * H * N * N * 4


def test_what_cannot_be_watched_has_no_number() -> None:
    """As torch's dispatcher answers for flex_attention."""

    def call() -> None:
        raise NotImplementedError("There was no rule registered for HigherOrderOperator")

    assert counting.flops(call) is None


def test_an_error_in_the_call_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        counting.peak_bytes(lambda: 1 / 0, CPU)
    with pytest.raises(ZeroDivisionError):
        counting.flops(lambda: 1 / 0)


def test_the_profiler_writes_nothing_to_stderr(capfd) -> None:
    counting.peak_bytes(lambda: torch.ones(3), CPU)
    assert capfd.readouterr() == ("", "")
