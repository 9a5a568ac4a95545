"""The native kernels of `clustering` and `clustered`, beside plain torch and a dense formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo_core.nn import choice, clustered, clustering

pytestmark = pytest.mark.usefixtures("native_kernels")

BATCH, HEADS, SCALE = 4, 2, 0.3
LENGTHS = pytest.mark.parametrize("length", [1, 2, 31, 64, 65, 150], ids=lambda n: f"{n}-tokens")
PADDED = pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])


def rows(length: int, width: int = 16) -> Tensor:
    """(BATCH, HEADS, length, width) as hosts store it, tokens before heads."""
    return torch.randn(BATCH, length, HEADS, width).transpose(1, 2)


def padding(length: int) -> Tensor:
    """Four samples: padded on the left, on the right, with gaps, and nothing else."""
    real = torch.ones(BATCH, length, dtype=torch.bool)
    real[0, : length // 3] = False
    real[1, (length + 1) // 2 :] = False
    real[2, 1::3] = False
    real[3] = False
    return real


def hide(x: Tensor, real: Tensor | None, value: float = 0.0) -> Tensor:
    return x if real is None else x.masked_fill(~real[:, None, :, None], value)


def one_head(q: Tensor, k: Tensor, v: Tensor, index: Tensor, number: int, topk: int) -> Tensor:
    """The formula for the real tokens (N, D) of one head, dense."""
    members = torch.nn.functional.one_hot(index, number).to(q.dtype)
    means = members.mT @ q / members.sum(0).clamp(min=1)[:, None]
    weights = (SCALE * means @ k.mT).softmax(-1)
    if topk == 0:
        return (weights @ v)[index]
    top = weights.topk(min(topk, len(k))).indices
    inside = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, top, True)
    share, rest = (weights * inside).sum(-1, keepdim=True), (weights * ~inside) @ v
    own = (SCALE * q @ k.mT).masked_fill(~inside[index], -torch.inf).softmax(-1) @ v
    return share[index] * own + rest[index]


def formula(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, number: int, topk: int) -> Tensor:
    """In float64, with the clusters that are found in fp32; zeros at padding."""
    index, _ = clustering.find_clusters(hide(q, real).float().detach(), real, number, 3)
    outs = []
    for b in range(BATCH):
        shown = torch.ones(q.shape[2], dtype=torch.bool) if real is None else real[b]
        for h in range(HEADS):
            out = torch.zeros(q.shape[2], v.shape[-1], dtype=torch.float64)
            if shown.any():
                alone = (x[b, h, shown].double() for x in (q, k, v))
                out[shown] = one_head(*alone, index[b, h, shown], number, topk)
            outs.append(out)
    return torch.stack(outs).unflatten(0, (BATCH, HEADS))


def check(
    tensors: list[Tensor], real: Tensor | None, number: int, topk: int, upstream: Tensor
) -> None:
    """The output and the gradients; both have zeros at padding."""
    found = []
    for by_kernel in (True, False):
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        number = min(number, q.shape[2])
        if by_kernel:
            how = clustered.How(number, 3, topk, SCALE, plain=lambda *_: pytest.fail("plain"))
            out = clustered.attend(q, k, v, real, how)
        else:
            out = formula(q, k, v, real, number, topk)
        grads = torch.autograd.grad(out, (q, k, v), upstream.to(out.dtype))
        found.append([out, *grads])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted.float(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("iterations", [0, 3], ids=lambda n: f"{n}-steps")
@pytest.mark.parametrize("number", [1, 5, 20, 70], ids=lambda n: f"{n}-clusters")
@PADDED
@LENGTHS
def test_clusters_are_the_same(length: int, padded: bool, number: int, iterations: int) -> None:
    torch.manual_seed(length)
    x, real = rows(length, 32), padding(length) if padded else None
    index, means = clustering.find_clusters(hide(x, real, torch.nan), real, number, iterations)
    with choice.plain_only():
        wanted, wanted_means = clustering.cluster(hide(x, real), real, number, iterations)
    assert torch.equal(hide(index[..., None], real), hide(wanted[..., None], real))
    torch.testing.assert_close(means, wanted_means, rtol=1e-5, atol=1e-5)


def test_the_first_of_equally_near_clusters_is_taken() -> None:
    x = rows(1).expand(-1, -1, 90, -1)
    index, means = clustering.find_clusters(x, None, 8, 0)
    assert (index == 0).all()
    torch.testing.assert_close(means[:, :, 0], x[:, :, 0])
    assert (means[:, :, 1:] == 0).all()


def test_the_map_of_a_mechanism_has_the_clusters_of_its_kernel() -> None:
    torch.manual_seed(0)
    x = rows(150)
    index, means = clustering.find_clusters(x, None, 9, 3)
    found, its_means = clustering.cluster(x, None, 9, 3)
    assert torch.equal(found, index)
    torch.testing.assert_close(its_means, means, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topk", [0, 1, 7, 40], ids=lambda n: f"top-{n}")
@pytest.mark.parametrize("number", [1, 6, 70], ids=lambda n: f"{n}-clusters")
@PADDED
@LENGTHS
def test_attention_is_that_of_the_formula(
    length: int, padded: bool, number: int, topk: int
) -> None:
    torch.manual_seed(length)
    real = padding(length) if padded else None
    tensors = [hide(rows(length, width), real, torch.nan) for width in (16, 16, 32)]
    upstream = hide(rows(length, 32), real)
    check(tensors, real, number, topk, upstream)


def test_more_keys_than_the_derivative_sees_at_once() -> None:
    torch.manual_seed(0)
    check([rows(600) for _ in range(3)], None, 6, 30, rows(600))


@pytest.mark.parametrize("topk", [5, 32])
def test_of_keys_that_are_as_near_just_so_many_are_chosen(topk: int) -> None:
    """Which of them makes no difference where their values are equal, too."""
    torch.manual_seed(0)
    q, k, v = (rows(90) for _ in range(3))
    k, v = (x[:, :, :1].expand_as(x) for x in (k, v))
    check([q, k, v], None, 4, topk, rows(90))


@pytest.mark.parametrize("descending", [False, True], ids=["rising", "falling"])
def test_top_keys_may_lie_side_by_side(descending: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (rows(90) for _ in range(3))
    k = k + torch.linspace(0, 3, 90)[:, None] * (-1 if descending else 1)
    check([q + 1, k, v], None, 4, 10, rows(90))


@pytest.mark.parametrize("topk", [0, 7])
def test_padding_of_the_gradient_has_no_effect(topk: int) -> None:
    torch.manual_seed(0)
    real, upstream = padding(40), rows(40)
    tensors = [rows(40).requires_grad_() for _ in range(3)]
    how = clustered.How(5, 3, topk, SCALE, plain=lambda *_: pytest.fail("plain"))
    out = clustered.attend(*tensors, real, how)
    first, second = (
        torch.autograd.grad(out, tensors, hide(upstream, real, value), retain_graph=True)
        for value in (0.0, torch.nan)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, hide(one, real))


@pytest.mark.parametrize("topk", [0, 7])
def test_rows_of_any_layout(topk: int) -> None:
    torch.manual_seed(0)
    q, k, v = (rows(47, 32) for _ in range(3))
    how = clustered.How(5, 3, topk, SCALE, plain=lambda *_: pytest.fail("plain"))
    wanted = clustered.attend(q, k, v, None, how)
    others = q.mT.contiguous().mT, k.contiguous(), torch.stack([v, v], 3)[:, :, :, 1]
    got = clustered.attend(*others, None, how)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    shared = clustered.attend(q[:1].expand_as(q), k[:1].expand_as(k), v, None, how)
    torch.testing.assert_close(shared[:1], wanted[:1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("topk", [0, 4])
def test_a_second_derivative_is_that_of_plain_torch(topk: int) -> None:
    torch.manual_seed(0)
    tensors = [rows(13).requires_grad_() for _ in range(3)]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return formula(q, k, v, None, 3, topk).float()

    def slopes(out: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), tensors)

    ours = slopes(clustered.attend(*tensors, None, clustered.How(3, 3, topk, SCALE, plain)))
    for got, wanted in zip(ours, slopes(plain(*tensors)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_nan_among_the_top_keys_stays_nan(which: int) -> None:
    torch.manual_seed(0)
    tensors = [rows(70) for _ in range(3)]
    tensors[which][1, 0, 3] = torch.nan
    how = clustered.How(5, 3, 7, SCALE, plain=lambda *_: pytest.fail("plain"))
    got = clustered.attend(*tensors, None, how).isnan()
    assert got[1, 0].all() if which == 1 else got[1, 0].any()
    assert got[1, 0, 3].all()
    assert not got[[0, 2, 3]].any()
    assert not got[1, 1].any()
