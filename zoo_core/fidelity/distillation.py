"""zoo.distil: train a student on labels and a teacher's answers, as DeiT does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zoo_core.errors import ZooError
from zoo_core.fidelity import losses
from zoo_core.fidelity.fitting import taking
from zoo_core.fidelity.healing import check_precision, check_trainable
from zoo_core.fidelity.observing import check_finite, logits_of
from zoo_core.fidelity.processes import Processes
from zoo_core.fidelity.resuming import Saves, fingerprint, key_of
from zoo_core.fidelity.samples import Samples, to_train_on
from zoo_core.fidelity.selection import Selection, kept, mechanism_buffers
from zoo_core.fidelity.settings import Schedule
from zoo_core.fidelity.training import Progress, Run, Stage, to_device
from zoo_core.fidelity.watching import bar
from zoo_core.hosts import unwrap
from zoo_core.mechanism import option
from zoo_core.modes import evaluating
from zoo_core.patching import auxiliary_loss, stack_of


@dataclass(frozen=True, kw_only=True)
class DistilSettings(Schedule):
    """What `zoo.distil` can be told.

    The paper's hard form has alpha = 0.5; its soft form alpha = 0.1 and temperature = 3.
    """

    kind: str = option("hard", choices=("hard", "soft"), help="the teacher's choice, or its odds")
    alpha: float = option(0.5, low=0, high=1, help="weight of the teacher against the labels")
    temperature: float = option(3.0, low=1e-3, help="softens both distributions; soft form only")
    learning_rate: float = option(5e-4, low=0, help="of all trainable tensors")


@dataclass(frozen=True)
class Distilled:
    """What zoo.distil did. accuracy: of the student, teacher_accuracy: of the teacher, held out.

    history: (step, stage, mean loss since the last look, accuracy).
    """

    accuracy: float
    teacher_accuracy: float
    steps: int
    seconds: float
    data: str
    settings: dict[str, Any]
    history: tuple[tuple[int, str, float, float], ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.steps} steps in {self.seconds:.0f} s on {self.data}: accuracy "
            f"{self.accuracy:.3f}, teacher {self.teacher_accuracy:.3f}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def distil(
    student: Any,
    teacher: nn.Module,
    data: Any,
    *,
    processor: Any = None,
    column: str | None = None,
    batch_size: int = 32,
    steps: int = 1000,
    checkpoint: str | Path | None = None,
    on_step: Callable[[Progress], None] | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Distilled:
    """Train a classifier, in place, by labels and by what a teacher says.

    student: a timm or transformers image classifier, patched or not. timm's distilled DeiT learns
        the labels with its class token and the teacher with its distillation token; any other
        model both with its one head. Everything that has requires_grad is trained.
    teacher: a timm or transformers classifier with the same classes and input size.
    data: labelled images: (image, label) pairs, a DataLoader or a `datasets` dataset; up to a
        quarter of it is held out to measure accuracy.
    processor: an image processor, for images that are not tensors yet.
    settings: the other fields of `DistilSettings`: kind, alpha, temperature, learning_rate, ...

    checkpoint, on_step, progress, several processes (all with the whole student, under FSDP too),
        and what is left as it was: see calibrate.
    """
    values = {"batch_size": batch_size, "steps": steps, **settings}
    chosen = DistilSettings.of(values, owner="distil")
    host = unwrap(student)
    check_trainable(host)
    if not isinstance(teacher, nn.Module):
        raise ZooError(f"teacher={teacher!r} is no model; pass a timm or transformers classifier")
    trained = {name: p for name, p in host.named_parameters() if p.requires_grad}
    if not trained:
        raise ZooError("every parameter of the student is frozen; there is nothing to train")
    check_precision(trained)
    samples = to_train_on(data, host, chosen, column=column, tokenizer=processor)
    samples = replace(samples, labels=_classes(samples), hand_labels=True)
    processes = Processes.here()
    processes.check_same(samples.digest)
    processes.agree([*host.parameters(), *host.buffers()])
    lesson = _Lesson(host, teacher, samples, *samples.split(chosen.held_out, chosen.seed), chosen)
    shown = progress if processes.is_main else False
    with (
        kept(host, Selection({}, {}, trained)),
        evaluating(teacher),
        _two_heads(host),
        bar(chosen.steps, "accuracy", shown=shown) as tell,
    ):
        watchers = (tell, on_step) if on_step else (tell,)
        return lesson.run(trained, processes, checkpoint, watchers)


@dataclass(eq=False)
class _Lesson:
    """One run: who learns from whom, on what. samples: those of both parts."""

    student: nn.Module
    teacher: nn.Module
    samples: Samples
    measured: Samples
    training: Samples
    settings: DistilSettings

    @torch.enable_grad()  # whoever calls may have turned gradients off
    def run(
        self,
        trained: dict[str, Parameter],
        processes: Processes,
        checkpoint: str | Path | None,
        watchers: Sequence[Callable[[Progress], None]],
    ) -> Distilled:
        """Train, and measure both."""
        self._check_answers()
        saves = None if checkpoint is None else self._saves(checkpoint, trained)
        self.student.train()
        stage = Stage(
            "distilling", self.settings.steps, [(trained, self.settings.learning_rate)], self.loss
        )
        run = Run(
            stages=[stage],
            tensors={**trained, **mechanism_buffers(self.student)},
            samples=self.training,
            score=lambda: self.accuracy(self.student),
            schedule=self.settings,
            processes=processes,
            device=self._device,
            saves=saves,
            watchers=watchers,
        )
        teacher_accuracy = self.accuracy(self.teacher)
        run.train()
        return Distilled(
            accuracy=self.accuracy(self.student),
            teacher_accuracy=teacher_accuracy,
            steps=run.done - run.memory.skipped,
            seconds=run.memory.seconds,
            data=f"{len(self.training)} samples of {self.training.description}",
            settings=self.settings.as_dict(),
            history=tuple(run.memory.history),
        )

    def _saves(self, directory: str | Path, trained: dict[str, Parameter]) -> Saves:
        stack = stack_of(self.teacher)
        teacher = [fingerprint(self.teacher), stack.attention() if stack else []]
        return Saves(directory, key_of(self.student, self.samples, self.settings, trained, teacher))

    @property
    def _device(self) -> torch.device:
        return next(self.student.parameters()).device

    def _batch(self, indices: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        """Some of the measured samples, and their labels."""
        batch = to_device(self.measured.batch(indices), self._device)
        labels = batch.pop("labels")
        return batch, labels

    def _check_answers(self) -> None:
        """Raise ZooError before anything is trained where answers are no use.

        Where a model cannot take the images, says NaN or infinity, or where teacher, student and
        labels do not know the same classes.
        """
        batch, _ = self._batch(self.measured.batches(self.settings.batch_size)[0])
        told = self._answer("the teacher", self.teacher, batch).shape[-1]
        own = self._answer("the student", self.student, batch).shape[-1]
        if told != own:
            raise ZooError(
                f"the teacher has {told} classes, the student {own}; build the student with "
                "num_classes= (transformers: num_labels=)"
            )
        labels = self.samples.labels or []
        if labels and not 0 <= min(labels) <= max(labels) < own:
            raise ZooError(
                f"labels go from {min(labels)} to {max(labels)}, and the classes of the student "
                f"from 0 to {own - 1}"
            )

    @torch.no_grad()
    def _answer(self, who: str, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with evaluating(model):
            with taking(who, model, batch):
                answer = _one(logits_of(model, batch))
            check_finite(who, model, batch, [answer])
        return answer

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The distillation loss of each sample of a batch, (B,)."""
        labels = batch.pop("labels")
        with torch.no_grad():
            told = _one(logits_of(self.teacher, batch))
        answer = logits_of(self.student, batch)
        own, distilled = answer if isinstance(answer, tuple) else (answer, answer)
        loss = losses.distillation(
            own,
            distilled,
            told,
            labels,
            kind=self.settings.kind,
            alpha=self.settings.alpha,
            temperature=self.settings.temperature,
        )
        return loss + auxiliary_loss(self.student).to(loss.device)

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Share of the held-out samples that a model tells right."""
        right = 0.0
        with evaluating(model):
            for indices in self.measured.batches(self.settings.batch_size):
                batch, labels = self._batch(indices)
                right += (_one(logits_of(model, batch)).argmax(-1) == labels).sum().item()
        return right / len(self.measured)


def _classes(samples: Samples) -> list[int]:
    """The labels as plain integers, of numpy's too. Raises ZooError where there are others."""
    labels = samples.labels
    if labels is None or not all(isinstance(label, Integral) for label in labels):
        raise ZooError(f"{samples.description} have no integer labels; pass (image, label) pairs")
    return [int(label) for label in labels]


def _one(logits: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The mean of the heads, which is what DeiT answers outside training."""
    return torch.stack(logits).mean(0) if isinstance(logits, tuple) else logits


@contextmanager
def _two_heads(host: Any) -> Iterator[None]:
    """Let timm's distilled DeiT give the answers of both its heads in training."""
    if not hasattr(host, "set_distilled_training"):
        yield
        return
    before = host.distilled_training
    host.set_distilled_training(True)
    try:
        yield
    finally:
        host.set_distilled_training(before)
