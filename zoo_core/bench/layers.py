"""Race bare mechanisms against fused softmax, the machine's floors, and their peers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zoo_core import registry
from zoo_core.bench import counting
from zoo_core.bench.cases import Case
from zoo_core.bench.competitors import Inputs, Work, attend, fitted, softmax
from zoo_core.bench.contest import Contest, Effort, Progress, Steps
from zoo_core.bench.machine import check_case
from zoo_core.bench.peers import peers_of
from zoo_core.bench.rows import Row
from zoo_core.bench.scaling import growth_between
from zoo_core.errors import BenchError
from zoo_core.mechanism import Mechanism, Options

Chosen = tuple[Mechanism, Options]

_SHARE_OF_MEMORY = 0.9


def measure(
    mechanisms: Sequence[str | Mechanism],
    cases: Sequence[Case],
    *,
    options: Mapping[str, Any] | None = None,
    peers: bool = True,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Rows of every case: the reference "sdpa", the mechanisms, and public implementations.

    mechanisms: names or records. options: of the mechanism, where there is just one.
    peers: whether installed public implementations take part.

    Rows come when their case is done. Ctrl-C ends it after the rows of the complete rounds. Raises
    UnknownName or OptionError before anything is measured; what fails later is a refused row.
    """
    chosen = choose(mechanisms, options)
    effort = effort or Effort()
    for case in cases:
        check_case(case)
    steps = Steps(len(cases) * (effort.rounds + len(chosen)), progress)
    memory = Memory()
    for case in cases:
        for row in _race(case, chosen, effort, steps, memory, peers=peers):
            memory.note(row)
            yield row
        torch.compiler.reset()


def choose(
    mechanisms: Sequence[str | Mechanism], options: Mapping[str, Any] | None
) -> list[Chosen]:
    """Look names up and parse options. Raises UnknownName or OptionError."""
    if options and len(mechanisms) != 1:
        raise BenchError("options belong to one mechanism; name just one, or leave them out")
    found = [registry.mechanism(m) if isinstance(m, str) else m for m in mechanisms]
    return [(one, one.options.parse(options, owner=one.name)) for one in found]


def _race(
    case: Case,
    chosen: Sequence[Chosen],
    effort: Effort,
    steps: Steps,
    memory: Memory,
    *,
    peers: bool,
) -> Iterator[Row]:
    inputs, what = Inputs.of(case), f"{case.length} tokens, {case.mode}"
    contest = Contest(case, effort, moved=inputs.bytes)
    contest.enter(Row(case=case, name="sdpa", role="reference"), partial(softmax, inputs))
    for mechanism, wanted in chosen:
        steps.say(f"{what}: preparing {mechanism.name}")
        options = fitted(mechanism, wanted, case).as_dict()
        row = Row(case=case, name=mechanism.name, role="mechanism", options=options)
        entry = contest.enter(row, partial(_attend, memory, row, mechanism, wanted, inputs))
        if peers and not entry.row.refused:
            for peer in peers_of(mechanism.name, case.device):
                row = Row(case=case, name=peer.name, role="peer", of=mechanism.name)
                contest.enter(row, partial(peer.work, inputs, options))
        steps.step(what)
    yield from contest.run(steps, what)


def _attend(
    memory: Memory, row: Row, mechanism: Mechanism, options: Options, inputs: Inputs
) -> Work:
    memory.check(row, mechanism, options)
    return attend(mechanism, options, inputs)


class Memory:
    """What mechanisms took at shorter lengths, to refuse a case that would exhaust the machine."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}

    def note(self, row: Row) -> None:
        """Remember a measured peak."""
        if row.role == "mechanism" and row.peak:
            self._rows[row.name, row.case.mode] = row

    def check(self, row: Row, mechanism: Mechanism, options: Options) -> None:
        """Raise BenchError where the declared growth from the last length does not fit."""
        before = self._rows.get((row.name, row.case.mode))
        free = counting.available_bytes(torch.device(row.case.device))
        if before is None or before.peak is None or free is None:
            return
        sizes = {**options.as_dict(), "d": row.case.width}
        growth = growth_between(mechanism.memory, before.case.length, row.case.length, sizes)
        samples = row.case.batch * row.case.heads / (before.case.batch * before.case.heads)
        needed = before.peak * growth * samples
        if needed > _SHARE_OF_MEMORY * free:
            raise BenchError(
                f"would take about {needed / 1e9:.1f} GB at {row.case.length} tokens, "
                f"{free / 1e9:.1f} GB are free; use shorter lengths or fewer heads"
            )
