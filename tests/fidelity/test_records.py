"""What a manifest and a card keep of a calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fidelity_lab as lab
import pytest
import torch

import zoo_core as zoo
from zoo_core.checkpoint import calibration

SHORT: dict[str, Any] = {"steps": 6, "batch_size": 4, "progress": False}


class TestUndone:
    """A run that made the model worse, so that its weights were put back."""

    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        model = lab.bert("local", options={"window": 16})
        zoo.calibrate(model, lab.tokens(), host_learning_rate=0.3, **SHORT)
        zoo.save(model, tmp_path)
        return tmp_path

    def test_manifest_and_card_say_so(self, saved: Path) -> None:
        record = json.loads((saved / "zoo.json").read_text())["calibration"]
        assert record["undone"] is True
        assert record["trained"] == 0
        assert "made it worse" in record["notes"][-1]
        card = (saved / "README.md").read_text()
        assert "that was undone, since it made the model worse." in card
        assert "Note, training made it worse (cosine of embeddings 0." in card
        assert "| before | after |" not in card

    def test_a_loaded_model_is_still_its_own_original(self, saved: Path) -> None:
        zoo.retention(zoo.load(saved), None, lab.tokens(8), resamples=5)


def test_notes_are_kept(tmp_path: Path) -> None:
    model = lab.bert()
    part = model.encoder.layer[0].attention.self.zoo
    part.register_parameter("spare", torch.nn.Parameter(torch.ones(2)))
    report = zoo.calibrate(model, lab.tokens(), patience=1, evaluate_every=1, **SHORT)
    record = report.summary()
    assert record["notes"] == list(report.notes)
    assert any("no gradient reached 1 tensor" in note for note in record["notes"])
    assert record["undone"] is False
    assert "no gradient reached 1 tensor" in calibration.markdown(record)


def test_notes_of_a_strangers_manifest_bring_no_markup() -> None:
    record = {"notes": ["see [this](http://a.b) <b>*now*</b>\n# head", 3], "undone": "yes"}
    assert calibration.notes(record) == ["see this(http//a.b) bnow/b head", ""]
    assert "undone" not in calibration.sentence(record)


def test_scores_that_are_no_numbers_are_null(tmp_path: Path) -> None:
    model = lab.bert()
    report = zoo.calibrate(model, lab.tokens(1) * 20, **SHORT)  # no two samples differ
    assert report.summary()["after"]["similarity_correlation"] is None
    zoo.save(model, tmp_path)
    assert "correlation" not in (tmp_path / "README.md").read_text()
