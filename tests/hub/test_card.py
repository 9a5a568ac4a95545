"""The card: what the Hub reads of it, what people read, and what of an existing one is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hub_models as models
import pytest
from huggingface_hub import HfApi, ModelCard

import zoo_core as zoo
from zoo_core.checkpoint import Manifest
from zoo_core.errors import HubError, ZooError
from zoo_core.hub.card import card, completed, metadata, pipeline_tag, speed_section
from zoo_core.testing.hub import Hub


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return zoo.save(models.bert(), tmp_path_factory.mktemp("card") / "saved")


@pytest.fixture
def about(manifest: Manifest) -> dict[str, object]:
    return metadata(manifest, license="mit", base_model="google-bert/bert-base-uncased")


def test_the_metadata_is_what_the_hub_reads(manifest: Manifest, about) -> None:
    data = ModelCard(card(manifest, "zoo/tiny", about, set())).data
    assert data.library_name == "zoo-core"
    assert data.tags == ["zoo-core", "attention", "linformer", "bert"]
    assert (data.license, data.pipeline_tag) == ("mit", "feature-extraction")
    assert data.base_model == "google-bert/bert-base-uncased"
    assert data.to_dict()["base_model_relation"] == "finetune"


def test_it_says_how_to_install_and_load(manifest: Manifest, about) -> None:
    text = card(manifest, "zoo/tiny", about, {"tokenizer.json"})
    assert "pip install zoo-core\n" in text
    assert 'model = zoo.pull("zoo/tiny")' in text
    assert "import zoo_core as zoo\nfrom transformers import AutoTokenizer\n\nmodel = " in text
    assert 'AutoTokenizer.from_pretrained("zoo/tiny")' in text
    assert "| 0, 1 | zoo-core/linformer | rank=4" in text
    assert '`SentenceTransformer` refuse it (`attn_implementation="zoo"`' in text
    stock = card(replace(manifest, attention=()), "zoo/tiny", about, set())
    assert "refuse it" not in stock


CALIBRATION = {
    "data": "text", "train": "attention", "steps": 300, "seconds": 61.5,
    "before": {"embedding_cosine": 0.7}, "after": {"embedding_cosine": 0.96},
    "floor": {"embedding_cosine": 0.47},
}  # fmt: skip


def test_what_a_calibration_measured_is_in_the_model_index_beside_the_floor(manifest) -> None:
    calibrated = replace(manifest, calibration=CALIBRATION)
    text = card(calibrated, "zoo/tiny", metadata(calibrated), set())
    [found] = ModelCard(text).data.eval_results[:1]
    assert found.task_type == "feature-extraction"
    values = {one.metric_type: one.metric_value for one in ModelCard(text).data.eval_results}
    assert values == {"embedding_cosine": 0.96, "embedding_cosine_floor": 0.47}
    assert "| cosine of embeddings | 0.700 | 0.960 | 0.470 |" in text


def test_nothing_measured_is_no_model_index(manifest, about) -> None:
    assert "model-index" not in about


def test_a_speed_table_comes_from_a_saved_measurement(manifest, about, tmp_path: Path) -> None:
    from zoo_core import bench

    effort = bench.Effort(rounds=3, seconds=0.001)
    rows = list(bench.measure(["linformer"], bench.sweep(length=[16]), effort=effort, peers=False))
    bench.save(tmp_path / "speed.json", rows, bench.describe_machine())
    text = card(manifest, "zoo/tiny", about, set(), speed_section(tmp_path / "speed.json"))
    assert "## Speed" in text
    assert "| `linformer` |" in text
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ZooError, match="was not written by `zoo bench --save`"):
        zoo.push(models.bert(), "zoo/tiny", speed=tmp_path / "other.json", dry_run=True)


@pytest.mark.parametrize(
    ("model_class", "tag"),
    [
        ("BertForSequenceClassification", "text-classification"),
        ("BertForMaskedLM", "fill-mask"),
        ("ViTForImageClassification", "image-classification"),
        ("BertModel", "feature-extraction"),
    ],
)
def test_pipeline_tags(manifest: Manifest, model_class: str, tag: str) -> None:
    assert pipeline_tag(replace(manifest, model_class=model_class)) == tag


class TestExisting:
    def test_text_and_metadata_stay(self, about) -> None:
        old = "---\nlicense: apache-2.0\ntags:\n- mine\n---\n# Mine\n\n--- no block ---\n"
        new = ModelCard(completed(old, about, "x"))
        assert new.text.lstrip() == "# Mine\n\n--- no block ---\n"
        assert new.data.license == "apache-2.0"
        assert new.data.tags == ["mine", "zoo-core", "attention", "linformer", "bert"]
        assert new.data.library_name == "zoo-core"

    def test_nothing_to_add_changes_no_byte(self, manifest: Manifest, about) -> None:
        text = card(manifest, "zoo/tiny", about, set()) + "\r\n# odd  \n"
        assert completed(text, about, "x") == text

    def test_without_metadata(self, about) -> None:
        new = completed("Only words.\n", about, "x")
        assert new.endswith("Only words.\n")
        assert ModelCard(new).data.library_name == "zoo-core"

    @pytest.mark.parametrize("text", ["---\n- a\n- b\n---\n", "---\n[: {\n---\n"])
    def test_broken_metadata_is_refused(self, about, text: str) -> None:
        with pytest.raises(HubError, match="the metadata of x cannot be read"):
            completed(text, about, "x")

    def test_on_the_hub(self, hub: Hub, api: HfApi, tmp_path: Path) -> None:
        hub.create("zoo/tiny", {"README.md": b"---\nlicense: mit\n---\nTheir words.\n"})
        where = {"token": hub.tokens.write, "endpoint": hub.endpoint}
        zoo.push(models.bert(), "zoo/tiny", license="apache-2.0", **where)
        loaded = ModelCard(
            Path(api.hf_hub_download("zoo/tiny", "README.md")).read_text(encoding="utf-8")
        )
        assert loaded.text.strip() == "Their words."
        assert loaded.data.license == "mit"
        assert "linformer" in loaded.data.tags
        assert not zoo.push(models.bert(), "zoo/tiny", **where).changed
