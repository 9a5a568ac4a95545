"""How many keys a kernel memory holds: linear < DPFP-1 < DPFP-2 < DPFP-3.

S keys of 64 numbers are trained so that a query gets back the value stored under its key and
nothing of the S - 1 others, by the sum rule of `linear` and `dpfp`. The values are independent
standard normal, over which the expected squared error is known: with weights A it is the mean over
queries of sum_j (A_ij - [i = j])^2. No keys can do better than 1 - M / S with M features.

Writes retrieval_capacity.json and a figure of the same name.

    python examples/retrieval_capacity.py            # some minutes
    python examples/retrieval_capacity.py --quick    # about a minute on one thread

Schlag, Irie, Schmidhuber, "Linear Transformers Are Secretly Fast Weight Programmers", 2021,
arXiv:2102.11174, section 6.1 and figure 2.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zoo_core as zoo

WIDTH = 64
MEMORIES: dict[str, tuple[str, dict[str, int], int]] = {
    "linear": ("linear", {}, WIDTH),
    "DPFP-1": ("dpfp", {"nu": 1}, 2 * WIDTH),
    "DPFP-2": ("dpfp", {"nu": 2}, 4 * WIDTH),
    "DPFP-3": ("dpfp", {"nu": 3}, 6 * WIDTH),
}


@dataclass(frozen=True)
class Effort:
    """How much is tried: the numbers of keys, optimiser steps for each, and the step size."""

    keys: tuple[int, ...]
    steps: int
    rate: float = 0.3


QUICK = Effort(keys=(20, 40, 60, 100, 140, 200, 240, 280, 340), steps=200)
FULL = Effort(keys=tuple(range(20, 421, 20)), steps=600)

#: Training stops at this error, as good as none.
FLOOR = 1e-3


@dataclass
class Curve:
    """One memory's error at each number of keys. capacity: the most keys below the threshold."""

    memory: str
    features: int
    keys: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    capacity: int = 0


def build(mechanism: str, options: dict[str, int]) -> nn.Module:
    """The mechanism of that name for one head of WIDTH numbers."""
    record = zoo.mechanisms(mechanism)[0]
    site = zoo.Site(dim=WIDTH, heads=1, head_dim=WIDTH)
    return record.factory(site, record.options(**options))


def retrieval_error(attention: nn.Module, queries: Tensor, keys: Tensor) -> Tensor:
    """Expected squared error of each number of a retrieved value; 1 = nothing is retrieved."""
    wanted = torch.eye(keys.shape[-2])[None, None]
    weights = attention(queries, keys, wanted, zoo.Context())
    return (weights - wanted).square().sum(-1).mean()


def train(attention: nn.Module, count: int, effort: Effort) -> float:
    """The error with the best `count` keys and queries found; stops once below FLOOR."""
    torch.manual_seed(count)
    tables = [nn.Parameter(torch.randn(1, 1, count, WIDTH)) for _ in range(2)]
    optimiser = torch.optim.Adam(tables, lr=effort.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, effort.steps)
    best = float("inf")
    for _ in range(effort.steps):
        optimiser.zero_grad()
        error = retrieval_error(attention, *tables)
        best = min(best, error.item())
        if best < FLOOR:
            break
        error.backward()
        optimiser.step()
        schedule.step()
    return best


def measure(effort: Effort, threshold: float) -> list[Curve]:
    """The curve of every memory; a line of progress for each number of keys."""
    curves = []
    for memory, (mechanism, options, features) in MEMORIES.items():
        attention, curve = build(mechanism, options), Curve(memory, features)
        for count in effort.keys:
            error = train(attention, count, effort)
            curve.keys.append(count)
            curve.errors.append(error)
            if error < threshold:
                curve.capacity = count
            print(f"{memory:8} {count:4} keys  error {error:.2e}", flush=True)
        curves.append(curve)
    return curves


def draw(curves: list[Curve], threshold: float, path: Path) -> None:
    """The error against the number of keys, with the number of features as dotted lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for curve in curves:
        label = f"{curve.memory}: {curve.capacity} keys, {curve.features} features"
        (line,) = axes.semilogy(curve.keys, curve.errors, marker=".", label=label)
        axes.axvline(curve.features, color=line.get_color(), linestyle=":", linewidth=1)
    axes.axhline(threshold, color="grey", linewidth=1)
    axes.set_xlabel("keys stored")
    axes.set_ylabel("squared error of a retrieved value")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Measure, print the capacities, write the numbers and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer numbers of keys and steps")
    parser.add_argument(
        "--threshold", type=float, default=0.05, help="error up to which keys count as held"
    )
    parser.add_argument("--output", type=Path, default=Path(), help="directory to write to")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), default="png")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else FULL
    start = time.perf_counter()
    curves = measure(effort, arguments.threshold)
    seconds = round(time.perf_counter() - start, 1)
    report: dict[str, Any] = {"threshold": arguments.threshold, "seconds": seconds}
    report |= {"effort": asdict(effort), "curves": [asdict(curve) for curve in curves]}
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "retrieval_capacity"
    path.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    draw(curves, arguments.threshold, path.with_suffix(f".{arguments.format}"))
    print("capacities:", ", ".join(f"{curve.memory} {curve.capacity}" for curve in curves))


if __name__ == "__main__":
    main()
