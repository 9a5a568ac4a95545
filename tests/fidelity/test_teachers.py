"""A teacher must take what the model takes: told, or seen to, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fidelity_lab as lab
import pytest
import torch
from sentence_transformers import SentenceTransformer

import zoo_core as zoo
from zoo_core.fidelity import preparing
from zoo_core.fidelity.samples import encode
from zoo_core.fidelity.sources import read

SHORT: dict[str, Any] = {"steps": 2, "batch_size": 4, "progress": False}
TEXTS = [f"text number {n}, which is longer than {n} letters" for n in range(20)]


def calibrate(host: torch.nn.Module, teacher: torch.nn.Module, data: Any, **how: Any) -> Any:
    return zoo.calibrate(host, data, teacher=teacher, **SHORT, **how)


def measure(host: torch.nn.Module, teacher: torch.nn.Module, data: Any, **how: Any) -> Any:
    return zoo.retention(host, teacher, data, resamples=5, **how)


verbs = pytest.mark.parametrize("verb", [calibrate, measure], ids=["calibrate", "retention"])


def shorter() -> torch.nn.Module:
    """A stock teacher that sees 16 tokens; the models here see 64."""
    return lab.bert("softmax", max_position_embeddings=16)


@verbs
class TestLength:
    def test_texts_are_cut_to_what_both_see_and_the_report_says_so(self, verb: Callable) -> None:
        report = verb(lab.bert(), shorter(), TEXTS, tokenizer=lab.Letters())
        assert report.data.endswith("a list of 20, cut to the 16 tokens that the teacher sees")
        report = verb(lab.bert(), shorter(), lab.tokens(20))
        assert report.data.endswith(", cut to the 16 tokens that the teacher sees")

    def test_nothing_is_said_where_nothing_is_cut(self, verb: Callable) -> None:
        report = verb(lab.bert(), shorter(), lab.tokens(20, longest=9))
        assert report.data.endswith("a list of 20")

    def test_a_length_that_the_teacher_does_not_see_is_refused(self, verb: Callable) -> None:
        host = lab.bert()
        before = lab.state(host)
        message = r"max_length=17 .* sees 16 tokens, the model 64; pass max_length=16 \(--max-len"
        with pytest.raises(zoo.ZooError, match=message):
            verb(host, shorter(), lab.tokens(20), max_length=17)
        assert not lab.changed(host, before)
        verb(host, shorter(), lab.tokens(20), max_length=16)


def test_packed_rows_are_as_long_as_both_see() -> None:
    source = read(lab.tokens(20), limit=99)
    samples = encode(source, lab.bert(), teacher=shorter(), packed=True, minimum=4)
    assert {samples.length(n) for n in range(len(samples))} == {16}


def test_a_sentence_transformers_length_fits_the_teacher() -> None:
    class Outer(SentenceTransformer):
        tokenizer, max_seq_length = lab.Letters(), 40

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.inner = lab.bert()

        def __iter__(self):
            return iter(())

    assert preparing.reading_of(Outer()).max_length == 40
    assert preparing.reading_of(Outer(), teacher=shorter()).max_length == 16


@verbs
@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (lambda: lab.bert("softmax", vocab_size=50), "do not fit the teacher, which knows 50 tok"),
        (lab.vit, "the teacher, VisionTransformer, takes images; a list of 20 holds tokens"),
    ],
    ids=["vocabulary", "images"],
)
def test_a_teacher_that_cannot_read_is_refused(
    teacher: Callable, message: str, verb: Callable
) -> None:
    host = lab.bert()
    before = lab.state(host)
    with pytest.raises(zoo.ZooError, match=message):
        verb(host, teacher(), lab.tokens(20))
    assert not lab.changed(host, before)


@verbs
def test_a_teacher_of_images_of_another_size_is_refused(verb: Callable) -> None:
    message = r"the teacher cannot .*\(1, 3, 32, 32\); it takes images of \(3, 64, 64\)"
    with pytest.raises(zoo.ZooError, match=message):
        verb(lab.vit(), lab.vit(img_size=64), lab.images())
