"""zoo.calibrate: it heals, is reproducible, goes on after a kill, and leaves the rest alone."""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import fidelity_lab as lab
import peft
import PIL.Image
import pytest
import torch
from killing import Change, killed_at
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zoo_core as zoo
from zoo_core.errors import CheckpointError, OptionError, PatchError
from zoo_core.fidelity import resuming, twins
from zoo_core.fidelity.layers import layer_errors
from zoo_core.fidelity.observing import observe
from zoo_core.fidelity.reports import Report
from zoo_core.fidelity.resuming import Saves
from zoo_core.fidelity.training import Progress
from zoo_core.fidelity.watching import describe

QUICK: dict[str, Any] = {"steps": 10, "evaluate_every": 5, "batch_size": 4, "progress": False}
IMPORTED = ["fidelity_lab", "zoo_core.builder", "zoo_core.fidelity.calibration"]
IMPORTED += ["transformers.models.bert.modeling_bert", "zoo_attention.linformer.attention"]
SAVING = [
    Change(resuming, "save_file", written=lambda tensors, path: path),
    Change(Path, "write_text", written=lambda path, text, encoding: path),
    Change(os, "replace"),
    Change(os, "unlink"),
]
TEXTS = [f"text number {n} says {n * n}, and nothing else" for n in range(40)]
RATES = {"learning_rate": 5e-3, "host_learning_rate": 5e-4, "layer_share": 0.7}


def calibrate(model: torch.nn.Module, data: Any = None, **how: Any) -> Report:
    return zoo.calibrate(model, lab.tokens() if data is None else data, **{**QUICK, **how})


class Killed(Exception):
    pass


def kill_at(step: int):
    def watch(now: Progress) -> None:
        if now.step == step:
            raise Killed

    return watch


@pytest.fixture
def each_step() -> Iterator[Callable[[Callable[[Any], Any]], list[Any]]]:
    """Makes a list that grows by what is asked of an optimiser's groups before each step."""
    handles = []

    def record(ask: Callable[[Any], Any]) -> list[Any]:
        told: list[Any] = []
        hook = register_optimizer_step_pre_hook(
            lambda optimiser, args, kwargs: told.append(ask(optimiser.param_groups))
        )
        handles.append(hook)
        return told

    yield record
    for handle in handles:
        handle.remove()


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[torch.nn.Module, Report]:
    model = lab.bert()
    return model, calibrate(model)


