"""Random features of the softmax kernel, and attention through them that cannot overflow.

    exp(q . k) = E_w[exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2)],   w ~ N(0, I)

With M directions w_f in place of w, kernel attention equals two softmaxes, in which the scale of
the features cancels:

    g_f, z_f = mean of v under softmax_j(w_f . k_j - |k_j|^2 / 2), and that softmax's denominator
    o_i      = mean of g under softmax_f(w_f . q_i + log z_f)

Both run on the fused kernel, which stores nothing of size N x M, forward or backward.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.nn import derivatives, fused, kernels, masks, precision, softmax
from zoo_core.nn.parts import spans, streams

Norms = Literal["chi", "sqrt_d"]

#: Chunks of a causal product that are worked on at once where no gradients are kept.
CHUNKS = 4


def orthogonal(rows: int, width: int, *, norms: Norms = "chi") -> Tensor:
    """Draw directions (rows, width) from torch's global generator, in blocks of orthogonal rows.

    norms: "chi", lengths of Gaussian vectors, so that each row by itself is N(0, I); or "sqrt_d",
    all of length sqrt(width). In fp32: QR has no half kernel.
    """
    q, r = torch.linalg.qr(torch.randn(-(-rows // width), width, width, dtype=torch.float32))
    # A positive diagonal of R makes Q uniform over rotations; the algorithm's own signs do not.
    blocks = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    units: Tensor = blocks.mT.flatten(0, 1)[:rows]
    if norms == "sqrt_d":
        return units * math.sqrt(width)
    gaussian = torch.randn(rows, width, dtype=torch.float32)
    return units * gaussian.square().sum(-1, keepdim=True).sqrt()


def attend(
    directions: Tensor, q: Tensor, k: Tensor, v: Tensor, ctx: Context, *, scale: float
) -> Tensor:
    """Attention whose kernel exp(scale * q . k) is estimated by `directions` (M, D).

    (B, H, L, E) in v's dtype, computed in at least fp32. A query that sees no real key gets zeros.
    Padded keys and values may hold anything.
    """
    wide = precision.sum_dtype(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        w = directions.to(wide) * math.sqrt(scale)
        keys, values = (masks.hide(x, ctx.key_padding).to(wide) for x in (k, v))
        bias = _key_bias(keys, ctx.key_padding, scale)
        if kernels.sees_all(ctx, k):
            out = _read(w, q.to(wide), *_gather(w, keys, bias, values))
        else:
            out = _causal(w, q.to(wide), keys, bias, values, offset=ctx.query_offset)
        return out.to(v.dtype)


def weights(directions: Tensor, q: Tensor, k: Tensor, ctx: Context, *, scale: float) -> Tensor:
    """The attention map (B, H, L, S) of `attend`, dense: for looking, not for running."""
    wide = precision.sum_dtype(q, k)
    with torch.autocast(q.device.type, enabled=False):
        w = directions.to(wide) * math.sqrt(scale)
        keys = masks.hide(k, ctx.key_padding).to(wide)
        bias = _key_bias(keys, ctx.key_padding, scale)
        scores = _log_kernel(q.to(wide) @ w.mT, keys @ w.mT + bias[..., None])
        mask = masks.scores_mask(ctx, q.shape[-2], k.shape[-2], q.device)
        return softmax.masked_softmax(scores, mask)


def _nothing(dtype: torch.dtype) -> float:
    """The log of no mass: finite, so that sums of nothing keep finite gradients."""
    return torch.finfo(dtype).min / 2


def _key_bias(k: Tensor, key_padding: Tensor | None, scale: float) -> Tensor:
    """-scale |k_j|^2 / 2 for keys k (B, H, S, D), and no mass at all for padding: (B, H, S)."""
    if streams(k):  # in one pass, whose derivative at zero is another matter
        squares: Tensor = torch.linalg.vector_norm(k, dim=-1).square_()
    else:
        squares = k.square().sum(-1)
    bias = squares * (-scale / 2)
    if key_padding is None:
        return bias
    return bias.masked_fill(~key_padding[:, None], _nothing(k.dtype))


def _gather(w: Tensor, k: Tensor, bias: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Means of v under softmax_j(w . k_j + bias_j), and the logs of those softmaxes' denominators.

    w (M, D) or (B, H, M, D), k (B, H, S, D), bias (B, H, S), v (B, H, S, E) -> (B, H, M, E) and
    (B, H, M).
    """
    if not torch.is_grad_enabled() and fused.has(k, v):
        return fused.attend(w.expand(*k.shape[:2], -1, -1), k, v, bias[:, :, None], scale=1.0)
    D, E = k.shape[-1], v.shape[-1]
    width = softmax.fused_width(max(D + 1, E + 2))
    queries, keys, values = (F.pad(x, (0, width - x.shape[-1])) for x in (w, k, v))
    queries[..., D], keys[..., D] = 1, bias
    queries = queries.expand(*k.shape[:2], -1, -1)
    if fused.has(queries, values) and not torch.compiler.is_compiling():
        out, mass = _WithMass.apply(queries, keys, values)
        return out[..., :E], mass
    # There the kernel keeps its denominators to itself. One more key, of known logit and in the
    # middle of all, has a share in each softmax that tells the mass of the others.
    known, middle = bias.detach().amax(-1), k.detach().mean(-2)
    keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (keys, values))
    keys[..., -1, :D], keys[..., -1, D] = middle, known
    values[..., :-1, E], values[..., -1, E + 1] = 1, 1
    out = F.scaled_dot_product_attention(queries, keys, values, scale=1.0)
    known = (queries[..., :D] @ middle[..., None]).squeeze(-1).detach() + known[..., None]
    share, share_of_known = out[..., E : E + 2].clamp_min(precision.negligible(k.dtype)).unbind(-1)
    mass = share.log() - share_of_known.log() + known
    return precision.divide(out[..., :E], out[..., E : E + 1]), mass


