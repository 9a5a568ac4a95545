"""Programs that solve the tasks exactly, written as the attention heads that they take.

Every word opens with the token START, by which heads count. Weiss, Goldberg, Yahav, "Thinking
Like Transformers", 2021, arXiv:2106.06981, section 4 and appendix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zoo_core.rasp.selectors import Selector, aggregate, selector_width
from zoo_core.rasp.words import START, SYMBOL, Words

#: What the Dyck programs say of the word up to a token: it cannot be completed, can be, or is.
FALSE, PARTIAL, TRUE = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Trace:
    """What a program did with some words.

    output: long (B, N); of no meaning at START and at padding.
    layers: the patterns of its heads, layer by layer; a transformer of as many layers and heads
        can do the same.
    """

    output: Tensor
    layers: tuple[tuple[Selector, ...], ...]

    @property
    def heads(self) -> int:
        """The most heads in a layer."""
        return max(map(len, self.layers))


def reverse(words: Words) -> Trace:
    """The word read backwards. One layer finds the length, the next one fetches."""
    everything = words.everything()
    length = selector_width(everything)
    flip = words.select(words.indices, length - words.indices, torch.eq)
    return Trace(_whole(aggregate(flip, words.tokens)), ((everything,), (flip,)))


def histogram(words: Words) -> Trace:
    """How often each token occurs in its word."""
    same = words.select(words.tokens, words.tokens, torch.eq)
    return Trace(selector_width(same), ((words.and_first(same),),))


def sort(words: Words) -> Trace:
    """The tokens in ascending order. One layer finds where each belongs, the next one fetches."""
    earlier = _before(words, words.tokens)
    fetched = words.select(selector_width(earlier), words.indices, torch.eq)
    output = _whole(aggregate(fetched, words.tokens))
    return Trace(output, ((words.and_first(earlier),), (fetched,)))


def most_frequent(words: Words) -> Trace:
    """Each symbol once, the most frequent first, ties as they appear; then START to the end."""
    same = words.select(words.tokens, words.tokens, torch.eq)
    copies = same & words.select(words.indices, words.indices, torch.lt)
    repeated = selector_width(copies) > 0
    beyond = words.tokens.shape[-1] + 1
    order = torch.where(repeated, beyond, -selector_width(same))
    order = order.masked_fill(words.indices == 0, -beyond)
    earlier = _before(words, order)
    fetched = words.select(selector_width(earlier), words.indices, torch.eq)
    output = _whole(aggregate(fetched, words.tokens.masked_fill(repeated, START)))
    counting = (words.and_first(same), words.and_first(copies))
    return Trace(output, (counting, (words.and_first(earlier),), (fetched,)))


def dyck1(words: Words) -> Trace:
    """FALSE, PARTIAL or TRUE for each prefix of a word of one kind of brackets.

    Tokens: SYMBOL opens, SYMBOL + 1 closes.
    """
    so_far = words.up_to_self()
    opens, _ = _brackets(words)
    depth = _depth(words, so_far, opens)
    failed = aggregate(so_far, depth < 0) > 0
    return Trace(_verdict(failed, depth), ((so_far,), (so_far,)))


def dyck2(words: Words) -> Trace:
    """FALSE, PARTIAL or TRUE for each prefix of a word of two or more kinds of brackets.

    Tokens: SYMBOL + 2 n opens and SYMBOL + 2 n + 1 closes a bracket of kind n. A closing bracket
    finds its partner as the one before it among those of its depth.
    """
    so_far = words.up_to_self()
    opens, kind = _brackets(words)
    closes = (words.tokens >= SYMBOL) & ~opens
    depth = _depth(words, so_far, opens)
    level = depth + closes
    same_level = words.select(level, level, torch.eq)
    place = selector_width(same_level & so_far)
    partner = (
        words.select(opens, 1, torch.eq) & same_level & words.select(place, place - 1, torch.eq)
    )
    unlike = closes & (_whole(aggregate(partner, kind, default=-1)) != kind)
    failed = aggregate(so_far, unlike | (depth < 0)) > 0
    layers = (
        (so_far,),
        (words.and_first(same_level & so_far),),
        (words.or_first(partner),),
        (so_far,),
    )
    return Trace(_verdict(failed, depth), layers)


def _before(words: Words, keys: Tensor) -> Selector:
    """Every token takes those that stand before it once sorted by these keys; equals keep order."""
    smaller = words.select(keys, keys, torch.lt)
    equal = words.select(keys, keys, torch.eq)
    return smaller | (equal & words.select(words.indices, words.indices, torch.lt))


def _brackets(words: Words) -> tuple[Tensor, Tensor]:
    """Whether each token opens a bracket, and of which kind it is."""
    symbol = words.tokens - SYMBOL
    return (symbol >= 0) & (symbol % 2 == 0), symbol // 2


def _depth(words: Words, so_far: Selector, opens: Tensor) -> Tensor:
    """How many brackets are open after each token, by the mean of +1, -1 and START's 0."""
    steps = torch.where(opens, 1, -1).masked_fill(words.tokens < SYMBOL, 0)
    return _whole((words.indices + 1) * aggregate(so_far, steps))


def _verdict(failed: Tensor, depth: Tensor) -> Tensor:
    complete = torch.where(depth == 0, TRUE, PARTIAL)
    return complete.masked_fill(failed, FALSE)


def _whole(values: Tensor) -> Tensor:
    """Whole numbers that went through a mean."""
    return values.round().long()
