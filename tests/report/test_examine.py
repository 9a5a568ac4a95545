"""What a report finds out about a model, and what it says where it cannot."""

from __future__ import annotations

import json

import pytest
import torch

import zoo_core as zoo
from zoo_core import ZooError
from zoo_core.report import measuring
from zoo_core.report.records import PATCHED, STOCK


def test_every_part_of_a_text_model_is_measured(text_report):
    assert text_report.missing == {}
    assert text_report.samples == 12
    assert {row.name for row in text_report.speed.rows} == {STOCK, PATCHED}
    assert len(text_report.speed.lengths) == 3
    assert [one.path for one in text_report.maps.layers] == [
        s.path for s in text_report.model.sites
    ]
    assert all(score.mechanism == "local" for score in text_report.diagnosis.attention)


def test_a_map_is_the_mean_of_the_heads_without_padding(make, tokens):
    model, sample = make("bert"), tokens[0]["input_ids"]
    batch = {"input_ids": torch.cat([sample, torch.zeros(5, dtype=torch.long)])[None]}
    batch["attention_mask"] = (torch.arange(len(sample) + 5) < len(sample)).long()[None]
    [first, *_] = zoo.report.seeing.see(model, batch).layers
    wanted = zoo.attention_map(model, batch, layers=0)[first.path][0].mean(0)
    wanted = wanted[: len(sample), : len(sample)]
    torch.testing.assert_close(torch.tensor(first.cells), wanted)
    assert first.prefix == pytest.approx(float(wanted[:, 0].sum() / wanted.sum()), rel=1e-5)


def test_long_inputs_are_joined_into_groups(make):
    batch = {"input_ids": torch.randint(5, 99, (1, 31))}
    [first, *_] = zoo.report.seeing.see(make("bert"), batch, groups=8).layers
    assert (first.queries, first.keys) == (31, 31)
    assert [len(first.cells), len(first.cells[0])] == [8, 8]


def test_an_image_model_shows_what_its_class_token_sees(image_report):
    [first, *_] = image_report.maps.layers
    rows, columns = len(first.over_image), len(first.over_image[0])
    assert rows * columns == first.keys - 1  # the class token itself


def test_the_model_is_as_it_was(make, tokens):
    model = make("bert", "linformer").train()
    model.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zoo.report.examine(model, tokens, parts=["speed", "maps"])
    assert model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_layer_without_a_map_says_so_and_the_others_are_shown(make, tokens):
    undefined = next(
        one.name
        for one in zoo.mechanisms()
        if not (one.supports.weights or one.supports.linear_in_v) and not zoo.why("bert", one.name)
    )
    model = make("bert", {"0": undefined, "1": "local"})
    report = zoo.report.examine(model, tokens, parts=["maps"])
    first, second = report.maps.layers
    assert "has no attention map" in first.undefined
    assert second.undefined is None
    assert report.maps.rollout is None
    [text] = report.maps.undefined
    assert text == f"{first.path}: {first.undefined}"
    assert text in report.html().replace("&#39;", "'")


@pytest.mark.parametrize("family", ["bert", "deit"])
def test_the_rollout_follows_all_layers(make, tokens, images, family):
    model = make(family)
    [sample, *_] = tokens if family == "bert" else images
    batch = (
        {k: v[None] for k, v in sample.items()}
        if family == "bert"
        else {"pixel_values": sample[None]}
    )
    found = zoo.report.seeing.see(model, batch).rollout
    maps = zoo.attention_map(model, batch.get("pixel_values", batch))
    wanted = zoo.diagnose.rollout(maps)[0]
    torch.testing.assert_close(torch.tensor(found.cells), wanted)
    assert found.mechanism == "all layers"
    if family == "deit":
        seen = torch.tensor(found.over_image).flatten()
        torch.testing.assert_close(seen, wanted[0, 1:])


