"""push, pull, verify and registry on a loopback Hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zoo_core
from zoo_core import registry
from zoo_core.checkpoint import read_manifest
from zoo_core.testing.hub import Hub


@pytest.fixture
def saved(tmp_path: Path) -> str:
    tiny = registry.architecture("bert").adapter().tiny()
    model = zoo_core.build("bert", "linformer", options={"rank": 4}, seed=0, **tiny)
    zoo_core.save(model, tmp_path / "saved")
    return str(tmp_path / "saved")


def test_from_a_directory_to_the_hub_and_into_a_catalogue(
    zoo, hub: Hub, saved: str, tmp_path: Path, monkeypatch
) -> None:
    at = ("--endpoint", hub.endpoint)
    dry = zoo("push", saved, "zoo/tiny", "--dry-run", *at)
    assert (dry.code, len(list(hub.log))) == (0, 0)
    assert "model.safetensors" in dry.out
    pushed = json.loads(zoo("push", saved, "zoo/tiny", "--json", *at).out)
    assert pushed["ref"] == f"zoo/tiny@{hub.head('zoo/tiny')}"
    assert zoo("push", saved, "zoo/tiny", *at).out.startswith(pushed["ref"])

    assert pushed["ref"] in zoo("pull", "zoo/tiny", *at).out
    assert zoo("verify", pushed["ref"], *at).code == 0
    assert zoo("verify", saved).code == 0

    path = tmp_path / "registry.toml"
    assert zoo("registry", "add", "zoo/tiny", "--to", str(path), "--name", "mine", *at).code == 0
    again = zoo("registry", "add", "zoo/tiny", "--to", str(path), "--name", "mine", *at)
    assert again.code == 1
    assert f"{path} has a checkpoint 'mine' already, {pushed['ref']}; give" in again.err
    assert path.read_text().count("[checkpoints.mine]") == 1
    monkeypatch.setenv("ZOO_REGISTRY", str(path))
    checked = zoo("registry", "check", "--online", *at)
    assert (checked.code, "1 checkpoint" in checked.out) == (0, True), checked.out
    pinned = json.loads(zoo("pull", "mine", "--offline", "--require-pin", "--json", *at).out)
    assert pinned["source"]["commit"] == hub.head("zoo/tiny")


def test_a_checkpoint_on_the_hub_will_do_where_one_is_asked_for(
    zoo, default_hub: Hub, saved: str, tmp_path: Path
) -> None:
    zoo("push", saved, "zoo/tiny")
    fetched = len(list(default_hub.log))
    run = zoo("inspect", "zoo/tiny", "--json")
    assert json.loads(run.out) == read_manifest(saved).as_dict()
    assert not any(".safetensors" in str(entry) for entry in list(default_hub.log)[fetched:])

    tokens = [{"input_ids": [2, 3 + n, 5, 4 + n]} for n in range(20)]
    data = tmp_path / "tokens.jsonl"
    data.write_text("\n".join(map(json.dumps, tokens)))
    report = json.loads(zoo("evaluate", "zoo/tiny", str(data), "--json").out)
    assert report["samples"] == 20
    target = str(tmp_path / "healed")
    run = zoo("calibrate", "zoo/tiny", str(data), "-o", target, "--steps", "1", "--batch-size", "4")
    assert run.code == 0, run.err
    assert read_manifest(target).calibration["steps"] == 1


@pytest.mark.parametrize(
    "verb",
    ["inspect", "verify", "evaluate {} x", "calibrate {} x -o y", "diagnose --data x", "report"],
)
def test_what_is_no_checkpoint_is_told_alike(zoo, default_hub: Hub, verb: str, tmp_path):
    (tmp_path / "file").touch()
    for reference, code, message in (
        ("no/such/place", 2, "there is no directory 'no/such/place'; one on the Hub is written"),
        (str(tmp_path / "file"), 2, "is a file, not a directory"),
        ("nothing", 2, "there is no directory 'nothing'; "),
        ("no/thing", 1, "zoo: no/thing@main could not be looked up"),
    ):
        words = verb.replace("{}", reference).split()
        words += [] if reference in words else [reference]
        words += ["--data", __file__] if verb == "report" else []
        run = zoo(*words)
        assert run.code == code, run.err
        assert message in run.err.replace("\n", " ")


def test_registry_add_asks_nobody_about_what_cannot_be(zoo, hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "registry.toml"
    (tmp_path / "registry.toml.new").write_text("mine")
    for name, to, code, message in (
        ("bad name", path, 1, "'bad name' cannot be the name of a checkpoint; give --name a lower"),
        ("", tmp_path / "gone" / "x.toml", 2, "make it first"),
    ):
        how = ("--to", str(to), "--name", name, "--endpoint", hub.endpoint)
        run = zoo("registry", "add", "zoo/tiny", *how)
        assert (run.code, message in " ".join(run.err.split())) == (code, True), run.err
    run = zoo("registry", "add", f"zoo/{'x' * 70}", "--to", str(path), "--endpoint", hub.endpoint)
    assert (run.code, "give --name" in run.err) == (1, True), run.err
    assert not list(hub.log)
    assert not path.exists()
    assert (tmp_path / "registry.toml.new").read_text() == "mine"


def test_a_port_that_is_none_is_misuse(zoo, tmp_path: Path) -> None:
    run = zoo("hub", "serve", str(tmp_path), "--port", "99999")
    assert (run.code, "0<=x<=65535" in run.err) == (2, True), run.err


def test_push_refuses_a_config_that_stock_tools_would_run(zoo, hub: Hub, saved: str) -> None:
    config = json.loads(Path(saved, "config.json").read_text())
    del config["attn_implementation"]
    Path(saved, "config.json").write_text(json.dumps(config))
    run = zoo("push", saved, "zoo/tiny", "--endpoint", hub.endpoint)
    assert (run.code, "attn_implementation is missing, must be 'zoo'" in run.err) == (1, True)
    assert f"(`zoo build {saved} -o ANOTHER`)" in run.err
    assert not list(hub.log)
    assert zoo("build", saved, "-o", f"{saved}-anew").code == 0
    assert zoo("verify", f"{saved}-anew").code == 0


def test_verify_says_what_is_wrong(zoo, saved: str) -> None:
    weights = Path(saved, "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\7")
    run = zoo("verify", saved, "--json")
    assert run.code == 1
    assert "SHA-256" in json.loads(run.out)["problems"][0]


def test_registry_check_finds_a_preset_that_does_not_fit(zoo, tmp_path, monkeypatch) -> None:
    path = tmp_path / "registry.toml"
    path.write_text(
        'schema = 1\n[presets.bad]\nsummary = "x"\narchitecture = "bert"\nattention = "nothing"\n'
    )
    monkeypatch.setenv("ZOO_REGISTRY", str(path))
    run = zoo("registry", "check")
    assert run.code == 1
    assert "[presets.bad]" in run.out


def test_push_with_a_base_names_it_and_without_one_says_so(zoo, hub: Hub, saved: str) -> None:
    push = ("push", saved, "zoo/tiny", "--endpoint", hub.endpoint)
    named = json.loads(zoo(*push, "--base", "zoo/stock@main", "--dry-run", "--json").out)
    assert "base_model: zoo/stock\n" in named["card"]
    run = zoo(*push, "--attention-only")
    assert (run.code, "(--base)" in run.err) == (1, True), run.err
    assert not list(hub.log)
