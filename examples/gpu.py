"""Measure every mechanism on one GPU in bfloat16, up to 65,536 tokens, and the kernels made for it.

python examples/gpu.py                                 # on one modern GPU about ten minutes
python examples/gpu.py --device cpu --lengths 64,128   # to see that it runs: three minutes

**This project has not yet run it on a GPU**, only on a CPU: the ten minutes are an estimate, and
--minutes keeps it from beginning anything later. It needs `pip install 'zoo-core[gpu,peers]'`.

It writes gpu.jsonl, one line for each measurement as it is made, and gpu.md with the tables that
README has for a CPU. First come the kernels of `zoo_core.nn.gpu` beside the plain path: how far
each is from the plain path in fp32, and how long it takes. Then all mechanisms, beside fused
softmax and public implementations. What does not fit, fails or would take too long is named with
the reason.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from benchmarks import TOGETHER, growth, is_quadratic
from torch import Tensor, nn

from zoo_core import Context, Site, bench, registry
from zoo_core.bench.cases import DTYPES, Case
from zoo_core.bench.competitors import Inputs
from zoo_core.bench.counting import available_bytes
from zoo_core.bench.rows import Row
from zoo_core.bench.tables import figures, headline
from zoo_core.bench.timing import Race, ratio
from zoo_core.errors import BenchError
from zoo_core.mechanism import Mechanism
from zoo_core.nn import choice
from zoo_core.words import markdown_table

LENGTHS = (1024, 4096, 16384, 65536)
#: Longer inputs only for mechanisms whose time grows more slowly than n**2.
QUADRATIC_UP_TO = 4096
#: Peers compile and search longer than they compute.
PEERS_UP_TO = 16384
#: A mechanism is left out where a call would take more seconds, or more of the free memory.
LONGEST_CALL, LARGEST_SHARE = 1.0, 0.8
ROUNDS, SECONDS = 3, 0.02
#: What has kernels of its own: mechanism, and whether the call is causal.
KERNELS = (("linear", True), ("delta", True), ("delta", False), ("local", False))


class Report:
    """What was measured, in two files; the first grows line by line."""

    def __init__(self, lines: TextIO, machine: dict[str, Any]) -> None:
        self.lines, self.machine = lines, machine
        self.rows: list[Row] = []
        self.kernels: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}
        self._write("machine", machine)

    def add_kernel(self, measured: dict[str, Any]) -> None:
        """Keep one comparison of `compare`."""
        self.kernels.append(measured)
        self._write("kernel", measured)

    def add(self, rows: Sequence[Row]) -> None:
        """Keep the rows of one race; of what takes part in several, the first."""
        known = {row.key for row in self.rows}
        for row in rows:
            if row.refused:
                self.leave_out(f"{row.name}, {row.case.length} tokens", row.refused)
            elif row.key not in known:
                self.rows.append(row)
                self._write("row", row.as_dict())

    def leave_out(self, what: str, reason: str) -> None:
        """Say why there is no number."""
        self.left_out[what] = reason
        self._write("left out", {"what": what, "reason": reason})

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        print(json.dumps({"kind": kind, **values}), file=self.lines, flush=True)

    def markdown(self) -> str:
        """The tables, the machine, and what is missing from them."""
        parts = [headline(self.machine), self._kernels_table(), bench.markdown(self.rows)]
        missing = [f"- {what}: {reason}" for what, reason in self.left_out.items()]
        if missing:
            parts.append("\n".join(["Left out:", "", *missing]))
        return "\n\n".join(part for part in parts if part) + "\n"

    def _kernels_table(self) -> str:
        if not self.kernels:
            return ""
        head = ("kernel", "tokens", "time / plain path", "error", "plain path's", "gradients'")
        lines = [
            (
                one["name"],
                str(one["length"]),
                figures(one["ratio"]),
                *(f"{one[key]:.0e}" for key in ("error", "plain_error", "gradient_error")),
            )
            for one in self.kernels
        ]
        return markdown_table(head, lines)


def compare(name: str, causal: bool, case: Case) -> dict[str, Any]:
    """One kernel beside the plain path, forward; errors are those of outputs and gradients.

    Root mean squares, relative to the plain path in fp32. Raises RuntimeError where both took the
    plain path.
    """
    module = build(name, causal, case)
    inputs = Inputs.of(case)
    wide = copy.deepcopy(module).float()
    with choice.plain_only():
        wanted = computed(wide, inputs, causal, torch.float32)
        plain = computed(module, inputs, causal, inputs.q.dtype)
    ours = computed(module, inputs, causal, inputs.q.dtype)
    if torch.equal(ours[0], plain[0]):
        raise RuntimeError("both took the plain path (no GPU, no zoo-core[gpu], or few tokens)")
    ctx = context(inputs, causal, inputs.q.dtype)

    def kernel() -> Tensor:
        with torch.no_grad():
            out: Tensor = module(inputs.q, inputs.k, inputs.v, ctx)
            return out

    def path() -> Tensor:
        with choice.plain_only():
            return kernel()

    race = Race({"kernel": kernel, "plain": path}, threads=torch.get_num_threads(), seconds=SECONDS)
    race.run(ROUNDS)
    times = race.timings()
    return {
        "name": f"{name}, {'causal' if causal else 'both ways'}",
        "length": case.length,
        "dtype": case.dtype,
        "seconds": times["kernel"].median,
        "plain_seconds": times["plain"].median,
        "ratio": ratio(times["kernel"], times["plain"]).value,
        "error": distance(ours[0], wanted[0]),
        "plain_error": distance(plain[0], wanted[0]),
        "gradient_error": max(map(distance, ours[1:], wanted[1:])),
    }


def build(name: str, causal: bool, case: Case) -> nn.Module:
    """A mechanism of its default options, on the case's device in its dtype."""
    record = registry.mechanism(name)
    site = Site(
        dim=case.dim,
        heads=case.heads,
        head_dim=case.width,
        scale=case.width**-0.5,
        max_len=case.length,
        causal=causal,
    )
    torch.manual_seed(0)
    module: nn.Module = record.factory(site, record.options())
    return module.eval().to(device=case.device, dtype=getattr(torch, case.dtype))