class TestHealing:
    @pytest.mark.parametrize("train", ["mechanism", "attention", "all"])
    def test_loss_falls_and_the_model_comes_closer(self, train: str) -> None:
        report = calibrate(lab.bert(), steps=30, train=train, evaluate_every=7, **RATES)
        by_layer = [loss for _, stage, loss, _ in report.history if stage == "by layer"]
        assert by_layer[-1] < by_layer[0]
        before, after = report.before.scores, report.after.scores
        assert after["token_cosine"].value > before["token_cosine"].value + 0.01
        for old, new in zip(report.before.layers, report.after.layers, strict=True):
            assert new.error.value < old.error.value

    def test_what_is_trained_is_what_was_asked_for(self) -> None:
        for train, inside in {
            "mechanism": (".zoo.",),
            "attention": (".zoo.", ".query.", ".key.", ".value.", "attention.output.dense."),
        }.items():
            model = lab.bert()
            before = lab.state(model)
            report = calibrate(model, train=train, steps=4)
            names = lab.changed(model, before)
            assert {part for part in inside if any(part in name for name in names)} == set(inside)
            assert all(any(part in name for part in inside) for name in names)
            assert report.trained == sum(
                p.numel() for n, p in model.named_parameters() if any(i in n for i in inside)
            )

    def test_images_and_logits(self) -> None:
        for share, stage in {1.0: "by layer", 0.0: "end to end"}.items():
            how = {**RATES, "steps": 20, "layer_share": share}
            report = calibrate(lab.vit(), lab.images(), **how)
            losses = [loss for _, name, loss, _ in report.history if name == stage]
            assert len(losses) == 4
            assert losses[-1] < losses[0]
        assert [layer.path for layer in report.after.layers] == ["blocks.0.attn", "blocks.1.attn"]
        assert "logits_divergence" in report.after.scores

    def test_masked_language_modelling_guesses_what_was_hidden(self) -> None:
        model = lab.bert(task="masked-lm")
        with torch.no_grad():  # it gives all tokens the same chance, as the stock model does
            model.cls.predictions.decoder.weight.zero_()
        how = {"match": "masked-lm", "mask_share": 0.5, "hidden_weight": 0.0, "layer_share": 0.0}
        report = calibrate(model, TEXTS, tokenizer=lab.Letters(), steps=1, **how)
        (_, stage, loss, _) = report.history[0]
        assert stage == "end to end"
        assert loss == pytest.approx(math.log(lab.tiny("bert")["vocab_size"]), rel=1e-4)

    @pytest.mark.parametrize("share", [0.15, 0.6])
    def test_four_fifths_of_the_mask_share_become_the_mask_token(self, share: float) -> None:
        model, hidden = lab.bert(task="masked-lm"), []

        def watch(module, args, kwargs) -> None:
            hidden.append((kwargs["input_ids"] == lab.Letters.mask_token_id).float().mean().item())

        model.bert.embeddings.register_forward_pre_hook(watch, with_kwargs=True)
        how = {"match": "masked-lm", "mask_share": share, "layer_share": 0.0, "batch_size": 16}
        calibrate(model, TEXTS, tokenizer=lab.Letters(), steps=1, **how)
        found = [one for one in hidden if one > 0]  # nothing is hidden where it is measured
        assert found
        assert found == pytest.approx([0.8 * share] * len(found), abs=0.05)

    def test_tensors_that_only_noise_can_train_are_told_of(self) -> None:
        model = lab.bert()
        part = model.encoder.layer[0].attention.self.zoo
        part.spare = torch.nn.Parameter(torch.ones(2))
        report = calibrate(model, steps=2)
        assert report.notes[0].startswith("no gradient reached 1 tensor, such as")
        assert "noise=True" in report.notes[0]

    def test_an_auxiliary_loss_is_added(self, monkeypatch) -> None:
        from zoo_core.fidelity import healing

        plain = calibrate(lab.bert(), steps=2)
        monkeypatch.setattr(healing, "auxiliary_loss", lambda host: torch.tensor(7.0))
        more = calibrate(lab.bert(), steps=2, auxiliary_weight=0.5)
        assert more.history[0][2] == pytest.approx(plain.history[0][2] + 3.5, rel=1e-4)

    def test_another_teacher_of_the_same_build(self) -> None:
        teacher = lab.bert("softmax")
        model = lab.bert()
        with torch.no_grad():  # forget what the teacher knows
            model.encoder.layer[0].attention.self.value.weight.mul_(0.5)
        report = calibrate(model, teacher=teacher, steps=20)
        after, before = report.after.scores["token_cosine"], report.before.scores["token_cosine"]
        assert after.value > before.value

    def test_a_teacher_that_is_built_differently_is_matched_at_the_end_only(self) -> None:
        teacher = lab.bert("softmax", num_hidden_layers=1)
        report = calibrate(lab.bert(), teacher=teacher)
        assert report.after.layers == ()
        assert any("built differently" in note for note in report.notes)

    def test_early_stop(self) -> None:
        report = calibrate(
            lab.bert(), steps=40, learning_rate=0.0, host_learning_rate=0.0, patience=2
        )
        # Each stage of 20 steps: one look that counts, two without gain; then two without gain.
        assert (report.steps, report.steps_planned) == (15 + 10, 40)
        assert "stopped early" in report.notes[0]

    def test_lora_trains_adapters_and_leaves_the_base(self) -> None:
        config = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["zoo"])
        model = peft.get_peft_model(lab.bert(), config)
        before = lab.state(model)
        calibrate(model, steps=5)
        names = lab.changed(model, before)
        assert any("lora_" in name for name in names)
        assert any(".zoo.modules_to_save." in name for name in names)
        assert all("lora_" in n or ".zoo.modules_to_save." in n for n in names)

    def test_lora_without_the_mechanism_says_so(self) -> None:
        model = peft.get_peft_model(lab.bert(), peft.LoraConfig(target_modules=["query"]))
        with pytest.raises(zoo.ZooError, match=r'modules_to_save=\["zoo"\]'):
            calibrate(model, train="mechanism")


