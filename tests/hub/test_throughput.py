"""Push, pull and load of about 400 MB against the plain libraries, in one run: `pytest -m bench`.

Best of three alternating pairs; every one into a fresh cache or repository.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants, snapshot_download
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertModel

import zoo_core as zoo
from zoo_core.hub.client import Client
from zoo_core.hub.reference import parse
from zoo_core.hub.snapshot import open_snapshot
from zoo_core.testing.hub import Hub

pytestmark = [pytest.mark.bench, pytest.mark.slow]

PAIRS = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("big") / "saved"
    zoo.save(zoo.build("bert", "linformer", seed=0), folder)
    assert sum(path.stat().st_size for path in folder.iterdir()) > 400e6
    return folder


def ratio(ours: Callable[[int], object], plain: Callable[[int], object], what: str) -> float:
    """The speed of ours relative to that of the plain libraries, best against best."""
    best = {"ours": float("inf"), "plain": float("inf")}
    for number in range(PAIRS):
        for name, work in (("ours", ours), ("plain", plain)):
            start = time.perf_counter()
            work(number)
            best[name] = min(best[name], time.perf_counter() - start)
    found = best["plain"] / best["ours"]
    seconds = f"ours {best['ours']:.2f} s, plain {best['plain']:.2f} s"
    print(f"{what}: {seconds}, speed {found:.2f}")  # noqa: T201
    return found


def test_push(api: HfApi, saved: Path) -> None:
    def ours(_: int) -> None:
        with Hub() as hub:  # A new one each time: content that a Hub has is not sent.
            zoo.push(saved, "zoo/big", token=hub.tokens.write, endpoint=hub.endpoint)

    def plain(_: int) -> None:
        with Hub() as hub:
            api = HfApi(endpoint=hub.endpoint, token=hub.tokens.write)
            api.create_repo("zoo/big")
            add = [CommitOperationAdd(path.name, str(path)) for path in saved.iterdir()]
            api.create_commit("zoo/big", add, commit_message="plain")

    assert ratio(ours, plain, "push") >= 0.9


def test_pull(hub: Hub, api: HfApi, saved: Path, tmp_path: Path, monkeypatch) -> None:
    ref = zoo.push(saved, "zoo/big", token=hub.tokens.write, endpoint=hub.endpoint)

    def fresh(name: str) -> None:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / name))

    def ours(number: int) -> None:
        fresh(f"ours{number}")
        client = Client(endpoint=hub.endpoint, token=hub.tokens.read)
        snapshot = open_snapshot(client, parse(ref))
        snapshot.fetch_weights()
        assert snapshot.discard_damaged() == []  # hashes every byte, as zoo.pull does on reading

    def plain(number: int) -> None:
        snapshot_download(
            "zoo/big",
            cache_dir=tmp_path / f"plain{number}",
            token=hub.tokens.read,
            endpoint=hub.endpoint,
        )

    assert ratio(ours, plain, "pull") >= 0.9


def test_load(saved: Path) -> None:
    def plain(_: int) -> nn.Module:
        model = BertModel(BertConfig())
        zoo.patch(model, "linformer")
        model.load_state_dict(load_file(saved / "model.safetensors"))
        return model

    assert ratio(lambda _: zoo.load(saved), plain, "load") >= 0.9
