"""zoo.json: what a checkpoint is, in data only; nothing it names is imported. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from zoo_core.architecture import Library
from zoo_core.checkpoint import checks, host_config, layout, strict_json
from zoo_core.checkpoint.header import ITEM_SIZES
from zoo_core.errors import CheckpointError
from zoo_core.mechanism import NAME
from zoo_core.names import COMMIT, DISTRIBUTION, REPOSITORY, SHA256

SCHEMA = 1

Holds = Literal["model", "attention"]

_CLASS = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_VARIANT = re.compile(r"[A-Za-z0-9_.]{1,128}")
_MECHANISM_KEYS = ("mechanism", "options", "layers", "distribution", "version")
# What a host builds is chosen by `config`; where it builds from is never a checkpoint's choice.
_NOT_CONFIG = frozenset({"pretrained", "skeleton", "task", "max_length"})


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What one file must be: the hex SHA-256 of its bytes and their number."""

    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Base:
    """The published model a checkpoint derives from: repository, full commit, weights' SHA-256."""

    repo: str
    commit: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of zoo.json; the fields are its keys, `model_class` is its `class`.

    architecture: qualified name. config: what the architecture's `create` takes.
    attention: one entry per mechanism and options, with its layers; empty = the stock attention.
    holds: "model" = every tensor, "attention" = only what the mechanisms added to `base`.
    files: the weight files by name. tied: name of a tensor -> name it is stored under.
    buffers: dtypes of buffers that a fresh model computes, where they differ from its own.
    trained: what a calibration trained of the host's own weights, with whatever attention.
    """

    architecture: str
    library: Library
    library_version: str
    model_class: str
    config: Mapping[str, Any]
    attention: tuple[Mapping[str, Any], ...]
    holds: Holds
    files: Mapping[str, FileRecord]
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)
    base: Base | None = None
    calibration: Mapping[str, Any] | None = None
    trained: str | None = None
    created_with: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What the model is, in words, as the head of a card."""
        names = list(dict.fromkeys(entry["mechanism"] for entry in self.attention))
        return f"{self.model_class} with {' and '.join(names) or 'its stock'} attention"

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of zoo.json."""
        files = {name: dict(vars(record)) for name, record in self.files.items()}
        buffers = {"buffers": dict(self.buffers)} if self.buffers else {}
        return {
            "schema": SCHEMA,
            "architecture": self.architecture,
            "library": self.library,
            "library_version": self.library_version,
            "class": self.model_class,
            "config": dict(self.config),
            "attention": [dict(entry) for entry in self.attention],
            "holds": self.holds,
            "files": files,
            "tied": dict(self.tied),
            **buffers,
            "base": None if self.base is None else dict(vars(self.base)),
            "calibration": None if self.calibration is None else dict(self.calibration),
            **({"trained": self.trained} if self.trained is not None else {}),
            "created_with": dict(self.created_with),
        }

    def to_json(self) -> bytes:
        """The bytes of zoo.json; equal manifests give equal bytes."""
        return strict_json.dump(self.as_dict(), layout.MANIFEST)

    @classmethod
    def from_json(cls, text: bytes, where: str = layout.MANIFEST) -> Manifest:
        """Parse and check. Raises CheckpointError naming the key that is wrong."""
        return _manifest(strict_json.parse(text, where), where)


def read_manifest(directory: str | Path, *, root: Path | None = None) -> Manifest:
    """Read the zoo.json of a checkpoint directory. Raises CheckpointError.

    root: see `layout.find`.
    """
    directory = Path(directory)
    path = layout.find(directory, layout.MANIFEST, root=root)
    if path is None:
        raise CheckpointError(_not_a_checkpoint(directory))
    manifest = _manifest(strict_json.read(path, layout.MANIFEST_LIMIT), str(path))
    if not manifest.files:
        raise CheckpointError(f"{path}: files names no weights; the checkpoint is incomplete")
    return manifest


def mechanism_name(entry: Mapping[str, Any]) -> str:
    """The qualified name of the mechanism of one attention entry."""
    return "/".join(filter(None, (entry["distribution"], entry["mechanism"])))


def check_class(name: Any, where: str) -> str:
    """Check the name of a host's class. Raises CheckpointError."""
    return checks.matched(where, name, _CLASS, "the name of a class")


