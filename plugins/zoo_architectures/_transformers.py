"""The bridge to transformers: one adapter, one small row (Family) for each model family."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from zoo_architectures import _transformers_calls as calls
from zoo_architectures import _transformers_weights as weights
from zoo_architectures._transformers_families import Family
from zoo_architectures._transformers_installed import (
    Projections,
    Restore,
    give_own_configs,
    keep_own_keys,
)
from zoo_core.attention import Site
from zoo_core.checkpoint import host_config
from zoo_core.errors import OptionError, ZooError, did_you_mean
from zoo_core.hosts import plain_name
from zoo_core.isolation import one_line
from zoo_core.nn.auxiliary import BeginForward

_SLIDING = "the host's attention is a sliding window, which a mechanism cannot take over"


@dataclass(frozen=True)
class TransformersAdapter:
    """Builds, describes and patches one family of transformers models."""

    family: Family

    def create(
        self,
        ref: str | None = None,
        *,
        pretrained: bool | str = False,
        task: str | None = None,
        max_length: int | None = None,
        skeleton: bool = False,
        add_pooling_layer: bool = True,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """See ArchitectureAdapter.create. `class` names the model class instead of `task`."""
        if ref is not None:
            raise OptionError(
                f"{self.family.stem} has no variants (got {ref!r}); size it by config entries such "
                "as hidden_size=128, or name a checkpoint with pretrained="
            )
        if max_length is not None and self.family.image:
            raise OptionError("max_length is for text; give an image model image_size= instead")
        if max_length is not None and max_length < 1:
            raise OptionError(f"max_length={max_length} must be at least 1")
        recorded = kwargs.pop("class", None)
        source = self.family.default if pretrained is True else pretrained or None
        stored = weights.read_config(source) if source is not None else {}
        trained = _architectures(stored)
        # Without its pooling layer only the bare model is ever built.
        model_class = self._model_class(task, recorded, trained if add_pooling_layer else [])
        if recorded is None:
            # A recorded config may hold entries of other versions, as every config.json may.
            _refuse_unknown(model_class.config_class, kwargs)
        extra = {} if add_pooling_layer else {"add_pooling_layer": False}
        with _in_words(model_class, {**kwargs, **extra}):
            config = model_class.config_class.from_dict({**stored, **kwargs})
            if skeleton or source is None:
                if max_length is not None:
                    config.max_position_embeddings = max_length + self.family.position_offset
                return _without_weights(model_class, config, skeleton=skeleton, **extra)
            attention = tuple(self.family.attention_classes)
            model = weights.from_checkpoint(model_class, source, config, attention, **extra)
        if task is None and recorded is None:
            self._tell_left_out(model, trained)
        if max_length is not None:
            weights.resize_positions(model, max_length, self.family.position_offset)
        return model

    def _model_class(
        self, task: str | None, name: str | None, trained: Sequence[str]
    ) -> type[PreTrainedModel]:
        """What to build: the class of this name, of this task, or what a checkpoint trained."""
        family = self.family
        if name is not None:
            if (model_class := family.class_named(name)) is None:
                raise OptionError(f"{family.stem} has no model class {name!r}")
            return model_class
        if task is None:
            heads = filter(None, map(family.trained_head, trained))
            return next(heads, family.named("Model"))
        heads = family.heads
        if task not in heads:
            raise OptionError(
                f"{family.stem} has no task {task!r} (has: {', '.join(heads)})"
                f"{did_you_mean(task, heads)}"
            )
        return heads[task]

    def _tell_left_out(self, model: PreTrainedModel, trained: Sequence[str]) -> None:
        """Warn where a checkpoint holds a head, and the bare model was built."""
        name, unused = type(model).__name__, model.zoo_loaded.unused
        if not trained or name in trained or not unused:
            return
        tasks = [task for task, head in self.family.heads.items() if head.__name__ in trained]
        hint = f"; task={tasks[0]!r} (--task {tasks[0]}) builds it with its head" if tasks else ""
        warnings.warn(
            f"{model.zoo_loaded.source} holds a {', '.join(trained)}, of which {name} leaves out "
            f"{len(unused)} tensors: {one_line(', '.join(unused))}{hint}",
            UserWarning,
            stacklevel=4,
        )

    def tiny(self) -> dict[str, Any]:
        """See ArchitectureAdapter.tiny."""
        sizes: dict[str, Any] = {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
        }
        if self.family.image:
            sizes |= {"image_size": 32, "patch_size": 8}
        else:
            positions = 64 + self.family.position_offset
            sizes |= {"vocab_size": 99, "max_position_embeddings": positions}
        return sizes | dict(self.family.tiny)

    def owns(self, model: nn.Module) -> bool:
        """Whether the model's classes are this family's."""
        return isinstance(model, self.family.named("PreTrainedModel"))

    def sites(self, model: nn.Module) -> list[Site]:
        """One site for each attention module, self before cross in each layer."""
        kinds = self.family.attention_classes
        found = [
            (plain_name(path), module, kinds[type(module)])
            for path, module in model.named_modules()
            if type(module) in kinds
        ]
        layers = sum(kind == "self" for _, _, kind in found)
        causal = bool(getattr(model.config, "is_decoder", False))
        counts = {"self": -1, "cross": -1}
        sites = []
        for path, module, kind in found:
            counts[kind] += 1
            sites.append(self._site(model, path, module, kind, counts[kind], layers, causal))
        return sites

    def _site(
        self,
        model: nn.Module,
        path: str,
        module: nn.Module,
        kind: str,
        layer: int,
        layers: int,
        causal: bool,
    ) -> Site:
        config = model.config
        heads = config.num_attention_heads
        head_dim = getattr(module, "attention_head_size", None) or module.head_dim
        grid = self._grid(config) if self.family.image else None
        prefix = 0 if causal or kind == "cross" else self.family.prefix
        window = getattr(module, "sliding_window", None)
        return Site(
            path=path,
            layer=layer,
            layers=layers,
            kind=kind,
            dim=config.hidden_size,
            heads=heads,
            head_dim=head_dim,
            scale=getattr(module, "scaling", head_dim**-0.5),
            dropout=_dropout(module),
            max_len=self._max_len(config, grid, prefix),
            causal=causal,
            grid=grid,
            prefix=prefix,
            calls=config.num_hidden_layers // layers if self.family.repeats else 1,
            obstacle=_SLIDING if window is not None else None,
        )

    def _max_len(self, config: PreTrainedConfig, grid: tuple[int, int] | None, prefix: int) -> int:
        if grid is not None:
            return grid[0] * grid[1] + prefix
        return config.max_position_embeddings - self.family.position_offset

    @staticmethod
    def _grid(config: PreTrainedConfig) -> tuple[int, int]:
        image, patch = _pair(config.image_size), _pair(config.patch_size)
        return image[0] // patch[0], image[1] // patch[1]

    def install(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module | None],
        attention: Sequence[Mapping[str, Any]],
    ) -> Restore:
        """See ArchitectureAdapter.install."""
        restore = Restore()
        installed = [module for module in modules.values() if module is not None]
        needs = frozenset().union(*(module.zoo_supports.needs for module in installed))
        for site in self.sites(model):
            host, module = model.get_submodule(site.path), modules[site.path]
            restore.hosts.append(host)
            host.zoo, host.zoo_site = module, site
            if module is not None:
                self._equip(host, model.get_submodule(self._out(site.path)), module, restore)
        reads_grid = any(module.zoo_supports.grid != "ignored" for module in installed)
        patch = _pair(model.config.patch_size) if reads_grid and self.family.image else None
        if patch or needs & {"carry", "times"}:
            extras = calls.AddExtras(needs, patch)
            hook = model.base_model.register_forward_pre_hook(extras, with_kwargs=True)
            restore.hooks.append(hook)
        if (begin := BeginForward(installed)).losses:
            restore.hooks.append(model.base_model.register_forward_pre_hook(begin))
        give_own_configs(model, attention, restore)
        keep_own_keys(model, restore)
        return restore

    def _equip(self, host: nn.Module, out: nn.Module, module: nn.Module, restore: Restore) -> None:
        """Give one attention module the extras that its mechanism reads; freeze what it ignores."""
        needs = module.zoo_supports.needs
        if "projections" in needs:
            host.zoo_projections = Projections(host, out, self.family.projections)
        if "hidden" in needs:
            hook = host.register_forward_pre_hook(calls.add_hidden, with_kwargs=True)
            restore.hooks.append(hook)
        if len(self.family.projections) == 3:
            names = dict(zip(("query", "key", "value"), self.family.projections, strict=True))
            for role in getattr(module, "unused", frozenset()):
                trained = [p for p in getattr(host, names[role]).parameters() if p.requires_grad]
                restore.frozen += trained
                for parameter in trained:
                    parameter.requires_grad_(False)

    def _out(self, path: str) -> str:
        """Path of the output projection of the attention module at `path`."""
        out = self.family.out
        while out.startswith("../"):
            path, out = path.rpartition(".")[0], out.removeprefix("../")
        return f"{path}.{out}"

    def installed(self, model: nn.Module) -> dict[str, nn.Module | None]:
        """What really runs at each site now, whatever anyone did since the patch."""
        active = model.config._attn_implementation == calls.NAME
        hosts = {site.path: model.get_submodule(site.path) for site in self.sites(model)}
        return {
            path: getattr(host, "zoo", None) if active else None for path, host in hosts.items()
        }

    def config(self, model: nn.Module) -> dict[str, Any]:
        """The model's class and its config where it differs from the defaults, JSON only."""
        stored = host_config.safe(model.config.to_diff_dict())
        for derived in ("architectures", "dtype", "model_type"):
            stored.pop(derived, None)
        stored["class"] = type(model).__name__
        if model is model.base_model and getattr(model, "pooler", True) is None:
            stored["add_pooling_layer"] = False
        return stored

    def convert(self, state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
        """Only transformers' own keys are known here."""
        if source != "transformers":
            raise OptionError(f"{self.family.stem} cannot convert keys from {source!r}")
        return dict(state)


def _architectures(stored: Mapping[str, Any]) -> list[str]:
    """The names of classes in a config.json, which may hold anything."""
    names = stored.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


@contextmanager
def _in_words(model_class: type[PreTrainedModel], changes: Mapping[str, Any]) -> Iterator[None]:
    """Name the settings where transformers cannot build a model with them."""
    try:
        yield
    except ZooError:
        raise
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        raise OptionError(
            f"transformers cannot build {model_class.__name__}({given}): {one_line(str(error))}"
        ) from error


def _without_weights(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, *, skeleton: bool, **extra: Any
) -> PreTrainedModel:
    if not skeleton:
        return model_class(config, **extra)
    # Numbers that nobody sees need not be drawn, which takes the most of it.
    with torch.device("meta"), no_init_weights():
        return model_class(config, **extra)


def _refuse_unknown(config_class: type[PreTrainedConfig], changes: Mapping[str, Any]) -> None:
    """Raise OptionError for an entry that the config class would take and never read."""
    known = config_class()
    for name in changes:
        if not (host_config.is_safe(name) and hasattr(known, name)):
            entries = [entry for entry in known.to_dict() if not entry.startswith("_")]
            hint = did_you_mean(name, entries)
            raise OptionError(f"{config_class.__name__} has no entry {name!r}{hint}")


def _dropout(host: nn.Module) -> float:
    """The dropout probability on attention weights, which hosts keep as a module or a number."""
    rate = host.attention_dropout if hasattr(host, "attention_dropout") else host.dropout
    return float(rate.p if isinstance(rate, nn.Dropout) else rate)


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    """(height, width) from a host's number or pair."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return height, width
