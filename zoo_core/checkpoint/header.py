"""The header of a safetensors file, checked before anything it says is believed.

Layout: length of the header (8 bytes, little endian), a JSON object, then the tensors' bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, BinaryIO

from zoo_core.checkpoint import strict_json
from zoo_core.errors import CheckpointError

HEADER_LIMIT = 25_000_000
TENSOR_LIMIT = 100_000
# Bytes per element. Types outside this table (quantised, complex) are refused.
ITEM_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "I16": 2,
    "I32": 4,
    "I64": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
}
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: its type, its shape and the number of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Header:
    """The tensors in the order of their bytes, and the header's own bytes (for the hash)."""

    entries: dict[str, Entry]
    raw: bytes


def read_header(file: BinaryIO, size: int, where: str) -> Header:
    """Read the header of an open file of `size` bytes; leaves it at the first tensor byte.

    Raises CheckpointError naming `where` unless the tensors fill the file exactly, each of a known
    type, without gap or overlap.
    """
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise CheckpointError(f"{where} is not a safetensors file, or is truncated")
    if length > HEADER_LIMIT:
        raise CheckpointError(
            f"{where} has a header of {length} bytes; more than {HEADER_LIMIT} is refused"
        )
    text = file.read(length)
    table = strict_json.parse(text, f"the header of {where}")
    entries = _entries(table, where)
    end = sum(entry.size for entry in entries.values())
    if end != size - 8 - length:
        raise CheckpointError(
            f"{where} is damaged: its header describes {end} bytes of tensors, "
            f"the file holds {size - 8 - length}"
        )
    return Header(entries, start + text)


def _entries(table: Any, where: str) -> dict[str, Entry]:
    if not isinstance(table, dict):
        raise CheckpointError(f"the header of {where} is not a JSON object")
    tensors = {name: value for name, value in table.items() if name != "__metadata__"}
    if len(tensors) > TENSOR_LIMIT:
        raise CheckpointError(f"{where} lists {len(tensors)} tensors; {TENSOR_LIMIT} is the limit")
    placed = [(_entry(name, value, where), name) for name, value in tensors.items()]
    placed.sort(key=lambda item: item[0][:2])
    at = 0
    entries = {}
    for (begin, end, entry), name in placed:
        if begin != at:
            raise CheckpointError(
                f"{where}: tensor {name!r} begins at byte {begin}, must begin at {at}"
            )
        entries[name] = entry
        at = end
    return entries


def _entry(name: str, value: Any, where: str) -> tuple[int, int, Entry]:
    place = f"{where}: tensor {name!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{place} must have a dtype, a shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        known = ", ".join(ITEM_SIZES)
        raise CheckpointError(f"{place} has dtype {dtype!r}; a checkpoint may hold {known}")
    if not _counts(shape) or len(shape) > 32 or math.prod(n or 1 for n in shape) > 2**60:
        raise CheckpointError(f"{place} has shape {str(shape)[:80]}; not a shape of a tensor")
    size = math.prod(shape) * ITEM_SIZES[dtype]
    if not _counts(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise CheckpointError(
            f"{place} has data_offsets {str(offsets)[:80]}, which do not span its {size} bytes"
        )
    return offsets[0], offsets[1], Entry(dtype, tuple(shape), size)


def _counts(value: Any) -> bool:
    """Whether this is a list of whole numbers, none below 0."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
