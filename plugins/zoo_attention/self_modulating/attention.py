"""Softmax attention whose weights are multiplied by intensities that read the tokens' times.

    o_i = sum_j a_ij lambda_ij v_j,   a_ij = softmax_j(scale * q_i . k_j)
    lambda_ij = s log(1 + exp(x_ij / s)),   x_ij = (k_j M) . sigmoid([h_i, dt_i] W + b)
    h_i = sum_j a_ij k_j,   dt_i = t_i - t_(i-1), 0 for the first token

lambda_ij is the intensity, in the state that token i leaves, of another token like j. Rows of
a * lambda do not sum to 1. The auxiliary loss is the negative log-likelihood of each token given
the state before it, with the trapezoid of the paper for the integral:

    loss = -likelihood_weight * mean_i (log lambda_(i-1),i - dt_i / 2 * mean_j lambda_(i-1),j)

Chen, Geng, Yang, Yan, Xue, Yu, Yang, "Learning Self-Modulating Attention in Continuous Time Space
with Applications to Sequential Recommendation", 2021, arXiv:2204.06517.
Deviations: the paper's tokens are items of a fixed number of kinds, and its x_ij takes a row of M
for each kind; here the row is a projection of the key, and the sum over kinds the mean over the
sample's tokens. h averages the keys instead of a fourth projection, so that the output is linear
in v. M starts at zero and s where lambda = 1. i - 1 is the real token before i. Times are used
as they are given, in one unit; a call without times takes tokens to be one unit apart.
There is no causal form: with a cache the time of the token before the first query is lost.
Exact when: M = 0 and s = 1 / log 2, as at the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import masks, precision, scores, softmax
from zoo_core.nn.auxiliary import AuxiliaryLoss
from zoo_core.nn.parts import attend_in_parts, rows_of_scores

if TYPE_CHECKING:
    from zoo_attention.self_modulating import SelfModulatingOptions


class SelfModulatingAttention(nn.Module):
    """Self-modulating attention; all heads share the parameters but s.

    state: W, (D + 1, D). state_bias: b, (D,). marks: M, (D, D). log_scale: log(s log 2), (H,).
    """

    def __init__(self, site: Site, options: SelfModulatingOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.likelihood_weight = options.likelihood_weight
        width = site.head_dim
        self.state = nn.Parameter(torch.randn(width + 1, width) * (width + 1) ** -0.5)
        self.state_bias = nn.Parameter(torch.zeros(width))
        self.marks = nn.Parameter(torch.zeros(width, width))
        self.log_scale = nn.Parameter(torch.zeros(site.heads))
        self.auxiliary = AuxiliaryLoss("self_modulating", site)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E).

        Raises UnsupportedCall for ctx.times of a shape other than (B, N).
        """
        steps = intervals(ctx, q)
        q, k, v = (masks.hide(x, ctx.key_padding) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            if self.training:
                return self._trained(q, k, v, steps, ctx)
            self.auxiliary.keep(None)

            def attend(heads: slice, span: slice) -> Tensor:
                own = steps.gap[:, span]
                weights, intensity = self._modulated(
                    q[:, heads, span], k[:, heads], heads, own, ctx
                )
                return scores.mix(weights * intensity, v[:, heads], None)

            return attend_in_parts(attend, q, v, rows=rows_of_scores(k.shape[-2]))

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights times the intensities, (B, H, N, N); rows do not sum to 1."""
        steps = intervals(ctx, q)
        q, k = masks.hide(q, ctx.key_padding), masks.hide(k, ctx.key_padding)
        weights, intensity = self._modulated(q, k, slice(None), steps.gap, ctx)
        return weights * intensity

    def auxiliary_loss(self) -> Tensor:
        """The weighted likelihood loss of the last forward, a scalar; 0 after one in eval mode."""
        return self.auxiliary.last()

    def _trained(self, q: Tensor, k: Tensor, v: Tensor, steps: Intervals, ctx: Context) -> Tensor:
        """The output, with the loss of these intensities kept; tokens are zero at padding."""
        weights, intensity = self._modulated(q, k, slice(None), steps.gap, ctx)
        likelihood = log_likelihood(intensity, steps, ctx.key_padding)
        self.auxiliary.keep(-self.likelihood_weight * likelihood)
        return scores.mix(weights * intensity, v, None, dropout=self.dropout)

    def _modulated(
        self, q: Tensor, k: Tensor, heads: slice, gap: Tensor, ctx: Context
    ) -> tuple[Tensor, Tensor]:
        """a and lambda, (B, H, L, N) each, in at least fp32, for queries of some heads.

        q, k: of these heads, zero at padding. gap: (B, L), the times since the tokens before.
        """
        dots = scores.dot_product(q, k, None, scale=self.scale)
        weights = softmax.masked_softmax(dots, scores.mask_of(dots, ctx))
        keys = k.to(dots.dtype)
        W, b, M = (x.to(dots.dtype) for x in (self.state, self.state_bias, self.marks))
        # [h, dt] W without the concatenation.
        gaps = gap.to(dots.dtype)[:, None, :, None]
        state = ((weights @ keys) @ W[:-1] + gaps * W[-1] + b).sigmoid()
        s = (self.log_scale[heads].to(dots.dtype).exp() / math.log(2))[:, None, None]
        x = (state / s) @ (keys @ M).mT
        return weights, s * torch.logaddexp(x, x.new_zeros(()))


@dataclass(frozen=True, eq=False)
class Intervals:
    """The steps from one real token to the next.

    gap: (B, N), the time since the token before, 0 for the first token and for padding.
    before: (B, N) long, which token that is; without meaning where there is none.
    follows: bool (B, N), whether there is one; False for padding.
    """

    gap: Tensor
    before: Tensor
    follows: Tensor


def intervals(ctx: Context, like: Tensor) -> Intervals:
    """The steps of a call, for tokens `like` (B, H, N, D)."""
    shape = (like.shape[0], like.shape[-2])
    index = torch.arange(shape[1], device=like.device).expand(shape)
    real = index >= 0 if ctx.key_padding is None else ctx.key_padding
    latest = index.masked_fill(~real, -1).cummax(-1).values
    before = F.pad(latest, (1, -1), value=-1)
    follows = real & (before >= 0)
    before = before.clamp(min=0)
    if ctx.times is None:
        return Intervals(follows.to(precision.sum_dtype(like)), before, follows)
    if ctx.times.shape != shape:
        raise UnsupportedCall(
            f"self_modulating got times of shape {tuple(ctx.times.shape)}; pass one time for each "
            f"token, {shape}, those of padding included"
        )
    times = ctx.times
    if times.is_floating_point():
        times = times.to(precision.sum_dtype(times))
    gap = (times - times.gather(-1, before)).where(follows, 0)
    return Intervals(gap, before, follows)


def log_likelihood(intensity: Tensor, steps: Intervals, key_padding: Tensor | None) -> Tensor:
    """The mean log-likelihood of the tokens that follow another, a scalar, 0 if there is none.

    intensity: lambda, (B, H, N, N).
    """
    before = steps.before[:, None].expand(intensity.shape[:-1])
    own = intensity.gather(-2, before[:, :, None]).squeeze(-2)
    real = intensity.new_ones(intensity.shape[-1]) if key_padding is None else key_padding
    share = real.to(intensity.dtype)
    share = share / share.sum(-1, keepdim=True).clamp(min=1)
    overall = (intensity @ share.expand(len(intensity), -1)[:, None, :, None]).squeeze(-1)
    waited = steps.gap.to(intensity.dtype)[:, None] / 2 * overall.gather(-1, before)
    found = own.clamp_min(precision.negligible(own.dtype)).log() - waited
    found = found.where(steps.follows[:, None], 0)
    return found.sum() / (steps.follows.sum() * found.shape[1]).clamp(min=1)
