"""FSDP2: what a calibration trains is split over the processes, with its gradients and moments.

Each mechanism, and each layer without parts (a Linear, an Embedding), is a unit of `fully_shard`:
whole only while it runs. Frozen weights are not split, since the teacher, which is the same model
with stock attention, needs them whole at the same time and shares them. The model that the user has
is left alone: a copy is trained, which has tensors of its own only where something is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zoo_core.errors import DoesNotFit
from zoo_core.fidelity.selection import Selection, mechanism_buffers
from zoo_core.hosts import adapter_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def copy_to_train(host: nn.Module, selection: Selection) -> nn.Module:
    """A copy of a host model, patches included, that shares everything which stays frozen."""
    own = {*map(id, selection.everything.values()), *map(id, mechanism_buffers(host).values())}
    tensors = (*host.parameters(), *host.buffers())
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors if id(tensor) not in own}
    return copy.deepcopy(host, memo)


def chosen_in(work: nn.Module, selection: Selection) -> Selection:
    """The same choice of tensors in a copy of the model."""
    named = dict(work.named_parameters())
    parts = (selection.mechanism, selection.layer, selection.rest)
    return Selection(*({name: named[name] for name in part} for part in parts))


def shard(work: nn.Module, selection: Selection, mesh: DeviceMesh) -> Selection:
    """Split the trained tensors over the processes of `mesh`; returns the choice of shards.

    What cannot be split stays whole on every process: scalars, and tensors of modules that have
    parts (a class token, positions), whose forward need not run when they are used.
    Raises DoesNotFit for a tensor that several modules own, which units cannot share.
    """
    from torch.distributed.fsdp import fully_shard

    trained = {id(parameter) for parameter in selection.everything.values()}
    for unit in _units(work, trained):
        left = {p for p in unit.parameters() if id(p) not in trained or p.dim() == 0}
        ignored: dict[str, Any] = {"ignored_params": left} if left else {}
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, **ignored)
    return chosen_in(work, selection)


def give_back(host: nn.Module, work: nn.Module, selection: Selection) -> None:
    """Write what the copy has learned into the user's model, whole on every process."""
    learned = {**dict(work.named_parameters()), **mechanism_buffers(work)}
    with torch.no_grad():
        for name, tensor in {**selection.everything, **mechanism_buffers(host)}.items():
            tensor.copy_(whole(learned[name]))


def is_split(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, without the import, which a single process can do without."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """A tensor in one piece; of shards every process must ask."""
    return tensor.full_tensor() if is_split(tensor) else tensor


def like(value: Tensor, reference: Tensor) -> Tensor:
    """A whole value where and as `reference` is: split if that is."""
    value = value.to(reference.device)
    if not is_split(reference):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, reference.device_mesh, reference.placements)


def clip_norm(parameters: Iterable[Parameter], largest: float) -> None:
    """torch's clip_grad_norm_ for a mixture of shards and whole tensors."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    pieces = [one.to_local() for one in gradients if is_split(one)]
    others = [one for one in gradients if not is_split(one)]
    squares = _squares(pieces, gradients[0].device)
    torch.distributed.all_reduce(squares)
    norm = (squares + _squares(others, squares.device)).sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for piece in (*pieces, *others):
        piece.mul_(factor.to(piece.dtype))


def _squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    zero = torch.zeros((), device=device)
    return sum((one.float().square().sum() for one in tensors), zero)


def _units(work: nn.Module, trained: Collection[int]) -> list[nn.Module]:
    """The mechanisms and layers without parts that own trained tensors."""
    _, adapter = adapter_of(work)
    mechanisms = [one for one in adapter.installed(work).values() if one is not None]
    inside = {id(part) for one in mechanisms for part in one.modules()}
    leaves = [m for m in work.modules() if id(m) not in inside and not any(m.children())]
    owned: dict[int, str] = {}
    units = []
    for unit in (*mechanisms, *leaves):
        mine = [id(parameter) for parameter in unit.parameters() if id(parameter) in trained]
        _check_unshared(mine, owned, type(unit).__name__)
        if mine:
            units.append(unit)
    return units


def _check_unshared(mine: Iterable[int], owned: dict[int, str], name: str) -> None:
    for one in mine:
        if one in owned:
            raise DoesNotFit(
                f"{owned[one]} and {name} share a tensor that is trained, which FSDP2 cannot split "
                "between them; launch without --use_fsdp, or train less of the model"
            )
        owned[one] = name
