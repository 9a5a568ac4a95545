"""Check a checkpoint directory against its manifest without loading it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zoo_core.checkpoint import checks, host_config, layout, strict_json
from zoo_core.checkpoint.digest import Digest, sha256_of
from zoo_core.checkpoint.header import read_header
from zoo_core.checkpoint.manifest import FileRecord, Manifest, read_manifest
from zoo_core.errors import CheckpointError


def verify(
    directory: str | Path, *, root: Path | None = None, digest: Digest = sha256_of
) -> list[str]:
    """Every way in which the files are not what zoo.json says, in words; empty if all is well.

    Reads all bytes and believes none: sizes, SHA-256, headers, the index of shards, ties; and
    config.json, by which stock tools know the model.
    root: see `layout.find`. digest: what hashes the weight files.
    """
    directory = Path(directory)
    try:
        manifest = read_manifest(directory, root=root)
    except CheckpointError as error:
        return [str(error)]
    homes: dict[str, str] = {}
    contradiction = host_config.contradiction(directory, manifest, root=root)
    problems = [] if contradiction is None else [contradiction]
    for name, record in manifest.files.items():
        try:
            stored = _check_file(layout.require(directory, name, root=root), record, digest)
        except (CheckpointError, OSError) as error:
            problems.append(str(error))
            continue
        problems += [f"{name} and {homes[key]} both hold {key!r}" for key in stored & homes.keys()]
        homes |= dict.fromkeys(stored, name)
    if problems:
        return problems
    return [*_check_ties(manifest, homes), *_check_index(directory, root, manifest, homes)]


def _check_file(path: Path, record: FileRecord, digest: Digest) -> set[str]:
    """The names of the tensors in one file. Raises CheckpointError if it is not as recorded."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size != record.size:
            raise CheckpointError(f"{path} has {size} bytes, its manifest says {record.size}")
        header = read_header(file, size, str(path))
    if digest(path) != record.sha256:
        raise CheckpointError(f"{path} does not have the SHA-256 of its manifest")
    return set(header.entries)


def _check_ties(manifest: Manifest, homes: dict[str, str]) -> Iterator[str]:
    for alias, kept in manifest.tied.items():
        if kept not in homes:
            yield f"{alias!r} is tied to {kept!r}, which no file holds"
        if alias in homes:
            yield f"{alias!r} is both stored and tied to {kept!r}"


def _check_index(
    directory: Path, root: Path | None, manifest: Manifest, homes: dict[str, str]
) -> Iterator[str]:
    """The index is for stock readers only; a wrong one would mislead them."""
    if len(manifest.files) < 2:
        return
    try:
        path = layout.require(directory, layout.INDEX, root=root)
        index = checks.typed(str(path), strict_json.read(path, layout.INDEX_LIMIT), dict)
    except CheckpointError as error:
        yield str(error)
        return
    if index.get("weight_map") != homes:
        yield f"{path} does not say in which file each tensor is"
