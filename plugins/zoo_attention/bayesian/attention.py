"""Softmax attention with random weights in training, and their divergence from a prior as a loss.

    p_ij = softmax_j(scale * q_i . k_j);  in eval mode o_i = sum_j p_ij v_j
    s_ij ~ Weibull(k, lambda_ij = p_ij / Gamma(1 + 1/k)), whose mean is p_ij
    o_i = sum_j s_ij v_j / sum_j s_ij = softmax_j(log p_ij + log(-log(1 - u_ij)) / k) v, u ~ U(0, 1)
    loss = kl_weight * mean_ij KL(Weibull(k, lambda_ij) || Gamma(alpha_ij, beta))

with a shape k for all weights. alpha is a constant; or learned, one for each head; or contextual,
beta * softmax_j(network(k_j)); or beta * p_ij of the previous layer, so that layers form a chain.

Zhang, Fan, Chen, Zhou, "Bayesian Attention Belief Networks", 2021, arXiv:2106.05251, with the
distributions of Fan, Zhang, Chen, Zhou, "Bayesian Attention Modules", 2020, arXiv:2010.10604.
Deviations: the chain of layers runs from the first to the last within one forward and has no
networks of its own, where the belief networks draw the last layer first; its first layer, and
one whose predecessor was skipped or has another shape, takes the constant prior. The divergence
is a mean, so that its weight does not depend on lengths. Its annealing belongs to the training
loop, which knows the step: add ramp(step) * zoo.auxiliary_loss(model), with a ramp from 0 to 1.
Exact when: in eval mode, always; in training as k grows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import masks, precision, scores, softmax
from zoo_core.nn.auxiliary import AuxiliaryLoss

if TYPE_CHECKING:
    from zoo_attention.bayesian import BayesianOptions

EULER = 0.5772156649015329


class BayesianAttention(nn.Module):
    """Attention with Weibull weights. Parameters: those of a learned or contextual prior."""

    def __init__(self, site: Site, options: BayesianOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.cross = site.kind == "cross"
        self.path, self.previous = site.path, site.previous
        self.shape = options.shape
        self.beta = options.beta
        self.kl_weight = options.kl_weight
        self.chained = options.prior == "layers"
        self.prior = prior(site, options)
        self.auxiliary = AuxiliaryLoss("bayesian", site)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E)."""
        if not self.training:
            self.auxiliary.keep(None)
            return softmax.attend(q, k, v, ctx, scale=self.scale)
        with torch.autocast(q.device.type, enabled=False):
            weights = self._sample(q, k, ctx)
        return scores.mix(weights, v, ctx.key_padding, dropout=self.dropout)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The mean weights (B, H, L, S), which are those of eval mode."""
        return softmax.weights(q, k, ctx, scale=self.scale)

    def auxiliary_loss(self) -> Tensor:
        """The weighted divergence of the last forward, a scalar; 0 after one in eval mode."""
        return self.auxiliary.last()

    def _sample(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """Draw weights (B, H, L, S) that sum to 1, and keep their divergence from the prior."""
        # Padded queries would reach the parameters of the prior through the divergence.
        rows = None if self.cross else scores.real_queries(ctx.key_padding, q.shape[-2])
        dots = scores.dot_product(masks.hide(q, rows), k, ctx.key_padding, scale=self.scale)
        mask = scores.mask_of(dots, ctx)
        log_p = dots if mask is None else dots.masked_fill(~mask, torch.finfo(dots.dtype).min)
        log_p = log_p.log_softmax(-1)
        alpha = self._alpha(log_p, mask, k, ctx)
        divergence = kl(log_p, alpha, self.beta, shape=self.shape)
        self.auxiliary.keep(self.kl_weight * mean(divergence, mask, rows))
        uniform = torch.rand_like(dots).clamp_min(torch.finfo(dots.dtype).tiny)
        noise = (-(-uniform).log1p()).log() / self.shape
        return softmax.masked_softmax(dots + noise, mask)

    def _alpha(self, log_p: Tensor, mask: Tensor | None, k: Tensor, ctx: Context) -> Tensor:
        """The prior's shape, broadcastable to (B, H, L, S); a chain hands the weights on."""
        if not self.chained or ctx.carry is None:
            alpha: Tensor = self.prior(masks.hide(k, ctx.key_padding).to(log_p.dtype), ctx)
            return alpha
        weights = log_p.exp() if mask is None else log_p.exp().masked_fill(~mask, 0)
        ctx.carry[self.path] = weights
        before = ctx.carry.get(self.previous)
        if before is None or before.shape != weights.shape:
            return weights.new_full((), self.prior.alpha)
        return self.beta * before


def kl(log_p: Tensor, alpha: Tensor, beta: float, *, shape: float) -> Tensor:
    """KL(Weibull(shape, p / Gamma(1 + 1/shape)) || Gamma(alpha, beta)), element by element."""
    alpha = alpha.clamp_min(precision.negligible(log_p.dtype))
    # The logarithm of a weight that underflows is no more than this below 0, and is not trained.
    log_p = log_p.clamp_min(math.log(precision.negligible(log_p.dtype)))
    log_scale = log_p - math.lgamma(1 + 1 / shape)
    return (
        alpha * (EULER / shape - log_scale - math.log(beta))
        + alpha.lgamma()
        + beta * log_p.exp()
        + (math.log(shape) - EULER - 1)
    )


def mean(x: Tensor, mask: Tensor | None, rows: Tensor | None) -> Tensor:
    """The mean of x (B, H, L, S) over what mask, broadcastable to it, and rows (B, L) leave."""
    if rows is not None:
        real = rows[:, None, :, None]
        mask = real if mask is None else mask & real
    if mask is None:
        return x.mean()
    count = mask.expand_as(x).sum().clamp(min=1)
    return x.masked_fill(~mask, 0).sum() / count


def prior(site: Site, options: BayesianOptions) -> nn.Module:
    """The module that gives alpha: (keys (B, H, S, D), ctx) -> broadcastable to (B, H, L, S)."""
    if options.prior == "contextual":
        return ContextualPrior(site, options.beta)
    if options.prior == "learned":
        return LearnedPrior(site, options.alpha)
    return ConstantPrior(options.alpha)


class ConstantPrior(nn.Module):
    """One alpha for all weights."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, k: Tensor, ctx: Context) -> Tensor:
        """A scalar."""
        return k.new_full((), self.alpha)


class LearnedPrior(nn.Module):
    """A positive alpha for each head, by its logarithm (H,)."""

    def __init__(self, site: Site, alpha: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.full((site.heads,), math.log(alpha)))

    def forward(self, k: Tensor, ctx: Context) -> Tensor:
        """(H, 1, 1)."""
        return self.log_alpha.to(k.dtype).exp()[:, None, None]


class ContextualPrior(nn.Module):
    """beta times a softmax over the keys, by a network of two layers that all heads share.

    Its last layer starts at zero, where all keys are alike.
    """

    def __init__(self, site: Site, beta: float) -> None:
        super().__init__()
        width = site.head_dim
        self.beta = beta
        self.hidden = nn.Parameter(torch.randn(width, width) * width**-0.5)
        self.out = nn.Parameter(torch.zeros(width))

    def forward(self, k: Tensor, ctx: Context) -> Tensor:
        """(B, H, 1, S), from keys that are zero at padding."""
        logits = (k @ self.hidden.to(k.dtype)).relu() @ self.out.to(k.dtype)
        real = None if ctx.key_padding is None else ctx.key_padding[:, None]
        return self.beta * softmax.masked_softmax(logits, real)[:, :, None]
