"""zoo.push through the real client into the loopback Hub."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import hub_models as models
import pytest
import torch
from huggingface_hub import HfApi

import zoo_core as zoo
from zoo_core.checkpoint import layout
from zoo_core.errors import CheckpointError, HubError
from zoo_core.hub.pushing import PushPlan
from zoo_core.hub.reference import PinnedRef
from zoo_core.testing.hub import Hub

REPO = "zoo/tiny"


@pytest.fixture
def push(hub: Hub, api: HfApi):
    def push(model=None, repo: str = REPO, **how) -> PinnedRef:
        model = models.bert() if model is None else model
        return zoo.push(model, repo, token=hub.tokens.write, endpoint=hub.endpoint, **how)

    return push


def files(hub: Hub, repo: str = REPO, revision: str = "main") -> dict[str, bytes]:
    found = hub.repository(repo)
    commit = found.resolve(revision)
    return {name: hub.store.read(file) for name, file in commit.files.items()}


class TestFirst:
    def test_one_commit_on_a_private_repository(self, hub: Hub, api: HfApi, push) -> None:
        ref = push()
        assert ref == f"{REPO}@{hub.head(REPO)}"
        assert (ref.repo, ref.commit, ref.changed) == (REPO, hub.head(REPO), True)
        assert api.model_info(REPO).private
        assert len(hub.log.find("*/commit/*")) == 1
        assert set(files(hub)) == {
            ".gitattributes",
            "README.md",
            "config.json",
            "model.safetensors",
            "zoo.json",
        }

    def test_public_where_asked(self, hub: Hub, api: HfApi, push) -> None:
        push(private=False)
        assert not api.model_info(REPO).private

    def test_the_row_is_one_of_a_catalogue(self, hub: Hub, push, tmp_path: Path) -> None:
        from zoo_core import catalogue

        ref = push()
        path = tmp_path / "registry.toml"
        path.write_text(f"schema = 1\n\n{ref.row}")
        row = catalogue.parse(path).checkpoints["tiny"]
        assert (row.repo, row.revision, row.attention) == (REPO, ref.commit, "zoo-core/linformer")
        assert set(row.files) == {"model.safetensors", "zoo.json"}
        for name, sha256 in row.files.items():
            assert hashlib.sha256(files(hub)[name]).hexdigest() == sha256
        assert tomllib.loads(ref.row)["checkpoints"]["tiny"]["repo"] == REPO

    def test_to_another_branch(self, hub: Hub, push) -> None:
        main = push().commit
        ref = push(models.bert("softmax"), revision="other")
        assert (hub.head(REPO), hub.head(REPO, "other")) == (main, ref.commit)

    def test_shards_with_their_index(self, hub: Hub, push) -> None:
        ref = push(max_shard_size="40KB")
        names = {name for name in files(hub) if layout.is_weights(name)}
        assert len(names) > 2
        assert layout.INDEX in files(hub)
        models.assert_same(
            models.bert(), zoo.pull(ref, endpoint=hub.endpoint, token=hub.tokens.read)
        )

    def test_a_saved_directory(self, hub: Hub, push, tmp_path: Path) -> None:
        zoo.save(models.bert(), tmp_path / "saved", tokenizer=models.tokenizer(tmp_path / "words"))
        (tmp_path / "saved" / "secret.txt").write_text("not yours")
        push(tmp_path / "saved")
        assert "secret.txt" not in files(hub)
        assert "tokenizer.json" in files(hub)
        assert f'zoo.pull("{REPO}")' in files(hub)["README.md"].decode()

    def test_a_saved_directory_with_a_card_of_its_own(self, hub: Hub, push, tmp_path: Path) -> None:
        zoo.save(models.bert(), tmp_path / "saved")
        (tmp_path / "saved" / "README.md").write_text("My own words.\n")
        push(tmp_path / "saved")
        assert files(hub)["README.md"].decode().endswith("My own words.\n")
        assert "library_name: zoo-core" in files(hub)["README.md"].decode()

    def test_of_a_directory_only_the_client_hashes_the_weights(
        self, push, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        zoo.save(models.bert(), tmp_path / "saved")
        hashed = []
        digest = hashlib.file_digest

        def file_digest(file, *how):
            hashed.append(str(getattr(file, "name", "")))
            return digest(file, *how)

        monkeypatch.setattr(hashlib, "file_digest", file_digest)
        push(tmp_path / "saved")
        push()
        assert not [name for name in hashed if name.endswith(".safetensors")]

    def test_a_directory_that_is_written_to_meanwhile_is_told(
        self, hub: Hub, push, tmp_path: Path
    ) -> None:
        zoo.save(models.bert(), tmp_path / "saved")
        hub.faults.meanwhile(
            lambda: zoo.save(models.bert(seed=1), tmp_path / "saved"), path="*/commit/*"
        )
        with pytest.raises(HubError, match=r"model\.safetensors .*changed on the disk during"):
            push(tmp_path / "saved")

    def test_the_base_stands_in_the_card(self, hub: Hub, push) -> None:
        push(base="google-bert/bert-base-uncased@main")
        text = files(hub)["README.md"].decode()
        assert "base_model: google-bert/bert-base-uncased\nbase_model_relation: finetune" in text

    def test_a_damaged_directory_is_refused_before_any_request(
        self, hub: Hub, push, tmp_path: Path
    ) -> None:
        zoo.save(models.bert(), tmp_path / "saved")
        path = tmp_path / "saved" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
        with pytest.raises(CheckpointError, match="does not have the SHA-256"):
            push(tmp_path / "saved")
        assert not list(hub.log)


class TestAgain:
    def test_the_same_is_no_commit(self, hub: Hub, push) -> None:
        first = push()
        hub.log.clear()
        again = push()
        assert (again, again.changed) == (first, False)
        assert not [each for each in hub.log if each.method != "GET" and each.method != "HEAD"]

    def test_other_weights_replace_the_old_shards(self, hub: Hub, push) -> None:
        push(max_shard_size="40KB")
        push(models.bert(seed=1))
        assert [name for name in files(hub) if name.startswith("model")] == ["model.safetensors"]
        assert len(hub.log.find("*/commit/*")) == 2

    def test_files_that_are_not_ours_stay(self, hub: Hub, push) -> None:
        push()
        hub.commit(REPO, {"notes.txt": b"keep"})
        push(models.bert(seed=1))
        assert files(hub)["notes.txt"] == b"keep"

    def test_visibility_stays(self, hub: Hub, api: HfApi, push) -> None:
        hub.create(REPO)
        push()
        assert not api.model_info(REPO).private


class TestAttention:
    """holds="attention": only what the mechanism added travels."""

    @pytest.fixture
    def base(self, hub: Hub, api: HfApi, tmp_path: Path) -> str:
        models.stock(tmp_path / "base")
        hub.create(
            "zoo/base",
            {
                name: (tmp_path / "base" / name).read_bytes()
                for name in ("config.json", "model.safetensors")
            },
        )
        return str(tmp_path / "base")

    def test_round_trip(self, hub: Hub, base: str, push) -> None:
        model = zoo.build("bert", "linformer", options={"rank": 4}, pretrained=base).eval()
        ref = push(model, holds="attention", base="zoo/base")
        assert len(files(hub)["model.safetensors"]) < 20_000
        pulled = zoo.pull(ref, endpoint=hub.endpoint, token=hub.tokens.read)
        models.assert_same(model, pulled)
        assert pulled.zoo_source.base == f"zoo/base@{hub.head('zoo/base')}"
        hub.commit("zoo/base", {"config.json": b"{}"})
        zoo.pull(ref, endpoint=hub.endpoint, token=hub.tokens.read)

    def test_of_a_saved_directory_with_its_tokenizer_and_card(
        self, hub: Hub, base: str, push, tmp_path: Path
    ) -> None:
        model = zoo.build("bert", "linformer", options={"rank": 4}, pretrained=base).eval()
        zoo.save(model, tmp_path / "saved", tokenizer=models.tokenizer(tmp_path / "words"))
        (tmp_path / "saved" / "README.md").write_text("My own words.\n")
        ref = push(tmp_path / "saved", holds="attention", base="zoo/base")
        assert len(files(hub)["model.safetensors"]) < 20_000
        assert "tokenizer.json" in files(hub)
        assert files(hub)["README.md"].decode().endswith("My own words.\n")
        pulled = zoo.pull(ref, endpoint=hub.endpoint, token=hub.tokens.read)
        models.assert_same(model, pulled)

    def test_a_saved_directory_that_is_only_attention_already(
        self, hub: Hub, base: str, push, tmp_path: Path
    ) -> None:
        model = zoo.build("bert", "linformer", options={"rank": 4}, pretrained=base).eval()
        sha256 = hashlib.sha256(files(hub, "zoo/base")["model.safetensors"]).hexdigest()
        origin = {"repo": "zoo/base", "commit": hub.head("zoo/base"), "sha256": sha256}
        zoo.save(model, tmp_path / "saved", holds="attention", base=origin)
        first = push(tmp_path / "saved", holds="attention")
        assert not push(tmp_path / "saved").changed
        pulled = zoo.pull(first, endpoint=hub.endpoint, token=hub.tokens.read)
        models.assert_same(model, pulled)

    def test_a_trained_base_is_refused(self, hub: Hub, base: str, push) -> None:
        model = zoo.build("bert", "linformer", options={"rank": 4}, pretrained=base)
        with torch.no_grad():
            model.pooler.dense.bias.add_(1)
        with pytest.raises(CheckpointError, match=r"'pooler.dense.bias' is not as in the base"):
            push(model, holds="attention", base="zoo/base")

    def test_without_a_base(self, hub: Hub, push) -> None:
        with pytest.raises(CheckpointError, match='needs base="owner/name@revision"'):
            push(holds="attention")


class TestDryRun:
    def test_lists_files_sizes_and_card_without_a_request(self, hub: Hub, push) -> None:
        plan = push(dry_run=True, license="mit")
        assert isinstance(plan, PushPlan)
        assert (plan.repo, plan.revision, plan.private) == (REPO, "main", True)
        assert set(plan.files) == {"README.md", "config.json", "model.safetensors", "zoo.json"}
        assert plan.files["README.md"] == len(plan.card.encode())
        assert "license: mit" in plan.card
        assert not list(hub.log)


class TestRefused:
    """Before any request."""

    @pytest.mark.parametrize(
        ("repo", "how", "says"),
        [
            ("tiny", {}, "not a repository's name"),
            ("zoo/../tiny", {}, "not a repository's name"),
            ("zoo/tiny", {"revision": "../x"}, "not a revision"),
            ("zoo/tiny", {"revision": "0" * 40}, "name a branch"),
        ],
    )
    def test_names(self, hub: Hub, push, repo: str, how: dict[str, str], says: str) -> None:
        with pytest.raises(HubError, match=says):
            push(repo=repo, **how)
        assert not list(hub.log)

    def test_a_tokenizer_with_code(self, hub: Hub, push) -> None:
        class Coded:
            def save_pretrained(self, folder: str) -> None:
                Path(folder, "tokenization_mine.py").write_text("import os")

        with pytest.raises(CheckpointError, match=r"wrote tokenization_mine\.py"):
            push(tokenizer=Coded())
        assert not list(hub.log)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ('{"auto_map": {"AutoTokenizer": "x.Y"}}', "names code to run"),
            ('{"a": "hf_' + "a" * 34 + '"}', "looks like a token"),
        ],
    )
    def test_companions(self, hub: Hub, push, text: str, says: str) -> None:
        class Hostile:
            def save_pretrained(self, folder: str) -> None:
                Path(folder, "tokenizer_config.json").write_text(text)

        with pytest.raises(CheckpointError, match=says) as caught:
            push(tokenizer=Hostile())
        assert "hf_a" not in str(caught.value)
        assert not list(hub.log)

    def test_a_model_that_is_not_finite(self, hub: Hub, push) -> None:
        tiny = zoo.build("bert", seed=0, **models.TINY)
        with torch.no_grad():
            tiny.pooler.dense.bias.fill_(float("nan"))
        with pytest.raises(CheckpointError, match="NaN"):
            push(tiny)
        assert not list(hub.log)
