"""One calibration at work: its two stages, what they match, and what is reported in the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zoo_core.errors import OptionError, ZooError
from zoo_core.fidelity import losses, preparing, twins
from zoo_core.fidelity.layers import layer_errors
from zoo_core.fidelity.masking import Masking, check_host
from zoo_core.fidelity.observing import Observed, mask_for, observe
from zoo_core.fidelity.processes import Processes
from zoo_core.fidelity.reports import SCORES, Report, Retention
from zoo_core.fidelity.resuming import Saves, fingerprint, key_of
from zoo_core.fidelity.retaining import Scale
from zoo_core.fidelity.samples import Samples
from zoo_core.fidelity.selection import Selection, mechanism_buffers
from zoo_core.fidelity.settings import Settings
from zoo_core.fidelity.training import Progress, Run, Stage, noise_from, to_device
from zoo_core.modes import evaluating
from zoo_core.patching import auxiliary_loss

_RESAMPLES = 1000

#: The learning rate where layers' outputs are as far off as they are large.
_RATE = 1e-3


@dataclass(eq=False)
class Healing:
    """One calibration: a host, its teacher, the samples to learn from and those to measure on.

    samples: all of them. training: those to learn from; the others are in `scale`.
    own: whether the teacher is the host itself, so that both agree wherever nothing is trained.
    paths: the patched layers, empty where the teacher is built differently.
    worse: whether training made the host worse, so that its weights are to be put back.
    """

    host: nn.Module
    stock: nn.Module
    selection: Selection
    samples: Samples
    training: Samples
    scale: Scale
    settings: Settings
    own: bool
    paths: list[str]
    masking: Masking | None
    worse: bool = False

    @classmethod
    def of(
        cls,
        host: nn.Module,
        original: nn.Module,
        selection: Selection,
        samples: Samples,
        settings: Settings,
        tokenizer: Any,
    ) -> Healing:
        """Make the teacher's twin and set samples aside; the host is left as it is."""
        check_trainable(original)
        own = original is host
        stock = twins.stock_twin(original, own=selection.host.values() if own else ())
        measured, training = samples.split(settings.held_out, settings.seed)
        scale = Scale(
            host,
            stock,
            measured,
            batch_size=settings.batch_size,
            pooling=settings.pooling,
            resamples=_RESAMPLES,
            seed=settings.seed,
        )
        masking = None
        if settings.match == "masked-lm":
            check_host(host)
            tokenizer = tokenizer or preparing.tokenizer_of(host)
            masking = Masking.of(tokenizer, settings.mask_share)
        return cls(
            host, stock, selection, samples, training, scale, settings, own, scale.paths, masking
        )

    @torch.enable_grad()  # whoever calls may have turned gradients off
    def run(
        self,
        processes: Processes,
        checkpoint: str | Path | None,
        watchers: Sequence[Callable[[Progress], None]],
    ) -> Report:
        """Measure, train, measure; a host that got worse is reported as it was before."""
        self.host.eval()
        before = self.scale.measure()
        self._check(before)
        saves = None if checkpoint is None else self._saves(checkpoint)
        self._choose_rates(before, processes)
        run = Run(
            stages=self._stages(),
            tensors={**self.selection.everything, **mechanism_buffers(self.host)},
            samples=self.training,
            score=self._score,
            schedule=self.settings,
            processes=processes,
            device=self.scale.device,
            saves=saves,
            watchers=watchers,
        )
        self._set_noise()
        run.train()
        notes = self._notes(run, processes)
        self.host.eval()
        after = self.scale.measure()
        worse = torch.tensor(float(_is_worse(after, before)), device=self.scale.device)
        if processes.sum(worse).item():  # the same answer in all of them
            notes = (*notes, _no_gain(before, after))
            self.worse, after = True, before
        return Report(
            before=before,
            after=after,
            steps=run.done - run.memory.skipped,
            steps_planned=run.steps,
            seconds=run.memory.seconds,
            trained=sum(p.numel() for p in self.selection.everything.values()),
            data=f"{len(self.training)} samples of {self.training.description}",
            settings=self.settings.as_dict(),
            history=tuple(run.memory.history),
            notes=notes,
            undone=self.worse,
        )

    def _choose_rates(self, before: Retention, processes: Processes) -> None:
        """Settle learning rates that were left open: the less layers are off, the lower."""
        errors = [layer.error.value for layer in before.layers] or [1.0]
        total = torch.tensor(sum(errors) / len(errors), device=self.scale.device)
        mean = float(processes.sum(total)) / processes.count  # the same in all of them
        # Rounded, so that a run that is continued elsewhere goes on alike.
        rate = float(f"{_RATE * min(mean, 1.0):.2g}") if math.isfinite(mean) else _RATE
        own, host = self.settings.learning_rate, self.settings.host_learning_rate
        self.settings = replace(
            self.settings,
            learning_rate=rate if own is None else own,
            host_learning_rate=rate if host is None else host,
        )

    def _set_noise(self) -> None:
        if self.settings.noise:
            for name, module in self.host.named_modules():
                if name.endswith(".zoo"):
                    module.train()

    def _score(self) -> float:
        with evaluating(self.host):
            return self.scale.cosine()

    def _check(self, before: Retention) -> None:
        """Raise OptionError for an output that the model does not have, before anything changes."""
        match, settings = self.settings.match, self.settings
        if match == "auto":
            self.scale.check_logits()
        if match in ("logits", "masked-lm") and "logits_divergence" not in before.scores:
            raise OptionError(
                f"match={match!r}, but model and teacher have no logits in common; build the "
                "model with a task=, or choose match='embedding'"
            )
        if match in ("auto", "embedding") and "embedding_cosine" not in before.scores:
            raise OptionError("model and teacher have embeddings of different width; pass match=")
        nothing = match == "none" or settings.output_weight == 0
        if nothing and (settings.hidden_weight == 0 or not self.paths) and self._end_steps:
            raise OptionError("the end-to-end stage has nothing to match; give one weight above 0")

    @property
    def _layer_steps(self) -> int:
        """Steps of the per-layer stage; none where no layer can be fed or has what to train."""
        trained = self.selection.mechanism or self.selection.layer
        share = self.settings.layer_share if self.paths and trained else 0.0
        return round(self.settings.steps * share)

    @property
    def _end_steps(self) -> int:
        return self.settings.steps - self._layer_steps

    def _stages(self) -> list[Stage]:
        rate = self.settings.learning_rate or 0.0
        host_rate = self.settings.host_learning_rate or 0.0
        end, chosen = self.settings.end_rate, self.selection
        by_layer = [(chosen.mechanism, rate), (chosen.layer, host_rate)]
        whole = [(chosen.mechanism, end * rate), (chosen.host, end * host_rate)]
        stages = [
            Stage("by layer", self._layer_steps, _filled(by_layer), self._layer_loss),
            Stage("end to end", self._end_steps, _filled(whole), self._end_loss),
        ]
        return [stage for stage in stages if stage.steps]

    def _layer_loss(self, batch: dict[str, Tensor]) -> Tensor:
        states = None
        if not self.own:
            with torch.no_grad():
                states = observe(self.stock, batch, paths=self.paths).states
        errors = layer_errors(self.host, self.stock, self.paths, batch, states=states)
        return torch.stack(errors).mean(0) + self._auxiliary()

    def _end_loss(self, batch: dict[str, Tensor]) -> Tensor:
        labels = None
        if self.masking is not None:
            batch, labels = self.masking.hide(batch)
        pooling = self.settings.pooling
        with torch.no_grad():
            wanted = observe(self.stock, batch, paths=self.paths, pooling=pooling)
        seen = observe(self.host, batch, paths=self.paths, pooling=pooling)
        loss = self.settings.output_weight * self._output_error(seen, wanted, labels)
        if self.paths:
            loss = loss + self.settings.hidden_weight * _hidden_error(seen, wanted)
        return loss + self._auxiliary()

    def _output_error(self, seen: Observed, wanted: Observed, labels: Tensor | None) -> Tensor:
        match = self.settings.match
        if match == "none":
            return torch.zeros(len(seen.tokens), device=seen.tokens.device)
        if labels is not None and seen.logits is not None:
            return losses.masked_lm(seen.logits, labels)
        ours, theirs = seen.logits, wanted.logits
        if match != "embedding" and ours is not None and theirs is not None:
            return losses.divergence(ours, theirs, wanted.mask)
        return losses.embedding_error(seen.embedding, wanted.embedding)

    def _auxiliary(self) -> Tensor:
        return self.settings.auxiliary_weight * auxiliary_loss(self.host).to(self.scale.device)

    def _saves(self, directory: str | Path) -> Saves:
        teacher = None if self.own else fingerprint(self.stock)
        trained = self.selection.everything
        return Saves(directory, key_of(self.host, self.samples, self.settings, trained, teacher))

    def _notes(self, run: Run, processes: Processes) -> tuple[str, ...]:
        notes = []
        if run.memory.skipped:
            notes.append(f"stopped early: no gain in {self.settings.patience} looks")
        if not self.paths:
            notes.append("the teacher is built differently: nothing was matched layer by layer")
        idle = self._idle(run.stages[-1]) if processes.count == 1 else []
        if idle:
            tensors = "1 tensor" if len(idle) == 1 else f"{len(idle)} tensors"
            own = any(name in self.selection.mechanism for name in idle) and not self.settings.noise
            hint = "; noise=True runs mechanisms in training mode, which some need" if own else ""
            notes.append(f"no gradient reached {tensors}, such as {idle[0]}{hint}")
        return tuple(notes)

    def _idle(self, stage: Stage) -> list[str]:
        """The tensors of a stage that no gradient reaches.

        Asked of one batch, not of what the last step left: a run that was finished before, and is
        read from the disk, makes no step.
        """
        for parameter in stage.parameters.values():
            parameter.requires_grad_(True)
        indices = list(range(min(self.settings.batch_size, len(self.training))))
        device = self.scale.device
        with (
            noise_from(device, self.settings.seed),
            torch.autocast(device.type, torch.bfloat16, enabled=self.settings.bf16),
        ):
            loss = stage.loss(to_device(self.training.batch(indices), device)).float().sum()
        reached = torch.autograd.grad(loss, [*stage.parameters.values()], allow_unused=True)
        pairs = zip(stage.parameters, reached, strict=True)
        return [name for name, gradient in pairs if gradient is None]


