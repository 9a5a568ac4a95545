"""The bridge to transformers: one adapter, one small row (Family) for each model family."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from zoo_architectures import _transformers_calls as calls
from zoo_architectures import _transformers_weights as weights
from zoo_architectures._transformers_weights import NOT_CONFIG
from zoo_core.attention import Site
from zoo_core.errors import OptionError, did_you_mean
from zoo_core.nn.auxiliary import BeginForward

# Stands for "no such attribute"; unlike an object() it stays itself when copied or pickled.
_ABSENT = ...

_SLIDING = "the host's attention is a sliding window, which a mechanism cannot take over"

TASKS = (
    ("causal-lm", "LMHeadModel"),
    ("causal-lm", "ForCausalLM"),
    ("image-classification", "ForImageClassification"),
    ("masked-image-modeling", "ForMaskedImageModeling"),
    ("masked-lm", "ForMaskedLM"),
    ("multiple-choice", "ForMultipleChoice"),
    ("next-sentence-prediction", "ForNextSentencePrediction"),
    ("pretraining", "ForPreTraining"),
    ("question-answering", "ForQuestionAnswering"),
    ("sequence-classification", "ForSequenceClassification"),
    ("token-classification", "ForTokenClassification"),
)


@dataclass(frozen=True)
class Family:
    """What differs between model families.

    package: module under transformers.models. stem: class prefix ("Bert").
    self_attention, cross_attention: class names of the attention modules.
    projections: attribute names of the query, key and value Linears, or one fused Linear.
    out: path of the output projection, relative to the attention module ("..": its parent).
    prefix: leading tokens outside the grid (BERT: its CLS).
    position_offset: rows of the position table before position 0 (RoBERTa: 2).
    image: whether inputs are images.
    repeats: whether the layers share their attention module (ALBERT).
    tiny: config entries of the smallest model that differ from the other families'.
    """

    package: str
    stem: str
    default: str
    self_attention: str
    cross_attention: str | None = None
    projections: tuple[str, ...] = ("query", "key", "value")
    out: str = "../output.dense"
    prefix: int = 1
    position_offset: int = 0
    image: bool = False
    repeats: bool = False
    tiny: tuple[tuple[str, Any], ...] = ()

    @property
    def modeling(self) -> Any:
        """The modeling module of transformers."""
        return importlib.import_module(
            f"transformers.models.{self.package}.modeling_{self.package}"
        )

    def named(self, suffix: str) -> Any:
        """The class `stem + suffix`."""
        return getattr(self.modeling, self.stem + suffix)

    @property
    def heads(self) -> dict[str, type[PreTrainedModel]]:
        """Task -> model class, for the tasks this family has."""
        names = [(task, self.stem + suffix) for task, suffix in TASKS]
        return {t: getattr(self.modeling, n) for t, n in names if hasattr(self.modeling, n)}

    @property
    def attention_classes(self) -> dict[type[nn.Module], str]:
        """Attention class -> "self" or "cross"."""
        classes = {getattr(self.modeling, self.self_attention): "self"}
        if self.cross_attention:
            classes[getattr(self.modeling, self.cross_attention)] = "cross"
        return classes


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
        model_class = self._model_class(task, recorded)
        source = self.family.default if pretrained is True else pretrained or None
        if recorded is None:
            # A recorded config may hold entries of other versions, as every config.json may.
            _refuse_unknown(model_class.config_class, kwargs)
        stored = weights.read_config(source) if source is not None else {}
        config = model_class.config_class.from_dict({**stored, **kwargs})
        extra = {} if add_pooling_layer else {"add_pooling_layer": False}
        if skeleton or source is None:
            if max_length is not None:
                config.max_position_embeddings = max_length + self.family.position_offset
            if skeleton:  # numbers that nobody sees need not be drawn, which takes the most of it
                with torch.device("meta"), no_init_weights():
                    return model_class(config, **extra)
            return model_class(config, **extra)
        attention = tuple(self.family.attention_classes)
        model = weights.from_checkpoint(model_class, source, config, attention, **extra)
        if max_length is not None:
            weights.resize_positions(model, max_length, self.family.position_offset)
        return model

    def _model_class(self, task: str | None, name: str | None) -> type[PreTrainedModel]:
        family = self.family
        if name is not None:
            model_class = (
                getattr(family.modeling, name, None) if name.startswith(family.stem) else None
            )
            if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
                raise OptionError(f"{family.stem} has no model class {name!r}")
            return model_class
        if task is None:
            return family.named("Model")
        heads = family.heads
        if task not in heads:
            raise OptionError(
                f"{family.stem} has no task {task!r} (has: {', '.join(heads)})"
                f"{did_you_mean(task, heads)}"
            )
        return heads[task]

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
        found = [(p, m, kinds[type(m)]) for p, m in model.named_modules() if type(m) in kinds]
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
        _give_own_configs(model, attention, restore)
        _keep_own_keys(model, restore)
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
        stored = {k: v for k, v in model.config.to_diff_dict().items() if k not in NOT_CONFIG}
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


def _give_own_configs(
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


def _keep_own_keys(model: nn.Module, restore: Restore) -> None:
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


def _refuse_unknown(config_class: type[PreTrainedConfig], changes: Mapping[str, Any]) -> None:
    """Raise OptionError for an entry that the config class would take and never read."""
    known = config_class()
    for name in changes:
        if name in NOT_CONFIG or not hasattr(known, name):
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
