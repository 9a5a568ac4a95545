"""Softmax attention reconstructed from M landmark queries and keys, the Nyström way.

    o = softmax(q k~^T) Z softmax(q~ k^T) v + conv(v),   Z ~ softmax(q~ k~^T)^+

with scores scaled as usual, q~ and k~ the means of M segments of the tokens, and Z from a few
iterations (Razavi et al.) on A = softmax(q~ k~^T), starting at Z = A^T / |A|_1:

    Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4

Xiong, Zeng, Chakraborty, Tan, Fung, Li, Singh, "Nyströmformer: A Nyström-Based Algorithm for
Approximating Self-Attention", 2021, arXiv:2102.03902.
Deviations: segments split a sample's real tokens, so that any length and any padding will do;
segments left empty in a short sample take part in none of the three softmaxes; |A|_1 is each
matrix's own, not the maximum over the batch; the optional convolution starts at zero and neither
reads nor writes padding and prefix tokens; dropout acts on the first softmax.
Exact when: every token is its own landmark and the iterations converge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn import landmarks, masks, softmax
from zoo_core.nn.parts import samples, streams

if TYPE_CHECKING:
    from zoo_attention.nystromformer import NystromformerOptions


class NystromformerAttention(nn.Module):
    """Nyströmformer's attention; conv, its only parameter, is (H, width) or None."""

    conv: nn.Parameter | None

    def __init__(self, site: Site, options: NystromformerOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.landmarks = options.landmarks
        self.iterations = options.iterations
        # Zero leaves pretrained weights as they are, and still receives a gradient.
        self.conv = nn.Parameter(torch.zeros(site.heads, options.conv)) if options.conv else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Attend: q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E)."""
        segments = landmarks.split(ctx.key_padding, self.landmarks, k)
        few_q, few_k = segments.mean(q), segments.mean(k)
        real, seen = Context(key_padding=ctx.key_padding), Context(key_padding=segments.seen)
        pooled = softmax.attend_compressed(few_q.to(q.dtype), k, v, real, scale=self.scale)
        # A few samples at a time, so that none of the many products leaves the cache.
        parts = samples(few_q) if streams(q) else [slice(None)]
        unmixed = [self._unmix(few_q, few_k, pooled, segments.seen, few) for few in parts]
        pooled = torch.cat(unmixed).to(v.dtype)
        dropout = self.dropout if self.training else 0.0
        few_k = few_k.to(k.dtype)
        out = softmax.attend_compressed(
            q, few_k, pooled, seen, scale=self.scale, dropout=dropout, finite=True
        )
        if self.conv is not None:
            out = out + convolve(v, self.conv, ctx)
        return out.to(v.dtype)

    def _unmix(
        self, few_q: Tensor, few_k: Tensor, pooled: Tensor, seen: Tensor | None, few: slice
    ) -> Tensor:
        """Z times what the landmarks of some samples gathered, in at least fp32.

        seen: (B, M), the landmarks that stand for any token; None = all.
        """
        real = None if seen is None else seen[few]
        # Inverting amplifies rounding: no half precision, also under autocast.
        with torch.autocast(few_q.device.type, enabled=False):
            own = Context(key_padding=real)
            kernel = softmax.weights(few_q[few], few_k[few], own, scale=self.scale)
            inverse = pseudo_inverse(masks.hide(kernel, real), self.iterations)
            return inverse @ pooled[few].to(inverse.dtype)


def pseudo_inverse(kernel: Tensor, iterations: int) -> Tensor:
    """Iterate towards the Moore-Penrose inverse of kernel (..., M, M).

    kernel: rows that sum to one, or to zero together with their column (an empty landmark);
    such rows and columns stay zero. Each matrix has its own start, so none depends on another.
    """
    a = kernel.flatten(0, -3)
    # |A|_1 is at least 1 where any row sums to one; the clamp is for matrices without any.
    z = a.mT / a.sum(-2, keepdim=True).amax(-1, keepdim=True).clamp(min=1)
    for _ in range(iterations):
        az = a @ z
        inner = torch.baddbmm(az, az, az, beta=7, alpha=-1)
        outer = torch.baddbmm(az, az, inner, beta=15, alpha=-1)
        z = torch.baddbmm(z, z, outer, beta=13 / 4, alpha=-1 / 4)
    return z.view_as(kernel)


def convolve(v: Tensor, weight: Tensor, ctx: Context) -> Tensor:
    """Convolve v (B, H, N, E) along the real tokens behind the prefix, by weight (H, width)."""
    alignment = masks.align(ctx.key_padding)
    inside = (torch.arange(v.shape[-2], device=v.device) >= ctx.prefix)[None]
    x = masks.hide(alignment.front(v), inside)
    heads, width = weight.shape
    kernel = weight.to(v.dtype)[:, None, :, None]
    x = nn.functional.conv2d(x, kernel, padding=(width // 2, 0), groups=heads)
    return alignment.back(masks.hide(x, inside))
