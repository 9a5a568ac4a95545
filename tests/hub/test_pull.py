"""zoo.pull through the real client from the loopback Hub: round trips, the cache, provenance."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
from pathlib import Path

import hub_models as models
import pytest
import torch
from huggingface_hub import HfApi, constants, scan_cache_dir, snapshot_download

import zoo_core as zoo
from zoo_core.errors import CheckpointError, HubError, UnknownName
from zoo_core.hub import verify
from zoo_core.testing.hub import Hub

REPO = "zoo/tiny"


@pytest.fixture
def ref(hub: Hub, api: HfApi) -> str:
    return zoo.push(models.bert(), REPO, token=hub.tokens.write, endpoint=hub.endpoint)


@pytest.fixture
def pull(hub: Hub, api: HfApi):
    def pull(ref: str = REPO, **how):
        return zoo.pull(ref, **{"token": hub.tokens.read, "endpoint": hub.endpoint, **how})

    return pull


def test_the_same_model_comes_back(ref: str, pull) -> None:
    model = pull(ref)
    models.assert_same(models.bert(), model)
    assert not model.training
    assert zoo.inspect(model).sites[0].mechanism == "zoo-core/linformer"


def test_load_takes_a_reference(hub: Hub, ref: str, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.tokens.read)
    models.assert_same(models.bert(), zoo.load(ref))


def test_a_timm_model_resolves_its_data_config(hub: Hub, api: HfApi, pull) -> None:
    import timm

    model = models.vit()
    zoo.push(model, "zoo/vit", token=hub.tokens.write, endpoint=hub.endpoint)
    pulled = pull("zoo/vit")
    models.assert_same(model, pulled)
    resolve = timm.data.resolve_model_data_config
    assert resolve(pulled) == resolve(model)
    assert resolve(pulled)["mean"]


def test_a_text_model_goes_into_a_pipeline(hub: Hub, api: HfApi, pull, tmp_path, monkeypatch):
    from transformers import AutoTokenizer, pipeline

    words = models.tokenizer(tmp_path / "words")
    zoo.push(models.bert(), REPO, tokenizer=words, token=hub.tokens.write, endpoint=hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", hub.tokens.read)
    model = pull()
    tokenizer = AutoTokenizer.from_pretrained(REPO)
    assert tokenizer("a plain word")["input_ids"] == words("a plain word")["input_ids"]
    (features,) = pipeline("feature-extraction", model=model, tokenizer=tokenizer)("a plain word")
    assert torch.tensor(features).shape == (5, 32)


def test_what_push_to_hub_of_transformers_wrote(hub: Hub, api: HfApi, pull, tmp_path) -> None:
    model = models.bert()
    model.save_pretrained(tmp_path / "saved")
    names = ("config.json", "model.safetensors")
    hub.create(REPO, {name: (tmp_path / "saved" / name).read_bytes() for name in names})
    pulled = pull()
    models.assert_same(model, pulled)
    folder = Path(constants.HF_HUB_CACHE, "models--zoo--tiny", "snapshots")
    (folder / pulled.zoo_source.commit / "zoo.json").write_text("{}")
    with pytest.raises(HubError, match=r"has a zoo\.json, the commit has none; delete it"):
        pull()


class TestRevision:
    def test_a_branch_is_resolved_once(self, hub: Hub, ref: str, pull) -> None:
        hub.log.clear()
        pull()
        assert len(hub.log.find("*/revision/*")) == 1
        commit = ref.partition("@")[2]
        for each in hub.log.find("*/resolve/*"):
            assert f"/resolve/{commit}/" in each.path

    def test_a_tag(self, hub: Hub, api: HfApi, ref: str, pull) -> None:
        api.create_tag(REPO, tag="v1.0")
        hub.commit(REPO, {"zoo.json": b"{}"})
        models.assert_same(models.bert(), pull(revision="v1.0"))

    def test_pinned_only(self, ref: str, pull) -> None:
        pull(ref, require_pin=True)
        with pytest.raises(HubError, match="require_pin refuses"):
            pull(f"{REPO}@main", require_pin=True)

    def test_two_revisions(self, pull) -> None:
        with pytest.raises(HubError, match="has a revision already"):
            pull(f"{REPO}@main", revision="other")


class TestCatalogue:
    @pytest.fixture
    def row(self, ref, tmp_path: Path, monkeypatch) -> Path:
        path = tmp_path / "registry.toml"
        path.write_text(f"schema = 1\n\n{ref.row}")
        monkeypatch.setenv("ZOO_REGISTRY", str(path))
        return path

    def test_by_name(self, hub: Hub, row: Path, pull) -> None:
        hub.commit(REPO, {"zoo.json": b"{}"})
        models.assert_same(models.bert(), pull("tiny"))

    def test_the_pinned_hashes_count(self, row: Path, pull) -> None:
        text = row.read_text()
        name, sha256 = next(
            (line.split('"zoo.json" = "')[1][:64], "0" * 64)
            for line in text.splitlines()
            if '"zoo.json"' in line
        )
        row.write_text(text.replace(name, sha256))
        with pytest.raises(HubError, match=r"zoo\.json is not the one that the catalogue pins"):
            pull("tiny")

    def test_an_unknown_name(self, row: Path, pull) -> None:
        with pytest.raises(UnknownName, match="did you mean 'tiny'"):
            pull("tinny")


class TestCache:
    def test_a_commit_in_the_cache_needs_no_request(self, hub: Hub, ref: str, pull) -> None:
        pull(ref)
        hub.log.clear()
        models.assert_same(models.bert(), pull(ref))
        assert not list(hub.log)

    @pytest.mark.parametrize("how", ["argument", "environment"])
    def test_offline(self, hub: Hub, ref: str, pull, how: str, monkeypatch) -> None:
        pull()
        hub.log.clear()
        if how == "environment":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        models.assert_same(models.bert(), pull(offline=how == "argument"))
        assert not list(hub.log)

    def test_cold(self, hub: Hub, ref: str, pull) -> None:
        hub.log.clear()
        for each in (REPO, ref):
            with pytest.raises(HubError, match=r"is not in the cache .* pull it once"):
                pull(each, offline=True)
        assert not list(hub.log)

    def test_partial(self, hub: Hub, ref: str, pull) -> None:
        pull(ref)
        for path in Path(constants.HF_HUB_CACHE).rglob("model.safetensors"):
            path.unlink()
        with pytest.raises(HubError, match="holds only a part"):
            pull(ref, offline=True)

    @pytest.mark.parametrize("name", ["model.safetensors", "zoo.json", "config.json"])
    def test_damage_is_found_and_healed(self, hub: Hub, ref: str, pull, name: str) -> None:
        pull(ref)
        (path,) = Path(constants.HF_HUB_CACHE).rglob(f"snapshots/*/{name}")
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        with pytest.raises((HubError, CheckpointError), match="deleted from the cache"):
            pull(ref, offline=True)
        models.assert_same(models.bert(), pull(ref))

    def test_other_tools_still_read_it(self, ref: str, pull) -> None:
        pull()
        found = scan_cache_dir(constants.HF_HUB_CACHE)
        (repo,) = found.repos
        assert (repo.repo_id, not found.warnings) == (REPO, True)
        assert {each.commit_hash for each in repo.revisions} == {ref.partition("@")[2]}

    def test_after_another_tool(self, hub: Hub, ref: str, pull) -> None:
        snapshot_download(REPO, endpoint=hub.endpoint, token=hub.tokens.read)
        hub.log.clear()
        pull()
        assert not hub.log.find("/storage/*")


class TestSource:
    def test_is_kept_and_shown(self, hub: Hub, ref: str, pull) -> None:
        model = pull()
        source = zoo.inspect(model).source
        assert (source["repo"], source["commit"], source["endpoint"], source["base"]) == (
            *ref.split("@"),
            hub.endpoint,
            None,
        )
        found = hub.repository(REPO).resolve("main")
        for name in ("zoo.json", "config.json", "model.safetensors"):
            data = hub.store.read(found.files[name])
            assert source["files"][name] == hashlib.sha256(data).hexdigest()
        json.dumps(zoo.inspect(model).as_dict())

    def test_travels_with_copies(self, ref: str, pull) -> None:
        model = pull()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other.zoo_source == model.zoo_source

    def test_is_none_of_a_model_built_here(self) -> None:
        assert zoo.inspect(models.bert()).source is None


class TestVerify:
    @pytest.fixture
    def check(self, hub: Hub, api: HfApi):
        return lambda ref=REPO: verify(ref, endpoint=hub.endpoint, token=hub.tokens.read)

    def test_all_is_well(self, ref: str, check) -> None:
        assert check() == []

    def test_a_damaged_file_is_named(self, ref: str, check) -> None:
        check()
        (path,) = Path(constants.HF_HUB_CACHE).rglob("snapshots/*/model.safetensors")
        path.write_bytes(path.read_bytes()[:-1] + b"\7")
        assert check() == [f"model.safetensors does not have the hash of {ref}"]
