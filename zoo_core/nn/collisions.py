"""Collisions of hashes: a query takes the sum of the values of the keys that share its code.

The share of the hashes under which a query and a key collide is then the weight of the key, a mean
of Bernoulli trials. Sums go code by code, in time and memory linear in the tokens. The probability
itself takes every pair of them, a block of pairs at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.nn import derivatives

#: Cosines are kept this far from 1 and -1, where acos has no derivative and rounding no mercy.
MARGIN = 1e-6

#: Pairs of a query and a key in one block: those that fit a cache; others just have to fit.
PAIRS_ON_CPU, PAIRS_ELSEWHERE = 1 << 18, 1 << 26

#: Columns of the values that the derivative of `sampled` multiplies with whole vectors at once.
COLUMNS = 8


def sign_codes(x: Tensor, planes: Tensor) -> Tensor:
    """Code of each row of x (B, H, N, D) in each of M hashes, (B, H, M, N) < 2 ** bits.

    planes: (H, M, D, bits), normals of the planes; each gives the bit of the side that x is on.
    Two vectors at an angle of a share a code with probability (1 - a / pi) ** bits.
    """
    hashes, bits = planes.shape[1], planes.shape[-1]
    sides = (x @ planes.to(x.dtype).transpose(1, 2).flatten(2)) > 0
    powers = 2 ** torch.arange(bits, device=x.device)
    codes = (sides.view(*x.shape[:-1], hashes, bits) * powers).sum(-1)
    return codes.mT.contiguous()


def collide(queries: Tensor, keys: Tensor, values: Tensor, *, number: int) -> Tensor:
    """Sum of the values of keys with the query's code, mean over M hashes: (B, H, L, E).

    queries (B, H, M, L) and keys (B, H, M, S): codes < number. values (B, H, S, E). Linear in L
    and S, and deterministic on every device. Not differentiable: see `sampled`.
    """
    batch, heads, hashes, length = keys.shape
    wanted = queries.flatten(0, 1)
    # Sorted by code, the keys of one stand in a run. There are never more runs than keys, so that
    # codes of many bits cost no more than those of few.
    ordered, order = keys.flatten(0, 1).sort(dim=-1)
    runs = F.pad(ordered.diff(dim=-1).sign().cumsum(-1), (1, 0))
    steps = torch.arange(min(number, length), device=keys.device)
    starts = torch.searchsorted(runs, steps.expand(*runs.shape[:2], -1).contiguous())
    at = torch.searchsorted(ordered, wanted).clamp(max=length - 1)
    missed = ordered.gather(-1, at) != wanted
    group = torch.arange(batch * heads, device=keys.device)[:, None, None]
    order, starts = order + group * length, starts + group * length
    rows = runs.gather(-1, at) + group * len(steps)

    values = values.flatten(0, 2)
    sums = values.new_zeros(*wanted.shape[::2], values.shape[-1])
    for one in range(hashes):
        bags = order[:, one].flatten(), values, starts[:, one].flatten()
        table = F.embedding_bag(*bags, mode="sum")
        found = table.index_select(0, rows[:, one].flatten()).view_as(sums)
        sums += found.masked_fill_(missed[:, one, :, None], 0)
    return (sums / hashes).view(batch, heads, *sums.shape[1:])


def sampled(
    q: Tensor, k: Tensor, v: Tensor, query_codes: Tensor, key_codes: Tensor, *, bits: int
) -> Tensor:
    """`collide`, with a derivative: sum_j w_ij v_j, w_ij the share of hashes in which they meet.

    q (B, H, L, D) and k (B, H, S, D): unit vectors, which only the derivative reads. In it w_ij is
    taken for a function of q_i . k_j that grows at a rate of bits / 2 * w_ij, a lower bound on how
    fast the probability of meeting does, so that it is linear in L and S as well.
    """
    out: Tensor = _Sampled.apply(q, k, v, query_codes, key_codes, bits)
    return out


class _Sampled(torch.autograd.Function):
    """See `sampled`."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, query_codes: Tensor, key_codes: Tensor, bits: int
    ) -> Tensor:
        return collide(query_codes, key_codes, v, number=2**bits)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.bits = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, query_codes, key_codes = ctx.saved_tensors
        rate, number = ctx.bits / 2, 2**ctx.bits
        grad_v = collide(key_codes, query_codes, grad, number=number)
        grad_q = rate * _contracted(query_codes, key_codes, grad, v, k, number)
        grad_k = rate * _contracted(key_codes, query_codes, v, grad, q, number)
        return grad_q, grad_k, grad_v, None, None, None


