"""What a push publishes: an explicit list of local files, complete and checked before any request.

A folder is never uploaded as it is: whatever else lies in it stays there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zoo_core.checkpoint import layout, strict_json, verify
from zoo_core.checkpoint.card import card as local_card
from zoo_core.checkpoint.digest import Digest
from zoo_core.checkpoint.manifest import Manifest, read_manifest
from zoo_core.errors import CheckpointError
from zoo_core.hub.listing import COMPANIONS

_SECRET = re.compile(rb"hf_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----")


@dataclass(frozen=True, kw_only=True)
class Staged:
    """The files by their names in the repository; `card` is the user's own README, or None."""

    manifest: Manifest
    files: dict[str, Path]
    card: str | None = None

    @property
    def companions(self) -> set[str]:
        """The names of tokenizer and processor files."""
        return set(COMPANIONS & self.files.keys())


def stage_model(folder: Path, model: Any, *, tokenizer: Any, digest: Digest, **how: Any) -> Staged:
    """Save a model into an empty folder. `how` and errors: see zoo.save."""
    from zoo_core.checkpoint.saving import write

    return _staged(folder, write(model, folder, tokenizer=tokenizer, digest=digest, **how))


def stage_directory(directory: Path, folder: Path, *, tokenizer: Any, digest: Digest) -> Staged:
    """Take the files of a saved checkpoint as they are. Raises CheckpointError for a damaged one.

    folder: empty; a tokenizer that is given is written there, and beats the directory's.
    """
    if problems := verify(directory, digest=digest):
        raise CheckpointError(f"{directory} is not fit to be published: {problems[0]}")
    manifest = read_manifest(directory)
    names = {layout.MANIFEST, layout.CONFIG, *manifest.files, *COMPANIONS}
    if len(manifest.files) > 1:
        names.add(layout.INDEX)
    files = _found(directory, names)
    if layout.CONFIG not in files:
        raise CheckpointError(f"{directory} has no {layout.CONFIG}; save the model again")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
        files |= _staged(folder, manifest).files
    _check_companions(files)
    return Staged(manifest=manifest, files=files, card=_own_card(directory))


def with_companions(staged: Staged, directory: Path) -> Staged:
    """Add the tokenizer or processor and the card of a checkpoint that was staged anew."""
    files = _found(directory, COMPANIONS) | staged.files
    _check_companions(files)
    return replace(staged, files=files, card=_own_card(directory))


def _found(directory: Path, names: Iterable[str]) -> dict[str, Path]:
    found = {name: layout.find(directory, name) for name in sorted(names)}
    return {name: path for name, path in found.items() if path is not None}


def _own_card(directory: Path) -> str | None:
    """The README that its owner wrote; None where there is none but the one of zoo.save."""
    readme = layout.find(directory, layout.CARD)
    text = readme.read_text(encoding="utf-8") if readme else None
    return None if text == local_card(read_manifest(directory)) else text


def _staged(folder: Path, manifest: Manifest) -> Staged:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    known = {layout.MANIFEST, layout.CONFIG, layout.INDEX, *manifest.files, *COMPANIONS}
    for name in names:
        if name not in known:
            raise CheckpointError(
                f"the tokenizer wrote {name}, which no checkpoint carries (code never travels); "
                "publish it by its own push_to_hub, and the model without tokenizer="
            )
    files = {name: folder / name for name in names}
    _check_companions(files)
    return Staged(manifest=manifest, files=files)


def _check_companions(files: dict[str, Path]) -> None:
    """Refuse what must not be published: secrets, and names of code to run."""
    for name in sorted(files.keys() - {layout.INDEX}):
        if layout.is_weights(name):
            continue
        text = files[name].read_bytes()
        if _SECRET.search(text):
            raise CheckpointError(f"{name} holds what looks like a token or a key; remove it")
        if name in COMPANIONS and name.endswith("_config.json"):
            data = strict_json.parse(text, name)
            if isinstance(data, dict) and "auto_map" in data:
                raise CheckpointError(
                    f"{name} names code to run (auto_map), which a checkpoint never does; use a "
                    "tokenizer of a class that transformers has"
                )
