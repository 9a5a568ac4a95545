"""registry.toml: names that resolve to something outside the installed code.

    schema = 1

    [plugins.zoo-example]                     # which distribution offers what I do not have
    summary = "one sentence"
    mechanisms = ["name"]                     # and/or architectures
    version = ">=1.2"                         # optional, as in a requirements file
    url = "https://..."                       # optional

    [presets.some_name]                       # a sensible whole, without weights
    summary = "one sentence"
    architecture = "bert"
    attention = "local"                       # or {"0-3" = "local", "4-" = ["linformer", {...}]}
    options = {window = 128}                  # optional, with a single mechanism
    layers = "0-3"                            # optional, with a single mechanism
    max_length = 4096                         # optional
    model = {num_hidden_layers = 6}           # optional, keyword arguments of zoo.build

    [checkpoints.some_name]                   # weights on the Hub, pinned
    summary = "one sentence"
    repo = "owner/name"
    revision = "40 hex digits"
    architecture = "bert"
    attention = "linformer"                   # optional
    files = {"model.safetensors" = "sha256, 64 hex digits"}
    metrics = {cosine = 0.97}                 # optional

Layers: the file shipped with zoo_core, the paths of the `zoo_catalogues` hook, then the files that
ZOO_REGISTRY lists. A later one may add names, never redefine one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zoo_core import names, plugins, toml
from zoo_core.distributions import normalise
from zoo_core.errors import CatalogueError, PluginError
from zoo_core.isolation import one_line
from zoo_core.mechanism import NAME
from zoo_core.plugins import Failure
from zoo_core.toml import Form, Table

SCHEMA = 1

Attention = str | tuple[str, Mapping[str, Any]] | Mapping[str, Any]

_DISTRIBUTION = Form("a distribution's name", names.DISTRIBUTION)
_VERSIONS = Form(
    'a version specifier such as ">=1.2,<2"',
    re.compile(r"{one}(,{one})*".format(one=r"\s*(==|>=|<=|~=|!=|>|<)\s*\d[\w.*+!]*\s*")),
)
_URL = Form("an https:// address", re.compile(r"https?://\S+"))
_LAYERS = Form('layers such as "0-3"', re.compile(r"[a-z0-9:,\- ]+"))
_REFERENCE = Form(
    "a name or distribution/name", re.compile(rf"({names.DISTRIBUTION.pattern}/)?{NAME.pattern}")
)
_REPOSITORY = Form("owner/name", names.REPOSITORY)
_COMMIT = Form("a commit of 40 hex digits", names.COMMIT)
_SHA256 = Form("a sha256 of 64 hex digits", names.SHA256)


@dataclass(frozen=True, kw_only=True)
class PluginRow:
    """A distribution that can be installed, and what it offers. `version`: a specifier or ""."""

    name: str
    source: Path
    summary: str
    mechanisms: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    version: str = ""
    url: str = ""

    @property
    def requirement(self) -> str:
        """What to hand to pip."""
        return f"{self.name}{self.version}"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model to build. `attention` has any form that `zoo.build` takes, options included."""

    name: str
    source: Path
    summary: str
    architecture: str
    attention: Attention
    max_length: int | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanisms it names, in order of its rules."""
        rules = self.attention
        chosen = list(rules.values()) if isinstance(rules, Mapping) else [rules]
        return tuple(dict.fromkeys(one if isinstance(one, str) else one[0] for one in chosen))


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """Weights on the Hub at one commit. `files`: path -> sha256. `metrics`: name -> number."""

    name: str
    source: Path
    summary: str
    repo: str
    revision: str
    architecture: str
    attention: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


Row = PluginRow | Preset | CheckpointRow


@dataclass(frozen=True)
class Catalogue:
    """All layers merged. `failures`: the catalogues of plugins that had to be left out, and why."""

    plugins: dict[str, PluginRow] = field(default_factory=dict)
    presets: dict[str, Preset] = field(default_factory=dict)
    checkpoints: dict[str, CheckpointRow] = field(default_factory=dict)
    failures: dict[Path, Failure] = field(default_factory=dict)

    def add(self, other: Catalogue) -> None:
        """Take over another layer's rows, or raise CatalogueError and take none."""
        kinds: list[tuple[str, Mapping[str, Row], Mapping[str, Row]]] = [
            ("plugins", self.plugins, other.plugins),
            ("presets", self.presets, other.presets),
            ("checkpoints", self.checkpoints, other.checkpoints),
        ]
        for kind, old, new in kinds:
            for name in sorted(old.keys() & new.keys()):
                raise CatalogueError(
                    f"{new[name].source}: [{kind}.{name}] is already defined in "
                    f"{old[name].source}; a catalogue may add names, never redefine one"
                )
        for preset in other.presets.values():
            for name in preset.mechanisms:
                if name in self.presets or name in other.presets:
                    raise CatalogueError(
                        f"{preset.source}: [presets.{preset.name}] attention: {name!r} is a "
                        "preset; name a mechanism"
                    )
        self.plugins.update(other.plugins)
        self.presets.update(other.presets)
        self.checkpoints.update(other.checkpoints)

    def offering(self, kind: str, name: str) -> list[PluginRow]:
        """The distributions that offer `name`. kind: "mechanisms" or "architectures"."""
        return [row for row in self.plugins.values() if name in getattr(row, kind)]


