"""What a push sends. Each file is read once to be hashed, by the operation that will send it.

That one hash is then compared with the manifest, with what the Hub has before, and with what it has
afterwards; hashing a large checkpoint takes a good part of the time of a push.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd

from zoo_core.hub.listing import Listing


class Operations:
    """The client's operations on local files, one for each path."""

    def __init__(self) -> None:
        self._made: dict[Path, CommitOperationAdd] = {}
        self._stamps: dict[Path, tuple[int, ...]] = {}

    def sha256(self, path: Path) -> str:
        """The hex SHA-256 of a file; a `Digest` that remembers."""
        return self.adding(path).upload_info.sha256.hex()

    def adding(self, path: Path) -> CommitOperationAdd:
        """The operation that adds a file to a repository under its own name."""
        if path not in self._made:
            self._stamps[path] = _stamp(path)
            self._made[path] = CommitOperationAdd(path.name, str(path.absolute()))
        return self._made[path]

    def changed(self, path: Path) -> bool:
        """Whether a file was written to, replaced or removed since its operation was made."""
        stamp = self._stamps.get(path)
        return stamp is not None and (not path.exists() or _stamp(path) != stamp)


@dataclass(frozen=True)
class Sent:
    """The local files of a push by name, and the operations on them."""

    files: Mapping[str, Path]
    operations: Operations

    def additions(self, names: Iterable[str]) -> list[CommitOperationAdd]:
        """The operations of some of the files."""
        return [self.operations.adding(self.files[name]) for name in names]

    def missing_in(self, listing: Listing) -> list[str]:
        """The files that a commit does not hold, byte by byte."""
        return [
            name
            for name, path in self.files.items()
            if name not in listing or not listing[name].is_at(path, self.operations.sha256)
        ]

    def changed(self) -> list[str]:
        """The files that were written to since they were hashed: sent may be either content."""
        return [name for name, path in self.files.items() if self.operations.changed(path)]


def _stamp(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns
