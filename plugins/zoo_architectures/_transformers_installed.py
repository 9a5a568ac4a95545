"""What a patch puts on a transformers model, and how all of it is taken off again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from zoo_architectures import _transformers_calls as calls

# Stands for "no such attribute"; unlike an object() it stays itself when copied or pickled.
_ABSENT = ...


@dataclass(eq=False)
class Restore:
    """The exact inverse of one install; plain data, so that it travels with a copied model."""

    configs: list[tuple[nn.Module, PreTrainedConfig]] = field(default_factory=list)
    hidden: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    hosts: list[nn.Module] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    frozen: list[nn.Parameter] = field(default_factory=list)

    def __call__(self) -> None:
        """Put the stock attention back."""
        for host in self.hosts:
            del host.zoo, host.zoo_site
            host.__dict__.pop("zoo_projections", None)
        for hook in self.hooks:
            hook.remove()
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        for module, config in self.configs:
            module.config = config
        for name, value in self.hidden.items():
            if value is _ABSENT:
                delattr(self.model, name)
            else:
                setattr(self.model, name, value)


@dataclass(eq=False)
class Projections:
    """The weights around one attention module, as views, taken anew at each call."""

    host: nn.Module
    out: nn.Module
    names: tuple[str, ...]

    def __call__(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """query, key, value and out -> (weight, bias or None)."""
        if len(self.names) == 3:
            parts = [getattr(self.host, name) for name in self.names]
            found = [(part.weight, part.bias) for part in parts]
        else:
            fused = getattr(self.host, self.names[0])
            biases = (None,) * 3 if fused.bias is None else fused.bias.chunk(3)
            found = list(zip(fused.weight.chunk(3), biases, strict=True))
        found.append((self.out.weight, self.out.bias))
        return dict(zip(("query", "key", "value", "out"), found, strict=True))


def give_own_configs(
    model: nn.Module, attention: Sequence[Mapping[str, Any]], restore: Restore
) -> None:
    """Let every module read a patched copy of its config.

    One config object may be shared with another model, and inside a composite model the layers of
    one host may hold several objects.
    """
    copies: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        old = module.__dict__.get("config")
        if not isinstance(old, PreTrainedConfig):
            continue
        if id(old) not in copies:
            config = copies[id(old)] = copy.deepcopy(old)
            config._attn_implementation = calls.NAME
            # Plain entries, so that config.json has them: stock loading then refuses by name, and
            # zoo.load knows what to build.
            config.attn_implementation = calls.NAME
            config.zoo = [dict(entry) for entry in attention]
        module.config = copies[id(old)]
        restore.configs.append((module, old))


def keep_own_keys(model: nn.Module, restore: Restore) -> None:
    """Let `save_pretrained` write our tensors under their names, and each tied one once."""
    changes: dict[str, Any] = {"_weight_conversions": []}  # it would write older names of keys
    kept: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if ".zoo." in name and kept.setdefault(id(parameter), name) != name:
            ties[name] = kept[id(parameter)]
    if ties:
        changes["_tied_weights_keys"] = {**(model._tied_weights_keys or {}), **ties}
    restore.model = model
    for name, value in changes.items():
        restore.hidden[name] = vars(model).get(name, _ABSENT)
        setattr(model, name, value)
