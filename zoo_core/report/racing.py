"""A model beside itself with its stock attention: time and memory, by length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from zoo_core.architecture import ArchitectureAdapter
from zoo_core.bench.cases import Case
from zoo_core.bench.contest import Contest, Effort, Steps
from zoo_core.bench.machine import describe_machine
from zoo_core.bench.models import Host
from zoo_core.bench.rows import Row
from zoo_core.bench.scaling import break_evens
from zoo_core.bench.tables import headline
from zoo_core.errors import ZooError
from zoo_core.hosts import adapter_of
from zoo_core.patching import stack_of
from zoo_core.report.records import PATCHED, STOCK, Speed

#: What a report spends on a race where nothing else is asked for.
QUICK = Effort(rounds=3, seconds=0.03)
#: Longer inputs are measured by `zoo bench` only.
LONGEST = 2048
_LENGTHS = 3


def race(
    host: nn.Module,
    *,
    reads_text: bool,
    effort: Effort = QUICK,
    progress: Callable[[str], None] | None = None,
) -> Speed:
    """Time one forward of one sample, patched and stock in turns, at the longest length and below.

    The model is as it was afterwards. Raises ZooError for a model with stock attention.
    """
    if stack_of(host) is None:
        raise ZooError("the model has its stock attention, which is what others are raced against")
    _, adapter = adapter_of(host)
    rows: list[Row] = []
    with _copies(host) as copies:
        for length in lengths(adapter, host, reads_text=reads_text):
            case = _case(adapter, host, length)
            rows += _race(adapter, copies, case, effort, progress, reads_text=reads_text)
    if not any(row.seconds is not None for row in rows):
        raise ZooError("; ".join(dict.fromkeys(row.refused for row in rows if row.refused)))
    pays = [str(found) for found in break_evens(rows)]
    device = str(next(host.parameters()).device)
    machine = headline(describe_machine(device, effort.threads))
    return Speed(tuple(rows), machine, pays[0] if pays else None)


def lengths(adapter: ArchitectureAdapter, host: nn.Module, *, reads_text: bool) -> list[int]:
    """The lengths to measure at: of images the one there is, of texts the longest and halves."""
    longest = min(site.max_len for site in adapter.sites(host))
    if not reads_text:
        return [longest]
    longest = min(longest, LONGEST)
    return sorted({max(1, longest >> halves) for halves in range(_LENGTHS)})


def _case(adapter: ArchitectureAdapter, host: nn.Module, length: int) -> Case:
    weight = next(host.parameters())
    site = adapter.sites(host)[0]
    return Case(
        length=length,
        heads=site.heads,
        width=site.head_dim,
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
    )


def _race(
    adapter: ArchitectureAdapter,
    copies: dict[str, nn.Module],
    case: Case,
    effort: Effort,
    progress: Callable[[str], None] | None,
    *,
    reads_text: bool,
) -> Iterator[Row]:
    what = f"speed at {case.length} tokens"
    if progress:
        progress(what)
    contest = Contest(case, effort)
    for name, model in copies.items():
        host = Host(
            name=type(model).__name__,
            model=model,
            heads=case.heads,
            width=case.width,
            length=None if reads_text else case.length,
            layers=None,
        )
        role: Any = "reference" if name == STOCK else "mechanism"
        row = Row(case=case, name=name, role=role, model=host.name)
        contest.enter(row, partial(host.work, name, model, case, {}))
    yield from contest.run(Steps(effort.rounds, None), what)


@contextmanager
def _copies(host: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Copies of all modules around the same tensors, whose flags are given back at the end."""
    flags = [(parameter, parameter.requires_grad) for parameter in host.parameters()]
    tensors: Sequence[Any] = (*host.parameters(), *host.buffers())
    stock, patched = (copy.deepcopy(host, {id(t): t for t in tensors}) for _ in range(2))
    if (stack := stack_of(stock)) is not None:
        stack.clear()
    try:
        yield {STOCK: stock, PATCHED: patched}
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
