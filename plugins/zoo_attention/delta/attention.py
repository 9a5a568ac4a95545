"""Delta rule: attention as a matrix that each token corrects, then reads.

    W_i = W_{i-1} + b_i (v_i - W_{i-1} k'_i) k'_i^T,   o_i = W_i q'_i
    x' = phi(x) / sum phi(x),   b_i = sigmoid(w . x_i) per head,   phi = DPFP

Schlag, Irie, Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", 2021,
arXiv:2102.11174.
Deviations: encoders, which the paper does not treat, take the mean of a pass from the left and one
from the right; both write with the same strengths. A decoder reads b from the keys of all heads in
place of the layer's input: that is what its cache keeps, and the same family of functions wherever
the key projection has an inverse. The host's scale is not applied (phi(c x) = c^2 phi(x), which
the sum normalisation cancels), nor is its attention dropout, since no weights exist to drop.
Exact when: never; the output is no average of values.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.errors import OptionError, UnsupportedCall
from zoo_core.nn import feature_maps, masks
from zoo_core.nn.fast_weights import delta_rule, delta_rule_both_ways, delta_rule_in_parts
from zoo_core.nn.fast_weights_native import delta_rule_of_dpfp
from zoo_core.nn.parts import streams
from zoo_core.nn.precision import divide, sum_dtype

if TYPE_CHECKING:
    from zoo_attention.delta import DeltaOptions


class DeltaAttention(nn.Module):
    """The delta rule with DPFP features.

    strength: w and its bias for each head, from `dim` (hidden) or H * D (keys) to H.
    """

    def __init__(self, site: Site, options: DeltaOptions) -> None:
        super().__init__()
        if site.causal and options.strength_from == "hidden":
            raise OptionError(
                "delta: strength_from='hidden' cannot serve a decoder, whose cache keeps keys but "
                "no layer inputs; use strength_from='keys' (or 'auto')"
            )
        self.nu = options.nu
        self.reads_keys = site.causal or options.strength_from == "keys"
        inputs = site.heads * site.head_dim if self.reads_keys else site.dim
        self.strength = nn.Linear(inputs, site.heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        The queries are those of the last L of the S tokens. A query that sees no real key gets
        zeros: the matrix starts at zero, and padding never touches it.
        """
        strengths = self._strengths(k, ctx)
        offset = ctx.query_offset if ctx.causal else None
        attend = partial(self._attend, real=ctx.key_padding, offset=offset)
        with torch.autocast(q.device.type, enabled=False):
            tokens = (q, k, v, strengths.to(sum_dtype(q, k, v)).sigmoid())
            out = delta_rule_of_dpfp(attend, *tokens, ctx.key_padding, nu=self.nu, offset=offset)
            return attend(*tokens) if out is None else out

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        strengths: Tensor,
        *,
        real: Tensor | None,
        offset: int | None,
    ) -> Tensor:
        """By plain torch, or a GPU's kernel; both ways if offset is None."""
        k, v, strengths = (masks.hide(x, real) for x in (k, v, strengths))
        if streams(q):
            return delta_rule_in_parts(self._features, q, k, v, strengths, offset=offset)
        wide = strengths.dtype
        queries, keys = (self._features(x.to(wide)) for x in (q, k))
        values = v.to(wide)
        if offset is None:
            out = delta_rule_both_ways(queries, keys, values, strengths, like=v)
        else:
            out = one_way(queries, keys, values, strengths, offset=offset, like=v)
        return out.to(v.dtype)

    def _strengths(self, k: Tensor, ctx: Context) -> Tensor:
        """Logits of b for every key, (B, H, S, 1).

        Raises UnsupportedCall where they are to come from a layer input that does not match.
        """
        if self.reads_keys:
            x = masks.hide(k, ctx.key_padding).transpose(1, 2).flatten(2)
        elif ctx.hidden is None or ctx.hidden.shape[1] != k.shape[-2]:
            raise UnsupportedCall(
                "delta reads its write strengths from the layer's input, which this call does not "
                "bring for every key (a cache, or no hidden states); use strength_from='keys'"
            )
        else:
            x = masks.hide(ctx.hidden[:, None], ctx.key_padding)[:, 0]
        logits: Tensor = self.strength(x.to(self.strength.weight.dtype))
        return logits.mT[..., None]

    def _features(self, x: Tensor) -> Tensor:
        """DPFP features that sum to 1, or are all 0: (..., D) -> (..., 2 D nu)."""
        features = feature_maps.dpfp(x, self.nu)
        return divide(features, features.sum(-1, keepdim=True))


def one_way(
    queries: Tensor, keys: Tensor, values: Tensor, strengths: Tensor, *, offset: int, like: Tensor
) -> Tensor:
    """The delta rule from the left, read by queries L that start after `offset` keys.

    like: as in `delta_rule`.
    """
    end = offset + queries.shape[-2]
    queries = F.pad(queries, (0, 0, offset, 0))
    keys, values, strengths = (x[..., :end, :] for x in (keys, values, strengths))
    return delta_rule(queries, keys, values, strengths, like=like)[..., offset:, :]
