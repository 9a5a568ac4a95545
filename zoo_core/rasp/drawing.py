"""Random words, the same for the same seed."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from zoo_core.rasp.words import PADDING, START, SYMBOL, Words


def symbols(count: int, longest: int, kinds: int, generator: Generator) -> Words:
    """Words of 1 to `longest` symbols out of `kinds`, all equally likely, each behind START."""
    drawn = torch.randint(kinds, (count, longest), generator=generator)
    return _words(SYMBOL + drawn, generator)


def brackets(count: int, longest: int, kinds: int, generator: Generator) -> Words:
    """Words of 1 to `longest` brackets, `kinds` counting opening and closing ones.

    All start as words that can be completed. In half of them one bracket is replaced by any, so
    that what cannot be completed is not told by brackets missing at the start.
    """
    drawn = _legal(count, longest, kinds // 2, generator)
    where = torch.randint(longest, (count, 1), generator=generator)
    other = torch.randint(kinds, (count, 1), generator=generator)
    spoiled = torch.rand(count, 1, generator=generator) < 0.5
    drawn = torch.where(spoiled, drawn.scatter(1, where, other), drawn)
    return _words(SYMBOL + drawn, generator)


def _legal(count: int, longest: int, kinds: int, generator: Generator) -> Tensor:
    """Prefixes of well-nested words, (count, longest): 2 n opens a bracket of kind n, 2 n + 1."""
    open_kinds = torch.zeros(count, longest + 1, dtype=torch.long)
    depth = torch.zeros(count, 1, dtype=torch.long)
    drawn = []
    for _ in range(longest):
        opening = (torch.rand(count, 1, generator=generator) < 0.5) | (depth == 0)
        fresh = torch.randint(kinds, (count, 1), generator=generator)
        innermost = open_kinds.gather(1, (depth - 1).clamp_min(0))
        drawn.append(torch.where(opening, 2 * fresh, 2 * innermost + 1))
        # Above the innermost open bracket whatever is written is overwritten before it is read.
        open_kinds = open_kinds.scatter(1, depth, fresh)
        depth = depth + torch.where(opening, 1, -1)
    return torch.cat(drawn, 1)


def _words(drawn: Tensor, generator: Generator) -> Words:
    """Put START before each word and cut it to a random length."""
    count, longest = drawn.shape
    lengths = torch.randint(1, longest + 1, (count, 1), generator=generator)
    real = torch.arange(longest + 1) <= lengths
    tokens = torch.cat([torch.full((count, 1), START), drawn], 1)
    return Words(tokens.masked_fill(~real, PADDING), real)
