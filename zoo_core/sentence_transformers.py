"""A SentenceTransformer whose attention is patched, saved and loaded as a SentenceTransformer.

    model = SentenceTransformer("...")
    zoo.patch(model, "nystromformer")
    zoo.sentence_transformers.save(model, "here")
    model = zoo.sentence_transformers.load("here")

A SentenceTransformer builds its first module through AutoModel, which knows nothing of patches and
refuses a patched checkpoint. So `modules.json` names `ZooTransformer` for that module instead.
sentence-transformers takes a class that is not its own only with `trust_remote_code=True`;
SentenceTransformer("here", trust_remote_code=True) works too, wherever zoo-core is installed. There
is no code in the directory; `load` needs no such trust, and takes classes of nobody else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer

from zoo_core.checkpoint import host_config, layout
from zoo_core.checkpoint import load as load_model
from zoo_core.checkpoint import save as save_model
from zoo_core.checkpoint.atomic import check_target
from zoo_core.checkpoint.card import card
from zoo_core.checkpoint.manifest import Manifest, read_manifest
from zoo_core.errors import CheckpointError, PatchError
from zoo_core.hosts import unwrap
from zoo_core.patching import attention_block

_MODULES = "modules.json"
_CONFIG = "config_sentence_transformers.json"
# Of the config of a SentenceTransformer, what its constructor takes.
_KEPT = ("prompts", "default_prompt_name", "similarity_fn_name")


class ZooTransformer(Transformer):
    """sentence-transformers' Transformer, around a patched model that `zoo.load` brings back."""

    def _load_model(self, model_name_or_path: str, *args: Any, **kwargs: Any) -> Any:
        """Raises CheckpointError for a directory that is not there or whose model is not patched.

        Arguments for AutoModel, which does not run, are of no consequence.
        """
        directory = Path(model_name_or_path)
        if not directory.is_dir():
            raise CheckpointError(
                f"{model_name_or_path} is no directory; download it first, for instance with "
                "huggingface_hub.snapshot_download"
            )
        _check_patched(directory)
        return load_model(directory)


def save(model: SentenceTransformer, directory: str | Path) -> None:
    """Write a SentenceTransformer whose first module is patched: its own `save`, and `zoo.save`.

    The manifest knows of a calibration, and the card tells of it. Raises PatchError for a model
    that is not patched: its own `save` is all that it needs.
    """
    if not attention_block(model):
        raise PatchError("this SentenceTransformer has its stock attention; use its own save")
    check_target(Path(directory))
    with _named_ours(model):
        model.save(str(directory), create_model_card=False)
    readme = Path(directory) / layout.CARD
    if readme.exists() and _is_card(readme, _card):
        readme.unlink()  # ours, and of the model that was there before
    save_model(unwrap(model), directory)
    if _is_card(readme, card):
        readme.write_text(_card(read_manifest(directory)), encoding="utf-8")


def _card(manifest: Manifest) -> str:
    """The card of a model, which names the load of this module."""
    return card(manifest).replace("zoo.load(", "zoo.sentence_transformers.load(")


def _is_card(readme: Path, made: Callable[[Manifest], str]) -> bool:
    """Whether nobody changed a card since it was made for the manifest beside it."""
    try:
        return readme.read_text(encoding="utf-8") == made(read_manifest(readme.parent))
    except (CheckpointError, UnicodeDecodeError):
        return False


def load(directory: str | Path, **kwargs: Any) -> SentenceTransformer:
    """The SentenceTransformer of a directory that `save`, or its own `save`, wrote.

    kwargs: for SentenceTransformer, such as device, prompts or truncate_dim.
    Raises CheckpointError for a directory that is not one, and for modules of others' classes.
    """
    folder = Path(directory)
    _check_patched(folder)
    entries = _entries(folder)
    kinds = [_kind(entry["type"], folder, first=not n) for n, entry in enumerate(entries)]
    modules = {
        entry["name"]: kind.load(str(folder), subfolder=entry["path"], local_files_only=True)
        for entry, kind in zip(entries, kinds, strict=True)
    }
    stored = _json(folder / _CONFIG) if (folder / _CONFIG).exists() else {}
    known = {name: stored[name] for name in _KEPT if stored.get(name) is not None}
    model = SentenceTransformer(modules=list(modules.values()), **{**known, **kwargs})
    model.module_kwargs = {e["name"]: e["kwargs"] for e in entries if e.get("kwargs")}
    return model


def _entries(folder: Path) -> list[dict[str, Any]]:
    """What modules.json lists: name, type, and a path inside the folder, of each module."""
    entries: Any = _json(folder / _MODULES)
    listed = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not listed or any(not {"name", "path", "type"} <= entry.keys() for entry in entries):
        raise CheckpointError(f"{folder / _MODULES} must list a name, path and type of each module")
    for entry in entries:
        if not (folder / entry["path"]).resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{folder / _MODULES} names {entry['path']}, outside the folder")
    return list(entries)


def _kind(reference: str, folder: Path, *, first: bool) -> Any:
    """The class of a module by its dotted name; ours, or one of sentence-transformers."""
    place, _, name = reference.rpartition(".")
    if place == __name__ or (first and name == Transformer.__name__):
        return ZooTransformer
    if place.partition(".")[0] == "sentence_transformers":
        return getattr(import_module(place), name)
    raise CheckpointError(f"{folder / _MODULES} names {reference}, which is not loaded")


def _check_patched(folder: Path) -> None:
    if "zoo" not in host_config.read(folder):
        raise CheckpointError(f"{folder} holds no patched model; load it with SentenceTransformer")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


@contextmanager
def _named_ours(model: SentenceTransformer) -> Iterator[None]:
    """For a while the first module is a ZooTransformer, whose name is then written down."""
    first = model[0]
    if type(first) not in (Transformer, ZooTransformer):
        raise PatchError(f"the first module is a {type(first).__name__}, not a Transformer")
    before = type(first)
    first.__class__ = ZooTransformer
    try:
        yield
    finally:
        first.__class__ = before
