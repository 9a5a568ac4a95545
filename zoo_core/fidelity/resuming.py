"""The state of a run on disk: written atomically, and only continued by the run it belongs to."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from zoo_core.errors import CheckpointError
from zoo_core.fidelity.samples import Samples
from zoo_core.fidelity.selection import mechanism_buffers
from zoo_core.fidelity.sharding import whole
from zoo_core.mechanism import Options
from zoo_core.patching import attention_block

_STATE = "state.json"


@dataclass(frozen=True)
class State:
    """After how many steps, with which tensors, and what a run remembers besides (JSON)."""

    step: int
    tensors: Mapping[str, Tensor]
    notes: Mapping[str, Any] = field(default_factory=dict)


class Saves:
    """The states of one run in a directory, the newest of which is kept.

    key: what the run is, in JSON values; a state of another run is refused.
    Raises CheckpointError where a file is in the place of the directory.
    """

    def __init__(self, directory: str | Path, key: Mapping[str, Any]) -> None:
        self.directory = Path(directory)
        there = next(one for one in (self.directory, *self.directory.parents) if one.exists())
        if not there.is_dir():
            raise CheckpointError(f"checkpoint={str(directory)!r}: {there} is a file, no directory")
        self.key = json.loads(json.dumps(key))

    def load(self) -> State | None:
        """The newest state, or None. Raises CheckpointError for that of another run."""
        path = self.directory / _STATE
        if not path.exists():
            return None
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            self._check(stored["key"])
            tensors = load_file(self.directory / stored["tensors"])
            return State(stored["step"], tensors, stored["notes"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be continued from, delete it: {error!r}"
            ) from error

    def save(self, state: State) -> None:
        """Replace the state on disk; whenever the process dies, one whole state is there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"step-{state.step:08d}.safetensors"
        ready = {key: tensor.detach().cpu().contiguous() for key, tensor in state.tensors.items()}
        save_file(ready, self.directory / f"{name}.new")
        self._replace(name)
        content = {"key": self.key, "step": state.step, "tensors": name, "notes": state.notes}
        (self.directory / f"{_STATE}.new").write_text(json.dumps(content), encoding="utf-8")
        self._replace(_STATE)
        for old in self.directory.glob("step-*.safetensors*"):
            if old.name != name:
                old.unlink()

    def _replace(self, name: str) -> None:
        new = self.directory / f"{name}.new"
        with new.open("rb+") as file:
            os.fsync(file.fileno())
        new.replace(self.directory / name)

    def _check(self, stored: Mapping[str, Any]) -> None:
        different = [name for name in self.key if stored.get(name) != self.key[name]]
        if different:
            raise CheckpointError(
                f"{self.directory} holds a run with another {' and '.join(different)}; continue "
                "that one with what it was started with (the same seed= where weights are drawn), "
                "or choose another directory"
            )


def key_of(
    model: nn.Module,
    samples: Samples,
    settings: Options,
    trained: Mapping[str, Tensor],
    teacher: Any,
) -> dict[str, Any]:
    """What must agree for a run on disk to be continued. teacher: what tells it from others."""
    # A mechanism's tensors, which are often drawn anew at each start, come from the disk.
    drawn = {name for name in trained if ".zoo." in name} | {*mechanism_buffers(model)}
    return {
        "settings": settings.as_dict(),
        "data": samples.digest(),
        "attention": attention_block(model),
        "weights": fingerprint(model, without=drawn),
        "teacher": teacher,
        "choice of tensors": {name: list(p.shape) for name, p in trained.items()},
    }


def fingerprint(model: nn.Module, *, without: Collection[str] = ()) -> str:
    """A hash of a model's class and of the tensors that it has now; of shards every process asks.

    without: names of tensors that a state on disk brings, whatever they are before it is read.
    """
    found = hashlib.sha256(type(model).__name__.encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in without:
            value = whole(tensor.detach())
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            # By bytes: numpy knows no bfloat16, and a conversion would make some values equal.
            found.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
