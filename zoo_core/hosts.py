"""The host model inside whatever a user hands over, and the family that owns it."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from torch import nn

from zoo_core import registry
from zoo_core.architecture import Architecture, ArchitectureAdapter
from zoo_core.errors import PatchError


def plain_name(name: str) -> str:
    """The name of a module or tensor without what torch.compile puts in where a part is compiled.

    `get_submodule` finds a module by either name.
    """
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def adapter_of(model: nn.Module) -> tuple[Architecture, ArchitectureAdapter]:
    """The architecture that owns a host model. Raises PatchError where none does."""
    for architecture, adapter in _families():
        if adapter.owns(model):
            return architecture, adapter
    raise PatchError(_unknown(model))


def _families() -> list[tuple[Architecture, ArchitectureAdapter]]:
    """Every family that may own a model which exists.

    That takes its library to be loaded: the others are not imported to ask. A family whose adapter
    cannot be had is passed over with a warning, so that one broken plugin does not stop patching.
    """
    families = []
    for architecture in registry.architectures():
        if architecture.library in sys.modules:
            try:
                families.append((architecture, architecture.adapter()))
            except Exception as error:
                message = f"{architecture.qualified} is passed over: its adapter failed: {error!r}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
    return families


def _unknown(model: object) -> str:
    known = ", ".join(architecture.name for architecture in registry.architectures())
    return (
        f"{type(model).__name__} is not a model the zoo can patch, nor holds one (knows: {known})"
    )


def unwrap(model: Any) -> nn.Module:
    """The known host model: `model`, or the one inside PeftModel, DDP, compile, a pipeline, ...

    Raises PatchError where there is none, or more than one.
    """
    if not isinstance(model, nn.Module):
        inner = getattr(model, "model", None)
        if not isinstance(inner, nn.Module):
            raise PatchError(_unknown(model))
        model = inner
    adapters = [adapter for _, adapter in _families()]
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") or outer == "" for outer in found)
        if not inside and any(adapter.owns(module) for adapter in adapters):
            found[name] = module
    if not found:
        raise PatchError(_unknown(model))
    if len(found) > 1:
        raise PatchError(
            f"{type(model).__name__} holds several models ({', '.join(found)}); patch one of them, "
            f"for instance zoo.patch(model.{next(iter(found))}, ...)"
        )
    return next(iter(found.values()))
