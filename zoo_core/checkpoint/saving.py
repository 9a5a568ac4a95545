"""zoo.save: write a model as a checkpoint directory, completely or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from zoo_core import __version__
from zoo_core.checkpoint import calibration, host_config, layout, strict_json, tensors
from zoo_core.checkpoint.atomic import check_target, replacing
from zoo_core.checkpoint.card import card
from zoo_core.checkpoint.digest import Digest, sha256_of
from zoo_core.checkpoint.manifest import SCHEMA, FileRecord, Holds, Manifest, read_manifest
from zoo_core.checkpoint.rebuilding import rebuild
from zoo_core.errors import CheckpointError
from zoo_core.hosts import adapter_of, unwrap
from zoo_core.inspection import inspect
from zoo_core.patching import attention_block

_SIZE = re.compile(r"(\d+) ?([KMG]?)B", re.IGNORECASE)
# What stock timm may need besides, to name the model and to replace its ends.
_TIMM_TOLD = host_config.TIMM_DATA | {
    *("tag", "fixed_input_size", "first_conv", "classifier", "license")
}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def save(
    model: Any,
    directory: str | Path,
    *,
    holds: Holds = "model",
    base: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
) -> Manifest:
    """Write `model`, or the known model inside a wrapper, to `directory`.

    A checkpoint that is there is replaced at once, or stays whole if anything fails. README.md is
    written where there is none, and anew where it is as the last save left it; one that anybody
    changed, and files that are not a checkpoint's, are left alone.

    holds: "model" writes every tensor; "attention" only what the mechanisms added to `base`.
    base: {"repo": "owner/name", "commit": 40 hex digits, "sha256": that of its weights}.
    max_shard_size: bytes, or a text such as "500MB"; a larger model gets several numbered files.
    tokenizer: a tokenizer or image processor, written beside the model.

    Raises CheckpointError for a model that zoo.load could not bring back, naming what stands in
    the way, and for a directory that holds weights of others; nothing is written then.
    """
    check_target(Path(directory))
    ready = _ready(model, holds, base, max_shard_size)
    with replacing(Path(directory)) as folder:
        manifest = ready.write(folder, tokenizer, sha256_of)
        if _card_is_ours(Path(directory)):
            (folder / layout.CARD).write_text(card(manifest), encoding="utf-8")
    return manifest


def _card_is_ours(directory: Path) -> bool:
    """Whether nobody's words are lost with README.md: it is missing, or what its manifest gives."""
    try:
        text = (directory / layout.CARD).read_text(encoding="utf-8")
        return text == card(read_manifest(directory))
    except FileNotFoundError:
        return True
    except (CheckpointError, UnicodeDecodeError):
        return False


