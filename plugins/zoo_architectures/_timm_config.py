"""How to build a timm model, and how to say how a given one was built."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import timm
import torch
from timm.models import VisionTransformer, get_arch_pretrained_cfgs, get_pretrained_cfg
from timm.models.deit import VisionTransformerDistilled
from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
from torch import nn

from zoo_core.checkpoint.host_config import TIMM_DATA as DATA
from zoo_core.checkpoint.host_config import TIMM_MARK as MARK
from zoo_core.errors import CheckpointError, OptionError, PatchError, UnknownName, did_you_mean
from zoo_core.hosts import plain_name

CLASSES = (VisionTransformer, VisionTransformerDistilled, NaFlexVit)
# Arguments that concern one build and not the architecture.
_PLACEMENT = frozenset({"device", "dtype", "cache_dir"})
# All that create_model may be given. An allow-list, because others name files to unpickle.
_ARGUMENTS = frozenset(inspect.signature(VisionTransformer).parameters) | {
    *(entry.name for entry in fields(NaFlexVitCfg)),
    *_PLACEMENT,
    "use_naflex",
    "pretrained_cfg_overlay",
}
# Modules of timm whose models can be made without initialising weights. On the meta device it has
# no effect and takes ten times as long as everything else.
_SKIP_INITIALISATION = frozenset({"timm.models.vision_transformer", "timm.models.deit"})
# State of training, not of the architecture; or set by the environment.
_NOT_DESCRIBED = frozenset(
    "training grad_checkpointing distilled_training weight_init_mode fix_init fused_attn".split()
)


def family_of(variant: str) -> str:
    """The zoo's name for the family of a timm name."""
    return "deit" if variant.startswith("deit") else "vit"


