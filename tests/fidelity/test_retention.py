"""zoo.retention: each score against a plain formula, the floor, intervals, the probe."""

from __future__ import annotations

import json

import fidelity_lab as lab
import pytest
import torch

import zoo_core as zoo
from zoo_core.errors import OptionError
from zoo_core.fidelity import metrics


def test_softmax_keeps_everything() -> None:
    report = zoo.retention(lab.bert("softmax"), None, lab.tokens(), resamples=50)
    for score in report.scores.values():
        assert score.value == pytest.approx(score.stock, abs=1e-5)
        assert score.low == pytest.approx(score.stock, abs=1e-5)
    assert all(layer.error.value < 1e-5 for layer in report.layers)


def test_the_uniform_mechanism_is_the_floor() -> None:
    report = zoo.retention(lab.bert("uniform"), None, lab.tokens(), resamples=50)
    for score in report.scores.values():
        assert score.value == pytest.approx(score.floor, abs=1e-5)
        assert score.low <= score.value <= score.high
    for layer in report.layers:
        assert layer.error.value == pytest.approx(layer.error.floor, abs=1e-5)


@torch.no_grad()
def test_scores_are_those_of_one_sample_at_a_time() -> None:
    model, stock = lab.bert(task="sequence-classification"), None
    stock = lab.bert("softmax", task="sequence-classification")
    data = lab.tokens(12)
    report = zoo.retention(model, stock, data, batch_size=5, resamples=50)
    pooled, logits, tokens = ([[], []] for _ in range(3))
    for row in data:
        for side, one in enumerate((model, stock)):
            output = one(row["input_ids"][None], output_hidden_states=True)
            tokens[side].append(output.hidden_states[-1][0])
            pooled[side].append(tokens[side][-1].mean(0))
            logits[side].append(output.logits[0])
    cosine = torch.cosine_similarity
    by_token = torch.stack([cosine(*pair, dim=-1).mean() for pair in zip(*tokens, strict=True)])
    ours, theirs = (torch.stack(side) for side in pooled)
    p, q = (torch.stack(side).log_softmax(-1) for side in logits)
    expected = {
        "embedding_cosine": cosine(ours, theirs, dim=-1).mean().item(),
        "token_cosine": by_token.mean().item(),
        "similarity_correlation": metrics.similarity_correlation(ours, theirs),
        "neighbours_kept": metrics.neighbours_kept(ours, theirs, k=5),
        "logits_divergence": (q.exp() * (q - p)).sum(-1).mean().item(),
        "top1_agreement": (p.argmax(-1) == q.argmax(-1)).float().mean().item(),
    }
    assert {name: score.value for name, score in report.scores.items()} == pytest.approx(
        expected, abs=1e-4
    )


def test_nothing_about_the_model_changes() -> None:
    model = lab.bert().train()
    before = lab.state(model)
    zoo.retention(model, None, lab.tokens(8), resamples=10)
    assert not lab.changed(model, before)
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_only_the_patched_layers_are_measured() -> None:
    model = lab.bert("linformer", options={"rank": 4}, layers="1")
    report = zoo.retention(model, None, lab.tokens(8), resamples=10)
    assert [layer.path for layer in report.layers] == ["encoder.layer.1.attention.self"]
    assert report.layers[0].cosine.value == pytest.approx(1, abs=1e-5)


def test_shared_layers_are_told_apart_by_call() -> None:
    model = lab.sharpened(zoo.build("albert", "uniform", **lab.tiny("albert")))
    report = zoo.retention(model, None, lab.tokens(8), resamples=10)
    assert len({layer.path for layer in report.layers}) == 2


def test_another_pooling_is_refused() -> None:
    with pytest.raises(OptionError, match="pooling='max' must be one of 'mean', 'cls'"):
        zoo.retention(lab.bert(), None, lab.tokens(8), pooling="max", resamples=10)


def test_weights_that_are_no_numbers_are_told_of() -> None:
    model = lab.bert()
    with torch.no_grad():
        model.encoder.layer[0].attention.self.zoo.project_keys[0] = float("inf")
    message = r"the model \(BertModel with linformer attention\) holds NaN.*zoo.project_keys'"
    with pytest.raises(zoo.ZooError, match=message):
        zoo.retention(model, None, lab.tokens(8), resamples=10)


