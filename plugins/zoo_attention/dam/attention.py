"""DAM, the differentiable attention mask of SparseBERT: softmax attention under a learned mask.

    o_i = sum_j M_ij p_ij v_j / sum_j M_ij p_ij,   p = softmax(scale * q k^T)
    training: M_ij = 1 where keep_ij + g_1 >= drop_ij + g_2, g Gumbel noise, else 0; its gradient is
              that of softmax((logits + g) / temperature) (straight-through)
    eval:     M_ij = 1 where keep_ij >= drop_ij
    loss:     penalty * mean_ij sigmoid(keep_ij - drop_ij)

Toeplitz masks, the paper's structured ones, have one decision for each |i - j|, free masks one for
each (i, j); every head has its own.

Shi, Gao, Ren, Xu, Liang, Li, Kwok, "SparseBERT: Rethinking the Importance Analysis in
Self-attention", 2021, arXiv:2102.12871.
Deviations: M multiplies the weights; the authors add -10000 * (1 - M) to the scores, whose
straight-through gradients are 10000 times too large. The loss is the expected L1 norm of the mask
over its size, not the sampled norm: the same mean with no noise. Noise is drawn in training only.
Layers that share a mask draw samples of their own, and each adds its loss. A query that the mask
leaves without a key sees itself. i and j are ranks among the sample's real tokens.
Exact when: keep >= drop throughout, in eval mode; masks start so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.errors import check_length
from zoo_core.nn import distances, masks, scores, softmax
from zoo_core.nn.auxiliary import AuxiliaryLoss
from zoo_core.nn.precision import divide, sum_dtype

if TYPE_CHECKING:
    from zoo_attention.dam import DamOptions


class DamAttention(nn.Module):
    """Softmax attention under a learned mask over at most `site.max_len` keys.

    logits: (H, max_len, 2), keep and drop for each distance, or (H, max_len, max_len, 2) for each
    pair of ranks.
    """

    def __init__(self, site: Site, options: DamOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.max_len = site.max_len
        self.toeplitz = options.structure == "toeplitz"
        self.temperature = options.temperature
        self.penalty = options.penalty
        shared = options.share == "layers"
        self.logits = logits_of_all_layers(site, options) if shared else fresh_logits(site, options)
        self.auxiliary = AuxiliaryLoss("dam", site)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        The queries are those of the last L of the S tokens. Raises UnsupportedCall where S exceeds
        the length that the mask was made for.
        """
        length = k.shape[-2]
        check_length("dam", length, self.max_len)
        if not self.training:
            self.auxiliary.keep(None)
            if self.toeplitz and distances.fits(ctx, q.shape[-2], length):
                return self._attend_distances(q, k, v, ctx).to(v.dtype)
            return softmax.attend(q, k, v, self._frozen(q, k, ctx), scale=self.scale).to(v.dtype)
        self.auxiliary.keep(self.penalty * self._kept())
        with torch.autocast(q.device.type, enabled=False):
            weights = F.dropout(self._sampled(q, k, ctx), self.dropout)
            return weights.to(v.dtype) @ masks.hide(v, ctx.key_padding)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S) of eval mode."""
        return softmax.weights(q, k, self._frozen(q, k, ctx), scale=self.scale)

    def auxiliary_loss(self) -> Tensor:
        """The expected part of the mask that is kept, times `penalty`; 0 in eval mode."""
        return self.auxiliary.last()

    def _attend_distances(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Attend under the likelier decisions, one for each distance."""
        queries, keys = q.shape[-2], k.shape[-2]
        keep, drop = self.logits.detach()[:, :keys].unbind(-1)
        open_ = keep >= drop
        kept = open_[:, distances.between(keys, k.device).abs()]
        terms = torch.zeros_like(kept, dtype=q.dtype).masked_fill(~kept, -torch.inf)
        out = distances.attend(q, k, v, terms, ctx, scale=self.scale)

        # A query that is left without a key sees itself: all distances up to its farthest key's are
        # closed.
        count = masks.count(ctx.key_padding, k)[:, None]
        rank = masks.positions(ctx.key_padding, k).clamp_min(0)
        farthest = rank if ctx.causal else rank.maximum(count - 1 - rank)
        some = open_.to(torch.uint8).cummax(-1).values[:, farthest[:, -queries:]]
        own = masks.hide(v, ctx.key_padding)[:, :, -queries:]
        return torch.where(some.bool().transpose(0, 1)[..., None], out, own)

    def _frozen(self, q: Tensor, k: Tensor, ctx: Context) -> Context:
        """The call with the likelier decisions as its bias."""
        keep, drop = self.logits.detach().unbind(-1)
        open_ = self._between((keep >= drop).to(q.dtype), q, k, ctx) > 0
        bias = torch.zeros((), dtype=q.dtype, device=q.device) if ctx.bias is None else ctx.bias
        return replace(ctx, bias=bias.masked_fill(~open_, -torch.inf))

    def _sampled(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S) under one draw of the mask, in at least fp32."""
        draw = F.gumbel_softmax(self._widened(), self.temperature, hard=True)[..., 0]
        mask = self._between(draw, q, k, ctx)

        dots = scores.dot_product(q, k, ctx.key_padding, scale=self.scale)
        dots = dots if ctx.bias is None else dots + ctx.bias
        low = torch.finfo(dots.dtype).min
        # Powers are relative to the largest score that is kept: whatever is dropped, the sum is
        # at least 1. A dropped key above it counts as if on a par, which bounds its gradient.
        peak = dots.detach().masked_fill(mask < 0.5, low).amax(-1, keepdim=True).clamp_min(low)
        weights = (dots - peak).clamp_max(0).exp() * mask
        return divide(weights, weights.sum(-1, keepdim=True))

    def _between(self, decisions: Tensor, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The mask (B or 1, H, L, S) by decisions (H, ...), 0 also where ctx hides the key.

        A query that is left without a key gets the one of its own position.
        """
        queries, keys = q.shape[-2], k.shape[-2]
        ranks = masks.positions(ctx.key_padding, k).clamp_min(0)
        i, j = ranks[:, -queries:, None], ranks[:, None]
        pair = (i - j).abs() if self.toeplitz else i * self.max_len + j
        # An embedding, for its derivative: that of indexing takes several times longer.
        mask = F.embedding(pair, decisions.flatten(1).mT).permute(0, 3, 1, 2)
        seen = masks.scores_mask(ctx, queries, keys, k.device)
        hidden = torch.zeros((), dtype=torch.bool, device=k.device) if seen is None else ~seen
        mask = mask.masked_fill(hidden, 0)
        token = torch.arange(keys, device=k.device)
        own = token[-queries:, None] == token
        lonely = (mask < 0.5).all(-1, keepdim=True)
        return mask.masked_fill(lonely & own & ~hidden, 1)

    def _kept(self) -> Tensor:
        """The expected part of a mask of max_len x max_len that is kept, over all heads."""
        keep, drop = self._widened().unbind(-1)
        kept = (keep - drop).sigmoid()
        if not self.toeplitz:
            return kept.mean()
        pairs = 2 * torch.arange(self.max_len, 0, -1, dtype=kept.dtype, device=kept.device)
        pairs[0] = self.max_len
        return (kept * pairs).sum(-1).mean() / self.max_len**2

    def _widened(self) -> Tensor:
        """The logits in at least fp32."""
        return self.logits.to(sum_dtype(self.logits))


def fresh_logits(site: Site, options: DamOptions) -> nn.Parameter:
    """Logits that keep everything: (H, max_len, 2), or (H, max_len, max_len, 2) if free."""
    positions = (site.max_len,) if options.structure == "toeplitz" else (site.max_len,) * 2
    logits = torch.zeros(site.heads, *positions, 2)
    logits[..., 0] = options.start
    return nn.Parameter(logits)


def logits_of_all_layers(site: Site, options: DamOptions) -> nn.Parameter:
    """The one mask of a patch: the first layer makes it, the others register the same Parameter.

    Layers of another structure, length or number of heads share among themselves.
    """
    name = f"{options.structure} mask, {site.heads} x {site.max_len}"
    if name not in site.shared:
        site.shared[name] = fresh_logits(site, options)
    shared: nn.Parameter = site.shared[name]
    return shared
