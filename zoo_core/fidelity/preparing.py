"""What prepares raw texts and pictures for a host: its library's own tokenizer or transform."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zoo_core.errors import ZooError
from zoo_core.fidelity.observing import is_timm

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")
_PROCESSOR_FILE = "preprocessor_config.json"


def from_directory(directory: Path) -> Any:
    """The tokenizer or image processor that lies in a directory; None where there is none."""
    if any((directory / name).exists() for name in _TOKENIZER_FILES):
        return _from("AutoTokenizer", directory)
    if (directory / _PROCESSOR_FILE).exists():
        return _from("AutoImageProcessor", directory)
    return None


def tokenizer_of(host: nn.Module) -> Any:
    """The tokenizer of the place a model was loaded from. Raises ZooError where none is."""
    place = place_of(host)
    if not place:
        raise ZooError("texts need a tokenizer, and this model names none; pass tokenizer=")
    return _from("AutoTokenizer", place)


def transform(host: Any, processor: Any) -> Callable[[Any], Tensor] | None:
    """What turns a picture into the tensor (C, H, W) a model takes; None where nothing is known."""
    if processor is None and is_timm(host):
        data: Any = import_module("timm.data")
        size = getattr(getattr(host, "patch_embed", None), "img_size", None)
        # The model's config knows the pretrained size only, not the one it was built for.
        asked = {"input_size": (host.patch_embed.proj.in_channels, *size)} if size else {}
        return _Opened(data.create_transform(**data.resolve_model_data_config(host, asked)))
    if processor is None and (place := place_of(host)):
        processor = _from("AutoImageProcessor", place)
    return None if processor is None else _Processed(processor)


def place_of(host: nn.Module) -> str:
    """The directory or repository that a model was loaded from, or nothing."""
    pulled: Any = getattr(host, "zoo_source", None)
    if pulled is not None:  # its tokenizer came along, into the cache
        cache: Any = import_module("zoo_core.hub.client").Client(endpoint=None, token=None)
        return str(cache.folder(pulled.repo) / "snapshots" / pulled.commit)
    loaded = getattr(host, "zoo_loaded", None)
    config = getattr(host, "config", None)
    return getattr(loaded, "source", "") or getattr(config, "name_or_path", "") or ""


def _from(kind: str, place: str | Path) -> Any:
    name, revision = str(place), None
    if not Path(place).is_dir():
        name, _, revision = name.partition("@")
    how = {"revision": revision or "main", "trust_remote_code": False}
    try:
        return getattr(import_module("transformers"), kind).from_pretrained(name, **how)
    except Exception as error:  # Whatever transformers makes of a place that has none.
        raise ZooError(f"{place} has no {kind[4:].lower()}; pass tokenizer= ({error})") from error


class _Opened:
    """A transform of torchvision's kind, for a path or a PIL image."""

    def __init__(self, transform: Callable[[Any], Tensor]) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> Tensor:
        return self.transform(_open(image))


class _Processed:
    """An image processor of transformers, for a path or a PIL image."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, image: Any) -> Tensor:
        found: Tensor = self.processor(_open(image), return_tensors="pt")["pixel_values"][0]
        return found


def _open(image: Any) -> Any:
    from PIL import Image

    if not isinstance(image, Path):
        return image.convert("RGB")
    try:
        with Image.open(image) as opened:
            return opened.convert("RGB")
    except OSError as error:
        raise ZooError(f"{image} cannot be read as an image: {error}") from error
