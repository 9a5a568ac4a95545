"""What one call costs besides time: products and additions, and memory.

Memory is counted where it is handed out. On an accelerator that is torch's own record
(`max_memory_allocated`). On a CPU it is the allocator's reports to torch's profiler: every
allocation and release with its bytes, those of buffers inside kernels and compiled code included;
not the release of what was there before the call. Out of sight remain what a library takes past
torch's allocator (packed copies inside a matrix product), the caching of the C library, and pages
that are reserved and never touched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from zoo_core.nn import choice


def flops(call: Callable[[], Any]) -> int | None:
    """Products and additions of the matrix products, convolutions and fused attention in a call.

    By torch's own formulas. Elementwise work and sums are not counted: they are bound by memory.
    Nor are products within kernels that are written in Triton; None for a call that cannot be
    watched, because it runs flex_attention. Where we have such kernels, what is counted are the
    products of the plain path.
    """
    counter = _Counter()
    with counter, choice.plain_only():
        try:
            call()
        except NotImplementedError:  # operators that take operators, by torch's dispatcher
            return None
    return counter.total


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what every operation of a block costs.

    `FlopCounterMode` follows modules by hooks that fail under `torch.autograd.grad`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        if packet in _OF_CPU_KERNELS:
            self.total += _OF_CPU_KERNELS[packet](*args)
        elif packet in flop_counter.flop_registry:
            self.total += int(
                flop_counter.flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            )
        return out


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    """q k^T and its product with v."""
    return 2 * q.numel() // q.shape[-1] * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    """q k^T again, and the four products with the gradients."""
    return 2 * q.numel() // q.shape[-1] * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


_ATEN = torch.ops.aten
#: The fused attention of the CPU, which torch's table lacks.
_OF_CPU_KERNELS: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """The most bytes that live at once during a call, beyond those before it.

    None for a device whose allocator keeps no such record.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    return _peak_on_cpu(call) if device.type == "cpu" else None


def _peak_on_cpu(call: Callable[[], Any]) -> int:
    with _muted(), profile(use_cpu=True, profile_memory=True) as profiler:
        call()
    live = peak = 0
    for event in sorted(_memory_events(profiler), key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _memory_events(profiler: Any) -> list[Any]:
    return [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]


@contextmanager
def _muted() -> Iterator[None]:
    """Drop what is written to stderr: the profiler's library and the allocator talk there.

    The call that is counted has run before, so that nothing of its own is lost.
    """
    try:
        sys.stderr.flush()
        saved = os.dup(2)
    except (OSError, ValueError, AttributeError):  # there is no stderr to write to
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def available_bytes(device: torch.device) -> int | None:
    """Memory that is free now, None where the system does not say."""
    if device.type == "cuda":
        # Torch keeps what was freed, which the driver then counts as taken.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kilobytes["MemAvailable"] * 1024
    except (OSError, KeyError, IndexError, ValueError):
        return None
