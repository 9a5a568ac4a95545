"""How much of a trained vision transformer survives a swap of its attention, before and after.

A ViT learns scikit-learn's digits, each pixel a token of its 8 x 8 grid. For each mechanism: patch
it, measure, `zoo.calibrate` it on the images it was trained on (without their labels), measure
again. Measured are, on images that neither has seen: the cosine of pooled features to the
original's, and accuracy. By default all mechanisms of the family grid, most of which cannot be
swapped into a text model.

    python examples/fidelity_vit.py                     # writes what README's table shows
    python examples/fidelity_vit.py --mechanisms local nystromformer --out others.jsonl
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path

import digits
import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import zoo_core as zoo
from zoo_core.fidelity import metrics

SAME = 0.999  # a cosine from which there is nothing to heal
RESULTS = Path(__file__).with_name("fidelity_vit.jsonl")
HEADINGS = ("mechanism", "cosine", "after", "accuracy", "after", "steps", "CPU seconds")


def trained(images: digits.Digits, *, epochs: int) -> nn.Module:
    """The model to patch, in eval mode."""
    torch.manual_seed(0)
    model = digits.small("vit", "softmax", patch=1)
    with Progress(transient=True) as progress:
        bar = progress.add_task("training", total=epochs)

        def show(epoch: int, loss: float) -> None:
            progress.update(bar, completed=epoch, description=f"training, loss {loss:.3f}")

        digits.fit(model, images, epochs=epochs, rate=4e-3, on_epoch=show)
    return model.eval()


class Exam:
    """Images that no model has seen, and what the original makes of them."""

    def __init__(self, images: digits.Digits, original: nn.Module) -> None:
        self.images = images
        self.features = self._features(original)

    def sit(self, model: nn.Module) -> dict[str, float]:
        """Measure a model."""
        cosine = metrics.cosine(self._features(model), self.features)
        return {"cosine": cosine, "accuracy": digits.accuracy(model, self.images)}

    @torch.inference_mode()
    def _features(self, model: nn.Module) -> Tensor:
        tokens = model.forward_features(self.images.images)
        return model.forward_head(tokens, pre_logits=True)


def examine(
    original: nn.Module, name: str, exam: Exam, lessons: digits.Digits, chosen: argparse.Namespace
) -> dict:
    """One line of the results."""
    model = copy.deepcopy(original)
    zoo.patch(model, name, seed=0)
    line = {"mechanism": name, "before": exam.sit(model)}
    if line["before"]["cosine"] > SAME or name == "uniform":  # no way back from the floor
        return line
    start = time.process_time()
    report = zoo.calibrate(
        model, list(lessons.images), steps=chosen.steps, batch_size=chosen.batch_size
    )
    effort = {"steps": report.steps, "images": chosen.batch_size}
    seconds = round(time.process_time() - start)
    return {**line, "after": exam.sit(model.eval()), **effort, "cpu_seconds": seconds}


def kept(path: Path = RESULTS) -> list[dict]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows(lines: list[dict]) -> list[tuple[str, ...]]:
    """The results as text, the closest to the original first."""
    best = sorted(lines, key=lambda line: line.get("after", line["before"])["cosine"])
    return [_cells(line) for line in reversed(best)]


def _cells(line: dict) -> tuple[str, ...]:
    name, after = line["mechanism"], line.get("after")
    cells = [f"{name} (floor)" if name == "uniform" else name]
    for score, form in (("cosine", ".3f"), ("accuracy", ".1%")):
        cells.append(format(line["before"][score], form))
        cells.append(format(after[score], form) if after else "")
    if not after:
        return (*cells, "", "")
    return (*cells, f"{line['steps']} x {line['images']}", str(line["cpu_seconds"]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the original, patch it with each mechanism, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanisms", nargs="+", help="by default the family grid")
    parser.add_argument("--epochs", type=int, default=60, help="of the original")
    parser.add_argument("--steps", type=int, default=1500, help="of calibration")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS, help="written anew at the end")
    parser.add_argument("--table", action="store_true", help="only print what is in the file")
    parser.add_argument("--quick", action="store_true", help="a few steps of axial, not written")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.mechanisms, chosen.epochs, chosen.steps = ["axial"], 1, 2
    lines = kept(chosen.out) if chosen.table else measure(chosen)
    if not (chosen.table or chosen.quick):
        chosen.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = Table(title="A ViT for digits, its attention swapped and healed", box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        justify = "left" if heading == "mechanism" else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for cells in rows(lines):
        table.add_row(*cells)
    Console().print(table)


def measure(chosen: argparse.Namespace) -> list[dict]:
    """A line for each mechanism."""
    learned, test = digits.load(0.3)
    if chosen.quick:
        learned, test = learned.first(64), test.first(64)
    model = trained(learned, epochs=chosen.epochs)
    exam = Exam(test, model)
    family = [one.name for one in zoo.mechanisms(family="grid", distribution="zoo-core")]
    lines = []
    for name in dict.fromkeys(["softmax", "uniform", *(chosen.mechanisms or family)]):
        Console().print(f"[bold]{name}[/bold]")
        lines.append(examine(model, name, exam, learned, chosen))
    return lines


if __name__ == "__main__":
    main()
