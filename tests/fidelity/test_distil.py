"""zoo.distil: the loss of DeiT, its two heads, and a student that learns."""

from __future__ import annotations

import fidelity_lab as lab
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import zoo_core as zoo
from zoo_core.errors import CheckpointError, OptionError
from zoo_core.fidelity.losses import distillation

DISTILLED = "deit:deit_tiny_distilled_patch16_224"


def pictures(count: int = 160) -> list:
    """Images whose label is the brightest quarter."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for n in range(count):
        image = 0.1 * torch.randn(3, 32, 32, generator=generator)
        top, left = divmod(n % 4, 2)
        image[:, 16 * top : 16 * top + 16, 16 * left : 16 * left + 16] += 2
        found.append((image, n % 4))
    return found


class Oracle(torch.nn.Module):
    """A teacher that is right."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(20.0))
        self.classes = classes

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        quarters = torch.nn.functional.avg_pool2d(pixel_values.mean(1, keepdim=True), 16)
        return torch.nn.functional.pad(quarters.flatten(1), (0, self.classes - 4)) * self.scale


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_the_loss_is_that_of_the_paper(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    own, distilled, teacher = (torch.randn(5, 3, generator=generator).double() for _ in range(3))
    labels = torch.tensor([0, 2, 1, 1, 0])
    found = distillation(own, distilled, teacher, labels, kind=kind, alpha=0.3, temperature=2.0)
    for row in range(5):
        p, s, t = own[row], distilled[row], teacher[row]
        label_term = -p.softmax(-1)[labels[row]].log()
        if kind == "hard":
            teacher_term = -s.softmax(-1)[t.argmax()].log()
        else:
            soft_t, soft_s = (t / 2).softmax(-1), (s / 2).softmax(-1)
            teacher_term = 4 * (soft_t * (soft_t / soft_s).log()).sum()
        expected = 0.7 * label_term + 0.3 * teacher_term
        torch.testing.assert_close(found[row].double(), expected, atol=1e-5, rtol=1e-5)


def test_alpha_0_is_plain_cross_entropy() -> None:
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    found = distillation(logits, logits, torch.randn(6, 4), labels, alpha=0.0)
    torch.testing.assert_close(
        found.mean(), torch.nn.functional.cross_entropy(logits, labels), atol=1e-6, rtol=1e-6
    )


def student(name: str = DISTILLED, attention: str = "linformer") -> torch.nn.Module:
    arguments = {**lab.tiny("deit"), "num_classes": 4}
    options = {"rank": 4} if attention == "linformer" else None
    return zoo.build(name, attention, options=options, seed=0, **arguments)


@pytest.mark.parametrize("name", [DISTILLED, "deit"], ids=["two heads", "one head"])
def test_a_student_learns(name: str) -> None:
    model = student(name)
    report = zoo.distil(
        model,
        Oracle(),
        DataLoader(pictures(), batch_size=16),
        steps=60,
        batch_size=16,
        learning_rate=3e-3,
        evaluate_every=30,
    )
    assert report.accuracy > 0.5  # chance is 0.25
    assert report.teacher_accuracy == 1.0
    assert model.training  # as build left it
    assert not getattr(model, "distilled_training", False)
    assert report.history[-1][2] < report.history[0][2]


def test_the_teacher_speaks_to_the_distillation_head_alone() -> None:
    model = student()
    before = lab.state(model)
    zoo.distil(model, Oracle(), pictures(), steps=2, batch_size=8, alpha=0.0)
    changed = lab.changed(model, before)
    assert "head.weight" in changed
    assert "head_dist.weight" not in changed


class TestGoingOn:
    """A run on disk is only continued by the one it belongs to."""

    def distil(self, directory, model=None, teacher=None, data=None, **how):
        how = {"steps": 2, "batch_size": 8, "checkpoint": directory, **how}
        return zoo.distil(model or student(), teacher or Oracle(), data or pictures(), **how)

    def test_the_same_one_goes_on(self, tmp_path) -> None:
        first = self.distil(tmp_path)
        told = []
        assert self.distil(tmp_path, on_step=told.append) == first
        assert not told

    def test_another_one_is_refused(self, tmp_path) -> None:
        self.distil(tmp_path)
        other, oracle = student(), Oracle()
        with torch.no_grad():
            other.head.weight.add_(1)
            oracle.scale.mul_(2)
        for change, named in [
            ({"model": student(attention="performer")}, "another attention"),
            ({"model": other}, "another weights"),
            ({"teacher": oracle}, "another teacher"),
            ({"data": [(image, 3 - label) for image, label in pictures()]}, "another data"),
        ]:
            with pytest.raises(CheckpointError, match=named):
                self.distil(tmp_path, **change)


def test_gradients_that_are_off_outside_are_on_inside() -> None:
    model = student()
    before = lab.state(model)
    with torch.no_grad():
        zoo.distil(model, Oracle(), pictures(), steps=2, batch_size=8)
    assert lab.changed(model, before)


def test_inference_mode_and_its_tensors_are_refused() -> None:
    with torch.inference_mode():
        made_there = student()
        with pytest.raises(zoo.ZooError, match="leave it before this call"):
            zoo.distil(student(), Oracle(), pictures(), steps=2)
    with pytest.raises(zoo.ZooError, match=r"'cls_token' of .* was made under"):
        zoo.distil(made_there, Oracle(), pictures(), steps=2)


def test_labels_of_numpy_and_a_teacher_without_parameters() -> None:
    class Constant(torch.nn.Module):
        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return torch.eye(4)[:1].expand(len(pixel_values), -1)

    data = [(image, np.int64(label)) for image, label in pictures(32)]
    assert zoo.distil(student(), Constant(), data, steps=2, progress=False).steps == 2


@pytest.mark.parametrize("whose", ["student", "teacher"])
def test_answers_that_are_no_numbers_are_told_of_first(whose: str) -> None:
    models = {"student": student(), "teacher": Oracle()}
    name = "scale" if whose == "teacher" else "head.bias"
    with torch.no_grad():
        models[whose].get_parameter(name).fill_(float("nan"))
    with pytest.raises(zoo.ZooError, match=f"output of the {whose} holds NaN.*'{name}'"):
        zoo.distil(models["student"], models["teacher"], pictures(), steps=2)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"data": lab.images(20)}, zoo.ZooError, "no integer labels"),
        ({"data": pictures(4)}, zoo.ZooError, "too few"),
        ({"teacher": Oracle(5)}, zoo.ZooError, "5 classes, the student 4"),
        ({"teacher": None}, zoo.ZooError, "teacher=None is no model"),
        ({"teacher": lab.vit(num_classes=0)}, zoo.ZooError, "gives no logits"),
        ({"teacher": torch.nn.Sequential(lab.vit())}, zoo.ZooError, "the model that is inside it"),
        ({"teacher": lab.vit(in_chans=1)}, zoo.ZooError, r"takes images of \(1, 32, 32\)"),
        ({"teacher": lab.vit(img_size=64)}, zoo.ZooError, r"teacher cannot .* \(\d+, 3, 32, 32\)"),
        (
            {"data": [(image, n - 1) for image, n in pictures()]},
            zoo.ZooError,
            "labels go from -1 to 2, and the classes of the student from 0 to 3",
        ),
        ({"kind": "sfot"}, OptionError, "must be one of"),
        ({"temprature": 2.0}, OptionError, "did you mean 'temperature'"),
    ],
    ids=[
        *("labels", "few", "classes", "nobody", "no classes", "wrapped", "channels", "size"),
        *("range", "kind", "typo"),
    ],
)
def test_bad_input_changes_nothing(change, kind: type[Exception], message: str) -> None:
    model = student()
    before = lab.state(model)
    arguments = {"teacher": Oracle(), "data": pictures(), **change}
    with pytest.raises(kind, match=message):
        zoo.distil(model, steps=2, **arguments)
    assert not lab.changed(model, before)