def check_variant(variant: str, family: str) -> None:
    """Raise UnknownName unless timm has a model of this name and it is of this family."""
    if not isinstance(variant, str) or set(variant) & set("/\\:") or not timm.is_model(variant):
        known = [name for name in timm.list_models() if family_of(name) == family]
        raise UnknownName(
            f"timm {timm.__version__} has no model {variant!r}"
            f"{did_you_mean(str(variant), known)}; timm.list_models('{family}*') lists them"
        )
    if family_of(variant) != family:
        raise UnknownName(
            f"{variant} is not of family {family!r}; write '{family_of(variant)}:{variant}'"
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise OptionError for an argument that no vision transformer of timm takes."""
    for name in arguments:
        if name not in _ARGUMENTS:
            raise OptionError(
                f"timm's vision transformers have no argument {name!r}"
                f"{did_you_mean(name, _ARGUMENTS)}"
            )
    overlay = arguments.get("pretrained_cfg_overlay") or {}
    if not isinstance(overlay, Mapping) or not overlay.keys() <= DATA:
        raise OptionError(
            f"pretrained_cfg_overlay={overlay!r} may set only {', '.join(sorted(DATA))}; "
            "weights are chosen with pretrained="
        )


def construct(
    variant: str, arguments: Mapping[str, Any], *, skeleton: bool = False, pretrained: bool = False
) -> nn.Module:
    """Call timm.create_model. skeleton: on the meta device, without weights.

    Raises OptionError for arguments that timm refuses or a class that cannot be patched, and
    CheckpointError if the pretrained weights cannot be had.
    """
    arguments = {name: _frozen(value) for name, value in arguments.items()}
    lasting = {name: value for name, value in arguments.items() if name not in _PLACEMENT}
    if skeleton:
        arguments = lasting
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    naflex = lasting.get("use_naflex", "TIMM_USE_NAFLEXVIT" in os.environ)  # is initialised anyway
    if skeleton and not naflex and _module_of(variant) in _SKIP_INITIALISATION:
        arguments = {**arguments, "weight_init": "skip"}
    try:
        with torch.device("meta") if skeleton else nullcontext():
            model = timm.create_model(variant, pretrained=pretrained and not skeleton, **arguments)
    except Exception as error:
        if pretrained and not skeleton:
            raise CheckpointError(
                f"timm could not load the pretrained weights of {variant}({shown}): {error}"
            ) from error
        raise OptionError(f"timm cannot build {variant}({shown}): {error}") from error
    if not isinstance(model, CLASSES):
        names = ", ".join(cls.__name__ for cls in CLASSES)
        raise OptionError(f"{variant}({shown}) is a {type(model).__name__}, not one of {names}")
    model.zoo_created = {"variant": variant, "arguments": lasting}
    return model


def _module_of(variant: str) -> str:
    """The module of timm that defines a variant; "" for a name that timm does not know."""
    known = timm.is_model(variant)
    return str(timm.model_entrypoint(variant).__module__) if known else ""


def variant_of(model: nn.Module) -> str:
    """Return timm's name of a model, with its tag if that is registered; "" if unknown."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    name = str(cfg.get("architecture") or "").removeprefix(MARK)
    tagged = f"{name}.{cfg.get('tag')}"
    return tagged if tagged in get_arch_pretrained_cfgs(name) else name


def describe(model: nn.Module) -> dict[str, Any]:
    """What `construct` needs to build this model again: "variant" and arguments, as JSON.

    Raises PatchError for a model that timm.create_model would not build like this, naming where.
    """
    variant = variant_of(model)
    if not variant:
        raise PatchError(
            f"this {type(model).__name__} does not say which timm model it is; build it with "
            "zoo.build or timm.create_model"
        )
    arguments = _arguments_of(model)
    try:
        config = json.loads(json.dumps({"variant": variant, **arguments}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise PatchError(f"{variant} was built with arguments that are not JSON: {error}") from None
    twin = construct(variant, arguments, skeleton=True)
    if found := next(_differences(twin, model), None):
        raise PatchError(
            f"this {type(model).__name__} is not what timm.create_model({variant!r}) with "
            f"{arguments} builds: {found}. Build it with zoo.build(..., **arguments) so that its "
            "arguments are known, or save its state_dict yourself"
        )
    return dict(config)


def _arguments_of(model: nn.Module) -> dict[str, Any]:
    """The arguments a model was built with, updated by what was changed since."""
    created = getattr(model, "zoo_created", {}).get("arguments", {})
    # timm keeps its own record, and updates it on a resize; older versions have none.
    recorded = getattr(model, "_model_args", {})
    arguments = {**created, **{k: v for k, v in recorded.items() if k in _ARGUMENTS}}
    for name in ("num_classes", "in_chans", "global_pool"):
        if hasattr(model, name):
            arguments[name] = getattr(model, name)
    if hasattr(model, "patch_embed"):
        arguments["img_size"] = model.patch_embed.img_size
    arguments["fc_norm"] = not isinstance(model.fc_norm, nn.Identity)
    if overlay := _data_of(model):
        arguments["pretrained_cfg_overlay"] = overlay
    return arguments


def _data_of(model: nn.Module) -> dict[str, Any]:
    """The preparation of images, where it is not the one that the variant brings."""
    registered = get_pretrained_cfg(variant_of(model))
    known = registered.to_dict() if registered else {}
    cfg = model.pretrained_cfg
    return {k: cfg[k] for k in sorted(DATA & cfg.keys()) if _frozen(cfg[k]) != known.get(k)}


def _frozen(value: Any) -> Any:
    """JSON lists as the tuples that timm expects."""
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {key: _frozen(part) for key, part in value.items()}
    return value


def _differences(twin: nn.Module, model: nn.Module) -> Iterator[str]:
    """What differs between two models besides their weights, in words."""
    expected, actual = (
        {plain_name(path): part for path, part in one.named_modules() if ".zoo." not in f"{path}."}
        for one in (twin, model)
    )
    for path in sorted(expected.keys() | actual.keys()):
        where, here, there = path or "the model", actual.get(path), expected.get(path)
        if here is None or there is None:
            yield f"{where} is {'missing' if here is None else 'additional'}"
        elif not isinstance(here, type(there)):
            yield f"{where} is a {type(here).__name__}, expected {type(there).__name__}"
        elif differing := _differing(here, there):
            yield f"{where} differs in {', '.join(differing)}"


def _differing(module: nn.Module, expected: nn.Module) -> list[str]:
    """Names of what fixes a module's behaviour and is not as expected."""
    shapes, wanted = _shapes(module), _shapes(expected)
    plain = {
        name
        for name, value in vars(expected).items()
        if isinstance(value, bool | int | float | str | tuple)
        and not name.startswith("_")
        and name not in _NOT_DESCRIBED
        and getattr(module, name, None) != value
    }
    tensors = {n for n in shapes.keys() | wanted.keys() if shapes.get(n) != wanted.get(n)}
    return sorted(plain | tensors)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {name: tuple(tensor.shape) for name, tensor in tensors}
