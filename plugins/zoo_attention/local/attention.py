"""Local attention: each token sees the tokens near it; the prefix sees, and is seen by, all.

    o_i = sum_{j in W(i)} softmax_{j in W(i)}(scale * q_i . k_j) v_j
    W(i) = {j : |i - j| <= window, or i or j lies in the prefix}

Beltagy, Peters, Cohan, "Longformer: The Long-Document Transformer", 2020, arXiv:2004.05150.
Deviations: `window` is the reach to one side, half of the paper's; i and j count real tokens only;
global tokens use the host's projections, which the paper's separate ones start from; no dilation.
Exact when: window >= N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.nn.windows import Window

if TYPE_CHECKING:
    from zoo_attention.local import LocalOptions


class LocalAttention(nn.Module):
    """Softmax over `window` tokens to each side and the prefix; it has no parameters."""

    def __init__(self, site: Site, options: LocalOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.window = options.window
        self.global_prefix = options.global_prefix

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        The queries are those of the last L of the S tokens.
        """
        dropout = self.dropout if self.training else 0.0
        window = self._window(ctx)
        return window.attend(q, k, v, ctx.key_padding, scale=self.scale, dropout=dropout)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        return self._window(ctx).weights(q, k, ctx.key_padding, scale=self.scale)

    def _window(self, ctx: Context) -> Window:
        prefix = ctx.prefix if self.global_prefix else 0
        return Window(self.window, prefix=prefix, causal=ctx.causal)