def check_attention(block: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Check an attention block. Raises CheckpointError naming the entry that is wrong."""
    checks.typed(where, block, list)
    return tuple(_mechanism(f"{where}[{n}]", entry) for n, entry in enumerate(block))


def check_config(config: Any, where: str) -> Mapping[str, Any]:
    """Check a host config: an object that names no source. Raises CheckpointError."""
    for key in checks.typed(where, config, dict):
        if key in _NOT_CONFIG:
            raise CheckpointError(f"{where} may not contain {key!r}")
    if "variant" in config:
        checks.matched(f"{where}.variant", config["variant"], _VARIANT, "the name of a variant")
    return dict(config)


def _not_a_checkpoint(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory} is not a directory"
    hint = "zoo.save(model, directory) writes one"
    if host_config.tells_of_a_patch(directory):
        hint = (
            "save_pretrained or Trainer wrote this patched model: zoo.save(zoo.load(directory), "
            f"another) makes it one (`zoo build {directory} -o ANOTHER`)"
        )
    elif (directory / layout.CONFIG).exists():
        hint = (
            "it looks like a stock model: zoo.build(..., pretrained=directory) loads and patches "
            f"it (`zoo build {directory} --attention NAME -o ANOTHER`)"
        )
    return f"not a zoo checkpoint: {directory} has no {layout.MANIFEST}; {hint}"


def _manifest(data: Any, where: str) -> Manifest:
    checks.typed(where, data, dict)
    schema = data.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise CheckpointError(
            f"{where} has schema {schema}, this zoo-core reads up to {SCHEMA}; "
            "pip install --upgrade zoo-core"
        )
    if type(schema) is not int or schema != SCHEMA:
        raise CheckpointError(f"{where}: schema is {schema!r}, must be {SCHEMA}")
    template = Manifest.__dataclass_fields__
    keys = ["schema", *("class" if name == "model_class" else name for name in template)]
    optional = ["buffers", "trained"]
    checks.keys(
        where, data, required=[key for key in keys if key not in optional], optional=optional
    )
    manifest = Manifest(
        architecture=_architecture(f"{where}: architecture", data["architecture"]),
        library=checks.chosen(f"{where}: library", data["library"], get_args(Library)),
        library_version=checks.line(f"{where}: library_version", data["library_version"]),
        model_class=check_class(data["class"], f"{where}: class"),
        config=check_config(data["config"], f"{where}: config"),
        attention=check_attention(data["attention"], f"{where}: attention"),
        holds=checks.chosen(f"{where}: holds", data["holds"], get_args(Holds)),
        files=_files(f"{where}: files", data["files"]),
        tied=checks.texts(f"{where}: tied", data["tied"]),
        buffers=checks.texts(f"{where}: buffers", data.get("buffers", {})),
        base=_base(f"{where}: base", data["base"]),
        calibration=checks.typed(f"{where}: calibration", data["calibration"], dict, type(None)),
        trained=_trained(f"{where}: trained", data.get("trained")),
        created_with=_created_with(f"{where}: created_with", data["created_with"]),
    )
    _check_whole(manifest, where)
    return manifest


def _check_whole(manifest: Manifest, where: str) -> None:
    for alias, kept in manifest.tied.items():
        if kept in manifest.tied:
            raise CheckpointError(f"{where}: tied: {alias!r} points at {kept!r}, itself an alias")
    for name, dtype in manifest.buffers.items():
        checks.chosen(f"{where}: buffers: {name!r}", dtype, tuple(ITEM_SIZES))
    if manifest.holds == "attention" and manifest.base is None:
        raise CheckpointError(f'{where} holds "attention" but names no base to add it to')


def _architecture(where: str, value: Any) -> str:
    distribution, slash, name = checks.typed(where, value, str).rpartition("/")
    if slash:
        checks.matched(where, distribution, DISTRIBUTION, "distribution/name")
    checks.matched(where, name, NAME, "distribution/name")
    return str(value)


def _mechanism(where: str, entry: Any) -> Mapping[str, Any]:
    checks.keys(where, entry, required=_MECHANISM_KEYS, optional=["kind"])
    checks.matched(f"{where}.mechanism", entry["mechanism"], NAME, "the name of a mechanism")
    if entry["distribution"] != "":
        checks.matched(
            f"{where}.distribution", entry["distribution"], DISTRIBUTION, "a distribution"
        )
    checks.line(f"{where}.version", entry["version"])
    checks.chosen(f"{where}.kind", entry.get("kind", "self"), ("self", "cross"))
    for name, value in checks.typed(f"{where}.options", entry["options"], dict).items():
        checks.line(f"{where}.options", name)
        checks.typed(f"{where}.options.{name}", value, bool, int, float, str, type(None))
        if isinstance(value, str):
            checks.line(f"{where}.options.{name}", value)
    layers = checks.typed(f"{where}.layers", entry["layers"], list)
    if not layers or any(type(n) is not int or n < 0 for n in layers):
        raise CheckpointError(f"{where}.layers is {layers!r}, must be numbers of layers from 0")
    return dict(entry)


def _trained(where: str, value: Any) -> str | None:
    return None if value is None else checks.line(where, value)


def _created_with(where: str, value: Any) -> Mapping[str, str]:
    for text in (part for item in checks.texts(where, value).items() for part in item):
        checks.line(where, text)
    return dict(value)


def _files(where: str, value: Any) -> Mapping[str, FileRecord]:
    checks.typed(where, value, dict)
    names = sorted(value)
    if names != layout.weight_names(len(names)):
        shown = ", ".join(map(repr, names[:5]))
        raise CheckpointError(
            f"{where} names {shown}; must be {layout.WEIGHTS!r} or all of its numbered shards"
        )
    return {name: _file(f"{where}: {name}", value[name]) for name in names}


def _file(where: str, value: Any) -> FileRecord:
    checks.keys(where, value, required=("sha256", "size"))
    size = checks.typed(f"{where}: size", value["size"], int)
    if not 0 <= size < 2**53:
        raise CheckpointError(f"{where}: size is {size}, not a size of a file")
    sha256 = checks.matched(f"{where}: sha256", value["sha256"], SHA256, "64 hex digits")
    return FileRecord(sha256=sha256, size=size)


def _base(where: str, value: Any) -> Base | None:
    if value is None:
        return None
    checks.keys(where, value, required=("repo", "commit", "sha256"))
    return Base(
        repo=checks.matched(f"{where}.repo", value["repo"], REPOSITORY, "owner/name"),
        commit=checks.matched(
            f"{where}.commit", value["commit"], COMMIT, "a commit of 40 hex digits"
        ),
        sha256=checks.matched(f"{where}.sha256", value["sha256"], SHA256, "64 hex digits"),
    )