class _WithMass(torch.autograd.Function):
    """`fused.attend` at scale 1 with a derivative of the logs of its denominators too.

    Those of the scores are P * (dP - (o . do) + dmass). The kernel's backward knows all but the
    last term, which one more channel of o brings in; v is zero there, so that dP stays as it is.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fused.attend(q, k, v, None, scale=1.0)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]
    ) -> None:
        ctx.save_for_backward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, of_mass: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, mass = ctx.saved_tensors
        if torch.is_grad_enabled():
            return derivatives.through(_with_mass, (q, k, v), (grad, of_mass))
        grad, out = grad.clone(), out.clone()
        grad[..., -1], out[..., -1] = 1, -of_mass
        return fused.attend_backward(grad, q, k, v, out, mass, None, scale=1.0)


def _with_mass(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same by single operations."""
    scores = q @ k.mT
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _read(w: Tensor, q: Tensor, means: Tensor, masses: Tensor) -> Tensor:
    """Means of `means` (B, H, M, E) under softmax_f(q . w_f + masses_f): (B, H, L, E).

    w (M, D), q (B, H, L, D), masses (B, H, M).
    """
    bias = masses - masses.detach().amax(-1, keepdim=True)
    keys = w.expand(*masses.shape, -1)
    if not torch.is_grad_enabled() and fused.has(q, means):
        # As a mask, which needs no wider rows, but may have no gradient. The kernel would make a
        # row of it for every query if its numbers were not side by side.
        bias = bias.contiguous()[:, :, None]
        return fused.attend(q, keys, means, bias, scale=1.0)[0]
    D, E = q.shape[-1], means.shape[-1]
    width = softmax.fused_width(max(D + 1, E))
    queries = F.pad(q, (0, width - D))
    queries[..., D] = 1
    keys = F.pad(keys, (0, width - D))
    keys[..., D] = bias
    values = F.pad(means, (0, width - E))
    return F.scaled_dot_product_attention(queries, keys, values, scale=1.0)[..., :E]


