"""The verbs that heal and measure a checkpoint: `calibrate`, `evaluate`; and `inspect` after."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zoo_core
from zoo_core.checkpoint import read_manifest
from zoo_core.hub.card import card, metadata

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
# Torch's launcher, and gloo where ACCELERATE_USE_CPU is set.
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += ["--num_machines", "1", "--main_process_port", "0"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no"]


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
    assert max(map(len, run.out.splitlines()[:10])) <= 80
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


def test_the_commands_of_the_readme(zoo, directory, texts, tmp_path, monkeypatch):
    directory.rename(tmp_path / "my-checkpoint")
    monkeypatch.chdir(tmp_path)
    verbs = dict(re.findall(r"^\$ zoo (calibrate|evaluate|report) (.*)$", README, re.MULTILINE))
    calibrate, evaluate, report = (shlex.split(text, comments=True) for text in verbs.values())
    assert zoo("calibrate", *calibrate, "--steps", "4").code == 0
    assert zoo("evaluate", *evaluate).code == 0
    page = zoo("report", *report, "--part", "retention")
    assert page.code == 0
    assert "Its embeddings have a cosine of" in page.out
    assert "--teacher" not in page.err


def test_an_original_that_is_needed_is_asked_for(zoo, directory, texts, tmp_path):
    healed = str(tmp_path / "healed")
    assert zoo("calibrate", str(directory), str(texts), "-o", healed, "--steps", "2").code == 0
    for verb in (("evaluate", healed, str(texts)), ("calibrate", healed, str(texts), "-o", healed)):
        run = zoo(*verb)
        assert run.code == 1
        assert "pass --teacher DIR" in run.err
    run = zoo("report", healed, "--data", str(texts), "--part", "retention", "--markdown")
    assert run.code == 0
    assert "healed: calibration trained" in run.err
    assert "pass --teacher DIR" in run.err


@pytest.mark.slow
def test_two_processes_calibrate_as_one(zoo, directory, texts, tmp_path):
    def words(target):
        yield from ("calibrate", str(directory), str(texts), "-o", str(tmp_path / target))
        yield from ("--steps", "4", "--batch-size", "4", "--train", "mechanism")

    run = subprocess.run(
        [sys.executable, *LAUNCH, Path(sys.executable).with_name("zoo"), *words("two")],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("4 of 4 steps") == 1
    assert run.stderr.count("4/4") == 1
    assert zoo(*words("one")).code == 0
    states = [zoo_core.load(tmp_path / name).state_dict() for name in ("two", "one", "model")]
    trained = [name for name in states[0] if not torch.equal(states[1][name], states[2][name])]
    assert trained
    # Another order of summation moves AdamW visibly where gradients are nothing but rounding.
    apart, moved = (
        sum((states[0][name] - other[name]).square().sum() for name in trained).sqrt()
        for other in states[1:]
    )
    assert apart < 0.02 * moved


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
    assert max(map(len, run.out.splitlines())) <= 80
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
        (("--steps", "0"), 2, "below its lower bound 1"),
        (("--max-length", "99"), 1, "between 1 and 32"),
    ],
    ids=["choice", "bound", "length"],
)
def test_misuse(zoo, directory, texts, tmp_path, arguments, code, message):
    run = zoo("calibrate", str(directory), str(texts), "-o", str(tmp_path / "out"), *arguments)
    assert run.code == code
    assert message in run.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "path", "message"),
    [
        ("-o", "texts.txt/healed", "texts.txt is a file"),
        ("--resume", "texts.txt/state", "texts.txt is a file"),
        ("--picture", "nowhere/layers.png", "is no directory, make it first"),
        ("--picture", "layers.doc", "must end with one of ."),
    ],
    ids=["output", "state", "folder", "suffix"],
)
def test_where_nothing_can_be_written(zoo, directory, texts, tmp_path, option, path, message):
    target = [] if option == "-o" else ["-o", str(tmp_path / "out")]
    run = zoo("calibrate", str(directory), str(texts), *target, option, str(tmp_path / path))
    assert run.code == 2
    assert message in " ".join(run.err.split())
    assert "/30" not in run.err  # nothing was trained
    if option == "--picture":
        assert zoo("evaluate", str(directory), str(texts), option, str(tmp_path / path)).code == 2


def test_a_picture_that_cannot_be_drawn_does_not_cost_the_report(
    zoo, directory, texts, tmp_path, small_bert
):
    teacher = zoo_core.build("bert", **{**small_bert, "num_attention_heads": 1})
    zoo_core.save(teacher, tmp_path / "teacher")
    picture = ("--picture", str(tmp_path / "layers.png"), "--teacher", str(tmp_path / "teacher"))
    run = zoo("evaluate", str(directory), str(texts), *picture)
    assert run.code == 1
    assert "nothing to draw by layer" in run.err
    assert "cosine of embeddings" in run.out
