"""Train small vision transformers from scratch on scikit-learn's digits, with any attention.

    python examples/train_vit.py                                    # softmax, linformer, local
    python examples/train_vit.py --mechanisms nystromformer axial --epochs 30
    python examples/train_vit.py --patch 1                          # 64 patches instead of 16

Ends with an error where a model stays below the goal.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import digits
import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


def main(arguments: Sequence[str] | None = None) -> None:
    """Train each one, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanisms", nargs="+", default=["softmax", "linformer", "local"])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--patch", type=int, default=2, choices=(1, 2, 4), help="pixels a side")
    parser.add_argument("--goal", type=float, default=0.95, help="accuracy to reach")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one epoch, of softmax, for no goal")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.mechanisms, chosen.epochs, chosen.goal = ["softmax"], 1, 0.0
        chosen.patch = 4
    found = {name: train(name, chosen) for name in chosen.mechanisms}
    table = Table(title=f"Digits, {chosen.epochs} epochs from scratch", box=box.SIMPLE_HEAD)
    table.add_column("mechanism")
    for heading in ("accuracy", "seconds"):
        table.add_column(heading, justify="right")
    for name, (accuracy, seconds) in found.items():
        table.add_row(name, f"{accuracy:.1%}", f"{seconds:.0f}")
    Console().print(table)
    missed = [name for name, (accuracy, _) in found.items() if accuracy < chosen.goal]
    if missed:
        raise SystemExit(f"below {chosen.goal:.0%}: {', '.join(missed)}")


def train(mechanism: str, chosen: argparse.Namespace) -> tuple[float, float]:
    """Accuracy on digits never seen, and the seconds it took."""
    learned, test = digits.load()
    torch.manual_seed(chosen.seed)
    model = digits.small("vit", mechanism, patch=chosen.patch, seed=chosen.seed)
    start = time.perf_counter()
    with Progress(transient=True) as progress:
        bar = progress.add_task(mechanism, total=chosen.epochs)

        def show(epoch: int, loss: float) -> None:
            progress.update(bar, completed=epoch, description=f"{mechanism}, loss {loss:.3f}")

        digits.fit(model, learned, epochs=chosen.epochs, on_epoch=show)
    return digits.accuracy(model, test), time.perf_counter() - start


if __name__ == "__main__":
    main()
