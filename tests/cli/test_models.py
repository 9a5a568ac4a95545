"""The verbs that plan, build and read models: `why`, `build`, `inspect`."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import BertConfig, BertModel

import zoo_core
from zoo_core.cli import output
from zoo_core.cli.output import Cell

SMALL = [
    f"--set={key}={value}"
    for key, value in {
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 50,
    }.items()
]


def test_why_says_yes(zoo):
    run = zoo("why", "bert", "softmax", *SMALL)
    assert (run.code, run.out) == (0, "yes  softmax fits bert\n")


def test_why_says_from_where_on_it_pays(zoo):
    run = zoo("why", "bert", "synthesizer", *SMALL)  # quadratic: it cannot
    assert run.code == 0
    note = "synthesizer does not pay here: it is slower than fused softmax"
    assert run.out.startswith(f"yes  synthesizer fits bert\nnote  {note}")
    answer = json.loads(zoo("why", "bert", "synthesizer", *SMALL, "--json").out)
    assert (answer["fits"], answer["reasons"]) == (True, [])
    assert "(measured with default options on" in answer["notes"][0]


def test_why_says_every_reason_and_exits_with_1(zoo):
    run = zoo("why", "bert", "linformer", *SMALL, "--set", "is_decoder=true")
    assert run.code == 1
    assert run.out.startswith("no  layers 0-2: linformer has no causal form")
    run = zoo("why", "bert", "linformer", *SMALL, "--option", "rank=0", "--json")
    assert run.code == 1
    answer = json.loads(run.out)
    assert answer["fits"] is False
    assert "rank=0 is below its lower bound 1" in answer["reasons"][0]


@pytest.fixture
def built(zoo, tmp_path):
    directory = tmp_path / "model"
    run = zoo(
        *("build", "bert", "--attention", "linformer", "--option", "rank=8", "--layers", "0-1"),
        *("--max-length", "32", "--seed", "7", "-o", str(directory)),
        *SMALL,
    )
    assert run.code == 0, run.err
    return directory, run


def test_inspect_prints_nothing_that_a_terminal_obeys(zoo, built):
    directory, _ = built
    path = directory / "zoo.json"
    data = json.loads(path.read_text())
    data["calibration"] = {"data": "x\x1b[2Jy", "steps": 1}
    path.write_text(json.dumps(data))
    run = zoo("inspect", str(directory))
    assert (run.code, "\x1b" in run.out) == (0, False)
    path.write_text(json.dumps({**data, "created_with": {"torch\x1b[31m": "2"}}))
    run = zoo("inspect", str(directory))
    assert (run.code, "\x1b" in run.err) == (1, False)
    assert "control characters" in run.err


def test_tables_print_nothing_that_a_terminal_obeys(capsys):
    output.table(["a\x1b[31m"], [["b\x07\x9b2J"], [Cell("c\rd", "red")]])
    output.say("e\x1b]0;f", Cell("\x08g", bold=True))
    assert not set(capsys.readouterr().out) & set("\x1b\x07\x9b\r\x08")


def test_build_writes_what_zoo_build_builds(built):
    directory, run = built
    assert "0-1     linformer  rank=8" in run.out
    assert run.out.endswith(f"written to {directory}\n")
    model = zoo_core.load(directory)
    again = zoo_core.build(
        "bert",
        "linformer",
        options={"rank": 8},
        layers="0-1",
        max_length=32,
        seed=7,
        num_hidden_layers=3,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=50,
    )
    state = again.state_dict()
    assert model.state_dict().keys() == state.keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=0)


def test_a_build_that_fails_writes_nothing(zoo, tmp_path):
    directory = tmp_path / "model"
    run = zoo("build", "bert", "--attention", "linfomer", "-o", str(directory), *SMALL)
    assert run.code == 1
    assert "did you mean 'linformer'" in run.err
    assert not directory.exists()


def test_build_from_pretrained_weights_in_a_directory(zoo, tmp_path):
    config = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 50}
    stock = BertModel(BertConfig(**config))
    stock.save_pretrained(tmp_path / "stock")
    run = zoo(
        *("build", "bert", "--attention", "local", "--pretrained", str(tmp_path / "stock")),
        *("-o", str(tmp_path / "patched"), "--json"),
    )
    assert run.code == 0, run.err
    assert json.loads(run.out)["attention"][0]["mechanism"] == "local"
    loaded = zoo_core.load(tmp_path / "patched").state_dict()
    name = "embeddings.word_embeddings.weight"
    torch.testing.assert_close(loaded[name], stock.state_dict()[name], rtol=0, atol=0)


def test_inspect_reads_the_manifest(zoo, built):
    directory, _ = built
    (directory / "model.safetensors").write_bytes(b"")
    run = zoo("inspect", str(directory))
    assert run.code == 0
    assert run.out.startswith("BertModel  zoo-core/bert, transformers ")
    [line] = [line for line in run.out.splitlines() if line.startswith("0-1")]
    assert "linformer" in line
    assert "zoo-core" in run.out
    manifest = json.loads(zoo("inspect", str(directory), "--json").out)
    assert manifest["attention"][0]["layers"] == [0, 1]


def test_inspect_reads_what_save_pretrained_wrote(zoo, built, tmp_path):
    zoo_core.load(built[0]).save_pretrained(tmp_path / "hf")
    run = zoo("inspect", str(tmp_path / "hf"))
    assert run.code == 0, run.err
    assert "0-1     linformer" in run.out


def test_inspect_marks_a_plugin_that_is_not_installed(zoo, built):
    directory, _ = built
    path = directory / "zoo.json"
    path.write_text(path.read_text().replace('"zoo-core"', '"zoo-gone"'))
    run = zoo("inspect", str(directory))
    assert run.code == 0, run.err
    assert "(not installed)" in " ".join(run.out.split())


def test_inspect_of_what_is_no_checkpoint(zoo, built, tmp_path):
    shutil.rmtree(built[0])
    built[0].mkdir()
    assert "has no zoo.json" in zoo("inspect", str(built[0])).err
