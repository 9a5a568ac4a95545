"""What prepares raw texts and pictures for a host: its library's own tokenizer or transform."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from zoo_core.errors import ZooError
from zoo_core.fidelity.observing import POOLINGS, is_timm
from zoo_core.patching import adapter_of, unwrap

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")
_PROCESSOR_FILE = "preprocessor_config.json"


class Reading(NamedTuple):
    """How texts are read, and what of them is the embedding; tokenizer: None where not known."""

    tokenizer: Any
    max_length: int | None
    pooling: str


def reading_of(
    model: Any,
    *,
    tokenizer: Any = None,
    max_length: int | None = None,
    pooling: str | None = None,
) -> Reading:
    """What the user gave, and for the rest what a SentenceTransformer around a model does.

    Raises ZooError for a SentenceTransformer with another pooling than mean and cls, where the
    user gave none.
    """
    outer = _sentence_transformer(model)
    if outer is not None:
        tokenizer = tokenizer or outer.tokenizer
        pooling = pooling or _pooling(outer)
        if max_length is None and outer.max_seq_length is not None:
            max_length = min(outer.max_seq_length, seen_by(unwrap(model)))
    return Reading(tokenizer, max_length, pooling or "mean")


def _sentence_transformer(model: Any) -> Any:
    """The SentenceTransformer that a model is, or that is wrapped in it; None where there is none.

    There is one only if its library is loaded: it is not imported to ask.
    """
    library: Any = sys.modules.get("sentence_transformers")
    if library is None or not isinstance(model, nn.Module):
        return None
    kind = library.SentenceTransformer
    return next((module for module in model.modules() if isinstance(module, kind)), None)


def _pooling(outer: Any) -> str | None:
    mode = next((one.pooling_mode for one in outer if hasattr(one, "pooling_mode")), None)
    if mode not in (None, *POOLINGS):
        raise ZooError(
            f"this SentenceTransformer's pooling is {mode!r}, which is not known here; pass "
            "pooling='mean' or 'cls'"
        )
    return mode


def seen_by(host: nn.Module) -> int:
    """The most tokens that a model can see."""
    _, adapter = adapter_of(host)
    return min(site.max_len for site in adapter.sites(host))


def loaded(given: Any, kind: str = "AutoTokenizer") -> Any:
    """What the user gave as tokenizer=; read from its place where that is a text or a path.

    kind: the class of transformers that reads it. Raises ZooError for what cannot be one.
    """
    if isinstance(given, str | Path):
        return _from(kind, given)
    if given is not None and not callable(given):
        raise ZooError(
            f"tokenizer={given!r} is neither a tokenizer nor an image processor, nor where one is"
        )
    return given


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
    processor = loaded(processor, "AutoImageProcessor")
    if processor is None and is_timm(host):
        data: Any = import_module("timm.data")
        size = getattr(getattr(host, "patch_embed", None), "img_size", None)
        # The model's config knows the pretrained size only, not the one it was built for.
        asked = {"input_size": (host.patch_embed.proj.in_channels, *size)} if size else {}
        return _Opened(data.create_transform(**data.resolve_model_data_config(host, asked)))
    if processor is None and (place := place_of(host)):
        processor = _from("AutoImageProcessor", place)
    return None if processor is None else _Processed(processor)


def channels_of(host: Any) -> int | None:
    """How many channels an image has for a model; None where it does not tell."""
    if not is_timm(host):
        return getattr(host.config, "num_channels", None)
    projection = getattr(getattr(host, "patch_embed", None), "proj", None)
    return getattr(projection, "in_channels", None)


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

    try:
        if not isinstance(image, Path):
            return image.convert("RGB")
        with Image.open(image) as opened:
            return opened.convert("RGB")
    except Exception as error:  # Whatever Pillow makes of damaged bytes: a SyntaxError of a PNG's.
        raise ZooError(f"{image} cannot be read as an image: {error}") from error
