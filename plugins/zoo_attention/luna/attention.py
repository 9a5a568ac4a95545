"""Nested linear attention: a packed sequence attends to the tokens, and they attend to it.

    A = softmax(scale * (P W) k^T),   o = softmax(scale * q (A k)^T) A v
    P_0 learned,   P_{l+1} = LayerNorm(P_l + A_l k_l)

Ma, Kong, Wang, Zhou, May, Ma, Zettlemoyer, "Luna: Linear Unified Nested Attention", 2021,
arXiv:2106.01540.
Deviations: the paper packs with one projection that is key and value in one; here they are the
host's two, and the packed sequence takes up the keys. What is packed needs no second projection,
since it would merge with the host's of the queries. W is the identity and P_0 is N(0, 1) at the
start, so that later layers, normalised, find what the first one does. The normalisation stands
where P is read, which is the same. No causal form; dropout acts on the second softmax.
Exact when: never in general.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import latents, scores, softmax

if TYPE_CHECKING:
    from zoo_attention.luna import LunaOptions


class LunaAttention(nn.Module):
    """One layer's two attentions; P, (B, M, H * D), comes from the previous layer.

    start: P_0, (M, H * D), in the first layer only. norm: LayerNorm, in all others.
    pack: W, from the width of P to the same.
    """

    start: nn.Parameter | None
    norm: nn.LayerNorm | None

    def __init__(self, site: Site, options: LunaOptions) -> None:
        super().__init__()
        self.path = site.path
        self.previous = site.previous
        self.scale = site.scale
        self.dropout = site.dropout
        self.heads = site.heads
        width = site.heads * site.head_dim
        self.shape = (options.packed, width)
        first = site.previous is None
        self.start = nn.Parameter(torch.randn(self.shape)) if first else None
        self.norm = None if first else nn.LayerNorm(width)
        self.pack = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.pack.weight)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, N, D), k (B, H, N, D), v (B, H, N, E) -> (B, H, N, E).

        Raises UnsupportedCall without a carry, and where the previous layer packs otherwise.
        """
        packed = self._packed(ctx)
        keys, values = latents.gather(
            self._queries(packed), k, v, ctx.key_padding, scale=self.scale
        )
        if ctx.carry is not None:
            # Layers add up in the precision of P, whatever that of their keys.
            ctx.carry[self.path] = packed + keys.transpose(1, 2).flatten(2).to(packed.dtype)
        dropout = self.dropout if self.training else 0.0
        out = softmax.attend(q, keys, values, Context(), scale=self.scale, dropout=dropout)
        return out.to(v.dtype)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, N, N), the product of both steps; of rank M at most."""
        queries = self._queries(self._packed(ctx))
        gathered, keys = latents.gather_weights(queries, k, ctx.key_padding, scale=self.scale)
        reading = softmax.weights(q, keys, Context(), scale=self.scale)
        return scores.mix(reading, gathered, None)

    def _packed(self, ctx: Context) -> Tensor:
        """P of this layer, (B, M, H * D), or (1, M, H * D) in the first one."""
        if self.start is not None:
            return self.start[None]
        state = None if ctx.carry is None else ctx.carry.get(self.previous)
        if state is None:
            raise UnsupportedCall(
                f"{self.path}: luna needs the packed sequence of {self.previous}, which did not "
                "run in this forward; call the whole model, not one of its layers"
            )
        if state.shape[1:] != self.shape:
            raise UnsupportedCall(
                f"{self.path}: luna packs to (length, width) {self.shape}, but {self.previous} "
                f"handed on {tuple(state.shape[1:])}; give all layers the same option packed"
            )
        return self.norm(state)

    def _queries(self, packed: Tensor) -> Tensor:
        """P W by heads, (B or 1, H, M, D)."""
        return self.pack(packed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
