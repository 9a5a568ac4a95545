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
from zoo_core.hosts import adapter_of, unwrap

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")
_PROCESSOR_FILE = "preprocessor_config.json"
_MODES = {1: "L", 3: "RGB"}
# What may be white in grey images of more than eight bits, by how Pillow's mode begins.
_WHITES = {"I;16": (65535,), "I": (255, 65535), "F": (1, 255)}


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
    teacher: nn.Module | None = None,
) -> Reading:
    """What the user gave, and for the rest what a SentenceTransformer around a model does.

    teacher: another model that is to see the texts too; a length that is not given fits it.

    Raises ZooError for a SentenceTransformer with another pooling than mean and cls, where the
    user gave none.
    """
    outer = _sentence_transformer(model)
    if outer is not None:
        tokenizer = tokenizer or outer.tokenizer
        pooling = pooling or _pooling(outer)
        if max_length is None and outer.max_seq_length is not None:
            hosts = [one for one in (unwrap(model), teacher) if one is not None]
            max_length = min(outer.max_seq_length, *map(seen_by, hosts))
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


def text_tokenizer(host: nn.Module, given: Any) -> Any:
    """The tokenizer that the user gave, or else the host's own.

    Raises ZooError where there is none, and for one that does not tell how it pads.
    """
    tokenizer = loaded(given) or tokenizer_of(host)
    if not hasattr(tokenizer, "pad_token_id"):
        raise ZooError(
            f"tokenizer={tokenizer!r:.80} has no pad_token_id, so that it is no tokenizer; pass "
            "one of transformers, or where one is"
        )
    return tokenizer


def tokenizer_of(host: nn.Module) -> Any:
    """The tokenizer of the place a model was loaded from. Raises ZooError where none is."""
    place = place_of(host)
    if not place:
        raise ZooError("texts need a tokenizer, and this model names none; pass tokenizer=")
    return _from("AutoTokenizer", place)


def transform(host: Any, processor: Any) -> Callable[[Any], Tensor] | None:
    """What turns a picture into the tensor (C, H, W) a model takes; None where nothing is known."""
    processor = loaded(processor, "AutoImageProcessor")
    channels = channels_of(host)
    if processor is None and is_timm(host):
        return _Opened(_timm_transform(host, channels), channels)
    if processor is None and (place := place_of(host)):
        processor = _from("AutoImageProcessor", place)
    if processor is None:
        return None
    if hasattr(processor, "pad_token_id"):
        raise ZooError(
            f"tokenizer={type(processor).__name__} is a tokenizer; images need an image processor"
        )
    return _Processed(processor, channels)


def _timm_transform(host: Any, channels: int | None) -> Callable[[Any], Tensor]:
    data: Any = import_module("timm.data")
    size = image_size_of(host)
    # The model's config knows the pretrained size only, not the one it was built for.
    config = data.resolve_model_data_config(host, {"input_size": size} if size else {})
    if channels == 1:  # and statistics of three colours
        config |= {name: (sum(config[name]) / len(config[name]),) for name in ("mean", "std")}
    made: Callable[[Any], Tensor] = data.create_transform(**config)
    return made


def channels_of(host: Any) -> int | None:
    """How many channels an image has for a model; None where it does not tell."""
    if not is_timm(host):
        return getattr(getattr(host, "config", None), "num_channels", None)
    projection = getattr(getattr(host, "patch_embed", None), "proj", None)
    return getattr(projection, "in_channels", None)


def image_size_of(host: Any) -> tuple[int, int, int] | None:
    """(C, H, W) of the images that a model is built for; None where it does not tell."""
    channels = channels_of(host)
    if is_timm(host):
        size = getattr(getattr(host, "patch_embed", None), "img_size", None)
    else:
        size = getattr(getattr(host, "config", None), "image_size", None)
    if channels is None or size is None:
        return None
    rows, columns = (size, size) if isinstance(size, int) else size
    return channels, rows, columns


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

    def __init__(self, transform: Callable[[Any], Tensor], channels: int | None) -> None:
        self.transform, self.channels = transform, channels

    def __call__(self, image: Any) -> Tensor:
        return self.transform(_open(image, self.channels))


class _Processed:
    """An image processor of transformers, for a path or a PIL image."""

    def __init__(self, processor: Any, channels: int | None) -> None:
        self.processor, self.channels = processor, channels

    def __call__(self, image: Any) -> Tensor:
        opened = _open(image, self.channels)
        found: Tensor = self.processor(opened, return_tensors="pt")["pixel_values"][0]
        return found


def _open(image: Any, channels: int | None) -> Any:
    """A picture with as many channels of eight bits as a model takes; None: three."""
    from PIL import Image

    mode = _MODES.get(channels or 3)
    if mode is None:
        raise ZooError(f"pictures have 1 or 3 channels, the model takes {channels}; pass tensors")
    try:
        if not isinstance(image, Path):
            return _eight_bits(image).convert(mode)
        with Image.open(image) as opened:
            return _eight_bits(opened).convert(mode)
    except Exception as error:  # Whatever Pillow makes of damaged bytes: a SyntaxError of a PNG's.
        raise ZooError(f"{image} cannot be read as an image: {error}") from error


def _eight_bits(image: Any) -> Any:
    """A grey image of more bits brought to 0..255, which Pillow's own conversion cuts off there.

    Raises ValueError for numbers of which it is not known what white is.
    """
    import numpy
    from PIL import Image

    whites = next((known for mode, known in _WHITES.items() if image.mode.startswith(mode)), None)
    if whites is None:
        return image
    values = numpy.asarray(image)
    low, high = float(values.min()), float(values.max())
    white = next((white for white in whites if low >= 0 and high <= white), None)
    if white is None:
        raise ValueError(
            f"its numbers, of mode {image.mode}, go from {low:g} to {high:g}, and what is white "
            f"among them is not known; bring them to 0..{whites[-1]}"
        )
    return Image.fromarray((values * (255 / white)).round().astype("uint8"))
