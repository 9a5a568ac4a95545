"""Words that pages, cards and tables share."""

from __future__ import annotations

import math

import pytest

from zoo_core import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "infinite"),
        (0.0, "0.000"),
        (0.0004, "4.0e-04"),
        (12.3456, "12.346"),
        (123456.0, "1.2e+05"),
    ],
)
def test_numbers(value, text) -> None:
    assert words.number(value) == text


def test_plural() -> None:
    assert [words.plural(n, "row") for n in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]


@pytest.mark.parametrize(
    ("count", "wanted"), [(1, "a"), (2, "a and b"), (6, "a, b, c, d, e and f")]
)
def test_lists_in_words(count, wanted) -> None:
    assert words.listed("abcdefgh"[:count]) == wanted
    assert words.listed("abcdefgh") == "a, b, c, d, e and 3 more"


def test_the_numbers_of_layers() -> None:
    assert words.layer_numbers(["encoder.layer.3.self", "encoder.layer.7.self"]) == [3, 7]
    assert words.layer_numbers(["blocks.0.attn", "deep.0.attn"]) is None
    assert words.layer_numbers(["attn"]) is None


def test_a_table_in_markdown() -> None:
    assert words.markdown_table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
