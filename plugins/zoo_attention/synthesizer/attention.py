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
from zoo_core.errors import check_length
from zoo_core.nn import masks, scores, softmax
from zoo_core.nn.parts import attend_in_parts, rows_of_scores
from zoo_core.nn.precision import sum_dtype

if TYPE_CHECKING:
    from zoo_attention.synthesizer import SynthesizerOptions

Rows = slice | Tensor

ALL = slice(None)


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
        rows = self._rows(q, k, ctx)
        q = masks.hide(q, scores.real_queries(ctx.key_padding, q.shape[-2]))
        k, v = tokens.front(k), tokens.front(v)
        dropout = self.dropout if self.training else 0.0

        def attend(heads: slice, span: slice) -> Tensor:
            own = part_of(rows, span)
            weights = self._weights(q[:, heads, span], k[:, heads], heads, own, tokens, ctx)
            return scores.mix(weights, v[:, heads], None, dropout=dropout)

        few = rows_of_scores(k.shape[-2])
        return attend_in_parts(attend, q, v, rows=few, dropout=dropout)

    def attention_map(self, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
        """The weights (B, H, L, S)."""
        tokens = masks.align(ctx.key_padding)
        rows = self._rows(q, k, ctx)
        batch = q.shape[0]
        q = masks.hide(q, scores.real_queries(ctx.key_padding, q.shape[-2]))
        weights = self._weights(q, tokens.front(k), ALL, rows, tokens, ctx)
        return tokens.back(weights.expand(batch, -1, -1, -1).mT).mT

    def _rows(self, q: Tensor, k: Tensor, ctx: Context) -> Rows:
        """The ranks of the queries. Raises UnsupportedCall where there are too many keys."""
        length, keys = q.shape[-2], k.shape[-2]
        check_length("synthesizer", keys, self.max_len)
        rows = slice(keys - length, keys)
        if ctx.key_padding is None:
            return rows
        # Padding before the first real token has rank -1, and may take any row.
        return masks.rank(ctx.key_padding)[:, rows].clamp(min=0)

    def _weights(
        self,
        q: Tensor,
        k: Tensor,
        heads: slice,
        rows: Rows,
        tokens: masks.Alignment,
        ctx: Context,
    ) -> Tensor:
        """The weights (B or 1, H, L, S) of queries of some heads, with keys in order of rank.

        q, k: of these heads, zero at padding, k with the real tokens at the front.
        """
        wide = sum_dtype(q, k)
        with torch.autocast(q.device.type, enabled=False):
            made = self.synthetic(q.to(wide), rows, k.shape[-2], heads)
            if self.gate is not None:
                share = self.gate.to(wide).sigmoid()
                dots = scores.dot_product(q, k, None, scale=self.scale)
                made = torch.lerp(dots, made.expand_as(dots), share)
            mask = visible(made, rows, tokens.key_padding, causal=ctx.causal)
            return softmax.masked_softmax(made, mask)


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
    """The module that makes R, of scores with unit variance: (q, rows, keys, heads) -> R.

    q (B, H, L, D) of these heads, rows a slice or (B, L) of ranks, keys their number S ->
    (B or 1, H, L, S).
    """
    if source == "dense":
        return Dense(site)
    return Table(site) if source == "random" else FactorisedTable(site, rank)


class Table(nn.Module):
    """R is a table (H, max_len, max_len) of scores."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(site.heads, site.max_len, site.max_len))

    def forward(self, q: Tensor, rows: Rows, keys: int, heads: slice = ALL) -> Tensor:
        """Look the rows up."""
        return take(self.table[heads, :, :keys].to(q.dtype), rows)


class FactorisedTable(nn.Module):
    """R is the product of two factors (H, max_len, rank); at full rank it is any table."""

    def __init__(self, site: Site, rank: int) -> None:
        super().__init__()
        shape = (2, site.heads, site.max_len, rank)
        self.rows, self.columns = map(nn.Parameter, torch.randn(shape) * rank**-0.25)

    def forward(self, q: Tensor, rows: Rows, keys: int, heads: slice = ALL) -> Tensor:
        """Multiply the rows' factors with those of the first `keys` columns."""
        columns = self.columns[heads, :keys].to(q.dtype)
        return take(self.rows[heads].to(q.dtype), rows) @ columns.mT


class Dense(nn.Module):
    """R is a layer on the query: relu(q) times weight (H, D, max_len)."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        shape = (site.heads, site.head_dim, site.max_len)
        self.weight = nn.Parameter(torch.randn(shape) * site.head_dim**-0.5)

    def forward(self, q: Tensor, rows: Rows, keys: int, heads: slice = ALL) -> Tensor:
        """Make each query's scores from itself; its rank does not matter."""
        return q.relu() @ self.weight[heads, :, :keys].to(q.dtype)


def take(table: Tensor, rows: Rows) -> Tensor:
    """Rows of table (H, N, M): (1, H, L, M) for a slice, (B, H, L, M) for ranks (B, L)."""
    if isinstance(rows, slice):
        return table[None, :, rows]
    return table[:, rows].transpose(0, 1)


def part_of(rows: Rows, span: slice) -> Rows:
    """Those of a run of queries."""
    if isinstance(rows, slice):
        return slice(rows.start + span.start, rows.start + span.stop)
    return rows[:, span]
