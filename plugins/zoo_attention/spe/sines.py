"""Queries and keys times sums of sinusoids with random factors.

    q^_nr = sum_d q_nd (s_d F_dr + sum_k a_dk (cos(t_ndk + o_dk) C_dkr + sin(t_ndk + o_dk) S_dkr))

and the same for k, with offsets o = 0. The angle t_ndk is turns_dk . n for a cell n of a grid of A
axes, row by row. On a CPU some tokens' sinusoids at a time, which so stay in the cache; for a
gradient they are made anew. Where native kernels are, those compute it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from zoo_attention.spe.waves import Noise, make_factors, make_waves, make_waves_in_place
from zoo_core.nn import derivatives, native
from zoo_core.nn.parts import cut, fits_parts

#: Entries of codes, or of products of tokens with sinusoids, that a thread works on at once.
ENTRIES = 1 << 18

#: Gradients of x (B, H, N, D); of amplitudes, of phases, and of phases times places on each axis,
#: (H, 2 + A, K, D); of s (H, D).
Pulled = tuple[Tensor, Tensor, Tensor]


def encode(
    q: Tensor,
    k: Tensor,
    turns: Tensor,
    offsets: Tensor,
    amplitudes: Tensor,
    still: Tensor | None,
    noise: Noise,
) -> tuple[Tensor, Tensor]:
    """Encode q, k (B, H, N, D) of the first N cells: (B, H, N, R) each.

    turns (H, D, K, A) in radians per cell, offsets o and amplitudes a (H, D, K), still s (H, D), or
    None as noise.free. All in one dtype, fp32 or fp64, with autocast off.
    """
    parameters = turns, offsets, amplitudes, still
    if q.shape[-2] == 0 or not (fits_parts(q) or _has_kernel(q, k, noise)):
        return _at_once(q, k, *parameters, noise=noise)
    if not torch.is_grad_enabled():
        return _in_parts(q, k, *parameters, noise)
    encoded: tuple[Tensor, Tensor] = _Encode.apply(q, k, *parameters, noise)
    return encoded


class _Encode(torch.autograd.Function):
    """`_in_parts`; its backward makes the sinusoids anew."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        turns: Tensor,
        offsets: Tensor,
        amplitudes: Tensor,
        still: Tensor | None,
        noise: Noise,
    ) -> tuple[Tensor, Tensor]:
        return _in_parts(q, k, turns, offsets, amplitudes, still, noise)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.noise = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, noise = ctx.saved_tensors, ctx.noise
        with torch.autocast(grads[0].device.type, enabled=False):
            if not torch.is_grad_enabled():
                return *_gradients(grads, *tensors, noise), None
            # A derivative of the derivative is wanted.
            return *derivatives.through(partial(_at_once, noise=noise), tensors, grads), None


def _at_once(
    q: Tensor,
    k: Tensor,
    turns: Tensor,
    offsets: Tensor,
    amplitudes: Tensor,
    still: Tensor | None,
    *,
    noise: Noise,
) -> tuple[Tensor, Tensor]:
    """The same by single operations, which compilers fuse if sinusoids are not put together."""
    waves = make_waves(noise.cells()[: q.shape[-2]], turns, still)
    rows = [wave.shape[2] for wave in waves]
    factors = make_factors(offsets, amplitudes, noise)

    def multiplied(x: Tensor, factor: Tensor) -> Tensor:
        pairs = zip(waves, factor.split(rows, 1), strict=True)
        return reduce(torch.add, [_multiply(x, wave, own) for wave, own in pairs])

    return multiplied(q, factors[0]), multiplied(k, factors[1])