@dataclass(frozen=True)
class Layer:
    """One file; `distribution` is the plugin's that names it, "" for the shipped and the user's."""

    path: Path
    distribution: str = ""
    stamp: int = 0


def load() -> Catalogue:
    """The merged catalogue, read again only when a file or the list of files changes.

    Raises CatalogueError for the shipped file and the user's own; a plugin's is left out and
    recorded, unless ZOO_STRICT is set.
    """
    return _merge(tuple(layers()), plugins.discovery().policy.strict)


def layers() -> list[Layer]:
    """The files in order of precedence, each once."""
    offered = [(path, p.distribution) for p in plugins.installed() for path in p.catalogues]
    user = os.environ.get("ZOO_REGISTRY", "").split(os.pathsep)
    named = [(Path(path).expanduser(), "") for path in user if path]
    files: dict[Path, Layer] = {}
    for path, distribution in [(shipped(), ""), *offered, *named]:
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        files.setdefault(path.resolve(), Layer(path, distribution, stamp))
    return list(files.values())


def shipped() -> Path:
    """registry.toml inside the installed package, or at the top of the repository beside it."""
    package = Path(__file__).parent
    inside, beside = package / "registry.toml", package.parent / "registry.toml"
    return inside if inside.exists() else beside


@lru_cache(maxsize=1)
def _merge(stack: tuple[Layer, ...], strict: bool) -> Catalogue:
    merged = Catalogue()
    for layer in stack:
        try:
            merged.add(parse(layer.path))
        except CatalogueError as error:
            if not layer.distribution:
                raise
            if strict:
                raise PluginError(f"plugin {layer.distribution}: {error}") from error
            failure = Failure(phase="zoo_catalogues", reason=one_line(str(error)))
            merged.failures[layer.path] = failure
    return merged


def parse(path: Path, text: str | None = None) -> Catalogue:
    """Read and check one file. Raises CatalogueError naming file, table and key.

    text: what is to stand in the file, where that is to be checked before it is written.
    """
    top = toml.read(path, text)
    schema = top.value("schema")
    if type(schema) is not int or schema != SCHEMA:
        top.fail(f"schema is {schema!r}, this zoo-core reads {SCHEMA}; install one that fits")
    catalogue = Catalogue(
        plugins={row.name: row for row in map(_plugin, top.tables("plugins", _DISTRIBUTION))},
        presets={row.name: row for row in map(_preset, top.tables("presets"))},
        checkpoints={row.name: row for row in map(_checkpoint, top.tables("checkpoints"))},
    )
    top.close()
    return catalogue


def _plugin(table: Table) -> PluginRow:
    row = PluginRow(
        name=normalise(_name(table)),
        source=table.path,
        summary=table.text("summary"),
        mechanisms=table.names("mechanisms"),
        architectures=table.names("architectures"),
        version=table.text("version", _VERSIONS, default=""),
        url=table.text("url", _URL, default=""),
    )
    table.close()
    return row


def _preset(table: Table) -> Preset:
    preset = Preset(
        name=_name(table),
        source=table.path,
        summary=table.text("summary"),
        architecture=table.text("architecture"),
        attention=_attention(table),
        max_length=table.integer("max_length"),
        model_kwargs=MappingProxyType(table.mapping("model")),
    )
    table.close()
    return preset


def _attention(table: Table) -> Attention:
    """The three keys attention, options and layers in the form that `zoo.build` takes."""
    value = table.value("attention")
    options, layers = table.mapping("options"), table.text("layers", _LAYERS, default="")
    if isinstance(value, dict):
        if options or layers or not value:
            table.fail("attention rules by layer carry their own options and layers")
        rules = {table.formed("attention", layer, _LAYERS): one for layer, one in value.items()}
        return MappingProxyType({layer: _mechanism(table, one) for layer, one in rules.items()})
    chosen = _mechanism(table, [value, options] if options else value)
    return MappingProxyType({layers: chosen}) if layers else chosen


def _mechanism(table: Table, value: Any) -> str | tuple[str, Mapping[str, Any]]:
    """A mechanism's name, or ["name", {option = value}]."""
    if not isinstance(value, list):
        return table.formed("attention", value, _REFERENCE)
    if len(value) != 2 or not isinstance(value[1], dict):
        table.fail(f'attention: {value!r} must be "name" or ["name", {{option = value}}]')
    name = table.formed("attention", value[0], _REFERENCE)
    options = Table(table.path, table.name, {"options": value[1]}).mapping("options")
    return name, MappingProxyType(options)


def _checkpoint(table: Table) -> CheckpointRow:
    files = table.mapping("files")
    row = CheckpointRow(
        name=_name(table),
        source=table.path,
        summary=table.text("summary"),
        repo=table.text("repo", _REPOSITORY),
        revision=table.text("revision", _COMMIT),
        architecture=table.text("architecture"),
        attention=table.text("attention", default=""),
        files=MappingProxyType({f: table.formed(f, h, _SHA256) for f, h in files.items()}),
        metrics=MappingProxyType(table.numbers("metrics")),
    )
    if not files:
        table.fail("files is missing: every file of a checkpoint is pinned by its sha256")
    table.close()
    return row


def _name(table: Table) -> str:
    return table.name.partition(".")[2]
