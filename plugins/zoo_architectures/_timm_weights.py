"""Pretrained weights for timm models: read with care, converted, filled in strictly, reported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from zoo_architectures._report import LoadReport, patched
from zoo_architectures._timm_config import DATA, MARK, check_arguments
from zoo_core import registry
from zoo_core.checkpoint import layout
from zoo_core.errors import CheckpointError, HubError, OptionError
from zoo_core.hub.places import find_place
from zoo_core.hub.reference import parse


@dataclass(frozen=True)
class Stored:
    """A checkpoint in timm's format: where it is, and the model that its weights fit.

    pinned: the source; of a repository the commit whose config was read.
    """

    source: str
    pinned: str
    variant: str
    arguments: dict[str, Any]


def read(source: str) -> Stored:
    """Read config.json of a directory or of `owner/name@revision`; no weights.

    Entries that say where weights are (url, file, hf_hub_id, custom_load) are not followed.
    Raises CheckpointError for what is not a stock timm checkpoint.
    """
    path = _fetched(source, layout.CONFIG)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        inner = config.get("pretrained_cfg", config)
        variant = config.get("architecture") or inner.get("architecture")
        arguments = dict(config.get("model_args") or {})
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{source}/config.json cannot be read: {error}") from error
    if not isinstance(variant, str):
        other = _other(config.get("model_type"))
        raise CheckpointError(f"{source}/config.json names no timm architecture{other}")
    if variant.startswith(MARK) or "zoo" in inner:
        raise patched(source)
    if inner.get("tag") and "." not in variant:
        variant = f"{variant}.{inner['tag']}"
    arguments = {**_described(config, inner), **arguments}
    try:
        check_arguments(arguments)
    except OptionError as error:
        raise CheckpointError(f"{source}/config.json: {error}") from None
    is_here = Path(source).is_dir()
    pinned = source if is_here else f"{parse(source).repo}@{path.parent.name}"
    return Stored(source, pinned, variant, arguments)


def _other(kind: object) -> str:
    """What to say of a config.json that is not timm's."""
    if not kind:
        return ""
    known = {one.name for one in registry.architectures() if one.library == "transformers"}
    fitting = [name for name in (str(kind), f"hf_{kind}") if name in known]
    hint = f", try {fitting[0]}" if fitting else ""
    return f"; it is a transformers checkpoint ({str(kind)[:40]}){hint}"


def _described(config: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that timm writes outside of model_args."""
    found: dict[str, Any] = {}
    for name in ("num_classes", "global_pool"):
        value = config.get(name, inner.get(name))
        if value is not None:
            found[name] = value
    if size := inner.get("input_size"):
        found["in_chans"] = size[0]
        if inner.get("fixed_input_size"):
            found["img_size"] = size[1:]
    if data := {name: inner[name] for name in sorted(DATA & inner.keys())}:
        found["pretrained_cfg_overlay"] = data
    return found


def _fetched(source: str, name: str) -> Path:
    """The local path of one file of a directory or of a repository on the Hub."""
    try:
        if not Path(source).is_dir():
            parse(source)
    except HubError:
        raise CheckpointError(
            f"pretrained={source!r} is neither a directory that exists nor owner/name@revision"
        ) from None
    try:
        path = find_place(source, frozenset({name})).directory / name
    except HubError as error:
        raise CheckpointError(f"{name} of {source} could not be fetched: {error}") from error
    if not path.is_file():
        raise CheckpointError(f"{source} has no {name}; save it with safetensors first")
    return path


def fill(model: nn.Module, stored: Stored, twin: nn.Module) -> LoadReport:
    """Copy a checkpoint's weights into `model`; only the classifier may differ, and positions.

    twin: the model that the checkpoint's own config describes; it knows the grid of its positions.
    Raises CheckpointError, before anything is copied, for tensors that are missing, unknown, of
    another shape or not finite.
    """
    try:
        state = load_file(_fetched(stored.pinned, layout.WEIGHTS))
    except SafetensorError as error:
        raise CheckpointError(f"{stored.source}/{layout.WEIGHTS} is damaged: {error}") from error
    if any(".zoo." in key for key in state):
        raise patched(stored.source)
    resized = _resize_positions(state, model, twin)
    own = model.state_dict()
    heads = _classifiers(model)
    missing = [k for k in own if k not in state or (_is_in(k, heads) and _differs(own, state, k))]
    unused = [k for k in state if k not in own or k in missing]
    attention = [key for key in own if ".attn." in key]
    if attention and set(attention) <= set(missing):
        raise CheckpointError(
            f"{stored.source} fills no attention weight of {stored.variant}: its own keys look "
            f"like {', '.join(sorted(state)[:3])}"
        )
    if faults := list(_faults(own, state, missing, unused, heads)):
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(
            f"{stored.source} does not fit {stored.variant}: {'; '.join(faults[:3])}{more}"
        )
    filling = {key: state[key] for key in own if key not in missing}
    model.load_state_dict(filling, strict=False)
    return LoadReport(
        stored.source, len(filling), tuple(sorted(missing)), tuple(sorted(unused)), resized
    )


def _resize_positions(
    state: dict[str, Tensor], model: nn.Module, twin: nn.Module
) -> tuple[str, ...]:
    """Resample the position embeddings in `state` if the model's grid is another one."""
    key = "pos_embed"
    old, new = (getattr(getattr(m, "patch_embed", None), "grid_size", None) for m in (twin, model))
    if old == new or old is None or key not in state or getattr(model, key, None) is None:
        return ()
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    state[key] = resample_abs_pos_embed(
        state[key], new_size=list(new), old_size=list(old), num_prefix_tokens=prefix
    )
    return (key,)


def _classifiers(model: nn.Module) -> tuple[str, ...]:
    names = model.pretrained_cfg.get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _is_in(key: str, modules: tuple[str, ...]) -> bool:
    return key.startswith(tuple(f"{name}." for name in modules))


def _differs(own: Mapping[str, Tensor], state: Mapping[str, Tensor], key: str) -> bool:
    return own[key].shape != state[key].shape


def _faults(
    own: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    missing: list[str],
    unused: list[str],
    heads: tuple[str, ...],
) -> Iterator[str]:
    yield from (f"it has no {key}" for key in missing if not _is_in(key, heads))
    yield from (f"the model has no {key}" for key in unused if not _is_in(key, heads))
    for key in own.keys() & state.keys() - set(missing):
        if _differs(own, state, key):
            yield f"{key} is {tuple(state[key].shape)}, the model's is {tuple(own[key].shape)}"
        elif not torch.isfinite(state[key]).all():
            yield f"{key} holds values that are not finite"