def _in_parts(
    q: Tensor,
    k: Tensor,
    turns: Tensor,
    offsets: Tensor,
    amplitudes: Tensor,
    still: Tensor | None,
    noise: Noise,
) -> tuple[Tensor, Tensor]:
    if _has_kernel(q, k, noise):
        tables = _Tables(turns, offsets, amplitudes, still, noise)
        return tables.call("sines", 0, q), tables.call("sines", 1, k)
    B, H, N, _ = q.shape
    # In the layout of hosts.
    out = [q.new_empty(B, N, H, noise.waves.shape[-1]).transpose(1, 2) for _ in range(2)]
    cells = noise.cells()
    groups, spans = _cut(q, noise, shared=_shares(B, *noise.waves.shape[1:]))
    for heads in groups:
        own = None if still is None else still[heads]
        factors = make_factors(offsets[heads], amplitudes[heads], noise)
        for span in spans:
            waves = make_waves_in_place(cells[span], turns[heads], own)
            for x, factor, to in zip((q, k), factors, out, strict=True):
                to[:, heads, span] = _multiply(x[:, heads, span], waves, factor)
    return out[0], out[1]


def _cut(x: Tensor, noise: Noise, *, shared: bool = False) -> tuple[list[slice], list[slice]]:
    """Heads and tokens of x (B, H, N, D) to work on at once; shared: by codes of all samples."""
    B, H, N, _ = x.shape
    width, rows, realizations = noise.waves.shape
    entries = width * (realizations if shared else B * rows)
    tokens = max(1, ENTRIES * torch.get_num_threads() // entries)
    return cut(H, tokens // N), cut(N, tokens)


def _shares(batch: int, rows: int, realizations: int) -> bool:
    """Whether codes for the whole batch take less room than products with every sample."""
    return batch * rows > realizations


def _multiply(x: Tensor, waves: Tensor, factors: Tensor) -> Tensor:
    """sum_jd x_nd waves_njd factors_jdr: x (B, H, n, D) to (B, H, n, R)."""
    if _shares(x.shape[0], waves.shape[2] // 2 * 2, factors.shape[-1]):
        pairs = waves.permute(0, 3, 1, 2), factors.transpose(1, 2)
        codes = torch.bmm(*(y.flatten(0, 1) for y in pairs))
        codes = codes.unflatten(0, (x.shape[1], x.shape[3])).transpose(1, 2)
        encoded = torch.bmm(x.permute(1, 2, 0, 3).flatten(0, 1), codes.flatten(0, 1))
        return encoded.unflatten(0, (x.shape[1], x.shape[2])).permute(2, 0, 1, 3)
    products = (x.transpose(0, 1)[..., None, :] * waves[:, None]).flatten(-2).flatten(1, 2)
    encoded = products @ factors.flatten(1, 2)
    return encoded.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)


def _gradients(
    grads: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    turns: Tensor,
    offsets: Tensor,
    amplitudes: Tensor,
    still: Tensor | None,
    noise: Noise,
) -> tuple[Tensor | None, ...]:
    """Gradients of all but the noise, from those of the encoded queries and keys."""
    pull = _pull_by_kernel if _has_kernel(q, k, noise) else _pull_in_parts
    of_q, of_k = pull(grads, (q, k), turns, offsets, amplitudes, still, noise)
    waves = of_q[1] + of_k[1]
    of_turns, of_offsets = waves[:, 2:].permute(0, 3, 2, 1), of_q[1][:, 1].mT
    of_still = None if still is None else of_q[2] + of_k[2]
    return of_q[0], of_k[0], of_turns, of_offsets, waves[:, 0].mT, of_still


def _pull_in_parts(
    grads: Sequence[Tensor],
    tokens: tuple[Tensor, Tensor],
    turns: Tensor,
    offsets: Tensor,
    amplitudes: Tensor,
    still: Tensor | None,
    noise: Noise,
) -> list[Pulled]:
    H, D, K, A = turns.shape
    pulled = [(torch.empty_like(x), x.new_zeros(H, 2 + A, K, D), x.new_zeros(H, D)) for x in tokens]
    cells = noise.cells().to(turns.dtype)
    groups, spans = _cut(tokens[0], noise)
    for heads in groups:
        own, sizes = None if still is None else still[heads], amplitudes[heads].mT
        factors = make_factors(offsets[heads], None, noise)
        for span in spans:
            waves = make_waves_in_place(cells[span], turns[heads], own)
            for x, grad, factor, (of_x, *sums) in zip(tokens, grads, factors, pulled, strict=True):
                x, grad = (y[:, heads, span].transpose(0, 1) for y in (x, grad))
                found, *some = _pull(grad, x, waves, factor, sizes, cells[span])
                of_x[:, heads, span] = found.transpose(0, 1)
                for total, more in zip(sums, some, strict=True):
                    total[heads] += more
    return pulled


def _pull(
    grad: Tensor, x: Tensor, waves: Tensor, factors: Tensor, sizes: Tensor, cells: Tensor
) -> Pulled:
    """The gradients that tokens x (H, B, n, D) leave, from that of what became of them.

    factors are without amplitudes, sizes (H, K, D).
    """
    K, x = sizes.shape[1], x[..., None, :]
    products = grad.flatten(1, 2) @ factors.flatten(1, 2).mT
    products = products.view(*grad.shape[:3], *waves.shape[2:])
    cosines, sines, free = products.tensor_split([K, 2 * K], 3)
    along_cosines, along_sines, still = waves[:, None].tensor_split([K, 2 * K], 3)
    along = (along_cosines * cosines).addcmul_(along_sines, sines)
    across = (along_cosines * sines).addcmul_(along_sines, cosines, value=-1)
    of_x = (along * sizes[:, None, None]).sum(-2).add_((still * free).sum(-2))
    places = torch.cat([torch.ones_like(cells[:, :1]), cells], 1)
    of_phases = torch.einsum("na,hbnkd->hakd", places, across.mul_(x)) * sizes[:, None]
    of_sizes = along.mul_(x).sum((1, 2))[:, None]
    return of_x, torch.cat([of_sizes, of_phases], 1), (free * x).sum((1, 2, 3))


def _has_kernel(q: Tensor, k: Tensor, noise: Noise) -> bool:
    whole = q.shape[-2] == k.shape[-2] == math.prod(noise.shape)
    return whole and native.suits(q, k, noise.waves)


class _Tables:
    """What kernels ask for, in float64: steps on the axes, and phases of queries and of keys.

    Sinusoids lie in the order (D, K), or with features last (K, D).
    """

    def __init__(
        self,
        turns: Tensor,
        offsets: Tensor,
        amplitudes: Tensor,
        still: Tensor | None,
        noise: Noise,
        *,
        features_last: bool = False,
    ) -> None:
        def listed(x: Tensor) -> Tensor:
            return (x.mT if features_last else x).flatten(-2)

        self.shape = noise.shape
        self.halves = _circle(listed(turns.double().movedim(-1, 0) / 2), 2)
        self.phases = [_circle(listed(x.double()), 1) for x in (offsets, torch.zeros_like(offsets))]
        others = listed(amplitudes), noise.waves, still, noise.free
        self.others = [None if x is None else x.contiguous() for x in others]

    def call(self, name: str, which: int, *tensors: Tensor) -> Any:
        """A kernel for queries, 0, or keys, 1."""
        phases = self.phases[which]
        return native.call(name, *tensors, self.shape, self.halves, phases, *self.others)


def _circle(angles: Tensor, at: int) -> Tensor:
    return torch.stack([angles.cos(), angles.sin()], at)


def _pull_by_kernel(
    grads: Sequence[Tensor],
    tokens: tuple[Tensor, Tensor],
    turns: Tensor,
    offsets: Tensor,
    amplitudes: Tensor,
    still: Tensor | None,
    noise: Noise,
) -> list[Pulled]:
    _, D, K, A = turns.shape
    tables = _Tables(turns, offsets, amplitudes, still, noise, features_last=True)
    pulled = []
    for i, (grad, x) in enumerate(zip(grads, tokens, strict=True)):
        of_x, sums = tables.call("sines_backward", i, grad, x)
        waves, of_still = sums.split([(2 + A) * K * D, D], 1)
        pulled.append((of_x, waves.view(-1, 2 + A, K, D), of_still))
    return pulled
