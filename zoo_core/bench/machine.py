"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import zoo_core
from zoo_core.bench.cases import Case
from zoo_core.errors import BenchError
from zoo_core.isolation import describe
from zoo_core.nn import choice, native


def describe_machine(device: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """Processor, cores, threads in use, memory, system and versions, as a JSON object.

    Raises BenchError for a device that cannot be used.
    """
    check_device(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": _processor(),
        "cores": cores,
        "threads": threads or torch.get_num_threads(),
        "memory": _memory(),
        "device": _device(device),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "zoo-core": zoo_core.__version__,
    }


def check_device(name: str) -> None:
    """Raise BenchError unless tensors can be put on a device."""
    try:
        torch.empty(1, device=name)
    except Exception as error:
        raise BenchError(f"device {name!r} cannot be used: {describe(error)}") from error


def check_case(case: Case) -> None:
    """Raise BenchError unless a case can be measured on this machine."""
    check_device(case.device)
    if case.native and not native.loaded():
        raise BenchError("the native kernels are not built; run `zoo native --build`")


def kernels(case: Case) -> AbstractContextManager[None]:
    """Within it, what a case asks for: native kernels, or plain torch although they are there."""
    on_cpu = torch.device(case.device).type == "cpu"
    return choice.plain_only() if on_cpu and not case.native else nullcontext()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> int | None:
    """Bytes."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def _device(device: str) -> str:
    if torch.device(device).type != "cuda":
        return device
    return f"{torch.cuda.get_device_name(device)} ({device})"
