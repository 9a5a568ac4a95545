"""Stochastic positional encoding: kernel attention that knows relative positions.

    q^_mr = sum_d q_md Q_mdr / sqrt(R),   k^_nr = sum_d k_nd K_ndr / sqrt(R),   r = 1 ... R
    E[Q_mdr K_nd'r] = [d = d'] P_d(m - n),  so that  E[q^_m . k^_n] = sum_d q_md P_d(m - n) k_nd

and q^, k^ take the place of q, k in linear or Performer attention: relative positions without a
matrix of them. With a gate, P_d becomes g_d + (1 - g_d) P_d.

Liutkus, Cifka, Wu, Simsekli, Yang, Richard, "Relative Positional Encoding for Transformers with
Linear Complexity", 2021, arXiv:2105.08399.
Deviations: the noise in Q and K is drawn once and saved, where the authors draw it in every
forward. On a grid both kinds use distances in rows and columns; the prefix tokens have no position
(their g is 1, and between a prefix token and a patch P_d is sqrt(g_d)). Positions are ranks among
the sample's real tokens. Frequencies may have either sign and start at about one turn over the
length of the input; P starts near 1 at short distances, and the gates mostly open (g = 0.88), since
pretrained weights know positions already. The host's attention dropout is not applied.
Exact when: never; q^ . k^ is off by O(1 / sqrt(R)), and the kernel is another than softmax's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_attention.spe.codes import ConvolutionalCodes, SineCodes
from zoo_core import Context, Site
from zoo_core.errors import OptionError, UnsupportedCall
from zoo_core.nn import feature_maps, kernels, masks, precision, random_features

if TYPE_CHECKING:
    from zoo_attention.spe import SPEOptions

#: Where gates start, before the sigmoid.
GATE = 2.0


class SPEAttention(nn.Module):
    """Linear or Performer attention over encoded queries and keys.

    codes: the module that makes Q and K. gate: (H, D) before the sigmoid, or None; free: (D, R),
    the code of what has no position, persistent, or None. directions: those of Performer, (M, R),
    persistent, or None.
    """

    free: Tensor | None
    directions: Tensor | None

    def __init__(self, site: Site, options: SPEOptions) -> None:
        super().__init__()
        if site.grid and site.prefix and not options.gated:
            raise OptionError(
                f"spe: with gated=False the {site.prefix} prefix tokens outside the grid would be "
                "unrelated to every patch; use gated=True"
            )
        R = options.realizations
        self.scale = site.scale
        self.realizations = R
        self.axes = len(site.grid) if site.grid else 1
        extents = site.grid or (site.max_len,)
        if options.kind == "sine":
            self.codes: SineCodes | ConvolutionalCodes = SineCodes(site, extents, options.sines, R)
        else:
            self.codes = ConvolutionalCodes(site, extents, options.kernel, R)
        self.shape = (site.heads, site.head_dim)
        self.gate = nn.Parameter(torch.full(self.shape, GATE)) if options.gated else None
        self.register_buffer("free", torch.randn(site.head_dim, R) if options.gated else None)
        directions = None
        if options.base == "performer":
            directions = random_features.orthogonal(options.features, R, norms="sqrt_d")
        self.register_buffer("directions", directions)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        The queries are those of the last L of the S tokens.
        """
        q, k = self.encode(q, k, ctx, self._factor)
        if self.directions is None:
            return kernels.attend(feature_maps.elu_plus_one, q, k, v, ctx)
        return random_features.attend(self.directions, q, k, v, ctx, scale=self.scale)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        q, k = self.encode(q, k, ctx, self._factor)
        if self.directions is None:
            return kernels.weights(feature_maps.elu_plus_one, q, k, ctx)
        return random_features.weights(self.directions, q, k, ctx, scale=self.scale)

    @property
    def _factor(self) -> float:
        """elu + 1 wants entries that are of the same size for every R, as in the paper."""
        if self.directions is not None:
            return 1.0
        return math.sqrt(self.scale * math.sqrt(self.realizations))

    def redraw(self) -> None:
        """Draw new codes from torch's global generator, and new directions: a step of training."""
        for noise in (self.codes.noise, self.free):
            if noise is not None:
                noise.normal_()
        if self.directions is not None:
            shape = self.directions.shape
            self.directions.copy_(random_features.orthogonal(*shape, norms="sqrt_d"))

    def encode(
        self, q: Tensor, k: Tensor, ctx: Context, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """q^ (B, H, L, R) and k^ (B, H, S, R) times factor, in at least fp32; padding holds zeros.

        Raises UnsupportedCall where the model has a grid and the call brings none like it.
        """
        queries, tokens = q.shape[-2], k.shape[-2]
        shape, prefix = self._layout(tokens, ctx)
        order = masks.align(ctx.key_padding)
        wide = precision.sum_dtype(q, k)
        factor *= self.realizations**-0.5
        with torch.autocast(q.device.type, enabled=False):
            gate, free = (None if x is None else x.to(wide) for x in (self.gate, self.free))
            free = None if free is None else free * factor
            # sqrt(g), with a finite gradient
            share = None if gate is None else (F.logsigmoid(gate) / 2).exp()
            if queries < tokens:
                q = F.pad(q, (0, 0, tokens - queries, 0))
            q, k = (order.front(x).to(wide) for x in (q, k))
            placed = slice(prefix, prefix + math.prod(shape))
            amplitude = self._amplitude(gate, wide, q.device) * factor
            codes = self.codes(shape, amplitude, q[..., placed, :], k[..., placed, :], share, free)
            q, k = (
                order.back(_with_others(code, x, share, free, prefix))
                for x, code in zip((q, k), codes, strict=True)
            )
        return q[..., tokens - queries :, :], k

    def _layout(self, tokens: int, ctx: Context) -> tuple[tuple[int, ...], int]:
        """The shape of the positions of this call, and how many tokens before it have none."""
        if self.axes == 1:
            return (tokens,), 0
        if ctx.grid is None or len(ctx.grid) != self.axes:
            raise UnsupportedCall(
                f"spe was built for patches on a grid of {self.axes} axes and this call brings "
                f"{ctx.grid}; do not drop patches, or patch a model without a grid"
            )
        return ctx.grid, ctx.prefix

    def _amplitude(self, gate: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the gate leaves of the codes, sqrt(1 - g), (H, D)."""
        if gate is None:
            return torch.ones(self.shape, dtype=dtype, device=device)
        return (F.logsigmoid(-gate) / 2).exp()


def _with_others(
    code: Tensor, x: Tensor, share: Tensor | None, free: Tensor | None, prefix: int
) -> Tensor:
    """Put those of tokens without a cell around the results (B, H, n, R) of those with one.

    x (B, H, N, D): all tokens. The first `prefix` get the code `free` (D, R) of no position, what
    lies behind the cells its part, `share` (H, D).
    """
    end = prefix + code.shape[-2]
    if code.shape[-2] == x.shape[-2]:
        return code
    if share is None or free is None:
        return F.pad(code, (0, 0, prefix, x.shape[-2] - end))
    behind = (x[..., end:, :] * share[:, None]) @ free
    return torch.cat([x[..., :prefix, :] @ free, code, behind], -2)
