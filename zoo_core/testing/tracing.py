"""Rule 7: compiles whole, never reads values, loops over nothing, stores no N x N tensor."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zoo_core.mechanism import Mechanism
from zoo_core.testing.cases import Call, Probe, Setting, main_settings, run, settings, small
from zoo_core.testing.compare import expect, expect_close
from zoo_core.testing.conformance import rule
from zoo_core.testing.layouts import padded_and_not


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that run below, and keeps the size of the largest tensor they made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.reads: list[str] = []
        self.largest = 0
        self.largest_shape: tuple[int, ...] = ()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        if function is torch.ops.aten._local_scalar_dense.default:
            self.reads.append(str(tuple(args[0].shape)))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() > self.largest:
                self.largest = tensor.untyped_storage().nbytes()
                self.largest_shape = tuple(tensor.shape)
        return out


def record(probe: Probe, call: Call, *, backward: bool = False) -> Recorder:
    """Run a call, and its backward if asked, under a Recorder."""
    call, _ = call.leaves()
    recorder = Recorder()
    with recorder:
        out = run(probe, call)
        if backward:
            torch.autograd.backward(out.sum())
    probe.zero_grad()
    return recorder


@rule(7)
def check_reads_no_values(mechanism: Mechanism) -> None:
    """A forward never reads a tensor's values into Python (item, bool, tolist)."""
    for setting in settings(mechanism):
        for call in padded_and_not(setting, 17):
            recorder = record(setting.build(), call)
            times = len(recorder.reads)
            expect(times == 0, call, "no value read", f"{times} reads of tensors {recorder.reads}")


@rule(7)
def check_no_loops(mechanism: Mechanism) -> None:
    """No Python loop over batch, head or token: the number of operations does not follow them."""
    for setting in settings(mechanism):
        base = record(setting.build(), setting.call(24, batch=2)).operations
        many = setting.but(heads=10)
        larger = {
            "batch 2 -> 10": (setting, setting.call(24, batch=10), 8),
            "heads 2 -> 10": (many, many.call(24, batch=2), 8),
            "tokens 24 -> 48": (setting, setting.call(48, batch=2), 24),
        }
        for note, (other, call, added) in larger.items():
            more = record(other.build(), call).operations - base
            expected = f"fewer than {added} operations more than at the smaller size"
            expect(more < added, call.but(note), expected, f"{more} more than {base}")


@rule(7)
def check_memory(mechanism: Mechanism) -> None:
    """Without n**2 in the declared memory no tensor grows like N x N, in the backward either.

    But for a mask where causality meets padding: whoever takes n**2 time may make one, as hosts do.
    """
    power, quadratic = declared_power(mechanism.memory), declared_power(mechanism.time) >= 2
    if power >= 2:
        return
    for setting in _approximating(mechanism):
        probe = setting.but(max_len=2048, heads=1).build(dtype=torch.float32)
        wide, masked = setting.but(heads=1), quadratic and setting.causal
        half, full = (
            record(probe, call, backward=True)
            for length in (1024, 2048)
            for call in [padded_and_not(wide, length)[0 if masked else -1].to(torch.float32)]
        )
        growth = full.largest / half.largest
        expect(
            growth < 2 ** (power + 0.5),
            f"{setting.label}, 1024 -> 2048 tokens",
            f"the largest tensor to grow like {mechanism.memory!r}, at most {2**power:.3g} times",
            f"{growth:.3g} times, to {full.largest:,} bytes, shape {full.largest_shape}",
        )


@rule(7, quick=False)
def check_compile(mechanism: Mechanism) -> None:
    """torch.compile(fullgraph=True) traces it, at several lengths, with and without padding."""
    for setting in main_settings(mechanism):
        probe = setting.build(dtype=torch.float32)
        torch._dynamo.reset()
        compiled: Any = torch.compile(probe, fullgraph=True, backend="eager")
        with _quiet_logs():
            # Two graphs: without padding at one length, then with padding at any length.
            for length, which in ((16, 0), (33, -1)):
                call = padded_and_not(setting, length)[which].to(torch.float32)
                wanted = run(probe, call)
                got = run(compiled, call.but("compiled with fullgraph=True"))
                rows = call.real
                expected = "what eager mode gives"
                expect_close(
                    got[..., rows, :], wanted[..., rows, :], call, expected, tolerance=1e-5
                )
    torch._dynamo.reset()


def declared_power(memory: str) -> float:
    """The largest power of n in a growth such as "n*rank*d" or "n**2 + n*d"; at least 1."""
    powers = re.findall(r"\bn\s*(?:\*\*|\^)\s*([\d.]+)", memory)
    squared = re.search(r"\bn\s*\*\s*n\b", memory)
    return max([1.0, *map(float, powers), 2.0 if squared else 1.0])


@contextmanager
def _quiet_logs() -> Iterator[None]:
    """Keep the compiler's thousands of debug records out of a test report."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _approximating(mechanism: Mechanism) -> list[Setting]:
    """All settings but those with default sizes, which may be larger than the tokens here."""
    default, found = mechanism.options(), settings(mechanism)
    if small(mechanism) == default:
        return found
    return [setting for setting in found if setting.options != default]
