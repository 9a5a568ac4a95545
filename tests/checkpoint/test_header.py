"""The safetensors header: what the format allows and a checkpoint may hold, nothing else."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from zoo_core.checkpoint.header import HEADER_LIMIT, TENSOR_LIMIT, Entry, read_header
from zoo_core.errors import CheckpointError


def file_of(table: Any, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


def read(content: bytes) -> Any:
    return read_header(io.BytesIO(content), len(content), "weights")


def tensor(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(3, 5),
        "scalar": torch.tensor(2, dtype=torch.int64),
        "empty": torch.empty(0, 7),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flag": torch.tensor([True, False]),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    with path.open("rb") as file:
        header = read_header(file, path.stat().st_size, "x")
        start = file.tell()
    assert header.raw == path.read_bytes()[:start]
    assert header.entries == {
        "matrix": Entry("F32", (3, 5), 60),
        "scalar": Entry("I64", (), 8),
        "empty": Entry("F32", (0, 7), 0),
        "half": Entry("BF16", (3,), 6),
        "flag": Entry("BOOL", (2,), 2),
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated"),
        (b"\x10\0\0", "truncated"),
        (file_of({})[:-1], "truncated"),
        ((2**62).to_bytes(8, "little") + b"{}", "truncated"),
        (b"\x80\x04}\x94.", "truncated"),
        (file_of([]), "not a JSON object"),
        (file_of(b'{"a": 1, "a": 1}'), "stands twice"),
        (file_of({"a": 3}), "must have a dtype"),
        (file_of({"a": {**tensor(), "x": 1}}, b"0" * 8), "must have a dtype"),
        (file_of({"a": tensor("C64", (1,))}, b"0" * 8), "dtype 'C64'"),
        (file_of({"a": tensor(["F32"])}, b"0" * 8), "dtype"),
        (file_of({"a": tensor(shape=(-1, -2))}, b"0" * 8), "shape"),
        (file_of({"a": tensor(shape=(True, 2))}, b"0" * 8), "shape"),
        (file_of({"a": tensor(shape=(2.0,))}, b"0" * 8), "shape"),
        (file_of({"a": tensor(shape=(2**40, 2**40, 0), offsets=(0, 0))}), "shape"),
        (file_of({"a": tensor(offsets=(0, 9))}, b"0" * 9), "do not span"),
        (file_of({"a": tensor(offsets=(8, 0))}, b"0" * 8), "do not span"),
        (file_of({"a": tensor(offsets=(-8, 0))}, b"0" * 8), "do not span"),
        (file_of({"a": tensor()}, b"0" * 9), "describes 8 bytes of tensors, the file holds 9"),
        (file_of({"a": tensor()}, b"0" * 7), "describes 8 bytes of tensors, the file holds 7"),
        (file_of({"a": tensor(), "b": tensor()}, b"0" * 16), "begins at byte 0, must begin at 8"),
        (file_of({"a": tensor(), "b": tensor(offsets=(4, 12))}, b"0" * 12), "must begin at 8"),
        (file_of({"a": tensor(), "b": tensor(offsets=(12, 20))}, b"0" * 20), "must begin at 8"),
    ],
    ids=[
        "empty", "short", "cut", "long", "pickle", "list", "twice", "no-object", "extra-key",
        "complex", "odd-dtype", "negative", "boolean", "fraction", "overflow", "span", "reversed",
        "before", "trailing", "missing", "same-bytes", "overlap", "hole",
    ],
)  # fmt: skip
def test_a_damaged_header_is_refused(
    content: bytes, says: str, request: pytest.FixtureRequest, fault: Callable[..., None]
) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        read(content)
    fault("header", f"CheckpointError: {caught.value}", request.node.callspec.id)


def test_a_huge_header_is_refused_before_it_is_read() -> None:
    content = io.BytesIO((HEADER_LIMIT + 1).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="has a header of 25000001 bytes"):
        read_header(content, HEADER_LIMIT + 9, "weights")


def test_a_swarm_of_empty_tensors_is_refused() -> None:
    table = {str(n): tensor(shape=(0,), offsets=(0, 0)) for n in range(TENSOR_LIMIT + 1)}
    with pytest.raises(CheckpointError, match=f"lists {TENSOR_LIMIT + 1} tensors"):
        read(file_of(table))