def write(
    model: Any,
    folder: Path,
    *,
    holds: Holds = "model",
    base: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    digest: Digest = sha256_of,
) -> Manifest:
    """Like `save`, to an empty folder that nobody else reads yet: without a card, not atomic.

    digest: what hashes the weight files.
    """
    try:
        return _ready(model, holds, base, max_shard_size).write(folder, tokenizer, digest)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A model that can be written: everything about it is checked. The manifest lacks its files."""

    host: nn.Module
    manifest: Manifest
    shards: list[dict[str, Tensor]]

    def write(self, folder: Path, tokenizer: Any, digest: Digest) -> Manifest:
        """Write all files but the card."""
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        manifest = replace(self.manifest, files=_write_weights(folder, self.shards, digest))
        config = strict_json.dump(_host_config(self.host, manifest), layout.CONFIG)
        (folder / layout.CONFIG).write_bytes(config)
        (folder / layout.MANIFEST).write_bytes(manifest.to_json())
        return manifest


def _ready(
    model: Any, holds: Holds, base: Mapping[str, str] | None, max_shard_size: int | str
) -> _Ready:
    host = unwrap(model)
    _refuse_what_would_be_lost(model, host)
    inspect(host)
    limit = _bytes(max_shard_size)
    manifest = _describe(host, holds, base)
    stored, tied = tensors.collect(host, own_only=holds == "attention")
    buffers = _check_it_comes_back(host, manifest, stored, tied)
    if manifest.attention and not any(map(tensors.is_own, stored)):
        stored[tensors.MARKER] = torch.empty(0, dtype=torch.float32, device="cpu")
    manifest = replace(manifest, tied=tied, buffers=buffers)
    return _Ready(host=host, manifest=manifest, shards=_shards(stored, limit))


def _refuse_what_would_be_lost(model: Any, host: nn.Module) -> None:
    """Raise CheckpointError for adapters, and for tensors of a wrapper beside its host model."""
    roots = [host, *([model] if isinstance(model, nn.Module) else [])]
    for module in (module for root in roots for module in root.modules()):
        if type(module).__module__.partition(".")[0] == "peft":
            raise CheckpointError(
                f"the model holds PEFT adapters ({type(module).__name__}); merge them first with "
                "model = model.merge_and_unload(), or save them with their own save_pretrained"
            )
    inside = {id(value) for value in host.state_dict(keep_vars=True).values()}
    outside = [
        name
        for name, value in roots[-1].state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and id(value) not in inside
    ]
    if outside:
        raise CheckpointError(
            f"{type(model).__name__} holds tensors outside its {type(host).__name__}, such as "
            f"{outside[0]!r}, which would be lost; save it with its own method"
        )


def _describe(host: nn.Module, holds: Holds, base: Mapping[str, str] | None) -> Manifest:
    """The manifest without what is known only later: files, ties and dtypes of buffers."""
    if holds == "attention" and base is None:
        raise CheckpointError(
            'holds="attention" needs base={"repo": "owner/name", "commit": ..., "sha256": ...}, '
            'the published model that the attention was added to; holds="model" needs nothing'
        )
    trained = calibration.trained_host(host)
    if holds == "attention" and trained is not None:
        raise CheckpointError(
            f'holds="attention" leaves out the model\'s own weights, which a calibration trained '
            f'(train={trained!r}); save the whole model with holds="model", or calibrate one built '
            "anew with train='mechanism'"
        )
    architecture, adapter = adapter_of(host)
    config = dict(adapter.config(host))
    config.pop("class", None)
    data = {
        "schema": SCHEMA,
        "architecture": architecture.qualified,
        "library": architecture.library,
        "library_version": metadata.version(architecture.library),
        "class": type(host).__name__,
        "config": host_config.safe(config),
        "attention": attention_block(host),
        "holds": holds,
        "files": {},
        "tied": {},
        "base": None if base is None else dict(base),
        "calibration": calibration.result_of(host, attention_block(host)),
        **({"trained": trained} if trained is not None else {}),
        "created_with": {"zoo-core": __version__, "torch": torch.__version__},
    }
    return Manifest.from_json(strict_json.dump(data, f"the config of {type(host).__name__}"))


def _check_it_comes_back(
    host: nn.Module, manifest: Manifest, stored: Mapping[str, Tensor], tied: Mapping[str, str]
) -> dict[str, str]:
    """Build the model as zoo.load will. Returns the dtypes of buffers where they differ.

    Raises CheckpointError if the tensors would not fill it.
    """
    own_only = manifest.holds == "attention"
    if own_only and not manifest.attention:
        raise CheckpointError('holds="attention" needs a patched model; this one is stock')
    fresh = rebuild(manifest, f"this {type(host).__name__}")
    if problems := tensors.mismatches(fresh, tensors.entries(stored), tied, own_only=own_only):
        raise CheckpointError(
            f"this {type(host).__name__} is not what its config builds, so that zoo.load could "
            f"not bring it back: {'; '.join(problems)}. Change it through its config, or save its "
            "state_dict yourself"
        )
    usual = tensors.buffer_dtypes(fresh)
    return {
        name: dtype
        for name, dtype in tensors.buffer_dtypes(host).items()
        if usual.get(name, dtype) != dtype
    }


def _shards(stored: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Split into files of at most `limit` bytes, but at least one tensor, in order."""
    shards: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, tensor in stored.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = limit
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _write_weights(
    folder: Path, shards: list[dict[str, Tensor]], digest: Digest
) -> dict[str, FileRecord]:
    """Write the weight files, and the index that stock readers need where there are several."""
    names = layout.weight_names(len(shards))
    records = {}
    for name, shard in zip(names, shards, strict=True):
        path = folder / name
        ready = {key: tensor.cpu().contiguous() for key, tensor in shard.items()}
        try:
            # One metadata key only: safetensors writes several in random order, and equal weights
            # would get different hashes.
            save_file(ready, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error
        records[name] = FileRecord(sha256=digest(path), size=path.stat().st_size)
    if len(shards) > 1:
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        homes = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        (folder / layout.INDEX).write_bytes(strict_json.dump(index, layout.INDEX))
    return records


def _host_config(host: Any, manifest: Manifest) -> dict[str, Any]:
    """The content of config.json, for stock tools: they read it, or refuse a patched model by it.

    zoo.load reads zoo.json instead.
    """
    if manifest.library == "timm":
        return _timm_config(host, manifest)
    config = host_config.safe(json.loads(host.config.to_json_string()))
    config["architectures"] = [manifest.model_class]
    config["transformers_version"] = manifest.library_version
    if manifest.attention:
        block = [dict(entry) for entry in manifest.attention]
        config |= {"attn_implementation": host_config.ATTENTION, "zoo": block}
    return config


def _timm_config(host: Any, manifest: Manifest) -> dict[str, Any]:
    """timm's own format. A patch has put a mark before the architecture's name (see the bridge)."""
    arguments = host_config.timm_arguments(manifest)
    cfg = host.pretrained_cfg
    data = {key: cfg[key] for key in sorted(_TIMM_TOLD & cfg.keys())}
    data |= manifest.config.get("pretrained_cfg_overlay", {})
    if size := arguments.get("img_size"):
        sides = [size, size] if isinstance(size, int) else size
        data["input_size"] = [arguments.get("in_chans", 3), *sides]
    return {
        "architecture": cfg["architecture"],
        "num_classes": host.num_classes,
        "num_features": host.num_features,
        "model_args": arguments,
        "pretrained_cfg": {key: value for key, value in data.items() if value is not None},
    }


def _bytes(size: int | str) -> int:
    """A size in bytes from a number or from a text such as "500MB"."""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        size = int(match[1]) * _UNITS[match[2].upper()]
    if type(size) is not int or size < 1:
        raise CheckpointError(f"max_shard_size={size!r} must be bytes, or a text such as '500MB'")
    return size
