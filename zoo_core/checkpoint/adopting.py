"""Read what `save_pretrained`, Trainer or `push_to_hub` wrote of a patched transformers model.

`patch` keeps the attention block in the host's config, and so config.json has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zoo_core import registry
from zoo_core.architecture import Architecture
from zoo_core.checkpoint import checks, host_config, layout, strict_json
from zoo_core.checkpoint.manifest import (
    Manifest,
    check_attention,
    check_class,
    check_config,
    read_manifest,
)
from zoo_core.errors import CheckpointError


def read(directory: Path, *, root: Path | None = None) -> Manifest:
    """The manifest of a directory: its zoo.json, else what config.json tells, which has no files.

    root: see `layout.find`. Raises CheckpointError where there is neither.
    """
    if layout.find(directory, layout.MANIFEST, root=root) is None:
        config = host_config.read(directory, root=root)
        if "zoo" in config:
            return manifest_of(config, str(directory / layout.CONFIG))
    return read_manifest(directory, root=root)


def manifest_of(config: Mapping[str, Any], where: str) -> Manifest:
    """The manifest that zoo.save would have written, but for the files and the ties.

    Raises CheckpointError naming `where`.
    """
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1:
        raise CheckpointError(f"{where}: architectures is {classes!r}, must name one class")
    model_class = check_class(classes[0], f"{where}: architectures")
    architecture = _architecture(model_class, where)
    version = config.get("transformers_version", "")
    entries = {k: v for k, v in config.items() if k not in host_config.DERIVED and k != "zoo"}
    return Manifest(
        architecture=architecture.qualified,
        library=architecture.library,
        library_version=checks.line(f"{where}: transformers_version", version),
        model_class=model_class,
        config=check_config(entries, where),
        attention=check_attention(config["zoo"], f"{where}: zoo"),
        holds="model",
        files={},
    )


def fit(manifest: Manifest, stored: Iterable[str]) -> Manifest:
    """Correct the one thing about a model that transformers keeps out of config.json: its pooler.

    stored: the names of the tensors in the weight files.
    """
    if any(name.startswith("pooler.") for name in stored):
        return manifest
    adapter = registry.architecture(manifest.architecture).adapter()
    usual = adapter.create(None, skeleton=True, **_named(manifest.model_class))
    if not any(name.startswith("pooler.") for name in usual.state_dict()):
        return manifest
    return replace(manifest, config={**manifest.config, "add_pooling_layer": False})


def weight_paths(directory: Path, *, root: Path | None = None) -> list[Path]:
    """The safetensors files of a directory without a manifest: one, or those of its index."""
    single = layout.find(directory, layout.WEIGHTS, root=root)
    if single is not None:
        return [single]
    path = layout.find(directory, layout.INDEX, root=root)
    if path is None:
        raise CheckpointError(
            f"{directory} has no {layout.WEIGHTS}; other formats can run code and are not read, "
            "save the model again with safetensors"
        )
    index = strict_json.read(path, layout.INDEX_LIMIT)
    weight_map = checks.typed(f"{path}", index, dict).get("weight_map")
    names = sorted(set(checks.texts(f"{path}: weight_map", weight_map).values()))
    for name in names:
        checks.matched(f"{path}: weight_map", name, layout.SHARD, "the name of a shard")
    return [layout.require(directory, name, root=root) for name in names]


def _architecture(model_class: str, where: str) -> Architecture:
    """The installed family that has this class."""
    for architecture in registry.architectures():
        if architecture.library == "transformers":
            adapter = architecture.adapter()
            try:
                skeleton = adapter.create(None, skeleton=True, **_named(model_class))
            except Exception:  # A family without this class, or another plugin's trouble.
                continue
            if adapter.owns(skeleton):
                return architecture
    known = ", ".join(one.name for one in registry.architectures())
    raise CheckpointError(
        f"{where} is of class {model_class}, which no installed architecture has ({known})"
    )


def _named(model_class: str) -> dict[str, Any]:
    """The argument of `create` that names a class; "class" is no Python identifier."""
    return {"class": model_class}