class TestSettings:
    """What the settings of a run do to its steps."""

    def test_rates_rise_fall_and_are_lower_end_to_end(self, each_step) -> None:
        rates = each_step(lambda groups: [group["lr"] for group in groups])
        how = {"learning_rate": 1e-3, "host_learning_rate": 2e-3, "end_rate": 0.3}
        calibrate(lab.bert(), steps=20, layer_share=0.5, warmup=0.2, final_rate=0.1, **how)
        falling = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]
        shares = [peak * share for peak in (1.0, 0.3) for share in (0.5, 1.0, *falling)]
        assert rates == [pytest.approx([1e-3 * share, 2e-3 * share]) for share in shares]

    def test_clip_is_the_largest_norm_of_a_gradient(self, each_step) -> None:
        norms = each_step(lambda groups: get_total_norm([p.grad for p in _trained(groups)]).item())
        for clip in (1e6, 1e-4):
            calibrate(lab.bert(), steps=2, clip=clip)
        assert min(norms[:2]) > 1e-3
        assert norms[2:] == pytest.approx([1e-4] * 2, rel=1e-3)

    def test_weight_decay_shrinks_what_is_trained(self) -> None:
        model, after = lab.bert(), []
        weight = model.encoder.layer[0].attention.self.query.weight
        before = weight.detach().clone()
        how = {"host_learning_rate": 1e-3, "weight_decay": 500.0, "warmup": 0.0, "layer_share": 1.0}
        calibrate(model, steps=1, on_step=lambda now: after.append(weight.detach().clone()), **how)
        # Half of it goes; the step of AdamW itself is no larger than the rate.
        torch.testing.assert_close(after[0], before / 2, rtol=0, atol=1.1e-3)

    @pytest.mark.parametrize("stage", ["by layer", "end to end"])
    def test_bf16_computes_in_bfloat16_and_leaves_the_weights(self, stage: str) -> None:
        model, seen, steps = lab.bert(), [], []
        layer = model.encoder.layer[1].attention.self.query
        layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        how = {"steps": 3, "layer_share": float(stage == "by layer"), "bf16": True}
        calibrate(model, on_step=lambda now: steps.append(len(seen)), **how)
        assert {*seen[steps[0] : steps[1]]} == {torch.bfloat16}  # a step without measurements
        assert seen[0] == torch.float32
        assert all(p.dtype == torch.float32 for p in model.parameters())

    def test_weights_of_what_is_matched_end_to_end(self) -> None:
        def loss(output: float, hidden: float) -> float:
            how = {"output_weight": output, "hidden_weight": hidden, "layer_share": 0.0}
            return calibrate(lab.bert(), steps=1, **how).history[0][2]

        output, hidden = loss(1.0, 0.0), loss(0.0, 1.0)
        assert min(output, hidden) > 0
        assert loss(2.0, 3.0) == pytest.approx(2 * output + 3 * hidden, rel=1e-4)

    def test_what_is_held_out_is_measured_on_and_never_learnt(self) -> None:
        model = lab.bert()
        seen = lab.Seen.by(model)
        report = calibrate(model, held_out=6, layer_share=0.0, steps=16)  # sees all at least once
        learnt, measured = ({*chain(*rows)} for rows in (seen.learnt, seen.measured))
        assert report.after.samples == len(measured) == 6
        assert len(learnt) == 34
        assert not learnt & measured

    def test_at_most_a_quarter_is_held_out(self) -> None:
        assert calibrate(lab.bert(), held_out=32, steps=2).after.samples == 10


def test_rates_left_open_follow_the_error_of_layers() -> None:
    far, near = (calibrate(lab.bert(options={"rank": rank}), steps=2) for rank in (2, 12))
    for report in (far, near):
        mean = sum(layer.error.value for layer in report.before.layers) / len(report.before.layers)
        rate = report.settings["learning_rate"]
        assert rate == pytest.approx(1e-3 * min(mean, 1), rel=0.05)
        assert rate == report.settings["host_learning_rate"]
    assert near.settings["learning_rate"] < far.settings["learning_rate"]
    given = calibrate(lab.bert(), steps=2, learning_rate=0.5).settings
    assert given["learning_rate"] == 0.5 != given["host_learning_rate"]


def test_weights_that_training_made_worse_are_put_back() -> None:
    model = lab.bert("local", options={"window": 16})
    before = lab.state(model)
    report = calibrate(model, host_learning_rate=0.3, steps=6)
    assert report.steps == 6
    assert report.after == report.before
    assert "made it worse (cosine of embeddings 0." in report.notes[-1]
    assert "lower learning_rate" in report.notes[-1]
    assert not lab.changed(model, before)
    zoo.retention(model, None, lab.tokens(8))  # which is still its own original


