"""Attention whose scores are synthesised: learned outright, or made from the query alone.

    o_i = sum_j softmax_j((1 - g) scale * q_i . k_j + g R_ij) v_j
    R_ij = T_ij (random) | A_i . B_j (factorised) | relu(q_i) . W_j (dense)

for each head, with g = 1 in the pure kinds, and g = sigmoid(gate), learned, in a mixture.

Tay, Bahri, Metzler, Juan, Zhao, Zheng, "Synthesizer: Rethinking Self-Attention in Transformer
Models", 2020, arXiv:2005.00743.
Deviations: i and j are ranks among the sample's real tokens, so that padding on either side
changes nothing; the first of the dense form's two layers is the host's query projection; the
dense form has no factorised variant; a mixture's gate starts near 0, not at 1/2, because random
scores destroy pretrained weights.
Exact when: it is a mixture and the gate is closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import kernels, masks, scores, softmax

if TYPE_CHECKING:
    from zoo_attention.synthesizer import SynthesizerOptions

Rows = slice | Tensor


class SynthesizerAttention(nn.Module):
    """Attention with synthetic scores for at most `site.max_len` tokens.

    synthetic: makes R. gate: the scalar before the sigmoid, None in the pure kinds.
    """

    gate: nn.Parameter | None

    def __init__(self, site: Site, options: SynthesizerOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.max_len = site.max_len
        source, _, content = options.kind.partition("+")
        self.synthetic = synthetic(source, site, options.rank)
        self.gate = nn.Parameter(torch.tensor(options.gate)) if content else None
        reads = {"query", "key"} if content else {"query"} if source == "dense" else set()
        self.unused = frozenset({"query", "key"} - reads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        The queries are those of the last L of the S tokens. Raises UnsupportedCall where S exceeds
        the length that the scores were made for.
        """
        tokens = masks.align(ctx.key_padding)
        weights = self._weights(q, tokens.front(k), tokens.key_padding, ctx)
        dropout = self.dropout if self.training else 0.0
        return scores.mix(weights, tokens.front(v), None, dropout=dropout)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        tokens = masks.align(ctx.key_padding)
        weights = self._weights(q, tokens.front(k), tokens.key_padding, ctx)
        return tokens.back(weights.expand(len(q), -1, -1, -1).mT).mT

    def _weights(self, q: Tensor, k: Tensor, real: Tensor | None, ctx: Context) -> Tensor:
        """The weights (B or 1, H, L, S) of keys in the order of their ranks.

        k: keys with the real ones at the front. real: (B, S), which they are, or None.
        """
        length, keys = q.shape[-2], k.shape[-2]
        if keys > self.max_len:
            raise UnsupportedCall(
                f"synthesizer was built for at most {self.max_len} tokens and got {keys}; "
                "truncate the input or build the model with a larger max_length"
            )
        q = masks.hide(q, scores.real_queries(ctx.key_padding, length))
        rows: Rows = slice(keys - length, keys)
        if ctx.key_padding is not None:
            # Padding before the first real token has rank -1, and may take any row.
            rows = masks.rank(ctx.key_padding)[:, rows].clamp(min=0)
        wide = kernels.sum_dtype(q, k)
        with torch.autocast(q.device.type, enabled=False):
            made = self.synthetic(q.to(wide), rows, keys)
            if self.gate is not None:
                share = self.gate.to(wide).sigmoid()
                dots = scores.dot_product(q, k, None, scale=self.scale)
                made = torch.lerp(dots, made.expand_as(dots), share)
            return softmax.masked_softmax(made, visible(made, rows, real, causal=ctx.causal))


def visible(made: Tensor, rows: Rows, real: Tensor | None, *, causal: bool) -> Tensor | None:
    """Who sees whom, (B or 1, 1, L or 1, S), for scores `made` of queries at `rows`."""
    mask = None if real is None else real[:, None, None]
    if not causal:
        return mask
    ranks = torch.arange(made.shape[-1], device=made.device)
    queries = ranks[rows] if isinstance(rows, slice) else rows
    past = (ranks <= queries[..., None]).view(-1, 1, *made.shape[-2:])
    return past if mask is None else past & mask


def synthetic(source: str, site: Site, rank: int) -> nn.Module:
    """The module that makes R, of scores with unit variance: (q, rows, keys) -> R.

    q (B, H, L, D), rows a slice or (B, L) of ranks, keys their number S -> (B or 1, H, L, S).
    """
    if source == "dense":
        return Dense(site)
    return Table(site) if source == "random" else FactorisedTable(site, rank)


class Table(nn.Module):
    """R is a table (H, max_len, max_len) of scores."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(site.heads, site.max_len, site.max_len))

    def forward(self, q: Tensor, rows: Rows, keys: int) -> Tensor:
        """Look the rows up."""
        return take(self.table.to(q.dtype)[..., :keys], rows)


class FactorisedTable(nn.Module):
    """R is the product of two factors (H, max_len, rank); at full rank it is any table."""

    def __init__(self, site: Site, rank: int) -> None:
        super().__init__()
        shape = (2, site.heads, site.max_len, rank)
        self.rows, self.columns = map(nn.Parameter, torch.randn(shape) * rank**-0.25)

    def forward(self, q: Tensor, rows: Rows, keys: int) -> Tensor:
        """Multiply the rows' factors with those of the first `keys` columns."""
        return take(self.rows.to(q.dtype), rows) @ self.columns[:, :keys].to(q.dtype).mT


class Dense(nn.Module):
    """R is a layer on the query: relu(q) times weight (H, D, max_len)."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        shape = (site.heads, site.head_dim, site.max_len)
        self.weight = nn.Parameter(torch.randn(shape) * site.head_dim**-0.5)

    def forward(self, q: Tensor, rows: Rows, keys: int) -> Tensor:
        """Make each query's scores from itself; its rank does not matter."""
        return q.relu() @ self.weight[..., :keys].to(q.dtype)


def take(table: Tensor, rows: Rows) -> Tensor:
    """Rows of table (H, N, M): (1, H, L, M) for a slice, (B, H, L, M) for ranks (B, L)."""
    if isinstance(rows, slice):
        return table[None, :, rows]
    return table[:, rows].transpose(0, 1)
