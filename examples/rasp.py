"""What small models learn of tasks with exact answers, by attention mechanism.

For each task and mechanism, two small BERTs with the layers and heads that the task's RASP program
takes are trained on the same words: one free, one whose heads are guided to the program's
attention patterns. Words held out say how many labels are right; `floor` is the best single answer.
Ctrl-C keeps what is complete.

    python examples/rasp.py                                    # some minutes
    python examples/rasp.py --quick                            # about two minutes on one thread
    python examples/rasp.py --tasks sort dyck2 --mechanisms softmax linformer

Weiss, Goldberg, Yahav, "Thinking Like Transformers", 2021, arXiv:2106.06981.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from zoo_core import rasp
from zoo_core.rasp.learning import Outcome, try_to_learn
from zoo_core.rasp.report import HEADINGS, LEGEND, caption, cells

MECHANISMS = ("softmax", "linear", "performer", "linformer", "nystromformer", "uniform")
FULL = {"width": 32, "steps": 1000, "learning_rate": 5e-3}
QUICK = {"width": 16, "steps": 300, "learning_rate": 1e-2}


def show_a_word(task: rasp.Task) -> None:
    """Show one word and the program's answer to it."""
    sample = task.sample(1, 8, torch.Generator().manual_seed(4))
    asked = sample.labels[0] >= 0
    print(f"  for instance {sample.words.tokens[0, asked].tolist()}", end="")
    print(f" -> {sample.labels[0, asked].tolist()}")


def measure(
    task: str, mechanisms: list[str], settings: dict[str, float]
) -> tuple[list[Outcome], bool]:
    """Train a free and a guided model with each mechanism; and whether Ctrl-C ended it."""
    outcomes: list[Outcome] = []
    with suppress(KeyboardInterrupt), Progress(transient=True) as bar:
        steps = int(settings["steps"])
        total = bar.add_task(task, total=2 * len(mechanisms) * steps)
        for mechanism in mechanisms:
            for guided in (False, True):
                bar.update(total, description=f"{task}: {mechanism:<16}")
                outcomes.append(
                    try_to_learn(
                        task,
                        mechanism,
                        guided=guided,
                        progress=lambda step: bar.advance(total),
                        **settings,
                    )
                )
    return outcomes, len(outcomes) < 2 * len(mechanisms)


def show(outcomes: list[Outcome], console: Console) -> None:
    """A table of one task."""
    table = Table(title=caption(outcomes), title_justify="left")
    for heading in HEADINGS:
        left = heading in ("mechanism", "heads")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*cells(outcome), style="dim" if outcome.attention == "uniform" else "")
    console.print(table)
    for outcome in outcomes:
        if outcome.refused:
            console.print(f"{outcome.attention}: {outcome.refused}", style="yellow")


def main() -> None:
    """Train, print a table for each task, and keep the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(rasp.TASKS), default=["reverse", "sort"])
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--quick", action="store_true", help="reverse, smaller models, few steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the outcomes as JSON")
    arguments = parser.parse_args()
    tasks = ["reverse"] if arguments.quick else arguments.tasks
    settings = {**(QUICK if arguments.quick else FULL), "seed": arguments.seed}
    console, outcomes = Console(), []
    for task in tasks:
        print(f"{task}: {rasp.TASKS[task].summary}")
        show_a_word(rasp.TASKS[task])
        found, interrupted = measure(task, arguments.mechanisms, settings)
        if found:
            show(found, console)
        outcomes += found
        if interrupted:
            console.print("interrupted; what was complete is above", style="yellow")
            break
    console.print(LEGEND, style="dim")
    if arguments.output:
        rows = [outcome.as_dict() for outcome in outcomes]
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
