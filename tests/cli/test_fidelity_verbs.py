"""The verbs that heal and measure a checkpoint: `calibrate`, `evaluate`; and `inspect` after."""

from __future__ import annotations

import json

import pytest

import zoo_core
from zoo_core.checkpoint import read_manifest
from zoo_core.hub.card import card, metadata


@pytest.fixture
def directory(tmp_path, small_bert, letters):
    model = zoo_core.build("bert", "linformer", options={"rank": 4}, seed=0, **small_bert)
    zoo_core.save(model, tmp_path / "model", tokenizer=letters)
    return tmp_path / "model"


@pytest.fixture
def texts(tmp_path):
    lines = [" ".join("abcdefghijkl"[(n * k) % 12] for k in range(3 + n % 7)) for n in range(30)]
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(lines))
    return path


def test_calibrate_writes_a_checkpoint_that_says_so(zoo, directory, texts, tmp_path):
    target, picture = tmp_path / "healed", tmp_path / "layers.png"
    run = zoo(
        *("calibrate", str(directory), str(texts), "-o", str(target), "--picture", str(picture)),
        *("--steps", "4", "--batch-size", "4", "--train", "mechanism", "--bf16"),
    )
    assert run.code == 0, run.err
    assert "4 of 4 steps" in run.out
    assert picture.exists()
    manifest = read_manifest(target)
    assert manifest.calibration["steps"] == 4
    assert manifest.calibration["settings"]["bf16"] is True
    shown = zoo("inspect", str(target)).out
    assert "calibrated on 23 samples of texts.txt, train=mechanism, 4 steps" in shown
    assert "cosine of embeddings" in shown
    for text in (
        (target / "README.md").read_text(),
        card(manifest, "zoo/tiny", metadata(manifest), set()),
    ):
        assert "The attention was calibrated on 23 samples of texts.txt" in text
        assert "| cosine of embeddings |" in text
    model = zoo_core.load(target)
    assert zoo_core.inspect(model).calibration == manifest.calibration
    assert zoo_core.save(model, tmp_path / "again").calibration == manifest.calibration


def test_a_calibration_does_not_outlive_its_attention(zoo, directory, texts, tmp_path):
    model = zoo_core.load(directory)
    zoo_core.calibrate(model, [{"input_ids": [1, 2, 3, 4]}] * 20, steps=1, train="mechanism")
    zoo_core.patch(model, "uniform")
    assert zoo_core.inspect(model).calibration is None
    assert zoo_core.save(model, tmp_path / "other").calibration is None


def test_evaluate(zoo, directory, texts, tmp_path):
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join("ab"[n % 2] for n in range(30)))
    run = zoo("evaluate", str(directory), str(texts), "--labels", str(labels))
    assert run.code == 0, run.err
    assert "retention on 30 samples of" in run.out
    assert "accuracy of a linear probe" in run.out
    run = zoo("evaluate", str(directory), str(texts), "--json", "--limit", "10")
    answer = json.loads(run.out)
    assert answer["samples"] == 10
    assert answer["scores"]["embedding_cosine"]["stock"] == 1


def test_evaluate_on_a_table(zoo, directory, texts, tmp_path):
    lines = texts.read_text().splitlines()
    table = tmp_path / "reviews.csv"
    table.write_text("\n".join(["id,review", *(f"{n},{line}" for n, line in enumerate(lines))]))
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join("ab"[n % 2] for n in range(30)))
    run = zoo("evaluate", str(directory), str(table))
    assert run.code == 1
    assert "pass column= (has: id, review)" in run.err
    run = zoo("evaluate", str(directory), str(table), "--column", "review", "--labels", str(labels))
    assert run.code == 0, run.err
    assert "accuracy of a linear probe" in run.out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--train", "everything"), 2, "'everything' is not one of"),
        (("--steps", "0"), 1, "below its lower bound 1"),
        (("--max-length", "99"), 1, "between 1 and 32"),
    ],
    ids=["choice", "bound", "length"],
)
def test_misuse(zoo, directory, texts, tmp_path, arguments, code, message):
    run = zoo("calibrate", str(directory), str(texts), "-o", str(tmp_path / "out"), *arguments)
    assert run.code == code
    assert message in run.err
    assert not (tmp_path / "out").exists()
