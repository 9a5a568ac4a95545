"""Distil small DeiTs from a teacher, with and without their distillation token (DeiT, 2020).

Digits of scikit-learn; the teacher is a vision transformer trained on the same images. Three
students for each attention, all trained as long:

- labels: no teacher;
- one head: the labels and the teacher's choice through the same class token;
- token: the teacher speaks to a token and a head of its own, and the two heads answer together.

    python examples/distil_deit.py --mechanisms softmax linformer
    python examples/distil_deit.py --images 400 --kind soft       # students that see less

Ends with an error where a student with the token stays below the goal. A teacher that has learned
the images by heart tells hardly more than their labels, so that little is gained here: what the
paper gains, it gains on a million images that are cut and coloured anew each time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import digits
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import zoo_core as zoo

ONE_HEAD = "deit:deit_tiny_patch16_224"
TWO_HEADS = "deit:deit_tiny_distilled_patch16_224"
STUDENTS = {"labels": (ONE_HEAD, 0.0), "one head": (ONE_HEAD, 0.5), "token": (TWO_HEADS, 0.5)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the teacher, then the students, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "linformer"])
    parser.add_argument("--kind", choices=("hard", "soft"), default="hard")
    parser.add_argument("--images", type=int, help="that the students see; by default all")
    parser.add_argument("--steps", type=int, default=500, help="of each student")
    parser.add_argument("--teacher-epochs", type=int, default=12)
    parser.add_argument("--goal", type=float, default=0.95, help="accuracy with the token")
    parser.add_argument("--quick", action="store_true", help="a few steps of softmax, no goal")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.mechanisms, chosen.images = ["softmax"], 64
        chosen.steps, chosen.teacher_epochs, chosen.goal = 3, 1, 0.0
    console = Console()
    learned, test = digits.load()
    if chosen.quick:
        learned = learned.first(chosen.images)
    torch.manual_seed(0)
    teacher = digits.small("vit", "softmax")
    digits.fit(teacher, learned, epochs=chosen.teacher_epochs)
    console.print(f"teacher: accuracy {digits.accuracy(teacher, test):.1%}")
    lessons = learned.first(chosen.images or len(learned))
    found = {
        mechanism: {
            name: learn(mechanism, name, teacher, lessons, test, chosen) for name in STUDENTS
        }
        for mechanism in chosen.mechanisms
    }
    table = Table(
        title=f"Students of {len(lessons)} digits, {chosen.kind} distillation: accuracy",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("mechanism")
    for name in STUDENTS:
        table.add_column(name, justify="right")
    for mechanism, scores in found.items():
        table.add_row(mechanism, *(f"{scores[name]:.1%}" for name in STUDENTS))
    console.print(table)
    missed = [mechanism for mechanism, scores in found.items() if scores["token"] < chosen.goal]
    if missed:
        raise SystemExit(f"below {chosen.goal:.0%}: {', '.join(missed)}")


def learn(
    mechanism: str,
    student: str,
    teacher: nn.Module,
    lessons: digits.Digits,
    test: digits.Digits,
    chosen: argparse.Namespace,
) -> float:
    """Accuracy of one student on digits that neither it nor the teacher has seen."""
    architecture, alpha = STUDENTS[student]
    torch.manual_seed(0)
    model = digits.small(architecture, mechanism)
    zoo.distil(
        model,
        teacher,
        lessons.pairs(),
        batch_size=32,
        steps=chosen.steps,
        kind=chosen.kind,
        alpha=alpha,
        learning_rate=2e-3,
        weight_decay=0.05,
        held_out=4,
        evaluate_every=chosen.steps,
        progress=False,
    )
    return digits.accuracy(model, test)


if __name__ == "__main__":
    main()
