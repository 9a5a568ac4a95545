"""Samples ready for a model: tokenised texts that are padded by the batch, and prepared images."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from zoo_core.errors import ZooError
from zoo_core.fidelity import fitting, preparing
from zoo_core.fidelity.settings import Schedule
from zoo_core.fidelity.sources import Item, Source, read

_FEWEST_TO_TRAIN = 16
_FEW = 4  # Of fewer samples each may well have a class of its own.
_TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """A set of samples of one kind, which makes batches of any of them.

    inputs: for each sample its tensors (N,) or (C, H, W), or an image still to be prepared.
    labels: one for each sample, or None. hand_labels: whether batches bring them.
    pad: the value that fills up each token input. prepare: image -> (C, H, W).
    """

    inputs: Sequence[Any]
    labels: Sequence[Any] | None
    description: str
    pad: Mapping[str, int] = field(default_factory=dict)
    pad_left: bool = False
    prepare: Callable[[Any], Tensor] | None = None
    hand_labels: bool = False

    def __len__(self) -> int:
        return len(self.inputs)

    def length(self, index: int) -> int:
        """Tokens of a text; 0 for images, which are all alike."""
        one = self.inputs[index]
        return len(one["input_ids"]) if isinstance(one, dict) and "input_ids" in one else 0

    def subset(self, indices: Sequence[int]) -> Samples:
        """Some of the samples, in the given order."""
        labels = None if self.labels is None else [self.labels[i] for i in indices]
        return replace(self, inputs=[self.inputs[i] for i in indices], labels=labels)

    def split(self, held_out: int, seed: int) -> tuple[Samples, Samples]:
        """At most a quarter of the samples, to measure on, and the others, to learn from."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).tolist()
        cut = min(held_out, len(self) // 4)
        return self.subset(order[:cut]), self.subset(order[cut:])

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """One padded batch; its attention_mask says where the padding is."""
        rows = [self._row(self.inputs[index]) for index in indices]
        batch = {name: self._joined(name, [row[name] for row in rows]) for name in rows[0]}
        if self.hand_labels and self.labels is not None:
            batch["labels"] = torch.tensor([self.labels[index] for index in indices])
        return batch

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        if parts[0].dim() != 1:
            _check_alike({tuple(part.shape) for part in parts}, self.description)
            return torch.stack(parts)
        return pad_sequence(
            parts,
            batch_first=True,
            padding_value=self.pad.get(name, 0),
            padding_side="left" if self.pad_left else "right",
        )

    def batches(self, size: int) -> list[list[int]]:
        """All samples in batches of similar length."""
        order = sorted(range(len(self)), key=self.length)
        return [order[start : start + size] for start in range(0, len(order), size)]

    def digest(self) -> str:
        """A hash of what the samples are, to tell one set from another.

        Files count by their content: a copy of a folder, with other paths and times, is the same
        data, and whoever trains on a file reads it anyway.
        """
        found = hashlib.sha256()
        # How images are prepared shows in the first of them.
        for one in (*self.inputs, self._row(self.inputs[0])):
            for name, value in (one if isinstance(one, dict) else {"image": one}).items():
                found.update(name.encode())
                found.update(_bytes(value))
        if self.hand_labels:
            found.update(repr(self.labels).encode())
        return found.hexdigest()

    def _row(self, one: Any) -> dict[str, Tensor]:
        if isinstance(one, dict):
            return one
        if self.prepare is None:
            raise ZooError("these images need preparing; pass an image processor as tokenizer=")
        return {"pixel_values": self.prepare(one)}


def _bytes(value: Any) -> bytes:
    """Content and size; without the size [ab, c] and [a, bc] would be the same data."""
    if isinstance(value, Path):
        content = value.read_bytes()
        return f"{len(content)} ".encode() + content
    if isinstance(value, Tensor):
        flat: Any = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {tuple(value.shape)} ".encode() + bytes(flat.tobytes())
    return f"{value.mode} {value.size} ".encode() + bytes(value.tobytes())  # a PIL image


def encode(
    source: Source,
    host: nn.Module,
    *,
    teacher: nn.Module | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    packed: bool = False,
    minimum: int,
) -> Samples:
    """Turn items into samples for a host model.

    teacher: another model that is to see them too.
    tokenizer: for texts a tokenizer, for images an image processor, or the directory or repository
        that has it; by default that of the one the model was loaded from, and for timm the model's
        own transform.
    max_length: longest text in tokens; by default, and at most, what host and teacher can see.
    packed: join texts, and cut them into rows of that length, which need no padding; labels are
        lost. A row's tokens see all texts in it.
    Raises ZooError for fewer than `minimum` samples, or items that do not fit the models.
    """
    models = [host] if teacher is None or teacher is host else [host, teacher]
    kind = _kind_of_all(source, minimum)
    fitting.check_kind(kind, models, source.description)
    values = [item.value for item in source.items]
    labels, note = _labels(source.items)
    known: dict[str, Any] = {"labels": labels, "description": source.description + note}
    if kind == "images":
        if packed or max_length is not None:
            given = "packed=" if packed else f"max_length={max_length}"
            raise ZooError(f"images are all of one size: {given} is for texts")
        return _images(values, host, tokenizer, **known)
    longest = fitting.longest(models, max_length)
    cut = None if packed else longest
    if kind == "texts":
        samples = _texts(values, preparing.text_tokenizer(host, tokenizer), cut, **known)
    else:
        samples = _token_rows(values, host, cut, **known)
    _check_filled(samples.inputs, samples.description)
    fitting.check_ids(samples.inputs, models, samples.description)
    if packed:
        return _packed(samples, longest, source.description, minimum)
    if longest < preparing.seen_by(host) and longest == preparing.seen_by(models[-1]):
        return _said_if_cut(samples, longest)
    return samples


def to_train_on(
    data: Any, host: nn.Module, schedule: Schedule, *, column: str | None, **how: Any
) -> Samples:
    """As many samples of `data` as the steps can see. how: as in `encode`."""
    limit = schedule.steps * schedule.samples_per_step + schedule.held_out
    limit = max(limit, _FEWEST_TO_TRAIN)
    source = read(data, column=column, limit=limit, seed=schedule.seed)
    return encode(source, host, minimum=_FEWEST_TO_TRAIN, **how)


def _kind_of_all(source: Source, minimum: int) -> str:
    """What all items are: texts, tokens or images. Raises ZooError for too few, and mixtures."""
    kinds = {_kind(item, source.description) for item in source.items}
    count = len(source.items)
    if count < minimum:
        raise ZooError(
            f"{source.description}: {count} samples are too few, at least {minimum} are needed"
        )
    if len(kinds) > 1:
        raise ZooError(f"{source.description} mixes {' and '.join(sorted(kinds))}")
    return kinds.pop()


def _images(
    values: Sequence[Any], host: nn.Module, processor: Any, *, description: str, labels: Any
) -> Samples:
    inputs = [_ready(value) for value in values]
    _check_pixels(inputs, preparing.channels_of(host), description)
    prepare = preparing.transform(host, processor)
    return Samples(inputs=inputs, labels=labels, description=description, prepare=prepare)


def _texts(
    values: list[str], tokenizer: Any, longest: int | None, *, description: str, labels: Any
) -> Samples:
    """Tokenised texts, cut where they are longer than `longest`; None: uncut."""
    _check_classes(labels, description)
    special = getattr(tokenizer, "num_special_tokens_to_add", lambda: 0)()
    if longest is not None and longest <= special:
        raise ZooError(
            f"max_length={longest} leaves no room for texts, since the tokenizer adds {special} "
            f"tokens of its own; pass {special + 1} or more"
        )
    return Samples(
        inputs=_tokenise(tokenizer, values, longest),
        labels=labels,
        description=description,
        pad={"input_ids": tokenizer.pad_token_id or 0},
        pad_left=getattr(tokenizer, "padding_side", "right") == "left",
    )


def _token_rows(
    values: Sequence[Any], host: nn.Module, longest: int | None, *, description: str, labels: Any
) -> Samples:
    """Texts that are tokenised already."""
    pad = getattr(getattr(host, "config", None), "pad_token_id", None) or 0
    return Samples(
        inputs=[_tokens(value, longest, description) for value in values],
        labels=labels,
        description=description,
        pad={"input_ids": pad},
    )


def _said_if_cut(samples: Samples, longest: int) -> Samples:
    """The samples, which say so where texts may have lost what only the model can see."""
    if all(samples.length(index) < longest for index in range(len(samples))):
        return samples
    told = f"{samples.description}, cut to the {longest} tokens that the teacher sees"
    return replace(samples, description=told)


def _check_filled(inputs: Sequence[Mapping[str, Tensor]], description: str) -> None:
    empty = sum(not len(one["input_ids"]) for one in inputs)
    if empty:
        raise ZooError(f"{description}: {empty} of {len(inputs)} samples have no tokens")
    names = Counter(name for one in inputs for name in one)
    for name, count in names.items():
        if count < len(inputs):
            raise ZooError(
                f"{description}: only {count} of {len(inputs)} samples have {name}; give it to all "
                "of them or to none"
            )


def _check_classes(labels: Sequence[Any] | None, description: str) -> None:
    """Raise ZooError for pairs of texts, the second of which would be taken for a label."""
    texts = [label for label in labels or () if isinstance(label, str)]
    differ = len(texts) >= _FEW and len(set(texts)) == len(labels or ())
    if differ and any(" " in text for text in texts):
        raise ZooError(
            f"{description}: each of the {len(texts)} samples has another label, such as "
            f"{texts[0][:40]!r}. Pairs of texts are not read: pass single texts, which may hold "
            "both of a pair"
        )


def _check_pixels(inputs: Sequence[Any], channels: int | None, description: str) -> None:
    """Raise ZooError for tensors that are no images, or not of one size."""
    pixels = [one["pixel_values"] for one in inputs if isinstance(one, dict)]
    wanted = f"({channels or 'C'}, H, W)"
    for one in pixels:
        fits = one.dim() == 3 and channels in (None, len(one))
        if not (fits and one.is_floating_point()):
            raise ZooError(
                f"{description}: an image is a tensor {tuple(one.shape)} of {one.dtype}; the model "
                f"takes {wanted} in floating point"
            )
    _check_alike({tuple(one.shape) for one in pixels}, description)


def _check_alike(shapes: set[tuple[int, ...]], description: str) -> None:
    if len(shapes) > 1:
        told = ", ".join(map(str, sorted(shapes)[:3]))
        raise ZooError(
            f"{description}: images are of {len(shapes)} sizes ({told}); bring them to the one "
            "that the model takes"
        )


def _packed(samples: Samples, length: int, description: str, minimum: int) -> Samples:
    """All tokens in one line, cut into rows of `length`; what is left over is dropped."""
    names = [name for name in samples.inputs[0] if name != "position_ids"]
    line = {name: torch.cat([one[name] for one in samples.inputs]) for name in names}
    rows = len(line["input_ids"]) // length
    if rows < minimum:
        raise ZooError(
            f"{description}: packed into {length} tokens these are {rows} samples, too few; at "
            f"least {minimum} are needed"
        )
    cut = {name: whole[: rows * length].view(rows, length) for name, whole in line.items()}
    inputs = [{name: cut[name][row] for name in names} for row in range(rows)]
    return replace(samples, inputs=inputs, labels=None, description=f"{description}, packed")


def _kind(item: Item, description: str) -> str:
    value = item.value
    if isinstance(value, str):
        return "texts"
    if isinstance(value, Mapping) and "input_ids" in value:
        return "tokens"
    if isinstance(value, Mapping) and "pixel_values" in value:
        return "images"
    if isinstance(value, Path | Tensor) or hasattr(value, "convert"):
        return "images"
    raise ZooError(
        f"{description}: a sample of type {type(value).__name__} is neither a text, an image nor "
        "tokens"
    )


def _labels(items: Sequence[Item]) -> tuple[list[Any] | None, str]:
    """A label for each item or None; and what to say of labels that only some of them have."""
    labels = [_plain(item.label) for item in items]
    missing = sum(label is None for label in labels)
    if not missing:
        return labels, ""
    told = f" ({missing} of {len(labels)} without a label, so that none is used)"
    return None, told if missing < len(labels) else ""


def _plain(label: Any) -> Any:
    """A label of a whole sample as plain data; None for others, such as those of each token."""
    if isinstance(label, Tensor):
        return label.item() if label.numel() == 1 else None
    return None if isinstance(label, list | tuple | Mapping) else label


def _tokenise(tokenizer: Any, texts: list[str], longest: int | None) -> list[dict[str, Tensor]]:
    """All texts in one call, which fast tokenizers spread over the processors; None: uncut."""
    encoded = tokenizer(texts, truncation=longest is not None, max_length=longest)
    names = [name for name in encoded if len(encoded[name]) == len(texts)]
    columns = [_tensors(encoded[name]) for name in names]
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return [_masked(row) for row in rows]


def _tensors(rows: Sequence[Sequence[int]]) -> Sequence[Tensor]:
    """One tensor for each row, all cut out of a single one: to make each takes eight times as long.

    That would be a third of the time of tokenising short texts, and it is not spread.
    """
    lengths = [len(row) for row in rows]
    return torch.split(torch.tensor(list(chain.from_iterable(rows)), dtype=torch.long), lengths)


def _tokens(value: Mapping[str, Any], longest: int | None, description: str) -> dict[str, Tensor]:
    given = {name: one for name, one in value.items() if name in _TOKEN_INPUTS}
    try:
        whole = {name: torch.as_tensor(one) for name, one in given.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ZooError(f"{description}: tokens of a sample are no numbers: {error}") from error
    ids = whole["input_ids"]
    if ids.dim() != 1 or (len(ids) and (ids.is_floating_point() or ids.is_complex())):
        raise ZooError(
            f"{description}: input_ids of a sample are a tensor {tuple(ids.shape)} of {ids.dtype}; "
            "they must be whole numbers in a single row, (N,)"
        )
    for name, one in whole.items():
        if one.shape != ids.shape:
            raise ZooError(
                f"{description}: {name} of a sample is {tuple(one.shape)}, input_ids are "
                f"{tuple(ids.shape)}"
            )
    return _masked({name: one[:longest] for name, one in whole.items()})


def _masked(row: dict[str, Tensor]) -> dict[str, Tensor]:
    """A row with an attention_mask, without which padded batches would run unmasked."""
    row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
    return row


def _ready(value: Any) -> Any:
    """An image that is a tensor needs no more preparing."""
    if isinstance(value, Mapping):
        return {"pixel_values": torch.as_tensor(value["pixel_values"])}
    return {"pixel_values": value} if isinstance(value, Tensor) else value
