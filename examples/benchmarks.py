"""Measure every mechanism, and whole models: what README's tables of speed and `zoo why` tell.

python examples/benchmarks.py                  # goes on where an interrupted run stopped
python examples/benchmarks.py --again          # begins anew
python examples/benchmarks.py --minutes 20     # begins no race after that
python examples/readme.py --quick              # then: write README's tables

The races that matter most come first, and each finished one is kept at once in
zoo_core/bench/measured.json. Run it on an idle machine, with the native kernels built (`zoo native
--build`), which it measures last.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zoo_core import bench, registry
from zoo_core.bench.cases import Case
from zoo_core.bench.measured import FILE
from zoo_core.bench.rows import Row
from zoo_core.bench.scaling import growth_between
from zoo_core.mechanism import Mechanism
from zoo_core.nn import native

SHORT, LONG, LONGER, LONGEST = (128, 512, 1024), 4096, 8192, 16384
#: Whole models: those that should pay, after softmax, which should cost nothing.
IN_MODELS = ("softmax", "linear", "performer", "linformer", "nystromformer", "local")
#: Those with native kernels, measured with and without them.
WITH_KERNELS = (
    "bigbird",
    "clustered",
    "delta",
    "dpfp",
    "improved_clustered",
    "linear",
    "local",
    "log_sparse",
    "low_rank_band",
    "lsh",
    "nystromformer",
    "pooling",
    "reformer",
    "sparse_transformer",
    "spe",
)
#: So many mechanisms share the calls of fused softmax in one race.
TOGETHER = 13
#: A mechanism is left out of a race where one call would take more seconds, or bytes.
LONGEST_CALL = 6.0
LARGEST_CALL = 8e9
#: A backward takes about twice as long as its forward, and keeps what that computed.
WITH_BACKWARD = 3


@dataclass(frozen=True)
class Heat:
    """One race. model: the architecture of whole models, with settings; "" for bare attention."""

    case: Case
    names: tuple[str, ...]
    peers: bool = False
    rounds: int = 3
    model: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        what = self.model or "attention"
        shape = f"{self.case.batch} x {self.case.length}"
        return f"{what}, {shape}, {self.case.mode}: {', '.join(self.names)}"

    def run(self) -> list[Row]:
        """All its rows, or interrupted none."""
        effort = bench.Effort(rounds=self.rounds, seconds=0.05)
        how: dict[str, Any] = {"peers": self.peers, "effort": effort, **self.settings}
        if self.model:
            return list(bench.measure_models(self.model, self.names, [self.case], **how))
        return list(bench.measure(self.names, [self.case], **how))

    def left(self, rows: Sequence[Row]) -> Heat | None:
        """Without what is measured already or would take for ever; None if nothing is left."""
        mine = [row for row in rows if row.model == self.model and row.role == "mechanism"]
        done = {row.name for row in mine if place(row.case) == place(self.case)}
        before = {} if self.model else {row.name: row for row in mine if is_measure(row)}
        names = [name for name in self.names if name not in done]
        names = [n for n in names if n not in before or is_feasible(before[n], self.case)]
        return replace(self, names=tuple(names)) if names else None


def place(case: Case) -> tuple[int, int, str, bool]:
    """What tells the races of one model apart."""
    return case.length, case.batch, case.mode, case.native


def is_measure(row: Row) -> bool:
    """Whether costs of other cases can be told from this row."""
    return row.case.mode == "forward" and bool(row.seconds and row.peak)


def is_feasible(before: Row, case: Case) -> bool:
    """Whether a call takes bearable time and memory, by those of a forward at another length."""
    record = registry.mechanism(before.name)
    more = WITH_BACKWARD if case.mode == "backward" else 1
    time = (before.seconds or 0) * more * growth(record, record.time, before.case, case)
    memory = (before.peak or 0) * more * growth(record, record.memory, before.case, case)
    return time < LONGEST_CALL and memory < LARGEST_CALL


def growth(record: Mechanism, cost: str, short: Case, long: Case) -> float:
    """How many times as much a mechanism takes at another length, by its record."""
    sizes = {**record.options().as_dict(), "d": long.width}
    return growth_between(cost, short.length, long.length, sizes)


def is_quadratic(record: Mechanism) -> bool:
    """Whether its time grows like the square of the length, or nearly."""
    short, long = Case(length=LONG), Case(length=LONGEST)
    return growth(record, record.time, short, long) > 0.9 * (LONGEST / LONG) ** 2


def heats(records: Sequence[Mechanism]) -> Iterator[Heat]:
    """Every race, those that matter most first."""
    names = [record.name for record in records]
    slow = [record.name for record in records if is_quadratic(record)]
    fast = [name for name in names if name not in slow]
    for length in SHORT:
        yield from bare(names, Case(length=length))
    yield from bare(names, Case(length=LONG), peers=True)
    yield from bare(fast, Case(length=LONGEST))
    yield from bare(fast, Case(length=LONGER))
    yield from bare(slow, Case(length=LONGER), rounds=2)
    yield from whole(IN_MODELS, peers=True)
    yield from bare(fast, Case(length=LONG, mode="backward"), peers=True)
    yield from bare(slow, Case(length=LONG, mode="backward"), peers=True, rounds=2)
    for length in SHORT[1:]:  # how memory grows
        yield from bare(names, Case(length=length, mode="backward"))
    yield from bare(fast, Case(length=LONGER, mode="backward"), rounds=2)
    yield from bare(fast, Case(length=LONG, mode="compiled"))  # compiling takes the most of it
    if native.loaded():
        yield from with_kernels()


def with_kernels() -> Iterator[Heat]:
    """The races with native kernels."""
    for mode in ("forward", "backward"):
        for length in (*SHORT, LONG, LONGER, LONGEST):
            if mode == "forward" or length not in (SHORT[0], LONGEST):
                case = Case(length=length, mode=mode, native=True)
                yield Heat(case, WITH_KERNELS, peers=length == LONG)
    yield Heat(Case(length=LONG, mode="compiled", native=True), WITH_KERNELS)
    yield from whole([name for name in IN_MODELS if name in WITH_KERNELS], native=True)


def whole(names: Sequence[str], *, peers: bool = False, native: bool = False) -> Iterator[Heat]:
    """The races of whole models."""
    both = tuple(names)
    bert: dict[str, Any] = {"model": "bert", "settings": {"num_hidden_layers": 2}}
    yield Heat(Case(length=LONG, native=native), both, peers=peers, **bert)
    yield Heat(Case(length=128, batch=32, padded=True, native=native), both, rounds=7, **bert)
    images = Case(
        length=197, batch=8, native=native
    )  # 196 patches and a CLS, whatever is asked for
    yield Heat(images, both, rounds=9, model="vit", settings={"depth": 2})
    one_layer = {"model": "bert", "settings": {"num_hidden_layers": 1}}
    faster = tuple(name for name in names if name != "softmax")
    yield Heat(Case(length=LONGEST, native=native), faster, **one_layer)


def bare(names: Sequence[str], case: Case, **how: Any) -> Iterator[Heat]:
    """Some mechanisms at a time, without a model: 12 heads of 64."""
    for start in range(0, len(names), TOGETHER):
        yield Heat(case, tuple(names[start : start + TOGETHER]), **how)


class Record:
    """The rows of all races so far, in a file."""

    def __init__(self, path: Path, *, threads: int | None, again: bool) -> None:
        self.path, self.machine = path, bench.describe_machine("cpu", threads)
        self.rows: list[Row] = []
        if again or not path.exists():
            return
        kept = bench.load(path)
        if kept.machine != self.machine:
            raise SystemExit(f"{path} is of another machine; add --again to begin anew")
        self.rows = list(kept.rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Keep the rows of one race; of what takes part in several, the first."""
        known = {row.key for row in self.rows}
        self.rows += [row for row in rows if row.key not in known]
        bench.save(self.path, self.rows, self.machine, command="python examples/benchmarks.py")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--threads", type=int, help="of torch (default: its own)")
    parser.add_argument("--output", type=Path, default=FILE, help="the file to keep it in")
    return parser.parse_args()


def main() -> None:
    """Run the races that are left."""
    chosen, start = parse(), time.monotonic()
    # It warns of a CUDA toolkit without a GPU, which is no concern of ours.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    if chosen.threads:
        import torch

        torch.set_num_threads(chosen.threads)
    record = Record(chosen.output, threads=chosen.threads, again=chosen.again)
    for heat in heats(registry.mechanisms(distribution="zoo-core")):
        minutes = (time.monotonic() - start) / 60
        if minutes > chosen.minutes:
            raise SystemExit(f"stopped after {minutes:.0f} minutes; the same command goes on")
        if left := heat.left(record.rows):
            print(f"{minutes:5.1f} min  {left}", flush=True)
            record.add(left.run())
    print(f"kept in {chosen.output}")


if __name__ == "__main__":
    main()