def expected(q: Tensor, k: Tensor, v: Tensor, *, bits: int) -> Tensor:
    """What `sampled` tends to: sum_j w_ij v_j, w_ij = (1 - acos(q_i . k_j) / pi) ** bits.

    q (B, H, L, D) and k (B, H, S, D): unit vectors. v (B, H, S, E). In time L * S, in memory L + S,
    the backward included, but not a second one. Its derivative is the true one, but 0 within MARGIN
    of |q_i . k_j| = 1.
    """
    if torch.compiler.is_compiling():  # single operations fuse, and there is no loop to unroll
        return _expected_at_once(q, k, v, bits=bits)
    out: Tensor = _Expected.apply(q, k, v, bits)
    return out


def _expected_at_once(q: Tensor, k: Tensor, v: Tensor, *, bits: int) -> Tensor:
    angles = (q @ k.mT).clamp(MARGIN - 1, 1 - MARGIN).acos()
    return torch.rsub(angles, 1, alpha=1 / math.pi).pow(bits) @ v


class _Expected(torch.autograd.Function):
    """See `expected`."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bits: int) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        for heads, rows in _blocks(q, k):
            cosines = (q[:, heads, rows] @ k[:, heads].mT).clamp_(MARGIN - 1, 1 - MARGIN)
            out[:, heads, rows] = _power(_chance_of(cosines), bits) @ v[:, heads]
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.bits = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        if torch.is_grad_enabled():
            single = partial(_expected_at_once, bits=ctx.bits)
            return *derivatives.through(single, (q, k, v), (grad,)), None
        grad_q, grad_k, grad_v = torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
        # d w / d cosine = bits * chance ** (bits - 1) / (pi * sqrt(1 - cosine ** 2))
        one, scaled = q.new_ones(()), grad * (ctx.bits / math.pi)
        for heads, rows in _blocks(q, k):
            queries, keys, some = q[:, heads, rows], k[:, heads], grad[:, heads, rows]
            cosines = queries @ keys.mT
            clamped = cosines.clamp(MARGIN - 1, 1 - MARGIN)
            slope = torch.addcmul(one, clamped, clamped, value=-1).rsqrt_()
            chance = _chance_of(clamped)
            powers = _power(chance, ctx.bits - 1)
            slope.mul_(powers).mul_(scaled[:, heads, rows] @ v[:, heads].mT)
            slope = torch.ops.aten.hardtanh_backward(slope, cosines, MARGIN - 1, 1 - MARGIN)
            grad_q[:, heads, rows] = slope @ keys
            _add_product(grad_k[:, heads], slope.mT, queries)
            _add_product(grad_v[:, heads], powers.mul_(chance).mT, some)
        return grad_q, grad_k, grad_v, None


def _blocks(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Heads and queries to take at a time, with all keys."""
    batch, heads, length, _ = q.shape
    pairs = (PAIRS_ON_CPU if q.device.type == "cpu" else PAIRS_ELSEWHERE) // batch
    some = max(1, pairs // (length * k.shape[-2]))
    rows = max(1, pairs // (min(some, heads) * k.shape[-2]))
    for head in range(0, heads, some):
        for row in range(0, length, rows):
            yield slice(head, head + some), slice(row, row + rows)


def _chance_of(cosines: Tensor) -> Tensor:
    """Turn cosines into the chance that a random plane has both vectors on one side.

    That is 1 - angle / pi.
    """
    angles = cosines.acos_()
    return torch.sub(angles.new_ones(()), angles, alpha=1 / math.pi, out=angles)


def _power(x: Tensor, exponent: int) -> Tensor:
    """x ** exponent, by squares in place of one another: `pow` takes several times longer."""
    if not exponent:
        return torch.ones_like(x)
    power = x
    for digit in f"{exponent:b}"[1:]:
        power = x * x if power is x else power.square_()
        if digit == "1":
            power.mul_(x)
    return power


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other, for some heads (B, h, n, m) of a contiguous total."""
    if len(total) == 1:
        total[0].baddbmm_(one[0], other[0])
    else:  # some heads of several samples have no single stride, as baddbmm wants
        total += one @ other


def _contracted(
    rows: Tensor, columns: Tensor, left: Tensor, right: Tensor, x: Tensor, number: int
) -> Tensor:
    """sum_j w_ij (left_i . right_j) x_j, by the codes of i in `rows` and of j in `columns`.

    left (B, H, L, E), right (B, H, S, E), x (B, H, S, D) -> (B, H, L, D).
    """
    total = left.new_zeros(*left.shape[:-1], x.shape[-1])
    pairs = zip(torch.split(left, COLUMNS, -1), torch.split(right, COLUMNS, -1), strict=True)
    for some, others in pairs:
        products = (others[..., None] * x[..., None, :]).flatten(-2)
        met = collide(rows, columns, products, number=number).view(*some.shape, -1)
        total += (some[..., None, :] @ met).squeeze(-2)
    return total