def test_what_cannot_be_measured_is_said_in_words(make, tokens, monkeypatch):
    def broken(*_, **__):
        raise ValueError("out of ideas")

    monkeypatch.setattr(measuring, "retention", broken)
    report = zoo.report.examine(make("bert", None), tokens, parts=["retention", "speed"])
    assert report.retention is report.speed is report.maps is None
    assert report.missing["retention"] == "it failed with ValueError: out of ideas"
    assert "stock attention" in report.missing["speed"]
    assert report.missing["maps"] == "not asked for"
    assert "Not measured: it failed with ValueError: out of ideas." in report.html()
    told = " ".join(report.warnings)
    assert "speed could not be measured" in told
    assert "maps" not in told


def test_ctrl_c_keeps_what_is_done(make, tokens, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "see", interrupted)
    report = zoo.report.examine(make("bert"), tokens, parts=["retention", "maps", "diagnosis"])
    assert report.retention is not None
    assert report.missing["diagnosis"] == "interrupted before it was done"
    assert report.interrupted
    with pytest.raises(KeyboardInterrupt):
        zoo.report.examine(make("bert"), tokens, parts=["maps"])


def test_data_that_cannot_be_used_is_refused_at_once(make, tokens):
    with pytest.raises(ZooError, match="too few"):
        zoo.report.examine(make("bert"), tokens[:2])
    with pytest.raises(ZooError, match="no part 'speeed'"):
        zoo.report.examine(make("bert"), tokens, parts=["speeed"])


def test_json_has_no_nan(text_report):
    answer = json.loads(json.dumps(text_report.as_dict(), allow_nan=False))
    assert answer["retention"]["scores"]["embedding_cosine"]["stock"] == 1
    assert {row["name"] for row in answer["speed"]["rows"]} == {"stock", "patched"}
    assert answer["warnings"] == text_report.warnings


def test_warnings_are_in_plain_words(text_report):
    assert "only 12 samples were measured; the intervals are wide" in text_report.warnings


def test_compare_puts_models_side_by_side(make, tokens):
    seen = []
    found = zoo.compare(
        {"window": make("bert"), "floor": lambda: make("bert", "uniform"), "broken": object()},
        tokens,
        parts=["retention", "maps"],
        on_report=lambda report: seen.append(report.name),
    )
    assert seen == [report.name for report in found.reports] == ["window", "floor"]
    assert "not a model" in found.failed["broken"]
    assert "attention" in str(found).splitlines()[0]
    rows = {line.split()[0]: line.split() for line in str(found).splitlines()[1:]}
    assert rows["floor"][1] == "uniform"
    assert rows["floor"][2] == rows["floor"][6]  # what uniform attention keeps is the floor


def test_ctrl_c_ends_a_comparison_and_keeps_what_is_done(make, tokens):
    def interrupt(text):
        if text.startswith("second: batch"):
            raise KeyboardInterrupt

    parts = ["maps", "diagnosis"]
    models = {name: make("bert") for name in ("first", "second", "third", "fourth")}
    found = zoo.compare(models, tokens, parts=parts, progress=interrupt)
    first, second = found.reports
    assert not first.interrupted
    assert second.interrupted
    assert second.maps is not None
    assert second.missing["diagnosis"] == "interrupted before it was done"
    assert list(found.failed) == ["third", "fourth"]
    # The next run goes on from there.
    again = zoo.compare({**models, "first": first}, tokens, parts=parts, limit=8)
    assert again.reports[0] == first
    assert [report.name for report in again.reports] == list(models)


def test_models_of_the_same_name_are_told_apart(make, tokens):
    found = zoo.compare([make("bert"), make("bert")], tokens, parts=["maps"])
    first, second = (report.name for report in found.reports)
    assert second == f"{first} (2)"


def test_compare_without_any_model_that_works(make, tokens):
    with pytest.raises(ZooError, match="model 1"):
        zoo.compare([object()], tokens)
    with pytest.raises(ZooError, match="no models"):
        zoo.compare([], tokens)