def test_progress_tells_loss_retention_and_time_left() -> None:
    told = []
    calibrate(lab.bert(), on_step=lambda now: told.append(describe(now, "cosine")))
    assert len(told) == 10
    assert "cosine" not in told[0]  # nothing was looked at yet
    assert re.fullmatch(r"loss 0\.\d{4}  cosine 0\.\d{3}  0:00 left", told[-1])


class TestReproducible:
    def test_seeds_decide_everything(self) -> None:
        models = [lab.bert() for _ in range(3)]
        for model, seed in zip(models, (0, 0, 1), strict=True):
            torch.manual_seed(len(models))  # of no consequence
            calibrate(model, seed=seed, steps=4)
        assert not lab.changed(models[0], lab.state(models[1]))
        assert lab.changed(models[0], lab.state(models[2]))

    def test_the_global_generator_is_left_alone(self) -> None:
        torch.manual_seed(3)
        before = torch.get_rng_state()
        calibrate(lab.bert(), noise=True)
        assert torch.equal(torch.get_rng_state(), before)

    # Before the first save; within the first stage, at its end, within the second; at the end.
    @pytest.mark.parametrize("step", [1, 5, 7, 9, 10])
    def test_going_on_after_a_kill_changes_nothing(
        self, step: int, uninterrupted, tmp_path
    ) -> None:
        whole, expected = uninterrupted
        how = {"checkpoint": tmp_path, "checkpoint_every": 2}
        with pytest.raises(Killed):
            calibrate(lab.bert(), on_step=kill_at(step), **how)
        again = lab.bert()
        steps = []
        report = calibrate(again, on_step=lambda now: steps.append(now.step), **how)
        assert not lab.changed(again, lab.state(whole))
        assert report.history == expected.history
        assert steps == list(range(step - step % 2 + 1, 11))

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_sigkill_in_each_part_of_a_save_changes_nothing(
        self, uninterrupted, tmp_path, monkeypatch
    ) -> None:
        whole, expected = uninterrupted
        save, left = Saves.save, []

        def killed_in_every_part(self, state):
            if state.step < 6:
                return save(self, state)
            while True:
                place = shutil.copytree(self.directory, tmp_path / f"killed {len(left)}")
                copy = Saves(place, self.key)
                if not killed_at(len(left) + 1, partial(save, copy, state), SAVING):
                    raise Killed
                left.append(place)

        monkeypatch.setattr(Saves, "save", killed_in_every_part)
        with pytest.raises(Killed):
            calibrate(lab.bert(), checkpoint=tmp_path / "run", checkpoint_every=3)
        monkeypatch.undo()
        # Both files are written and renamed, the state last; then the old tensors are removed.
        assert [Saves(place, {}).load().step for place in left] == [3, 3, 3, 3, 6]
        for place in left:
            again = lab.bert()
            report = calibrate(again, checkpoint=place, checkpoint_every=3)
            assert not lab.changed(again, lab.state(whole)), place
            assert report.history == expected.history
            assert len(list(place.iterdir())) == 2, "what the kill left is cleared up"

    @pytest.mark.slow
    def test_sigkill_at_any_moment_changes_nothing(self, uninterrupted, tmp_path) -> None:
        """Two processes killed at random, wherever they are, in a save or between; then one."""
        whole, expected = uninterrupted
        context = multiprocessing.get_context("forkserver")  # which imports everything only once
        context.set_forkserver_preload(IMPORTED)
        steps = sorted(random.sample(range(1, 10), 2))
        for step in (*steps, None):
            ours, theirs = context.Pipe(duplex=False)
            how = {**QUICK, "checkpoint_every": 1}
            arguments = (str(tmp_path), theirs, how)
            process = context.Process(target=lab.calibrate_in_sight, args=arguments, daemon=True)
            process.start()
            theirs.close()
            if step is not None:
                while ours.poll(60) and ours.recv() < step:
                    pass
                time.sleep(random.uniform(0, 0.02))
                process.kill()
            process.join(60)
        assert process.exitcode == 0, steps
        state, history = torch.load(tmp_path / "result.pt")
        assert not lab.changed(whole, state), steps
        assert history == expected.history

    def test_a_finished_run_is_not_run_again(self, tmp_path) -> None:
        first, second = lab.bert(), lab.bert()
        calibrate(first, checkpoint=tmp_path)
        report = calibrate(second, checkpoint=tmp_path, on_step=kill_at(1))
        assert report.steps == 10
        assert not lab.changed(first, lab.state(second))

    @pytest.mark.parametrize("noise", [False, True])
    def test_the_report_of_a_finished_run_is_that_of_the_first(self, noise, tmp_path) -> None:
        reports = []
        for _ in range(2):
            model = lab.bert()
            model.encoder.layer[0].attention.self.zoo.spare = torch.nn.Parameter(torch.ones(2))
            reports.append(calibrate(model, noise=noise, checkpoint=tmp_path))
        assert "no gradient reached 1 tensor" in reports[0].notes[0]
        assert reports[0] == reports[1]

    def test_a_mechanism_that_is_drawn_anew_is_no_other_run(self, tmp_path) -> None:
        how = {**RATES, "checkpoint": tmp_path, "checkpoint_every": 2}
        with pytest.raises(Killed):
            calibrate(lab.bert(), on_step=kill_at(5), **how)
        again = lab.bert()
        with torch.no_grad():
            again.encoder.layer[0].attention.self.zoo.project_keys.add_(1)
        report = calibrate(again, **how)
        whole = lab.bert()
        assert report.history == calibrate(whole, **RATES).history
        assert not lab.changed(again, lab.state(whole))

    def test_other_frozen_weights_are_another_run(self, tmp_path) -> None:
        calibrate(lab.bert(), checkpoint=tmp_path, train="mechanism")
        with pytest.raises(CheckpointError, match="another weights"):
            calibrate(_scaled(lab.bert()), checkpoint=tmp_path, train="mechanism")

    def test_another_teacher_is_another_run(self, tmp_path) -> None:
        teachers = [lab.bert("softmax"), _scaled(lab.bert("softmax"))]
        for _ in range(2):  # the same one goes on
            calibrate(lab.bert(), teacher=teachers[0], checkpoint=tmp_path)
        for teacher in (teachers[1], None):
            with pytest.raises(CheckpointError, match="another teacher"):
                calibrate(lab.bert(), teacher=teacher, checkpoint=tmp_path)

    def test_files_count_by_their_content(self, tmp_path) -> None:
        pictures = [(one * 50 + 128).clamp(0, 255).byte() for one in lab.images(33)]
        _write(tmp_path / "first", pictures[:32])
        _write(tmp_path / "copy", pictures[:32])
        _write(tmp_path / "other", [pictures[32], *pictures[1:32]])
        run = {"checkpoint": tmp_path / "run", "steps": 2, "batch_size": 16}
        calibrate(lab.vit(), tmp_path / "first", **run)
        calibrate(lab.vit(), tmp_path / "copy", **run)
        with pytest.raises(CheckpointError, match="another data"):
            calibrate(lab.vit(), tmp_path / "other", **run)

    def test_the_same_tokens_in_other_texts_are_other_data(self, tmp_path) -> None:
        line = torch.cat([one["input_ids"] for one in lab.tokens(40, longest=7)])
        calibrate(lab.bert(), [{"input_ids": one} for one in line.split(6)], checkpoint=tmp_path)
        with pytest.raises(CheckpointError, match="another data"):
            calibrate(lab.bert(), [{"input_ids": t} for t in line.split(5)], checkpoint=tmp_path)

    @pytest.mark.parametrize(
        ("change", "named"),
        [({"steps": 11}, "settings"), ({"data": lab.tokens(41)}, "data")],
        ids=["settings", "data"],
    )
    def test_the_state_of_another_run_is_refused(self, change, named, tmp_path) -> None:
        calibrate(lab.bert(), checkpoint=tmp_path)
        with pytest.raises(CheckpointError, match=f"another {named}"):
            calibrate(lab.bert(), checkpoint=tmp_path, **change)

    def test_accumulation_equals_the_larger_batch(self) -> None:
        models = [lab.bert().double() for _ in range(2)]
        calibrate(models[0], batch_size=8, accumulate=1, steps=4)
        calibrate(models[1], batch_size=2, accumulate=4, steps=4)
        for name, tensor in lab.state(models[0]).items():
            torch.testing.assert_close(models[1].state_dict()[name], tensor, rtol=0, atol=1e-4)


