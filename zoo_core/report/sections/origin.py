"""Where a model came from: hashes, revisions, plugins, stock weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from zoo_core import words
from zoo_core.report.blocks import Block, Facts, Text
from zoo_core.report.records import Report


def origin(report: Report) -> Iterator[Block]:
    """Files and revisions that vouch for it, and a word where none do."""
    rows = [*_source(report.model.source), *_manifest(report), *_loaded(report.model.loaded)]
    if rows:
        yield Facts(rows)
    if report.manifest is None and report.model.source is None:
        yield Text("The model was in memory when it was measured: no hashes of files vouch for it.")
    elif report.manifest is not None and not report.manifest.files:
        yield Text("The checkpoint was written by stock tools, which keep no hashes of its files.")


def _source(source: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if source is None:
        return
    yield "pulled from", f"{source['repo']} at {source['commit']}, {source['endpoint']}"
    if source.get("base"):
        yield "added to", str(source["base"])
    yield from ((f"sha256 of {name}", digest) for name, digest in source["files"].items())


def _manifest(report: Report) -> Iterator[tuple[str, str]]:
    manifest = report.manifest
    if manifest is None:
        return
    for name, file in manifest.files.items():
        yield f"sha256 of {name}", f"{file.sha256} ({words.megabytes(file.size)})"
    if manifest.base is not None:
        base = manifest.base
        yield "derives from", f"{base.repo} at {base.commit}, weights {base.sha256}"
    if manifest.created_with:
        tools = ", ".join(f"{name} {version}" for name, version in manifest.created_with.items())
        yield "written with", tools
    for entry in manifest.attention:
        owner = f"{entry['distribution']} {entry['version']}".strip()
        yield f"plugin of {entry['mechanism']}", owner or "none, it was registered by hand"


def _loaded(loaded: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if loaded is None:
        return
    source = PurePath(str(loaded["source"]))
    place = f"a local folder, {source.name}" if source.is_absolute() else str(source)
    yield "pretrained weights", f"{place}, {words.plural(loaded['loaded'], 'tensor')} loaded"
    for name in ("new", "unused", "resized"):
        if tensors := loaded.get(name):
            shown = ", ".join(tensors[:5]) + (", ..." if len(tensors) > 5 else "")
            yield f"{name} tensors", f"{len(tensors)}: {shown}"
