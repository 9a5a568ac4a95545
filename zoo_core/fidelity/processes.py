"""Several processes as one: each takes a share of every batch, and gradients are summed.

The single process needs nothing; more of them are what `accelerate launch` or torchrun started.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zoo_core.errors import ZooError


@dataclass(frozen=True, eq=False)
class Processes:
    """This process among its peers. rank: 0 is the one that prints and writes."""

    rank: int = 0
    count: int = 1
    accelerator: Any = field(default=None, repr=False)

    @classmethod
    def here(cls) -> Processes:
        """Find out how many there are, by the environment that launchers set."""
        launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if not (launched or torch.distributed.is_initialized()):
            return cls()
        try:
            from accelerate import Accelerator
        except ImportError as error:
            raise ZooError("more than one process needs accelerate: pip install it") from error
        accelerator = Accelerator()
        return cls(accelerator.process_index, accelerator.num_processes, accelerator)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def share(self, samples: Sequence[int]) -> Sequence[int]:
        """This process's part of a batch."""
        return samples[self.rank :: self.count]

    def agree(self, tensors: Iterable[Tensor]) -> None:
        """Give every process the values of the first one, in place."""
        if self.count > 1:
            with torch.no_grad():
                for tensor in tensors:
                    torch.distributed.broadcast(tensor, src=0)

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Add up each gradient over the processes; one without any counts as zero."""
        if self.count == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        if self.count > 1:
            torch.distributed.all_reduce(value)
        return value

    def wait(self) -> None:
        """Return when every process is here."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()