class TestLeavesTheRestAlone:
    def test_modes_flags_and_gradients(self) -> None:
        model = lab.bert()
        model.train()
        model.encoder.layer[0].eval()
        model.embeddings.requires_grad_(False)
        parameter = model.encoder.layer[1].attention.self.query.weight
        parameter.grad = torch.ones_like(parameter)
        modes = [module.training for module in model.modules()]
        flags = [p.requires_grad for p in model.parameters()]
        calibrate(model)
        assert [module.training for module in model.modules()] == modes
        assert [p.requires_grad for p in model.parameters()] == flags
        assert torch.equal(parameter.grad, torch.ones_like(parameter))
        assert not any(m._forward_hooks for m in model.modules())

    def test_an_error_on_the_way_changes_nothing(self) -> None:
        model = lab.bert().train()
        before = lab.state(model)
        with pytest.raises(Killed):
            calibrate(model, on_step=kill_at(5))
        assert not lab.changed(model, before)
        assert model.training
        assert zoo.inspect(model).calibration is None

    @pytest.mark.parametrize("whose", ["the model", "the teacher"])
    def test_weights_that_are_no_numbers_are_told_of_first(self, whose: str) -> None:
        model, teacher = lab.bert(), lab.bert("softmax")
        broken = model if whose == "the model" else teacher
        with torch.no_grad():
            broken.encoder.layer[1].output.dense.bias[3] = float("nan")
        message = rf"output of {whose} .*NaN.*'encoder.layer.1.output.dense.bias'"
        with pytest.raises(zoo.ZooError, match=message):
            calibrate(model, teacher=teacher)

    def test_data_that_are_no_numbers_are_told_of_first(self) -> None:
        data = lab.images()
        for image in data:
            image[0, 0, 0] = float("inf")
        with pytest.raises(zoo.ZooError, match="the data do too, in 'pixel_values'"):
            calibrate(lab.vit(), data)

    def test_gradients_that_are_off_outside_are_on_inside(self) -> None:
        models = [lab.bert(), lab.bert()]
        with torch.no_grad():
            calibrate(models[0], steps=4)
        calibrate(models[1], steps=4)
        assert not lab.changed(models[0], lab.state(models[1]))

    def test_inference_mode_is_refused(self) -> None:
        model = lab.bert()
        before = lab.state(model)
        with torch.inference_mode(), pytest.raises(zoo.ZooError, match="leave it before this call"):
            calibrate(model, steps=4)
        with torch.inference_mode():
            teacher = lab.bert("softmax")
        with pytest.raises(zoo.ZooError, match="of BertModel was made under"):
            calibrate(model, teacher=teacher, steps=4)
        assert not lab.changed(model, before)
        assert all(p.requires_grad for p in model.parameters())

    def test_divergence_is_told_and_undone(self) -> None:
        model = lab.bert()
        before = lab.state(model)
        with pytest.raises(zoo.ZooError, match="Lower the learning rates"):
            calibrate(model, learning_rate=1e30, clip=1e30)
        assert not lab.changed(model, before)

    @pytest.mark.parametrize(
        ("how", "kind", "message"),
        [
            ({"data": []}, zoo.ZooError, "no samples in a list of 0"),
            ({"data": lab.tokens(5)}, zoo.ZooError, "5 samples are too few, at least 16"),
            ({"data": ["a text"] * 20}, zoo.ZooError, "pass tokenizer="),
            ({"data": 3}, zoo.ZooError, "int is no data"),
            ({"data": lab.images(16)}, zoo.ZooError, "takes texts; a list of 16 holds images"),
            ({"stepz": 3}, OptionError, "did you mean 'steps'"),
            ({"steps": 0}, OptionError, "below its lower bound"),
            ({"train": "everything"}, OptionError, "must be one of"),
            ({"match": "logits"}, OptionError, "no logits in common"),
            ({"match": "none", "hidden_weight": 0.0}, OptionError, "nothing to match"),
            ({"max_length": 65}, zoo.ZooError, "between 1 and 64"),
        ],
        ids=lambda value: str(value)[:25] if isinstance(value, dict) else "",
    )
    def test_bad_input(self, how: dict, kind: type[Exception], message: str) -> None:
        model = lab.bert()
        before = lab.state(model)
        with pytest.raises(kind, match=message):
            calibrate(model, **how)
        assert not lab.changed(model, before)
        assert all(p.requires_grad for p in model.parameters())

    def test_a_stock_model(self) -> None:
        model = lab.bert()
        zoo.patching.stack_of(model).clear()
        with pytest.raises(PatchError, match=r"zoo\.patch it"):
            calibrate(model)

    def test_a_mechanism_without_tensors(self) -> None:
        with pytest.raises(zoo.ZooError, match=r"nothing to train.*train='attention'"):
            calibrate(lab.bert("local"), train="mechanism")
        assert calibrate(lab.bert("local", options={"window": 2}), steps=4).trained


