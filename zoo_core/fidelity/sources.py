"""Where samples come from: texts, files, folders, datasets and loaders, read into plain items.

An item is a text, an image (a path, a PIL image or a tensor (C, H, W)) or the mapping of tensors
that a tokenizer makes of one text; each with its label, or None.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from zoo_core.errors import ZooError

IMAGES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
# Read by the `datasets` library: as files, and as what its save_to_disk leaves in a folder.
_FORMATS = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".tsv": "csv",
}
_OPTIONS: dict[str, dict[str, Any]] = {
    ".tsv": {"sep": "\t"},
    ".parquet": {"batch_size": 1000},  # It takes it from the first row group, if there is one.
}
_NO_ROWS = "corresponds to no data"  # Its words for a file of columns without rows.
_LONGEST_NAME = 255
_SAVED = ("dataset_info.json", "dataset_dict.json")
_LABELS = ("labels", "label")
_RAW = ("text", "sentence", "image", "img")
_READY = ("input_ids", "pixel_values")


class Item(NamedTuple):
    """One sample as the user has it, and its label."""

    value: Any
    label: Any = None


class Source(NamedTuple):
    """The items read, and what they are in words, for reports."""

    items: list[Item]
    description: str


def read(
    data: Any,
    *,
    column: str | None = None,
    limit: int,
    seed: int = 0,
    labels: Sequence[Any] | None = None,
) -> Source:
    """At most `limit` items of whatever a user calls data; blank and missing ones are left out.

    data: a text file (one text a line), a folder of images (labelled where all of them lie in two
        or more sub-folders, by these, numbered in order), a DataLoader, a data frame of pandas, or
        an iterable of texts, images, mappings, or (input, label) pairs. With the `datasets`
        library also one of its datasets (one split) or streams, a .csv, .tsv, .json, .jsonl or
        .parquet file, a folder of these, or a name, of which the split called train is read.
    column: which column of a dataset, or key of a mapping, to read; by default input_ids or
        pixel_values, else text, sentence, image or img, whichever is there first.
    labels: kept beside the data, in its order; of a file each line has one, or each that is not
        blank.
    Where the number is known, the items are drawn at random; of a stream they are the first.
    Raises ZooError where nothing is there, or for items or labels that cannot be understood.
    """
    found, description = _open(data, column)
    if labels is not None:
        beside = _of_pandas(labels) if hasattr(labels, "iloc") else list(labels)
        found = _paired(found, beside, column, may_skip=isinstance(data, str | Path))
    items: dict[int, Item] = {}
    blank = missing = 0
    for place, value in _places(found, limit, seed):
        item = _item(value, column)
        if item.value is None:
            missing += 1
        elif _is_blank(item):
            blank += 1
        else:
            items[place] = item
        if len(items) == limit:
            break
    if not items:
        why = f": {blank + missing} are blank or missing" if blank or missing else ""
        raise ZooError(f"there are no samples in {description}{why}")
    if missing:
        description += f" ({missing} without a value left out)"
    return Source([items[place] for place in sorted(items)], description)


def _places(found: Iterable[Any], limit: int, seed: int) -> Iterator[tuple[int, Any]]:
    """What was found, each with its place: in order, or drawn where there is more than `limit`.

    After `limit` draws come the others, drawn too, in the stead of those that are of no use.
    """
    if not isinstance(found, Sequence) or len(found) <= limit:
        yield from enumerate(found)
        return
    generator = random.Random(seed)
    drawn = generator.sample(range(len(found)), limit)
    yield from ((place, found[place]) for place in drawn)
    others = sorted({*range(len(found))}.difference(drawn))
    generator.shuffle(others)
    yield from ((place, found[place]) for place in others)


def _paired(
    found: Iterable[Any], labels: list[Any], column: str | None, *, may_skip: bool
) -> Sequence[Any]:
    """Samples with their labels. may_skip: whether blank samples need not have one.

    Raises ZooError where they do not go together.
    """
    missing = sum(label is None for label in labels)
    if missing:
        raise ZooError(f"{missing} of the {len(labels)} labels are None; leave out these samples")
    if not isinstance(found, Sequence):
        raise ZooError("labels= goes with a list of samples or a file; an iterable may give pairs")
    blank = 0
    if may_skip and len(labels) != len(found):
        filled = [item for item in (_item(one, column) for one in found) if not _is_blank(item)]
        blank = len(found) - len(filled)
        found = filled if len(labels) == len(filled) else found
    if len(labels) != len(found):
        of_which = f", {blank} of them blank" if blank else ""
        raise ZooError(f"there are {len(labels)} labels for {len(found)} samples{of_which}")
    return _Labelled(found, labels, column)


def _is_blank(item: Item) -> bool:
    """Whether `read` leaves an item out, since there is nothing in it."""
    return item.value is None or (isinstance(item.value, str) and not item.value.strip())


def lines(path: Path) -> list[str]:
    """The lines of a text file, without a mark of the byte order that Windows puts first.

    Only ends of lines end them: texts may hold other separators, such as U+2028, which
    `str.splitlines` heeds. Raises ZooError for a file that is not text in UTF-8.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            return [line.removesuffix("\n") for line in file]
    except UnicodeDecodeError as error:
        raise ZooError(f"{path} is not a text file in UTF-8: {error}") from error


