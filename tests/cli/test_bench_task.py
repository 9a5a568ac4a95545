"""`zoo bench --task` on models that learn nothing in their few steps."""

from __future__ import annotations

import json

import pytest

from zoo_core.rasp import learning

QUICK = "--length 5 --batch 4 --width 4 --steps 2".split()


def test_a_table_of_what_was_learned(zoo) -> None:
    run = zoo("bench", "--task", "reverse", "--attention", "softmax,pooling", *QUICK)
    assert run.code == 0, run.err
    lines = run.out.splitlines()
    caption = "reverse: words of up to 5, BERT of 2 layers and 1 head of 4, 2 steps of 4, floor"
    assert lines[0].startswith(caption)
    assert [line.split()[:2] for line in lines if line.startswith(("softmax", "pooling"))] == [
        ["softmax", "free"],
        ["softmax", "guided"],
        ["pooling", "free"],
    ]
    assert max(map(len, lines[1:])) <= 80
    assert "not trained: zoo-core/pooling, guided: " in run.err
    assert "has no attention map" in run.err


def test_json_lines(zoo) -> None:
    run = zoo(
        *("bench", "linformer", "--task", "most-frequent", "--guided", "--option", "rank=3"),
        *("--depth", "4", "--heads", "3", "--seed", "5", "--json", *QUICK),
    )
    assert run.code == 0, run.err
    (outcome,) = map(json.loads, run.out.splitlines())
    assert (outcome["kind"], outcome["task"]) == ("outcome", "most_frequent")
    assert outcome["attention"].endswith("linformer")
    assert outcome["guided"]
    lesson = {"layers": 4, "heads": 3, "width": 4, "length": 5, "batch_size": 4, "seed": 5}
    assert outcome["lesson"].items() >= (lesson | {"steps": 2}).items()


def test_interruption_keeps_what_is_complete_and_exits_with_1(zoo, monkeypatch) -> None:
    learn, calls = learning.try_to_learn, []

    def interrupted(*arguments, **how):
        calls.append(how)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return learn(*arguments, **how)

    monkeypatch.setattr(learning, "try_to_learn", interrupted)
    run = zoo("bench", "softmax", "--task", "histogram", *QUICK)
    assert run.code == 1
    assert "interrupted; 1 model complete" in run.err
    assert "softmax" in run.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["linear", "--task", "masked-lm"], 1, "there is no task 'masked-lm' (there are: reverse"),
        (["--task", "reverse"], 2, "name mechanisms"),
        (["linear", "--task", "sort", "--length", "3,4"], 2, "--length takes one number"),
        (["linear", "--task", "sort", "--mode", "forward"], 2, "--mode goes with"),
        (["linear", "--task", "sort", "--depth", "1", "--guided"], 1, "takes 2 layers"),
        (["linear", "--task", "sort", "--option", "rnk=3"], 1, "linear has no option 'rnk'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_is_said_at_once(zoo, arguments, code: int, words: str) -> None:
    run = zoo("bench", *arguments)
    assert (run.code, words in " ".join(run.err.split())) == (code, True), run.err
