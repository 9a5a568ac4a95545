"""zoo.calibrate: win back what a swap of the attention lost, by distilling a model from itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zoo_core.checkpoint.calibration import keep
from zoo_core.errors import PatchError
from zoo_core.fidelity import preparing, sharding
from zoo_core.fidelity.healing import Healing, check_precision, check_trainable
from zoo_core.fidelity.processes import Processes
from zoo_core.fidelity.reports import Report
from zoo_core.fidelity.retaining import teacher_host
from zoo_core.fidelity.samples import to_train_on
from zoo_core.fidelity.selection import kept, select
from zoo_core.fidelity.settings import Settings
from zoo_core.fidelity.training import Progress
from zoo_core.fidelity.watching import bar
from zoo_core.hosts import unwrap
from zoo_core.patching import attention_block


def calibrate(
    model: Any,
    data: Any,
    *,
    teacher: Any = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    packed: bool = False,
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

    data: a list or stream of texts, a text file, a folder of images, a DataLoader; a `datasets`
        dataset, stream or name, or its files (see `zoo_core.fidelity.sources.read`). A quarter of
        it, at most `held_out` samples, is only measured on.
    teacher: the original; by default the model itself without its patches, whose weights are not
        copied except for those that are trained.
    tokenizer: or where it is; by default that of the directory or repository the model was loaded
        from; for images an image processor, by default timm's transform of the model. A
        SentenceTransformer brings its own, and its max_seq_length and pooling.
    max_length: longest text in tokens; by default as many as model and teacher see.
    packed: join texts into rows of just that length, instead of padding each batch to its longest
        text. batch_size: samples of one forward.
    steps: optimiser steps over both stages.
    train: "mechanism" (its own tensors only), "attention" (the projections around it too), "all".
        What is frozen stays so, also what PEFT froze around LoRA adapters.
    column: of a dataset. checkpoint: a directory in which the state is kept; a run that was
        killed and is started again in the same way goes on from there to the same result.
    on_step: called after each step. progress: False tells nobody how far it is.
    settings: the other fields of `zoo_core.fidelity.settings.Settings`.

    Under `accelerate launch` or torchrun every process takes its share of each batch. With
    `--use_fsdp --fsdp_version 2` what is trained, its gradients and the optimiser's moments are
    split over the processes too; in the end each of them has the whole model.
    Modes, requires_grad flags and gradients are left as they were. On any error the weights are
    too, and ZooError says what to do; also where training made embeddings (and logits, if there
    are) worse, which the report's notes then say.
    """
    host = unwrap(model)
    if not attention_block(host):
        raise PatchError("this model has its stock attention: zoo.patch it before calibrating")
    check_trainable(host)
    original = teacher_host(host, teacher)
    reading = preparing.reading_of(
        model,
        tokenizer=tokenizer,
        max_length=max_length,
        pooling=settings.get("pooling"),
        teacher=original,
    )
    given = {"batch_size": batch_size, "steps": steps, "train": train, **settings}
    chosen = Settings.of({**given, "pooling": reading.pooling}, owner="calibrate")
    selection = select(host, chosen.train)
    check_precision(selection.everything)
    processes = Processes.here()
    samples = to_train_on(
        data,
        host,
        chosen,
        column=column,
        teacher=original,
        tokenizer=reading.tokenizer,
        max_length=reading.max_length,
        packed=packed,
    )
    processes.check_same(samples.digest)
    for one in dict.fromkeys((host, original)):
        if processes.accelerator is not None:
            one.to(processes.accelerator.device)
        processes.agree([*one.parameters(), *one.buffers()])
    with (
        kept(host, selection) as put_back,
        bar(chosen.steps, "cosine", shown=_shown(progress, processes)) as tell,
    ):
        watchers = (tell, on_step) if on_step else (tell,)
        mesh = processes.mesh
        work = host if mesh is None else sharding.copy_to_train(host, selection)
        teaches = work if original is host else original
        trained = sharding.chosen_in(work, selection)
        healing = Healing.of(work, teaches, trained, samples, chosen, reading.tokenizer)
        if mesh is not None:  # the teacher, made by now, has kept the tensors whole
            healing.selection = sharding.shard(work, trained, mesh)
        report = healing.run(processes, checkpoint, watchers)
        if healing.worse:
            put_back()
        elif mesh is not None:
            sharding.give_back(host, work, selection)
    keep(host, attention_block(host), report.summary())
    return report


def _shown(progress: bool | None, processes: Processes) -> bool | None:
    return progress if processes.is_main else False
