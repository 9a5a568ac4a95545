"""Padding and causal masks. Polarity everywhere: True = real token, may be attended."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo_core.attention import Context


def hide(x: Tensor, key_padding: Tensor | None) -> Tensor:
    """Zero the padded rows of x (B, H, S, D) by key_padding (B, S), even where they hold NaN."""
    if key_padding is None:
        return x
    # Several times faster than masked_fill, whose mask would be expanded to every element.
    return torch.where(key_padding[:, None, :, None], x, x.new_zeros(()))


def rank(key_padding: Tensor) -> Tensor:
    """Rank of each token among its sample's real tokens, (B, S) long; padding has no meaning."""
    return key_padding.cumsum(-1) - 1


def positions(key_padding: Tensor | None, like: Tensor) -> Tensor:
    """Rank of each token among its sample's real tokens, -1 at padding: (B or 1, S) long.

    For keys `like` of shape (B, H, S, D).
    """
    if key_padding is None:
        return torch.arange(like.shape[-2], device=like.device)[None]
    return rank(key_padding).masked_fill(~key_padding, -1)


def count(key_padding: Tensor | None, like: Tensor) -> Tensor:
    """Real tokens per sample, (B,) long, for keys `like` of shape (B, H, S, D)."""
    if key_padding is None:
        return torch.full((like.shape[0],), like.shape[-2], device=like.device)
    return key_padding.sum(-1)


@dataclass(frozen=True, eq=False)
class Alignment:
    """Real tokens moved to the front, in order, so that position means rank.

    key_padding: (B, S) after the move, a run of True then False; None where all tokens are real.
    """

    order: Tensor | None
    key_padding: Tensor | None

    def front(self, x: Tensor) -> Tensor:
        """Move the tokens of x (B, H, S, D); padding ends up at the back, zeroed."""
        if self.order is None or self.key_padding is None:
            return x
        rows = _rows(x, self.order)
        if torch.compiler.is_compiling():  # which fuses them, and loses track of strides in place
            return hide(rows, self.key_padding)
        # In place on what was just copied: a second fresh buffer costs more than both passes.
        return rows.masked_fill_(~self.key_padding[:, None, :, None], 0)

    def back(self, x: Tensor) -> Tensor:
        """Undo `front`: x (B, H, S, D) in the original order of tokens."""
        if self.order is None:
            return x
        return _rows(x, self.order.argsort(-1))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """The tokens `index` (B, S) of x (B, H, S, D), with all heads of a token moved as one row."""
    batch, heads, length, width = x.shape
    # Hosts keep tokens outermost, so that this is a view of what they pass.
    rows = x.transpose(1, 2).reshape(batch * length, heads * width)
    first = torch.arange(batch, device=x.device)[:, None] * length
    moved = rows.index_select(0, (index + first).flatten())
    return moved.view(batch, length, heads, width).transpose(1, 2)


def align(key_padding: Tensor | None) -> Alignment:
    """Plan the move of the real tokens of each sample to the front; free without padding."""
    if key_padding is None:
        return Alignment(None, None)
    order = key_padding.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
    return Alignment(order, key_padding.gather(-1, order))


def causal(length: int, keys: int, offset: int, device: torch.device) -> Tensor:
    """Causal mask (length, keys), dense: query i may see keys up to i + offset."""
    queries = torch.arange(length, device=device)[:, None] + offset
    return torch.arange(keys, device=device) <= queries


def scores_mask(ctx: Context, length: int, keys: int, device: torch.device) -> Tensor | None:
    """The dense mask of one call for quadratic mechanisms: bool (B or 1, 1, L or 1, S), or None.

    Without causality it stays (B, 1, 1, S).
    """
    mask = None if ctx.key_padding is None else ctx.key_padding[:, None, None, :]
    if ctx.causal and length > 1:
        triangle = causal(length, keys, ctx.query_offset, device)
        mask = triangle[None, None] if mask is None else mask & triangle
    return mask