def check_trainable(*models: nn.Module) -> None:
    """Raise ZooError where torch's inference mode is on, or has made weights of these models."""
    if torch.is_inference_mode_enabled():
        raise ZooError(
            "nothing can be trained under torch.inference_mode(); leave it before this call"
        )
    for model in models:
        made_there = [name for name, p in model.named_parameters() if p.is_inference()]
        if made_there:
            raise ZooError(
                f"{made_there[0]!r} of {type(model).__name__} was made under "
                "torch.inference_mode(), which rules out training; build or load that model "
                "outside it"
            )


def check_precision(trained: Mapping[str, Tensor]) -> None:
    """Raise ZooError for weights in float16, whose optimiser's steps overflow or vanish."""
    half = next((name for name, one in trained.items() if one.dtype == torch.float16), None)
    if half is not None:
        raise ZooError(
            f"{half!r} is float16, in which training overflows; train weights in float32, "
            "model.float(), and pass bf16=True to compute fast"
        )


def _is_worse(after: Retention, before: Retention) -> bool:
    """Whether both of what a user takes from a model, embeddings and logits, are further off."""
    cosine, divergence = "embedding_cosine", "logits_divergence"
    falls = cosine not in after.scores or after.scores[cosine].value < before.scores[cosine].value
    if divergence in after.scores:
        return falls and after.scores[divergence].value > before.scores[divergence].value
    return falls and cosine in after.scores


def _no_gain(before: Retention, after: Retention) -> str:
    changes = "; ".join(
        f"{SCORES[name][0]} {before.scores[name].value:.4f} to {score.value:.4f}"
        for name, score in after.scores.items()
    )
    return (
        f"training made it worse ({changes}), so that the weights are as they were before: lower "
        "learning_rate and host_learning_rate"
    )


def _filled(
    rates: Sequence[tuple[dict[str, Parameter], float]],
) -> list[tuple[dict[str, Parameter], float]]:
    return [(group, rate) for group, rate in rates if group]


def _hidden_error(seen: Observed, wanted: Observed) -> Tensor:
    """Mean relative error of what enters each patched layer and of the last hidden states, (B,)."""
    pairs = [*zip(seen.states, wanted.states, strict=True), (seen.tokens, wanted.tokens)]
    errors = [losses.relative_error(a, b, mask_for(a, wanted.mask)) for a, b in pairs]
    return torch.stack(errors).mean(0)
