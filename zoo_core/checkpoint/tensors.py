"""A model's tensors: taken out for saving, put back in on loading, both strictly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.checkpoint.header import FLOATS, Entry
from zoo_core.checkpoint.weights import DTYPES, NAMES, unusable
from zoo_core.errors import CheckpointError
from zoo_core.hosts import plain_name

# Present where a patched model has no tensor of its own: without it, `load_state_dict` would put
# the weights into a stock model, which then runs other attention in silence.
MARKER = "zoo.patched"
_SHOWN = 5


def is_own(name: str) -> bool:
    """Whether a tensor was added by a mechanism, and not by the host."""
    return ".zoo." in name


def collect(
    model: nn.Module, *, own_only: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, by name, and the ties: other name -> name that is written.

    own_only: only what mechanisms added.
    Raises CheckpointError for what a checkpoint cannot hold, naming the tensor.
    """
    live = {
        plain_name(name): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if is_own(name) or not own_only
    }
    for name, tensor in live.items():
        if problem := _unsavable(tensor):
            raise CheckpointError(f"tensor {name!r} cannot be saved: it {problem}")
    tied = _ties(live)
    kept = {name: tensor.detach() for name, tensor in live.items() if name not in tied}
    _refuse_overlap(kept)
    return kept, tied


def entries(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """What a file's header would say of these tensors."""
    return {
        name: Entry(NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }


def mismatches(
    model: nn.Module,
    stored: Mapping[str, Entry],
    tied: Mapping[str, str],
    *,
    own_only: bool = False,
) -> list[str]:
    """Why these tensors and ties do not fill the model exactly, in words; empty if they do.

    A parameter takes any floating dtype; every other tensor must have the model's own.
    """
    live = {n: t for n, t in model.state_dict(keep_vars=True).items() if is_own(n) or not own_only}
    given = {**stored, **{alias: stored[kept] for alias, kept in tied.items() if kept in stored}}
    found = [
        f"{alias!r} is tied to {kept!r}, which is not stored"
        for alias, kept in tied.items()
        if kept not in stored
    ]
    found += [f"{alias!r} is both stored and tied" for alias in tied if alias in stored]
    found += _some("missing", [name for name in live if name not in given])
    found += _some("unknown", [name for name in given if name not in live])
    if not own_only:
        hidden = [name for name, _ in model.named_parameters() if name not in live]
        found += _some("left out of the model's state_dict:", hidden)
    for name in [name for name in live if name in given]:
        entry, target = given[name], live[name]
        wanted = NAMES.get(target.dtype, str(target.dtype))
        if entry.shape != tuple(target.shape):
            found.append(f"{name!r} has shape {entry.shape}, the model {tuple(target.shape)}")
        elif entry.dtype != wanted and not {entry.dtype, wanted} <= FLOATS:
            found.append(f"{name!r} has dtype {entry.dtype}, the model {wanted}")
    return found


def fill(model: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Put tensors into a model that they match (see `mismatches`), and tie what is tied.

    Parameters stay the objects they are, so that whatever refers to them keeps doing so; names
    that the model ties and the checkpoint does not are untied.
    """
    live = model.state_dict(keep_vars=True)
    filled: set[int] = set()
    for name, tensor in tensors.items():
        target = live[name]
        if id(target) in filled:
            replacement = nn.Parameter(tensor, target.requires_grad)
            _assign(model, name, replacement if isinstance(target, nn.Parameter) else tensor)
        else:
            target.data = tensor
            filled.add(id(target))
    live = model.state_dict(keep_vars=True)
    for alias, kept in tied.items():
        if live[alias] is not live[kept]:
            _assign(model, alias, live[kept])


def buffer_dtypes(model: nn.Module) -> dict[str, str]:
    """The dtypes of the buffers that a checkpoint does not store."""
    stored = model.state_dict(keep_vars=True)
    return {
        plain_name(name): NAMES[buffer.dtype]
        for name, buffer in model.named_buffers()
        if name not in stored and buffer.dtype in NAMES
    }


def cast_buffers(model: nn.Module, dtypes: Mapping[str, str], where: object) -> None:
    """Convert buffers to these dtypes, in place. Raises CheckpointError for an unknown name."""
    buffers = dict(model.named_buffers())
    for name, dtype in dtypes.items():
        if name not in buffers:
            raise CheckpointError(f"{where} gives a dtype to {name!r}, which is no buffer")
        buffers[name].data = buffers[name].to(DTYPES[dtype])


def ties_of(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The names that the model itself ties to a stored one: other name -> stored name."""
    live = model.state_dict(keep_vars=True)
    homes = {id(live[name]): name for name in stored if name in live}
    return {
        name: homes[id(tensor)]
        for name, tensor in live.items()
        if id(tensor) in homes and homes[id(tensor)] != name
    }


def _unsavable(tensor: Any) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"is a {type(tensor).__name__}, not a tensor"
    if hasattr(tensor, "full_tensor"):
        return "is spread over processes; gather the full model first"
    if tensor.device.type == "meta":
        return "is on the meta device and has no values"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return f"is stored as {tensor.layout}; convert it to a dense tensor"
    if tensor.dtype not in NAMES:
        return f"has dtype {tensor.dtype}; a checkpoint may hold {', '.join(NAMES.values())}"
    return unusable(tensor.detach())


def _ties(live: Mapping[str, Tensor]) -> dict[str, str]:
    """Names whose tensor is the same memory as that of an earlier name."""
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, tensor in live.items():
        if tensor.numel() == 0:
            continue
        start = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        view = tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()
        kept = first.setdefault((start, view), name)
        if kept != name:
            tied[name] = kept
    return tied


def _refuse_overlap(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError where two tensors share a part of their memory: a tie of views."""
    spans = []
    for name, tensor in tensors.items():
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = 1 + sum((size - 1) * step for size, step in steps)
            spans.append((str(tensor.device), tensor.data_ptr(), reach * tensor.itemsize, name))
    spans.sort()
    for (device, at, size, name), (next_device, next_at, _, other) in pairwise(spans):
        if device == next_device and next_at < at + size:
            raise CheckpointError(
                f"{name!r} and {other!r} are different views of the same memory, which a "
                "checkpoint cannot keep; clone one of them"
            )


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, tensor)


def _some(kind: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{kind} {', '.join(map(repr, names[:_SHOWN]))}{more}"]