def _open(data: Any, column: str | None) -> tuple[Iterable[Any], str]:
    if isinstance(data, str | Path):
        return _named(data, column)
    if isinstance(data, DataLoader):
        return _unbatched(data), "a DataLoader"
    if hasattr(data, "column_names"):
        return _dataset(data, column)
    if hasattr(data, "iloc"):
        return _of_pandas(data), f"a {type(data).__name__} of {len(data)} rows"
    listed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, Mapping) or not (listed or isinstance(data, Iterable)):
        raise ZooError(
            f"{type(data).__name__} is no data to calibrate on; pass texts, a text file, a folder "
            "of images, a dataset or its name, or a DataLoader"
        )
    if listed:
        indexed = _Indexed(data)
        return indexed, f"a list of {len(indexed)}"
    return data, "an iterable"


def _of_pandas(data: Any) -> list[Any]:
    """The rows of a data frame, or the values of a series; what is missing is None."""
    plain = data.astype(object).where(data.notna(), None)
    found: list[Any] = plain.to_dict("records") if data.ndim == 2 else plain.tolist()
    return found


class _Indexed(Sequence[Any]):
    """A sequence in torch's sense, which need not know about slices or its end."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.data[index]


class _Labelled(_Indexed):
    """Samples with labels that the user keeps beside them. column: as in `read`."""

    def __init__(self, data: Sequence[Any], labels: Sequence[Any], column: str | None) -> None:
        super().__init__(data)
        self.labels, self.column = labels, column

    def __getitem__(self, index: Any) -> Item:
        item = _item(super().__getitem__(index), self.column)
        return item._replace(label=self.labels[index])


def _named(data: str | Path, column: str | None) -> tuple[Iterable[Any], str]:
    path = Path(data)
    if len(path.name.encode()) > _LONGEST_NAME:
        raise ZooError(f"{path.name[:40]!r}... is no file; a text by itself goes into a list")
    suffix = path.suffix.lower()
    if path.is_file() and suffix in _FORMATS:
        return _dataset(_from_file(path), column, path.name)
    if path.is_file():
        return lines(path), path.name
    if path.is_dir():
        return _folder(path, column)
    if isinstance(data, Path) or suffix in {".txt", *_FORMATS, *IMAGES}:
        raise ZooError(f"there is no file or folder {path}")
    return _dataset(_loaded(data, "load_dataset", data, split="train"), column, data)


def _from_file(path: Path) -> Any:
    if not path.stat().st_size:
        raise ZooError(f"there are no samples in {path.name}: the file is empty")
    suffix = path.suffix.lower()
    how = {"data_files": str(path), "split": "train", **_OPTIONS.get(suffix, {})}
    return _loaded(path, "load_dataset", _FORMATS[suffix], **how)


def _folder(path: Path, column: str | None) -> tuple[Iterable[Any], str]:
    """A folder of images, or one that holds a dataset."""
    name = f"{path.name}/"
    if any((path / saved).exists() for saved in _SAVED):
        return _dataset(_loaded(path, "load_from_disk", str(path)), column, name)
    images = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES)
    if images:
        return _by_class(path, images), name
    if any(p.suffix.lower() in _FORMATS for p in path.rglob("*")):
        return _dataset(_loaded(path, "load_dataset", str(path), split="train"), column, name)
    raise ZooError(
        f"the folder {path} holds no images ({', '.join(sorted(IMAGES))}) and no dataset "
        f"({', '.join(_FORMATS)})"
    )


def _by_class(folder: Path, images: list[Path]) -> list[Any]:
    """The images, with a label where each lies in a sub-folder: as torchvision's ImageFolder."""
    places = [image.relative_to(folder).parts for image in images]
    classes = sorted({parts[0] for parts in places})
    if len(classes) < 2 or any(len(parts) == 1 for parts in places):
        return images
    labels = {name: number for number, name in enumerate(classes)}
    return [(image, labels[parts[0]]) for image, parts in zip(images, places, strict=True)]


def _loaded(place: str | Path, verb: str, *args: Any, **kwargs: Any) -> Any:
    """What the `datasets` library loads. Raises ZooError without it, and for what it raises."""
    try:
        import datasets
    except ImportError as error:
        what = "is a dataset" if Path(place).exists() else "is neither a file nor a folder"
        raise ZooError(
            f"{str(place)!r} {what}; to load a dataset, pip install 'zoo-core[data]'. "
            "A text by itself goes into a list"
        ) from error
    try:
        return getattr(datasets, verb)(*args, **kwargs)
    except Exception as error:  # Whatever the library, the network or the disk make of a name.
        if _NO_ROWS in str(error):
            raise ZooError(f"there are no samples in {place}: it has no rows") from error
        # The library often only says that it failed, and keeps what failed as the cause.
        cause = error.__cause__ or error
        why = str(cause) or type(cause).__name__
        raise ZooError(f"the dataset {str(place)!r} could not be loaded: {why}") from error


