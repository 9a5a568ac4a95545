"""Several processes as one: each takes a share of every batch, and gradients are summed.

The single process needs nothing; more of them are what `accelerate launch` or torchrun started.
With accelerate's `--use_fsdp --fsdp_version 2` what is trained is split over them (see `sharding`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from zoo_core.errors import ZooError
from zoo_core.fidelity.sharding import clip_norm, is_split

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Processes:
    """This process among its peers.

    rank: 0 is the one that prints and writes. mesh: the processes that what is trained is split
    over; None: each of them holds all of it.
    """

    rank: int = 0
    count: int = 1
    accelerator: Any = field(default=None, repr=False)
    mesh: DeviceMesh | None = field(default=None, repr=False)

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
        count = accelerator.num_processes
        mesh = _mesh(accelerator.device.type, count) if count > 1 else None
        return cls(accelerator.process_index, count, accelerator, mesh)

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

    def check_same(self, digest: Callable[[], str]) -> None:
        """Raise ZooError, in all processes, where they were given different data."""
        if self.count == 1:
            return
        found: list[str | None] = [None] * self.count
        torch.distributed.all_gather_object(found, digest())
        if len(set(found)) > 1:
            raise ZooError(
                f"the {self.count} processes were given different data, or in another order, so "
                "that one would train on what another measures on; sort what has no order of its "
                "own, such as a set, and seed what is drawn"
            )

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Add up each gradient over the processes; one without any counts as zero."""
        if self.count == 1:
            return
        for parameter in parameters:
            gradient = parameter.grad
            if is_split(parameter):
                if gradient is not None:
                    gradient.mul_(self.count)  # FSDP has already taken their mean.
                continue
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(gradient)

    def clip(self, parameters: Sequence[Parameter], largest: float) -> None:
        """Shorten the gradient, which all parameters have in common, to the norm `largest`."""
        if self.mesh is None:
            clip_grad_norm_(parameters, largest)
        else:
            clip_norm(parameters, largest)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        if self.count > 1:
            torch.distributed.all_reduce(value)
        return value

    def wait(self) -> None:
        """Return when every process is here."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()


def _mesh(device: str, count: int) -> DeviceMesh | None:
    """All processes, where accelerate was asked for FSDP; it tells by the environment."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() not in ("1", "true"):
        return None
    if os.environ.get("FSDP_VERSION") != "2":
        raise ZooError("FSDP 1 is not supported; launch with --use_fsdp --fsdp_version 2")
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (count,))
