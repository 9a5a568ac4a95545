"""A calibrated checkpoint through every part of a report, with the original in a directory."""

from __future__ import annotations

import pytest
import torch
from page_reader import Page
from transformers import BertModel

import zoo_core as zoo


@pytest.fixture(scope="module")
def places(make, tokens, tmp_path_factory):
    """A stock model as transformers saves it, and a calibrated checkpoint made from it."""
    home = tmp_path_factory.mktemp("calibrated")
    stock = make("bert", None)
    assert type(stock) is BertModel
    stock.save_pretrained(home / "stock")
    model = zoo.build("bert", "linformer", pretrained=str(home / "stock"), seed=0)
    zoo.calibrate(model, 2 * tokens, steps=2, batch_size=4)
    zoo.save(model, home / "mine")
    return home


def test_with_full_effort(places, tokens):
    report = zoo.report.examine(
        places / "mine", tokens, teacher=places / "stock", effort="full", batch_size=6
    )
    assert report.missing == {}
    assert report.diagnosis.lipschitz
    assert report.diagnosis.sensitivity
    page = Page(report.html())
    assert page.problems == []
    for text in ("What the calibration won", "Jacobian norm", "sensitivity", "rollout"):
        assert text in page.text


def test_without_the_original_the_rest_is_measured(places, tokens):
    report = zoo.report.examine(places / "mine", tokens, parts=["retention", "maps"])
    assert "pass the original as teacher" in report.missing["retention"]
    assert report.maps is not None


@pytest.mark.parametrize("place", ["stock", "mine"])
def test_an_original_is_read_from_stock_weights_or_a_checkpoint(places, place):
    from zoo_core.fidelity.originals import original_in

    pupil = zoo.load(places / "mine")
    found = original_in(places / place, pupil)
    assert (
        zoo.inspect(found)
        .sites[0]
        .mechanism.endswith("linformer" if place == "mine" else "softmax")
    )
    if place == "stock":
        wanted = BertModel.from_pretrained(places / "stock").state_dict()
        assert all(torch.equal(found.state_dict()[name], wanted[name]) for name in wanted)


def test_an_original_that_is_none(places, tmp_path):
    from zoo_core.fidelity.originals import original_in

    with pytest.raises(zoo.ZooError):
        original_in(tmp_path, zoo.load(places / "mine"))