def context(inputs: Inputs, causal: bool, dtype: torch.dtype) -> Context:
    """Of a call without padding whose layer input are the keys of all heads."""
    hidden = inputs.k.detach().transpose(1, 2).flatten(2).to(dtype)
    return Context(causal=causal, hidden=hidden)


def computed(
    module: nn.Module, inputs: Inputs, causal: bool, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k and v for a loss of its squares."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out: Tensor = module(*leaves, context(inputs, causal, dtype))
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)


def distance(x: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference, relative to that of what is wanted."""
    return float((x.float() - wanted).norm() / wanted.norm())


def races(
    records: Sequence[Mechanism], case: Case, report: Report
) -> Iterator[Callable[[], list[Row]]]:
    """The races of one length, by some mechanisms each."""
    names = []
    for record in records:
        if reason := too_much(record, case, report.rows):
            report.leave_out(f"{record.name}, {case.length} tokens", reason)
        else:
            names.append(record.name)
    effort = bench.Effort(rounds=ROUNDS, seconds=SECONDS)
    peers = case.length <= PEERS_UP_TO
    for start in range(0, len(names), TOGETHER):
        some = names[start : start + TOGETHER]
        yield lambda: list(bench.measure(some, [case], peers=peers, effort=effort))  # noqa: B023


def too_much(record: Mechanism, case: Case, rows: Sequence[Row]) -> str:
    """Why not to try a mechanism at a length, "" if nothing is known against it."""
    if case.length > QUADRATIC_UP_TO and is_quadratic(record):
        return f"its time grows like n**2; measured up to {QUADRATIC_UP_TO} tokens"
    before = [row for row in rows if row.name == record.name and row.role == "mechanism"]
    if not before or not before[-1].seconds:
        return ""
    last = before[-1]
    seconds = before[-1].seconds * growth(record, record.time, last.case, case)
    if seconds > LONGEST_CALL:
        return f"a call would take about {seconds:.1f} s"
    size = (last.peak or 0) * growth(record, record.memory, last.case, case)
    free = available_bytes(torch.device(case.device))
    if free is not None and size > LARGEST_SHARE * free:
        return f"would take about {size / 1e9:.0f} GB of {free / 1e9:.0f} that are free"
    return ""


def measure(chosen: argparse.Namespace, report: Report) -> None:
    """Kernels, then mechanisms by growing length, until the time is up."""
    start = time.monotonic()
    records = [registry.mechanism(name) for name in chosen.mechanisms]
    records = records or registry.mechanisms(distribution="zoo-core")
    how = {"device": chosen.device, "dtype": chosen.dtype}
    cases = [Case(length=length, **how) for length in sorted(set(chosen.lengths))]

    def is_over(what: str) -> bool:
        minutes = (time.monotonic() - start) / 60
        print(f"{minutes:5.1f} min  {what}", flush=True)
        if over := minutes > chosen.minutes:
            report.leave_out(what, f"the {chosen.minutes:g} minutes were over")
        return over

    for case in cases:
        for name, causal in KERNELS:
            what = f"kernel of {name}, {'causal' if causal else 'both ways'}, {case.length} tokens"
            if not is_over(what):
                attempt(what, report, lambda: report.add_kernel(compare(name, causal, case)))  # noqa: B023
    for case in cases:
        for number, race in enumerate(races(records, case, report), 1):
            what = f"mechanisms at {case.length} tokens, part {number}"
            if not is_over(what):
                attempt(what, report, lambda: report.add(race()))  # noqa: B023


def attempt(what: str, report: Report, run: Callable[[], None]) -> None:
    """Run one part; what ends it, as too little memory does, is kept as the reason."""
    try:
        run()
    except Exception as failure:
        report.leave_out(what, f"{type(failure).__name__}: {failure}".splitlines()[0])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse() -> argparse.Namespace:
    """The command line."""

    def several(text: str) -> list[str]:
        return [part for part in text.split(",") if part]

    def numbers(text: str) -> list[int]:
        return [int(part) for part in several(text)]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="as torch writes it (default: cuda)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--lengths", type=numbers, default=LENGTHS, help="1024,4096,...")
    parser.add_argument("--mechanisms", type=several, default=[], help="linear,local,... (all)")
    parser.add_argument("--minutes", type=float, default=10, help="begin nothing later")
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="files, without endings")
    return parser.parse_args()


def main() -> None:
    """Measure, and write both files, also when it is interrupted."""
    chosen = parse()
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        machine = bench.describe_machine(chosen.device)
    except BenchError as error:
        raise SystemExit(f"{error}; --device cpu --lengths 64,128 shows what it does") from None
    lines, tables = (chosen.output.with_suffix(ending) for ending in (".jsonl", ".md"))
    with lines.open("w", encoding="utf-8") as file:
        report = Report(file, machine)
        try:
            measure(chosen, report)
        finally:
            tables.write_text(report.markdown(), encoding="utf-8")
    print(f"kept in {lines} and {tables}")


if __name__ == "__main__":
    main()