def _dataset(
    dataset: Any, column: str | None, name: str | None = None
) -> tuple[Iterable[Any], str]:
    """The rows of a `datasets` dataset or stream as items. name: what to call it."""
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(repr, dataset))
        raise ZooError(f"the dataset has several splits, pass one of them ({splits})")
    names = dataset.column_names or list(next(iter(dataset), {}))  # A stream may not know them.
    chosen, label = _columns(names, column)
    which = "" if chosen in _READY else f", column {chosen!r}"
    if not hasattr(dataset, "__len__"):
        rows = (_row(row, chosen, label) for row in dataset)
        return rows, f"{name or 'a stream of rows'}{which}"
    known = name or f"a dataset of {len(dataset)} rows"
    return _Rows(dataset, chosen, label), f"{known}{which}"


def _columns(names: Sequence[Any], column: str | None) -> tuple[str, str | None]:
    """Which of the names is that of the inputs, and which that of the labels, if any.

    Raises ZooError where `column` is not among the names; or, without it, no known one is.
    """
    has = f"(has: {', '.join(map(str, names))})"
    if column is not None and column not in names:
        raise ZooError(f"there is no column {column!r} {has}")
    chosen = column or next((name for name in (*_READY, *_RAW) if name in names), None)
    if chosen is None:
        raise ZooError(
            f"which column holds the inputs? None is called {', '.join((*_RAW, *_READY))}: pass "
            f"column= {has}"
        )
    return chosen, next((name for name in _LABELS if name in names and name != chosen), None)


def _row(row: Mapping[str, Any], column: str, label: str | None) -> Item:
    value = row if column in _READY else row[column]
    return Item(value, None if label is None else row[label])


class _Rows(_Indexed):
    """The input, and where there is one the label, of each row of a dataset."""

    def __init__(self, data: Any, column: str, label: str | None) -> None:
        super().__init__(data)
        self.column, self.label = column, label

    def __getitem__(self, index: Any) -> Item:
        return _row(super().__getitem__(index), self.column, self.label)


def _item(value: Any, column: str | None) -> Item:
    if isinstance(value, Item):
        return value
    if isinstance(value, Mapping):
        return _row(value, *_columns(list(value), column))
    if column is not None:
        raise ZooError(
            f"column={column!r} chooses a part of each row; these samples have no columns, they "
            f"are of type {type(value).__name__}"
        )
    if isinstance(value, tuple | list) and len(value) in (1, 2):
        return Item(*value)
    return Item(value)


def _unbatched(loader: Iterable[Any]) -> Iterator[Any]:
    """The single samples of the batches of a loader, without their padding."""
    for batch in loader:
        if isinstance(batch, Mapping):
            yield from _rows(batch)
        elif _is_pair(batch):
            yield from map(Item, batch[0], batch[1])
        elif isinstance(batch, Tensor) or _is_texts(batch):
            yield from batch
        elif isinstance(batch, tuple | list) and len(batch) == 1:
            yield from batch[0]
        else:
            raise ZooError(
                f"a DataLoader gave a batch of type {type(batch).__name__}; it must be a mapping "
                "of tensors, a tensor, a list of texts, or one of these and as many labels"
            )


def _is_pair(batch: Any) -> bool:
    """Whether a batch is a tensor or list of inputs, and as many labels."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        return False
    inputs, labels = batch
    known = isinstance(inputs, Tensor) or _is_texts(inputs)
    return known and _length(inputs) is not None and _length(inputs) == _length(labels)


def _length(values: Any) -> int | None:
    """How many samples a part of a batch is of; None for what is of the whole batch."""
    if isinstance(values, Tensor):
        return len(values) if values.dim() else None
    return len(values) if isinstance(values, tuple | list) else None


def _is_texts(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and all(isinstance(one, str) for one in batch)


def _rows(batch: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    columns = {name: values for name, values in batch.items() if _is_column(values)}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1:
        parts = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise ZooError(
            "a DataLoader gave a mapping of which no part, or not each, is of as many samples "
            f"({parts or 'no tensors or lists'})"
        )
    for index in range(next(iter(lengths.values()))):
        row = {name: values[index] for name, values in columns.items()}
        mask = row.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 1:
            row |= {k: v[mask.bool()] for k, v in row.items() if _is_like(v, mask)}
        yield row


def _is_column(values: Any) -> bool:
    """Whether a part of a batch has a value for each sample.

    torch makes a list of tensors of what was a list in each sample: one for each place in it.
    """
    parts = () if isinstance(values, Tensor) or _length(values) is None else values
    turned = any(isinstance(part, Tensor) and part.dim() for part in parts)
    return _length(values) is not None and not turned


def _is_like(value: Any, mask: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == mask.shape
