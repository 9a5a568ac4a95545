"""Softmax attention over keys and values compressed along the sequence to `rank` rows.

    o_i = softmax(scale * q_i (E k)^T) (F v),   E, F in R^{rank x max_len}

Wang, Li, Khabsa, Fang, Ma, "Linformer: Self-Attention with Linear Complexity", 2020,
arXiv:2006.04768.
Deviations: column j of E belongs to the j-th real token of the sample, so that padding on either
side changes nothing; E and F start as single tokens and means of segments, not Gaussian, because a
random E destroys pretrained weights; E acts on keys and values after their projection (bias
included), per head; rows that start beyond a short sample are left out of the softmax unless
empty_rows="null".
Exact when: rank = max_len and E = F = I, which is how they start there; and as patched, before any
training, on texts no longer than the rows that start as single tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn

from zoo_core import Context, Site
from zoo_core.errors import check_length
from zoo_core.nn import landmarks, masks, softmax

if TYPE_CHECKING:
    from zoo_attention.linformer import LinformerOptions


class LinformerAttention(nn.Module):
    """Linformer over at most `site.max_len` keys.

    project_keys: E, (rank, max_len), or (H, rank, max_len) where heads have their own.
    project_values: F, of the same shape, or None where E serves the values too.
    """

    project_values: nn.Parameter | None

    def __init__(self, site: Site, options: LinformerOptions) -> None:
        super().__init__()
        self.scale = site.scale
        self.dropout = site.dropout
        self.max_len = site.max_len
        self.rank = options.rank
        self.singles = single_rows(options)
        self.keeps_empty_rows = options.empty_rows == "null"
        if options.share == "layers":
            self.project_keys = projection_of_all_layers(site, options)
        else:
            self.project_keys = projection(site, options)
        separate = options.share in ("none", "heads")
        self.project_values = projection(site, options) if separate else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Attend: q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E).

        Raises UnsupportedCall where S exceeds the length that E was made for.
        """
        length = k.shape[-2]
        check_length("linformer", length, self.max_len)
        rows = self.rank
        if not self.keeps_empty_rows:
            # What the longest possible sample does not reach is masked in all: leave it out.
            rows = self._row_of(length - 1) + 1
        E = self.project_keys
        F = E if self.project_values is None else self.project_values
        short_k = compress(E[..., :rows, :length], k, ctx.key_padding)
        short_v = compress(F[..., :rows, :length], v, ctx.key_padding)
        seen = Context(key_padding=self._seen(rows, ctx.key_padding))
        dropout = self.dropout if self.training else 0.0
        out = softmax.attend(
            q, short_k, short_v, seen, scale=self.scale, dropout=dropout, finite=True
        )
        return out.to(v.dtype)

    def _seen(self, rows: int, key_padding: Tensor | None) -> Tensor | None:
        """Which of the first `rows` rows take part in each sample, (B, rows); None = all."""
        if key_padding is None or self.keeps_empty_rows:
            return None
        last = key_padding.sum(-1, keepdim=True) - 1
        return torch.arange(rows, device=last.device) <= self._row_of(last)

    @overload
    def _row_of(self, place: int) -> int: ...
    @overload
    def _row_of(self, place: Tensor) -> Tensor: ...
    def _row_of(self, place: int | Tensor) -> int | Tensor:
        """The row that the token at `place` among a sample's real ones started in; -1 of -1."""
        rank, length = self.rank - self.singles, self.max_len - self.singles
        later = landmarks.segment_of(place - self.singles, rank, length)
        if isinstance(place, Tensor) and isinstance(later, Tensor):
            return place.clamp(max=self.singles) + later.clamp(min=0)
        return min(place, self.singles) + max(later, 0)


def compress(rows: Tensor, x: Tensor, key_padding: Tensor | None) -> Tensor:
    """Combine the real tokens of x (B, H, S, D) by rows (R, S) or, for each head, (H, R, S).

    Column j is that of the j-th real token of a sample. Padded tokens may hold anything.
    """
    rows = rows.to(x.dtype)
    if rows.dim() == 3:
        return torch.einsum("hrs,bhsd->bhrd", rows, masks.align(key_padding).front(x))
    if key_padding is not None:
        # Columns go where the tokens are, which moves far less than bringing those to the front.
        order = masks.rank(key_padding).clamp(min=0)
        rows = rows[:, order].transpose(0, 1) * key_padding[:, None]
    # One product over all heads; hosts keep tokens outermost, so that it copies nothing. Not by
    # matmul, which takes another way, with other last bits, where the rows are to be trained.
    combined = torch.bmm(
        rows.expand(x.shape[0], -1, -1), masks.hide(x, key_padding).transpose(1, 2).flatten(2)
    )
    return combined.view(*combined.shape[:2], x.shape[1], x.shape[-1]).transpose(1, 2)


def projection(site: Site, options: LinformerOptions) -> nn.Parameter:
    """A fresh E: (rank, max_len), or (H, rank, max_len) where every head has its own."""
    copies = (site.heads,) if options.share == "none" else ()
    shape = (*copies, options.rank, site.max_len)
    if options.start == "gaussian":
        return nn.Parameter(torch.randn(shape) / options.rank**0.5)
    singles = single_rows(options)
    places = torch.arange(site.max_len - singles)
    segment = landmarks.segment_of(places, options.rank - singles, len(places))
    means = torch.zeros(options.rank - singles, len(places))
    means[segment, places] = 1 / segment.bincount()[segment]
    rows = torch.block_diag(torch.eye(singles), means)
    return nn.Parameter(rows.expand(shape).clone())


def single_rows(options: LinformerOptions) -> int:
    """How many rows start as one token each, from the first on."""
    return 3 * options.rank // 4 if options.start == "front" else 0


def projection_of_all_layers(site: Site, options: LinformerOptions) -> nn.Parameter:
    """The one E of a patch: the first layer makes it, the others register the same Parameter.

    Tied by identity, which deepcopy, pickle and optimisers keep, and every layer stays whole when
    another one is unpatched. Layers of another rank, length, start or kind share among themselves.
    """
    name = f"E of {site.kind} layers, {options.rank} x {site.max_len}, {options.start}"
    if name not in site.shared:
        site.shared[name] = projection(site, options)
    shared: nn.Parameter = site.shared[name]
    return shared
