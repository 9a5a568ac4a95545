"""Softmax attention over negative squared distances, and its Lipschitz form.

    o_i = sum_j P_ij v_j,   P_ij = softmax_j(-scale * |q_i - k_j|^2)

tied, for each head: q = k = x W and v = x A W_v with A = scale * W W^T. Then the whole layer
F(x) = concat_h(P x A W_v) W_o is Lipschitz; see `L2Attention.lipschitz_bound`. The contractive
form is F times contraction / bound, so that x + F(x) has an inverse; it is never causal, for the
bound counts all tokens, the later ones too.

Kim, Papamakarios, Mnih, "The Lipschitz Constant of Self-Attention", 2021, arXiv:2006.04710.
Deviations: W is the host's key projection, so that a decoder needs no cache but the one of keys;
the host's biases are kept: they move queries and keys alike, and the output by a constant; the
bound holds where the host hands on keys as it projected them (no rotation, no normalisation).
Exact when: never; it is another kernel. Untied it equals dot-product attention with doubled
queries and a bias of -scale |k_j|^2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import masks, precision, softmax

if TYPE_CHECKING:
    from zoo_attention.l2 import L2Options

Projections = Mapping[str, tuple[Tensor, Tensor | None]]


class L2Attention(nn.Module):
    """L2 attention; it has no parameters, its tied forms read the host's projections."""

    def __init__(self, site: Site, options: L2Options) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.heads = site.heads
        self.tied = options.form != "untied"
        self.contraction = options.contraction if options.form == "contractive" else None
        self.unused = frozenset({"query"} if self.tied else ())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        A tied form takes its queries from the last L keys and its values from all of them.
        """
        k = masks.hide(k, ctx.key_padding)
        dtype = v.dtype
        if self.tied:
            projections = _asked(ctx)
            q, v = k[..., k.shape[-2] - q.shape[-2] :, :], self._values(k, projections)
        dropout = self.dropout if self.training else 0.0
        out = attend(q, k, v, ctx, scale=self.scale, dropout=dropout)
        if self.contraction is not None:
            bound = self.lipschitz_bound(masks.count(ctx.key_padding, k), projections)
            # Of a layer that is zero the bound is zero too, and nothing has to be divided.
            factor = self.contraction / bound.where(bound > 0, self.contraction)
            out = out * factor[:, None, None, None].to(out.dtype)
        return out.to(dtype)

    def lipschitz_bound(
        self, count: Tensor | int, projections: Projections, *, norm: float = 2
    ) -> Tensor:
        """An upper bound on the Lipschitz constant of the tied layer, W_o included, of x (N, dim).

        count: N, or one for each sample (B,). norm: 2, or math.inf, of x flattened. Before the
        contraction and without dropout. As many numbers as counts, in at least fp32; 0 at N = 0.
        Raises UnsupportedCall for the untied form, which has no bound.
        """
        if not self.tied:
            raise UnsupportedCall(
                'l2 with form="untied" is not Lipschitz; build it with form="tied" or "contractive"'
            )
        key, value = (_by_head(projections, name, self.heads) for name in ("key", "value"))
        out = projections["out"][0]
        wide = precision.sum_dtype(key, value, out)
        key, value, out = key.to(wide), value.to(wide), out.to(wide)
        count = torch.as_tensor(count, device=key.device).to(wide)
        spread = 4 * inverse_phi(count - 1)
        with torch.autocast(key.device.type, enabled=False):
            if norm == 2:
                heads = _norm(key, 2) ** 4 * _norm(value, 2) ** 2
                weights = heads.sum().sqrt() * _norm(out, 2)
                return count.sqrt() * self.scale * (spread + 1) * weights
            # Rows of a Linear's weight are columns of W.
            own = _norm(key, torch.inf) * _norm(key.mT, torch.inf)
            weights = own.amax() * _norm(value, torch.inf).amax() * _norm(out, torch.inf)
            bound = (spread * key.shape[-2] ** 0.5 + 1) * self.scale * weights
            return bound * (count > 0)

    def _values(self, k: Tensor, projections: Projections) -> Tensor:
        """x A W_v + b_v, (B, H, S, E), from keys k = x W + b (B, H, S, D)."""
        key, value = (_by_head(projections, name, self.heads) for name in ("key", "value"))
        mixed = key @ value.mT * self.scale
        shift = _bias(projections, "value", value) - _bias(projections, "key", key) @ mixed
        return k @ mixed.to(k.dtype) + shift.to(k.dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, ctx: Context, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attention with weights softmax(-scale |q - k|^2), (B, H, L, E), by the fused kernel."""
    if not ctx.causal or ctx.key_padding is None or q.shape[-2] < k.shape[-2]:
        return _fused(q, k, v, ctx, scale=scale, dropout=dropout)
    # At the front, real tokens need no mask but the kernel's own causal one, which is not N x N.
    tokens = masks.align(ctx.key_padding)
    q, k, v = (tokens.front(x) for x in (q, k, v))
    out = _fused(q, k, v, Context(causal=True), scale=scale, dropout=dropout)
    return masks.hide(tokens.back(out), ctx.key_padding)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, ctx: Context, *, scale: float, dropout: float
) -> Tensor:
    """|q_i|^2 cancels in the softmax, so that scores 2 q . k - |k|^2 remain.

    -|k_j|^2 / 2 becomes two more columns of k, its value in k's dtype and what that rounds off,
    which meet columns of ones in q.
    """
    D, E = k.shape[-1], v.shape[-1]
    width = -(-max(D + 2, E) // 8) * 8  # fused kernels on GPUs take multiples of 8 only
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = q.to(dtype), masks.hide(k, ctx.key_padding).to(dtype), v.to(dtype)
        wide, most = precision.sum_dtype(k), torch.finfo(dtype).max
        half = (k.to(wide).square().sum(-1, keepdim=True) / -2).clamp(min=-most)
        coarse = half.to(dtype)
        keys = torch.cat([k, coarse, (half - coarse).to(dtype)], -1)
        queries = F.pad(q, (0, 2), value=1)
        queries, keys, values = (F.pad(x, (0, width - x.shape[-1])) for x in (queries, keys, v))
        out = softmax.attend(queries, keys, values, ctx, scale=2 * scale, dropout=dropout)
        return out[..., :E]


def inverse_phi(x: Tensor) -> Tensor:
    """The y >= 0 with y exp(y + 1) = x, for x >= 0: Lambert's W of x / e, by Halley's method."""
    z = (x / torch.e).clamp(min=0)
    y = z.log1p()
    for _ in range(5):
        power = y.exp()
        error = y * power - z
        y = y - error / (power * (y + 1) - (y + 2) * error / (2 * y + 2))
    return y


def _asked(ctx: Context) -> Projections:
    if ctx.projections is None:
        raise UnsupportedCall(
            "l2 in a tied form reads the host's projections, and this call brings none; call it "
            'through a patched model, or build it with form="untied"'
        )
    return ctx.projections


def _norm(matrix: Tensor, order: float) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(matrix, order)
    return norm


def _by_head(projections: Projections, name: str, heads: int) -> Tensor:
    """The weight of one projection, (H, width, dim)."""
    return projections[name][0].unflatten(0, (heads, -1))


def _bias(projections: Projections, name: str, weight: Tensor) -> Tensor:
    """The bias of one projection, (H, 1, width), 0 where it has none."""
    bias = projections[name][1]
    if bias is None:
        return weight.new_zeros(*weight.shape[:2])[:, None]
    return bias.view(weight.shape[:2])[:, None]