def _causal(w: Tensor, q: Tensor, k: Tensor, bias: Tensor, v: Tensor, *, offset: int) -> Tensor:
    """Attend to keys up to i + offset."""
    length = q.shape[-2]
    carried = _gather_cached(w, k, bias, v, offset)
    most = CHUNKS * kernels.CHUNK if streams(q) else length
    outs = []
    for part in spans(length, q, most=most):
        now = slice(part.start + offset, part.stop + offset)
        keys, values = k[..., now, :], v[..., now, :]
        out, carried = _causal_part(w, q[..., part, :], keys, bias[..., now], values, carried)
        outs.append(out)
    return torch.cat(outs, -2)


def _causal_part(
    w: Tensor, q: Tensor, k: Tensor, bias: Tensor, v: Tensor, carried: tuple[Tensor, Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Attend to what is carried, by means and masses, and to keys up to i; what to carry on.

    Chunk by chunk a query weighs what the directions gathered before its chunk against the keys
    within it; no key has a say in the scale of what came before it.
    """
    length, heads = q.shape[-2], q.shape[:2]
    # From here on chunks stand where there were heads: (B * H, C, W, D).
    q = kernels.chunks(q, length).flatten(0, 1)
    k, v = (kernels.chunks(x, length).flatten(0, 1) for x in (k, v))
    bias = kernels.chunks(bias[..., None], length, fill=_nothing(k.dtype)).flatten(0, 1)

    mean, mass = (x.flatten(0, 1) for x in carried)
    means, masses, mean, mass = _accumulate(mean, mass, *_gather(w, k, bias.squeeze(-1), v))
    past, past_mass = _gather(q, w.expand(*masses.shape, -1), masses, means)

    present = _log_kernel(q @ w.mT, k @ w.mT + bias)
    future = ~masks.causal(q.shape[-2], q.shape[-2], 0, q.device)
    present = present.masked_fill_(future, torch.finfo(q.dtype).min)
    shares = torch.cat([past_mass[..., None], present], -1).softmax(-1)
    out = torch.addcmul(shares[..., 1:] @ v, shares[..., :1], past)
    out, mean, mass = (torch.unflatten(x, 0, heads) for x in (out, mean, mass))
    return kernels.joined(out, length), (mean, mass)


def _gather_cached(
    w: Tensor, k: Tensor, bias: Tensor, v: Tensor, offset: int
) -> tuple[Tensor, Tensor]:
    """`_gather` over the first `offset` keys, of which there may be none."""
    if offset:
        return _gather(w, k[..., :offset, :], bias[..., :offset], v[..., :offset, :])
    shape = (*k.shape[:2], w.shape[0])
    return v.new_zeros(*shape, v.shape[-1]), v.new_full(shape, _nothing(v.dtype))


def _accumulate(
    mean: Tensor, mass: Tensor, means: Tensor, masses: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge (mean, mass) with those of one chunk after another.

    mean (G, M, E), mass (G, M), means (G, C, M, E), masses (G, C, M). What lies before each chunk,
    of the shapes of the latter, and after the last, of those of the former.
    """
    before = []
    for own, own_mass in zip(means.unbind(1), masses.unbind(1), strict=True):
        before.append((mean, mass))
        mean = torch.lerp(mean, own, (own_mass - mass).sigmoid()[..., None])
        # The second derivative of logaddexp is NaN where one of the two is no mass.
        mass = torch.stack([mass, own_mass]).logsumexp(0)
    means, masses = (torch.stack(x, 1) for x in zip(*before, strict=True))
    return means, masses, mean, mass


def _log_kernel(q_log: Tensor, k_log: Tensor) -> Tensor:
    """log sum_f exp(q_log_if + k_log_jf): (..., L, M), (..., S, M) -> (..., L, S)."""
    q_top, k_top = (x.detach().amax(-1, keepdim=True) for x in (q_log, k_log))
    inner = (q_log - q_top).exp_() @ (k_log - k_top).exp_().mT
    return inner.clamp_min(precision.negligible(inner.dtype)).log().add_(q_top).add_(k_top.mT)
