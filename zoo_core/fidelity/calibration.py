"""zoo.calibrate: win back what a swap of the attention lost, by distilling a model from itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from zoo_core.checkpoint.calibration import keep
from zoo_core.errors import PatchError
from zoo_core.fidelity.healing import Healing
from zoo_core.fidelity.processes import Processes
from zoo_core.fidelity.reports import Report
from zoo_core.fidelity.retaining import teacher_host
from zoo_core.fidelity.samples import Samples, encode
from zoo_core.fidelity.selection import kept, select
from zoo_core.fidelity.settings import Settings
from zoo_core.fidelity.sources import read
from zoo_core.fidelity.training import Progress
from zoo_core.fidelity.watching import bar
from zoo_core.patching import attention_block, unwrap

MINIMUM = 16


def calibrate(
    model: Any,
    data: Any,
    *,
    teacher: Any = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    batch_size: int = 8,
    steps: int = 300,
    train: str = "attention",
    column: str | None = None,
    checkpoint: str | Path | None = None,
    on_step: Callable[[Progress], None] | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Report:
    """Heal a patched model, in place, so that it answers as it did with its stock attention.

    First each patched attention layer by itself: fed what the stock model's layer sees, it learns
    that layer's output. Then the model as a whole: hidden states, and its embedding or logits.

    data: a list or stream of texts, a text file, a folder of images, a `datasets` dataset or its
        name, a DataLoader. A quarter of it, at most `held_out` samples, is only measured on.
    teacher: the original; by default the model itself without its patches, whose weights are not
        copied except for those that are trained.
    tokenizer: by default that of the directory or repository the model was loaded from; for
        images an image processor, by default timm's transform of the model.
    max_length: longest text in tokens. batch_size: samples of one forward.
    steps: optimiser steps over both stages.
    train: "mechanism" (its own tensors only), "attention" (the projections around it too), "all".
        Of a model with LoRA adapters, only what PEFT left trainable.
    column: of a dataset. checkpoint: a directory in which the state is kept; a run that was
        killed and is started again in the same way goes on from there to the same result.
    on_step: called after each step. progress: show a bar; by default on a terminal.
    settings: the other fields of `zoo_core.fidelity.settings.Settings`.

    Under `accelerate launch` or torchrun every process takes its share of each batch, with all of
    the weights.
    Modes, requires_grad flags and gradients are left as they were. On any error the weights are
    too, and ZooError says what to do.
    """
    chosen = Settings.of(
        {"batch_size": batch_size, "steps": steps, "train": train, **settings}, owner="calibrate"
    )
    host = unwrap(model)
    if not attention_block(host):
        raise PatchError("this model has its stock attention: zoo.patch it before calibrating")
    selection = select(host, chosen.train)
    original = teacher_host(host, teacher)
    processes = Processes.here()
    samples = _samples(host, data, column, tokenizer, max_length, chosen)
    if processes.accelerator is not None:
        host.to(processes.accelerator.device)
    processes.agree([*host.parameters(), *host.buffers()])
    healing = Healing.of(host, original, selection, samples, chosen, tokenizer)
    with (
        kept(host, selection),
        bar(chosen.steps, "cosine", shown=_shown(progress, processes)) as tell,
    ):
        watchers = (tell, on_step) if on_step else (tell,)
        report = healing.run(processes, checkpoint, watchers)
    keep(host, attention_block(host), report.summary())
    return report


def _shown(progress: bool | None, processes: Processes) -> bool | None:
    return progress if processes.is_main else False


def _samples(
    host: nn.Module,
    data: Any,
    column: str | None,
    tokenizer: Any,
    max_length: int | None,
    settings: Settings,
) -> Samples:
    limit = settings.steps * settings.samples_per_step + settings.held_out
    source = read(data, column=column, limit=max(limit, MINIMUM), seed=settings.seed)
    return encode(source, host, tokenizer=tokenizer, max_length=max_length, minimum=MINIMUM)
