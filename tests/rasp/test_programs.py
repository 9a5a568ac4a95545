"""The operations and the programs, against loops over plain Python lists."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo_core.rasp import TASKS, Words, aggregate, programs, selector_width
from zoo_core.rasp.words import PADDING, START, SYMBOL

START_ROW = [START]


def words_of(rows: list[list[int]], left: bool, junk: int = PADDING) -> Words:
    """Words behind START, padded on either side with any token."""
    rows = [START_ROW + row for row in rows]
    longest = max(map(len, rows)) + 1
    tokens, real = [], []
    for row in rows:
        padding = [junk] * (longest - len(row))
        tokens.append(padding + row if left else row + padding)
        front, back = (len(padding), 0) if left else (0, len(padding))
        real.append([False] * front + [True] * len(row) + [False] * back)
    return Words(torch.tensor(tokens), torch.tensor(real))


def rows_of(values: torch.Tensor, words: Words) -> list[list[int]]:
    """What stands at the real tokens behind START."""
    return [row[real].tolist()[1:] for row, real in zip(values, words.real, strict=True)]


def batches(symbols: int) -> st.SearchStrategy[list[list[int]]]:
    symbol = st.integers(SYMBOL, SYMBOL + symbols - 1)
    return st.lists(st.lists(symbol, min_size=1, max_size=11), min_size=1, max_size=4)


def most_frequent(word: list[int]) -> list[int]:
    distinct = [symbol for symbol, _ in Counter(word).most_common()]  # ties: as they appear
    return distinct + [START] * (len(word) - len(distinct))


def dyck(word: list[int]) -> list[int]:
    """By a stack, as parsers do."""
    stack, failed, verdicts = [], False, []
    for token in word:
        kind, closing = divmod(token - SYMBOL, 2)
        if not closing:
            stack.append(kind)
        else:
            failed = failed or not stack or stack.pop() != kind
        verdicts.append(programs.FALSE if failed else programs.PARTIAL if stack else programs.TRUE)
    return verdicts


LOOPS = {
    "reverse": lambda word: word[::-1],
    "histogram": lambda word: [word.count(token) for token in word],
    "sort": sorted,
    "most_frequent": most_frequent,
    "dyck1": dyck,
    "dyck2": dyck,
}


@pytest.mark.parametrize("name", TASKS)
@given(data=st.data(), left=st.booleans(), junk=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_program_is_exact(name: str, data, left: bool, junk: int) -> None:
    task = TASKS[name]
    rows = data.draw(batches(task.symbols))
    words = words_of(rows, left, junk)
    assert rows_of(task.program(words).output, words) == [LOOPS[name](row) for row in rows]


@pytest.mark.parametrize("name", TASKS)
def test_a_program_is_exact_on_what_its_task_draws(name: str) -> None:
    task = TASKS[name]
    sample = task.sample(200, 24, torch.Generator().manual_seed(0))
    expected = [LOOPS[name](row) for row in rows_of(sample.words.tokens, sample.words)]
    assert rows_of(sample.labels, sample.words) == expected
    labels = sample.labels[sample.labels >= 0]
    assert int(labels.max()) < task.classes(24)
    asked = sample.words.real & (sample.words.indices > 0)
    assert torch.equal(sample.labels >= 0, asked)
    lengths = asked.sum(-1)
    assert (int(lengths.min()), int(lengths.max())) == (1, 24)


def test_brackets_are_drawn_with_every_verdict_and_every_pair_that_can_fail() -> None:
    sample = TASKS["dyck2"].sample(500, 12, torch.Generator().manual_seed(0))
    counts = sample.labels[sample.labels >= 0].bincount()
    assert len(counts) == 3
    assert int(counts.min()) > 0.1 * int(counts.sum())


@pytest.mark.parametrize("name", TASKS)
def test_the_same_seed_draws_the_same_words(name: str) -> None:
    drawn = [TASKS[name].sample(8, 9, torch.Generator().manual_seed(s)) for s in (3, 3, 4)]
    same, again, other = (sample.words.tokens for sample in drawn)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


PREDICATES = [operator.eq, operator.lt, operator.le, operator.gt, operator.ne]


@given(
    rows=batches(4),
    left=st.booleans(),
    predicate=st.sampled_from(PREDICATES),
    combine=st.sampled_from(["&", "|", "~"]),
)
@settings(max_examples=40, deadline=None)
def test_the_operations_are_loops_over_pairs(rows, left: bool, predicate, combine: str) -> None:
    words = words_of(rows, left)
    tokens, places = words.tokens, words.indices
    first = words.select(tokens, tokens, predicate)
    second = words.select(places, places, operator.lt)
    selector = {"&": first & second, "|": first | second, "~": ~first}[combine]
    values = tokens.double().masked_fill(~words.real, float("nan"))
    mean, width = aggregate(selector, values, default=-7.0), selector_width(selector)
    for b, row in enumerate([START_ROW + row for row in rows]):
        where = words.real[b].nonzero().squeeze(-1).tolist()
        for i, query in enumerate(row):
            taken = []
            for j, key in enumerate(row):
                one, two = predicate(key, query), j < i
                if {"&": one and two, "|": one or two, "~": not one}[combine]:
                    taken.append(key)
            assert int(width[b, where[i]]) == len(taken)
            expected = sum(taken) / len(taken) if taken else -7.0
            assert float(mean[b, where[i]]) == pytest.approx(expected, abs=1e-12)


def test_a_key_comes_first_and_padding_takes_nothing() -> None:
    words = Words.of([[3, 5], [4]])
    smaller = words.select(words.tokens, words.tokens, torch.lt)
    assert smaller.mask.tolist() == [[[False, False], [True, False]], [[False] * 2] * 2]
    everything = ~(smaller & ~smaller)
    assert everything.mask.tolist() == [[[True] * 2] * 2, [[True, False], [False] * 2]]


@given(rows=batches(4), left=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_head_finds_the_width_by_the_share_of_token_0(rows, left: bool) -> None:
    words = words_of(rows, left)
    same = words.select(words.tokens, words.tokens, operator.eq)
    share = aggregate(words.and_first(same), words.indices == 0)
    behind = words.real & (words.indices > 0)
    found = (1 / share - 1).round().long()
    assert torch.equal(found[behind], selector_width(same)[behind])


@pytest.mark.parametrize("name", TASKS)
def test_every_head_takes_something_at_every_token_asked(name: str) -> None:
    sample = TASKS[name].sample(100, 12, torch.Generator().manual_seed(0))
    for selector in [head for layer in sample.trace.layers for head in layer]:
        assert bool((selector_width(selector) > 0)[sample.labels >= 0].all())


@pytest.mark.parametrize(
    ("name", "layers", "heads"),
    [
        ("reverse", 2, 1),
        ("histogram", 1, 1),
        ("sort", 2, 1),
        ("most_frequent", 3, 2),
        ("dyck1", 2, 1),
        ("dyck2", 4, 1),
    ],
)
def test_the_size_of_a_program(name: str, layers: int, heads: int) -> None:
    assert (TASKS[name].layers, TASKS[name].heads) == (layers, heads)
