"""The SHA-256 of a file, by which a checkpoint says what its bytes are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

# Whoever needs the hash of a file again for a purpose of their own passes one that remembers.
Digest = Callable[[Path], str]


def sha256_of(path: Path) -> str:
    """The hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
