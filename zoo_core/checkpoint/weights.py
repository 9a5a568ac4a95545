"""Read weight files: each is opened once, so that what is checked is what ends up in the model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from zoo_core.checkpoint.header import Entry, read_header
from zoo_core.checkpoint.manifest import FileRecord
from zoo_core.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WeightFile:
    """One open safetensors file whose size and header are checked.

    record: what the manifest says of it; None where no manifest does.
    """

    def __init__(self, path: Path, record: FileRecord | None) -> None:
        self.path = path
        self.record = record
        self.file = path.open("rb", buffering=0)
        try:
            size = os.fstat(self.file.fileno()).st_size
            if record is not None and size != record.size:
                raise CheckpointError(
                    f"{path} has {size} bytes, its manifest says {record.size}: it is truncated "
                    "or was overwritten; fetch or save it again"
                )
            self.header = read_header(self.file, size, str(path))
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def read(self) -> dict[str, Tensor]:
        """Read all tensors into memory of their own, once.

        Raises CheckpointError if the bytes are not those of the manifest or a value is not finite.
        """
        tensors, problems = {}, []
        digest = hashlib.sha256(self.header.raw)
        # Hashing takes longer than all else; beside it the rest costs almost nothing.
        with ThreadPoolExecutor(max_workers=1) as hasher:
            pending = []
            for name, entry in self.header.entries.items():
                tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
                raw = _bytes_of(tensor)
                self._fill(raw)
                if self.record is not None:
                    pending.append(hasher.submit(digest.update, raw))
                if problem := unusable(tensor):
                    problems.append(f"{self.path}: tensor {name!r} {problem}")
                tensors[name] = tensor
            for update in pending:
                update.result()
        self._compare(digest)
        if problems:
            raise CheckpointError(problems[0])
        return tensors

    def check_digest(self) -> None:
        """Raise CheckpointError if the bytes are not those of the manifest; without one, pass."""
        if self.record is not None:
            self.file.seek(0)
            self._compare(hashlib.file_digest(self.file, "sha256"))

    def _compare(self, digest: hashlib._Hash) -> None:
        if self.record is not None and digest.hexdigest() != self.record.sha256:
            raise CheckpointError(
                f"{self.path} does not have the SHA-256 of its manifest: it is damaged, was "
                "tampered with, or was overwritten; fetch or save it again"
            )

    def _fill(self, raw: memoryview) -> None:
        while raw.nbytes:
            count = self.file.readinto(raw)
            if not count:
                raise CheckpointError(f"{self.path} was truncated while it was read")
            raw = raw[count:]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def unusable(tensor: Tensor) -> str | None:
    """Why the values of a tensor cannot be a checkpoint's, in words; None if they can."""
    if tensor.numel() == 0:
        return None
    if tensor.is_floating_point():
        # One pass without a temporary; NaN is neither less nor greater and comes through.
        least, most = tensor.aminmax()
        if not (least.isfinite() and most.isfinite()):
            return "holds NaN or infinity"
    if tensor.dtype == torch.bool and tensor.view(torch.uint8).max() > 1:
        return "holds bytes that are no booleans"
    return None


def open_all(files: Iterable[tuple[Path, FileRecord | None]], stack: ExitStack) -> list[WeightFile]:
    """Open files, to be closed with the stack. Raises CheckpointError if two hold one tensor."""
    opened = [stack.enter_context(WeightFile(path, record)) for path, record in files]
    home: dict[str, Path] = {}
    for file in opened:
        for name in file.header.entries:
            if name in home:
                raise CheckpointError(f"{file.path} and {home[name]} both hold tensor {name!r}")
            home[name] = file.path
    return opened


def entries_of(files: Iterable[WeightFile]) -> dict[str, Entry]:
    """All tensors of open files, by name."""
    return {name: entry for file in files for name, entry in file.header.entries.items()}
