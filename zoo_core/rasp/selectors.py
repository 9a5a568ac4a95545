"""select, aggregate, selector_width: one attention head in three operations.

    select(keys, queries, p)[i, j] = p(keys[j], queries[i])
    aggregate(s, values)[i]        = mean of values[j] over the j with s[i, j]
    selector_width(s)[i]           = number of j with s[i, j]

Weiss, Goldberg, Yahav, "Thinking Like Transformers", 2021, arXiv:2106.06981.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Of (B, 1, N) keys and (B, N, 1) queries: `operator.eq`, `lt`, `le`, ... or any that broadcasts.
Predicate = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Selector:
    """Which keys each query takes, for a padded batch; `&`, `|` and `~` combine selectors.

    mask: bool (B, N, N), query by key, True = taken. Rows and columns of padding are False.
    real: bool (B, N), True = real token; what `~` leaves False.
    """

    mask: Tensor
    real: Tensor

    def __and__(self, other: Selector) -> Selector:
        return Selector(self.mask & other.mask, self.real)

    def __or__(self, other: Selector) -> Selector:
        return Selector(self.mask | other.mask, self.real)

    def __invert__(self) -> Selector:
        return Selector(~self.mask & _pairs(self.real), self.real)

    def weights(self, dtype: torch.dtype | None = None) -> Tensor:
        """The attention map of a head that does this, (B, N, N); rows that take nothing are 0."""
        taken = self.mask.to(dtype or torch.get_default_dtype())
        return taken / taken.sum(-1, keepdim=True).clamp_min(1)

    def bias(self, dtype: torch.dtype | None = None) -> Tensor:
        """The same as `Context.bias`, (B, 1, N, N): 0 where a key is taken, else -inf.

        Mechanisms with supports.bias are held to the selector by it; those without refuse it.
        """
        bias = torch.zeros_like(self.mask, dtype=dtype or torch.get_default_dtype())
        return bias.masked_fill(~self.mask, float("-inf"))[:, None]


def select(keys: Tensor, queries: Tensor, predicate: Predicate, *, real: Tensor) -> Selector:
    """Compare every key with every query: keys and queries (B, N), real bool (B, N).

    predicate(key, query): the key comes first, so that `operator.lt` takes smaller keys.
    """
    mask = predicate(keys[:, None, :], queries[:, :, None])
    return Selector(mask & _pairs(real), real)


def aggregate(selector: Selector, values: Tensor, default: float = 0.0) -> Tensor:
    """The mean of the values (B, N) of the keys taken, (B, N); `default` where none is.

    Exact where the values of the keys taken are one integer; means of others are rounded, so
    that counts made of them want `round`. Values of padding may be anything.
    """
    dtype = torch.promote_types(values.dtype, torch.get_default_dtype())
    hidden = values.to(dtype).masked_fill(~selector.real, 0)
    total = (selector.mask.to(dtype) @ hidden[..., None]).squeeze(-1)
    width = selector_width(selector)
    return torch.where(width > 0, total / width.clamp_min(1), total.new_tensor(default))


def selector_width(selector: Selector) -> Tensor:
    """How many keys each query takes, long (B, N).

    No head can add, only average: where token 0 is a mark that is always taken besides, the share
    of its value in the mean, 1 / (1 + width), tells the width. See `Words.and_first`.
    """
    return selector.mask.sum(-1)


def _pairs(real: Tensor) -> Tensor:
    return real[:, :, None] & real[:, None, :]