class TestTwins:
    def test_a_twin_has_no_weights_of_its_own_but_for_those_asked_for(self) -> None:
        model = lab.bert()
        own = model.encoder.layer[0].attention.self.query.weight
        twin = twins.stock_twin(model, own=[own])
        mine = {id(p) for p in model.parameters()}
        extra = [name for name, p in twin.named_parameters() if id(p) not in mine]
        assert extra == ["encoder.layer.0.attention.self.query.weight"]

    @pytest.mark.parametrize("family", ["bert", "deit"])
    def test_it_answers_as_the_stock_model_to_the_bit(self, family: str) -> None:
        model = lab.bert() if family == "bert" else lab.vit()
        batch = _batch(family)
        twin = observe(twins.stock_twin(model), batch)
        zoo.patching.stack_of(model).clear()
        assert torch.equal(twin.tokens, observe(model, batch).tokens)

    def test_the_floor_averages(self) -> None:
        model = lab.bert()
        expected = lab.bert("uniform")
        batch = _batch("bert")
        floor = twins.uniform_twin(model, twins.patched_paths(model))
        got, wanted = (observe(one, batch).tokens for one in (floor, expected))
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(got[real], wanted[real], atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("family", ["bert", "deit"])
    def test_layer_errors_are_those_of_single_layers(self, family: str) -> None:
        model = lab.bert() if family == "bert" else lab.vit()
        batch, paths = _batch(family), twins.patched_paths(model)
        found = layer_errors(model, twins.stock_twin(model), paths, batch)
        zoo.patching.stack_of(model).clear()
        inputs, outputs = _run(model, batch, paths)
        for path, error in zip(paths, found, strict=True):
            one = lab.bert() if family == "bert" else lab.vit()
            ours = _run(one, batch, [path], feed=inputs[path])[1][path]
            mask = batch.get("attention_mask", torch.ones(ours.shape[:2])).bool()
            for row in range(len(ours)):
                a, b = ours[row][mask[row]], outputs[path][row][mask[row]]
                expected = (a - b).square().sum() / b.square().sum()
                torch.testing.assert_close(error[row], expected, atol=1e-5, rtol=1e-4)


def _scaled(model: torch.nn.Module) -> torch.nn.Module:
    """The host's weights, half as large again."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".zoo." not in name:
                parameter.mul_(1.5)
    return model


def _trained(groups: Any) -> list[torch.nn.Parameter]:
    """The parameters of an optimiser's groups that have a gradient."""
    return [p for group in groups for p in group["params"] if p.grad is not None]


def _write(folder: Path, pictures: list[torch.Tensor]) -> None:
    folder.mkdir()
    for number, picture in enumerate(pictures):
        image = PIL.Image.fromarray(picture.permute(1, 2, 0).numpy())
        image.save(folder / f"{number:02d}.png")


def _batch(family: str) -> dict[str, torch.Tensor]:
    if family != "bert":
        return {"pixel_values": torch.stack(lab.images(3))}
    ids = torch.randint(5, 99, (3, 17), generator=torch.Generator().manual_seed(4))
    lengths = torch.tensor([17, 9, 4])
    return {"input_ids": ids, "attention_mask": (torch.arange(17) < lengths[:, None]).long()}


def _run(model, batch, paths, feed=None):
    """Inputs and outputs of layers in a plain forward, by hooks of its own."""
    inputs, outputs, handles = {}, {}, []
    for path in paths:

        def before(module, args, kwargs, path=path):
            inputs[path] = args[0] if args else kwargs["hidden_states"]
            if feed is not None:
                return (
                    ((feed, *args[1:]), kwargs)
                    if args
                    else (args, {**kwargs, "hidden_states": feed})
                )
            return None

        def after(module, args, output, path=path):
            outputs[path] = output[0] if isinstance(output, tuple) else output

        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))
    with torch.no_grad():
        observe(model, batch)
    for handle in handles:
        handle.remove()
    return inputs, outputs
