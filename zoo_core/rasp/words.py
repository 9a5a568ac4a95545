"""A padded batch of words, which is what programs run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from zoo_core.nn import masks
from zoo_core.rasp.selectors import Predicate, Selector, select

#: Token of padding, of the mark that opens every word, and the first of the symbols.
PADDING, START, SYMBOL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Words:
    """Words of different lengths, padded on any side.

    tokens: long (B, N); the first real one of each word is START where a program counts.
    real: bool (B, N), True = real token.
    """

    tokens: Tensor
    real: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Self:
        """Words of lists of tokens, padded on the right."""
        longest = max(map(len, rows))
        padded = [[*row, *[PADDING] * (longest - len(row))] for row in rows]
        real = [[index < len(row) for index in range(longest)] for row in rows]
        return cls(torch.tensor(padded), torch.tensor(real))

    @property
    def indices(self) -> Tensor:
        """The position of each token among the real ones of its word, long (B, N)."""
        return masks.rank(self.real)

    def select(self, keys: Tensor | int, queries: Tensor | int, predicate: Predicate) -> Selector:
        """`rasp.select` on these words; a number stands for itself at every token."""
        return select(self._each(keys), self._each(queries), predicate, real=self.real)

    def everything(self) -> Selector:
        """Every token takes every token."""
        return self.select(0, 0, torch.eq)

    def up_to_self(self) -> Selector:
        """Every token takes itself and those before it."""
        return self.select(self.indices, self.indices, torch.le)

    def first(self) -> Selector:
        """Every token takes token 0."""
        return self.select(self.indices, 0, torch.eq)

    def and_first(self, selector: Selector) -> Selector:
        """The pattern by which a head finds the selector's width: token 0 is taken too."""
        return selector | self.first()

    def or_first(self, selector: Selector) -> Selector:
        """The pattern by which a head finds whether anything is taken: if not, it takes token 0."""
        nothing = ~selector.mask.any(-1, keepdim=True)
        return selector | Selector(self.first().mask & nothing, self.real)

    def _each(self, values: Tensor | int) -> Tensor:
        return torch.as_tensor(values, device=self.tokens.device).expand(self.tokens.shape)
