"""Wall time that freezing saves at equal loss, on a BERT that learns to tell praise.

all-MiniLM-L6-v2 with other attention and a new classifier is fine-tuned three times on the same
film reviews in the same order: all layers train; converged layers are frozen, as PipeTransformer
does; and what the frozen layers compute is cached too. Compared are the seconds of training until
the loss on other reviews is as low as all three get, between two epochs by a straight line.

    python examples/freezing.py
    python examples/freezing.py --mechanism nystromformer --sentences 2000 --rate 1e-5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

import corpora
import torch
from finetune_bert import MINILM, encode
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoTokenizer, DataCollatorWithPadding

import zoo_core as zoo

Curve = list[tuple[float, float]]  # seconds of training and the loss on other reviews, by epoch


def main(arguments: Sequence[str] | None = None) -> None:
    """Train three times, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanism", default="linformer")
    parser.add_argument("--sentences", type=int, default=400, help="to learn from")
    parser.add_argument("--tests", type=int, default=400, help="to measure on")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1.5e-5)
    parser.add_argument("--alpha", type=float, default=0.5, help="of FreezeConverged")
    chosen = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    train, test = corpora.split(corpora.sentences("movies"), 0.7)
    collate = DataCollatorWithPadding(tokenizer)
    learned = encode(tokenizer, train[: chosen.sentences])
    others = encode(tokenizer, test[: chosen.tests])
    converged = zoo.FreezeConverged(alpha=chosen.alpha)
    runs = {
        "all layers train": (zoo.FreezeByHand((0,)), None),
        "frozen": (converged, None),
        "frozen and cached": (converged, zoo.ActivationCache()),
    }
    found = {}
    for name, (schedule, cache) in runs.items():
        print(name)
        found[name] = finetune(chosen, learned, others, collate, schedule, cache)
    target = max(min(loss for _, loss in curve) for curve, _ in found.values())
    title = f"{chosen.mechanism}, {chosen.sentences} reviews, until the loss is {target:.3f}"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("training")
    for heading in ("seconds", "saved", "all epochs, s", "lowest loss", "frozen layers"):
        table.add_column(heading, justify="right")
    whole = reached(found["all layers train"][0], target)
    for name, (curve, frozen) in found.items():
        seconds = reached(curve, target)
        saved = f"{1 - seconds / whole:.0%}"
        lowest = min(loss for _, loss in curve)
        layers = " ".join(map(str, frozen)) or "-"
        table.add_row(name, f"{seconds:.0f}", saved, f"{curve[-1][0]:.0f}", f"{lowest:.3f}", layers)
    Console().print(table)


def reached(curve: Curve, target: float) -> float:
    """The seconds after which the loss is first as low as that, which it has to get."""
    after = next(index for index, (_, loss) in enumerate(curve) if loss <= target)
    if after == 0:
        return curve[0][0]
    (start, high), (end, low) = curve[after - 1], curve[after]
    return start + (end - start) * (high - target) / (high - low)


def finetune(
    chosen: argparse.Namespace,
    learned: list[dict],
    others: list[dict],
    collate: DataCollatorWithPadding,
    schedule: zoo.FreezeByHand | zoo.FreezeConverged,
    cache: zoo.ActivationCache | None,
) -> tuple[Curve, list[int]]:
    """The curve of one training, and how many layers were frozen after each epoch."""
    torch.manual_seed(0)  # of the classifier and the dropout
    model = zoo.build(
        "bert",
        chosen.mechanism,
        pretrained=str(MINILM),
        task="sequence-classification",
        num_labels=2,
        seed=0,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.rate)
    curve: Curve = []
    frozen: list[int] = []
    seconds = 0.0
    with zoo.Freezing(model, schedule, cache=cache) as freezing:
        for epoch in range(chosen.epochs):
            start = time.perf_counter()
            model.train()
            for batch in batches(learned, collate, seed=epoch):
                optimizer.zero_grad()
                (model(**batch).loss + zoo.auxiliary_loss(model)).backward()
                freezing.observe()
                optimizer.step()
            frozen.append(freezing.end_epoch())
            seconds += time.perf_counter() - start
            curve.append((seconds, loss_on(model, others, collate)))
            print(f"{epoch + 1}: {seconds:.1f} s, loss {curve[-1][1]:.4f}, {frozen[-1]} frozen")
    return curve, frozen if any(frozen) else []


def batches(
    samples: list[dict], collate: DataCollatorWithPadding, *, seed: int
) -> Iterator[dict[str, Tensor]]:
    """All samples once, 16 at a time, in an order of their own for each seed."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    for part in order.split(16):
        yield collate([samples[index] for index in part.tolist()])


@torch.inference_mode()
def loss_on(model: nn.Module, samples: list[dict], collate: DataCollatorWithPadding) -> float:
    """The mean loss on samples that are not learned from."""
    model.eval()
    losses = [
        model(**batch).loss.item() * len(batch["labels"])
        for batch in batches(samples, collate, seed=0)
    ]
    return sum(losses) / len(samples)


if __name__ == "__main__":
    main()
