"""A pulled model on the page: where it came from, and its own tokenizer for the texts."""

from __future__ import annotations

import hub_models
import pytest

import zoo_core as zoo

TEXTS = ["the cat sat", "a dog ran far", "the cat ran", "a dog sat", "the dog", "a cat sat far"]


@pytest.fixture
def pinned(hub, api, tmp_path):
    prepared = hub_models.tokenizer(tmp_path / "tokenizer")
    how = {"token": hub.tokens.write, "endpoint": hub.endpoint}
    return zoo.push(hub_models.bert(), "zoo/tiny", tokenizer=prepared, private=False, **how)


@pytest.mark.parametrize("given", ["reference", "model"])
def test_a_pulled_model_is_reported_on(hub, pinned, given):
    ref = str(pinned)
    model = ref if given == "reference" else zoo.pull(ref, endpoint=hub.endpoint)
    report = zoo.report.examine(model, TEXTS, parts=["retention", "maps"])
    assert report.retention is not None
    assert report.missing.keys() == {"speed", "diagnosis"}
    page = report.html()
    assert f"zoo/tiny at {hub.head('zoo/tiny')}" in page
    assert report.name == ("zoo/tiny" if given == "reference" else "BertModel, linformer")