class TestProbe:
    def test_it_reads_labels_from_embeddings(self) -> None:
        data = lab.tokens(40)
        labels = [n % 2 for n in range(40)]
        for row, label in zip(data, labels, strict=True):
            row["input_ids"] = torch.where(
                row["input_ids"] % 2 == label, row["input_ids"], 7 + label
            )
        report = zoo.retention(lab.bert("softmax"), None, data, labels=labels, resamples=50)
        assert report.probe.stock > 0.9
        assert report.probe.value == report.probe.stock
        assert "linear probe" in str(report)

    @pytest.mark.parametrize(
        ("labels", "message"), [([0] * 40, "two classes"), ([0, 1], "2 labels for 40 samples")]
    )
    def test_bad_labels(self, labels, message: str) -> None:
        with pytest.raises(zoo.ZooError, match=message):
            zoo.retention(lab.bert(), None, lab.tokens(40), labels=labels, resamples=5)


class TestReport:
    def test_table_json_and_picture(self, tmp_path) -> None:
        report = zoo.retention(lab.bert(), None, lab.tokens(8), resamples=10)
        lines = str(report).splitlines()
        assert lines[2].split()[:2] == ["score", "kept"]
        assert all(len(line) < 100 for line in lines)
        plain = json.loads(json.dumps(report.as_dict()))
        assert plain["scores"]["embedding_cosine"]["stock"] == 1.0
        report.picture(tmp_path / "layers.png")
        assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")

    def test_a_calibrated_model_needs_its_original(self) -> None:
        model = lab.bert()
        zoo.calibrate(model, lab.tokens(), steps=2, batch_size=4, train="attention")
        with pytest.raises(zoo.ZooError, match="pass the original as teacher"):
            zoo.retention(model, None, lab.tokens(8))
        zoo.retention(model, lab.bert("softmax"), lab.tokens(8), resamples=10)

    def test_a_later_calibration_does_not_bring_the_original_back(self) -> None:
        model, how = lab.bert(), {"steps": 2, "batch_size": 4}
        zoo.calibrate(model, lab.tokens(), train="attention", **how)
        zoo.calibrate(model, lab.tokens(), teacher=lab.bert("softmax"), train="mechanism", **how)
        with pytest.raises(zoo.ZooError, match=r"train='attention'.*pass the original as teacher"):
            zoo.retention(model, None, lab.tokens(8))

    def test_nor_do_another_patch_and_a_checkpoint(self, tmp_path) -> None:
        model = lab.bert()
        zoo.calibrate(model, lab.tokens(), steps=2, batch_size=4, train="all")
        zoo.patch(model, "performer")
        assert zoo.save(model, tmp_path).calibration is None
        with pytest.raises(zoo.ZooError, match=r"train='all'.*pass the original as teacher"):
            zoo.retention(zoo.load(tmp_path), None, lab.tokens(8))

    def test_a_mechanism_that_was_trained_leaves_the_original(self, tmp_path) -> None:
        model = lab.bert()
        zoo.calibrate(model, lab.tokens(), steps=2, batch_size=4, train="mechanism")
        zoo.save(model, tmp_path)
        zoo.retention(zoo.load(tmp_path), None, lab.tokens(8), resamples=10)


class TestIntervals:
    def test_an_interval_of_a_mean_is_that_of_the_normal_law(self) -> None:
        values = torch.randn(2000, generator=torch.Generator().manual_seed(0))
        low, high = metrics.resampled_mean(values, resamples=2000, seed=0)
        assert high - low == pytest.approx(2 * 1.96 * values.std().item() / 2000**0.5, rel=0.08)

    def test_the_correlation_of_a_resample_leaves_out_pairs_of_one_text(self) -> None:
        generator = torch.Generator().manual_seed(0)
        ours, theirs = (torch.randn(9, 4, generator=generator) for _ in range(2))
        low, high = metrics.resampled_correlation(ours, theirs, resamples=40, seed=3)
        drawn = torch.randint(9, (40, 9), generator=torch.Generator().manual_seed(3))
        found = []
        for row in drawn.tolist():
            pairs = [(i, j) for i in row for j in row if i != j]
            x, y = (
                torch.tensor([torch.cosine_similarity(z[i], z[j], dim=0) for i, j in pairs])
                for z in (ours, theirs)
            )
            found.append(torch.corrcoef(torch.stack([x, y]))[0, 1])
        expected = torch.quantile(torch.stack(found), torch.tensor([0.025, 0.975]))
        assert [low, high] == pytest.approx(expected.tolist(), abs=1e-4)
