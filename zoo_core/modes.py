"""Evaluation mode for a while, in a model whose modules need not all be in the same mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(host: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module gets its own mode back, a mixture stays one."""
    modes = [(module, module.training) for module in host.modules()]
    host.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
