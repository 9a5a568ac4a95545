"""Freezing inside a transformers Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zoo_core.errors import ZooError
from zoo_core.fidelity.activations import ActivationCache
from zoo_core.fidelity.freezing import FreezeSchedule, Freezing


class FreezingCallback(TrainerCallback):
    """Freezes the converged layers of a Trainer's model after each epoch, and thaws them at last.

        Trainer(..., callbacks=[FreezingCallback(cache=ActivationCache())])

    schedule, cache: as in Freezing. history: how many layers were frozen after each epoch.
    A run that is resumed from a checkpoint starts with nothing frozen.
    """

    def __init__(
        self, schedule: FreezeSchedule | None = None, *, cache: ActivationCache | None = None
    ) -> None:
        self.schedule, self.cache = schedule, cache
        self.history: list[int] = []
        self._freezing: Freezing | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Find the layers. Raises ZooError where there are several processes."""
        if args.world_size > 1:
            raise ZooError(
                "freezing changes which gradients there are, and DistributedDataParallel waits for "
                "all of them; train in one process, or freeze the layers before training"
            )
        self.thaw()
        self.history = []
        self._freezing = Freezing(model, self.schedule, cache=self.cache)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the gradients."""
        if self._freezing is not None:
            self._freezing.observe()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Freeze what has converged."""
        if self._freezing is not None:
            self.history.append(self._freezing.end_epoch())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the model as it was found, but for what it has learned."""
        self.thaw()

    def thaw(self) -> None:
        """The same for a training that was broken off by an error."""
        if self._freezing is not None:
            self._freezing.thaw()
            self._freezing = None
