"""The training loop: stages of optimiser steps that can be killed anywhere and continued.

All randomness of a step is drawn from the seed and the number of the step, so that nothing but
tensors and counts must be kept to continue a run to the bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from zoo_core.errors import ZooError
from zoo_core.fidelity.order import Order, seed_of
from zoo_core.fidelity.processes import Processes
from zoo_core.fidelity.resuming import Saves, State
from zoo_core.fidelity.samples import Samples
from zoo_core.fidelity.settings import Schedule
from zoo_core.fidelity.sharding import like, whole

_GAIN = 1e-4


@dataclass(frozen=True, eq=False)
class Stage:
    """Some steps with one objective. loss: batch -> (B,), one value for each sample.

    rates: (parameters by name, peak learning rate) of each group.
    """

    name: str
    steps: int
    rates: Sequence[tuple[Mapping[str, Parameter], float]]
    loss: Callable[[dict[str, Tensor]], Tensor]

    @property
    def parameters(self) -> dict[str, Parameter]:
        """All parameters that this stage trains."""
        return {name: p for group, _ in self.rates for name, p in group.items()}


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step. score: the last look at the held-out samples."""

    step: int
    steps: int
    stage: str
    loss: float
    score: float | None
    seconds_left: float


@dataclass
class Memory:
    """What a run knows of its past, in JSON values.

    history: (step, stage, mean loss since the last entry, score) of each look at the held-out
    samples. losses: since the last look. stale: looks since the best score. skipped: steps that
    were left out because patience ended their stage.
    """

    history: list[tuple[int, str, float, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    best: float | None = None
    stale: int = 0
    seconds: float = 0.0
    skipped: int = 0


@dataclass(eq=False)
class Run:
    """One run over all its stages.

    tensors: everything that training changes, by name. score: a look at the held-out samples,
    larger is better. watchers: called after every step; what they raise ends the run.
    done: steps behind us, those that were skipped included.
    """

    stages: Sequence[Stage]
    tensors: Mapping[str, Tensor]
    samples: Samples
    score: Callable[[], float]
    schedule: Schedule
    processes: Processes
    device: torch.device
    saves: Saves | None = None
    watchers: Sequence[Callable[[Progress], None]] = ()
    done: int = 0
    memory: Memory = field(default_factory=Memory)

    @property
    def steps(self) -> int:
        """Steps of all stages together."""
        return sum(stage.steps for stage in self.stages)

    def train(self) -> None:
        """Run all steps that are left. Raises ZooError if the loss diverges."""
        if self.schedule.batch_size < self.processes.count:
            raise ZooError(
                f"batch_size={self.schedule.batch_size} is shared by {self.processes.count} "
                "processes; give each of them at least one sample"
            )
        moments = self._resume()
        lengths = [self.samples.length(index) for index in range(len(self.samples))]
        order = Order(lengths, self.schedule.samples_per_step, self.schedule.seed)
        start = 0
        for stage in self.stages:
            if self.done < start + stage.steps:
                optimiser = self._optimiser(stage)
                if self.done > start:
                    _restore(optimiser, stage, moments)
                self._run(stage, start, optimiser, order)
            start += stage.steps
        self._save()
        self.processes.wait()

    def _optimiser(self, stage: Stage) -> torch.optim.Optimizer:
        for name, tensor in self.tensors.items():
            if isinstance(tensor, Parameter):
                tensor.requires_grad_(name in stage.parameters)
                tensor.grad = None
        groups = [{"params": list(group.values()), "peak": peak} for group, peak in stage.rates]
        # torch's fast paths take no mixture of shards and whole tensors.
        foreach = None if self.processes.mesh is None else False
        decay = self.schedule.weight_decay
        return torch.optim.AdamW(groups, weight_decay=decay, foreach=foreach)

    def _run(
        self, stage: Stage, start: int, optimiser: torch.optim.Optimizer, order: Order
    ) -> None:
        end = start + stage.steps
        while self.done < end:
            began = time.perf_counter()
            share = self.schedule.rate(self.done - start, stage.steps)
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * share
            loss = self._step(stage, optimiser, order.step(self.done))
            self.done += 1
            self.memory.losses.append(loss)
            if self.done % self.schedule.evaluate_every == 0 or self.done == self.steps:
                self._look(stage)
                self._skip(end)
            self.memory.seconds += time.perf_counter() - began
            if self.done % self.schedule.checkpoint_every == 0:
                self._save(_moments(optimiser, stage))
            self._tell(stage, loss)

    def _step(self, stage: Stage, optimiser: torch.optim.Optimizer, chosen: list[int]) -> float:
        """One optimiser step on the samples `chosen`. Returns their mean loss."""
        optimiser.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        size = self.schedule.batch_size
        with noise_from(self.device, self.schedule.seed, self.done, self.processes.rank):
            for start in range(0, len(chosen), size):
                mine = self.processes.share(chosen[start : start + size])
                batch = to_device(self.samples.batch(mine), self.device)
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.schedule.bf16):
                    losses = stage.loss(batch)
                loss = losses.float().sum() / len(chosen)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        mean = self.processes.sum(total).item()
        if not math.isfinite(mean):
            raise ZooError(
                f"the loss became {mean} in step {self.done + 1} ({stage.name}); the model is left "
                "as it was before. Lower the learning rates, or do without bf16"
            )
        parameters = list(stage.parameters.values())
        self.processes.sum_gradients(parameters)
        self.processes.clip(parameters, self.schedule.clip)
        optimiser.step()
        return mean

    def _look(self, stage: Stage) -> None:
        """Measure on the held-out samples."""
        memory, score = self.memory, self.score()
        mean = sum(memory.losses) / len(memory.losses)
        memory.history.append((self.done, stage.name, mean, score))
        memory.losses = []
        gained = memory.best is None or score > memory.best + _GAIN
        memory.stale = 0 if gained else memory.stale + 1
        memory.best = score if memory.best is None else max(memory.best, score)

    def _skip(self, end: int) -> None:
        """Leave out the rest of a stage, up to the step `end`, where patience ends."""
        patience = self.schedule.patience
        if patience is not None and self.memory.stale >= patience:
            self.memory.skipped += end - self.done
            self.memory.stale = 0
            self.done = end

    def _tell(self, stage: Stage, loss: float) -> None:
        score = self.memory.history[-1][3] if self.memory.history else None
        left = self.memory.seconds / (self.done - self.memory.skipped) * (self.steps - self.done)
        now = Progress(self.done, self.steps, stage.name, loss, score, left)
        for watcher in self.watchers:
            watcher(now)

    def _save(self, moments: Mapping[str, Tensor] | None = None) -> None:
        if self.saves is None:
            return
        tensors = {name: whole(t) for name, t in {**self.tensors, **(moments or {})}.items()}
        if self.processes.is_main:
            self.saves.save(State(self.done, tensors, asdict(self.memory)))

    def _resume(self) -> Mapping[str, Tensor]:
        """Go on from the state on disk, if any. Returns its tensors."""
        state = self.saves.load() if self.saves is not None else None
        if state is None:
            return {}
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(like(state.tensors[name], tensor))
        self.done = state.step
        self.memory = Memory(**state.notes)
        self.memory.history = [(n, s, loss, score) for n, s, loss, score in self.memory.history]
        return state.tensors


def _moments(optimiser: torch.optim.Optimizer, stage: Stage) -> dict[str, Tensor]:
    """The optimiser's state, by `kind:parameter`."""
    return {
        f"{kind}:{name}": value
        for name, parameter in stage.parameters.items()
        for kind, value in optimiser.state[parameter].items()
    }


def _restore(optimiser: torch.optim.Optimizer, stage: Stage, tensors: Mapping[str, Tensor]) -> None:
    for key, value in tensors.items():
        kind, colon, name = key.partition(":")
        if colon:
            parameter = stage.parameters[name]
            # AdamW keeps its count of steps on the CPU.
            optimiser.state[parameter][kind] = like(value, parameter) if value.dim() else value


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The batch where the model is."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


@contextmanager
def noise_from(device: torch.device, *seed: int) -> Iterator[None]:
    """Draw from a seed of one's own, and leave torch's global generators alone."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(*seed))
        yield
