"""The directory behind a Hub: content-addressed blobs and one JSON file per repository.

    hub.json                      who may sign in, with their tokens (mode 0600)
    blobs/ab/abcd...              bytes by sha256, never changed
    repos/models/owner/name.json  refs, commits and file lists, replaced as a whole
    xet/                          chunks uploaded by hf-xet, see `cas`
    incoming/                     unfinished uploads, emptied at the start

A file appears under its final name only when it is complete, so a killed process leaves a directory
that the next one can serve.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

from zoo_core.errors import ZooError
from zoo_core.testing.hub.repository import File, Repository, from_json, git_id, pointer, to_json


class Upload:
    """Bytes on their way in: hashed while they are written, kept only if they are what was said."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hash = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> Self:
        descriptor, name = tempfile.mkstemp(dir=self._store.incoming)
        self.path = Path(name)
        self._file: IO[bytes] = os.fdopen(descriptor, "wb")
        return self

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._hash.update(data)
        self._file.write(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        """Return the sha256 of what has been written so far."""
        return self._hash.hexdigest()

    def keep(self, path: Path) -> None:
        """Move the bytes to their final place."""
        self._file.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self.path, path)

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


class Store:
    """Blobs and repositories of one directory, held by one process at a time; thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.incoming = self.directory / "incoming"
        self.lock = threading.RLock()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._held = _hold(self.directory / ".lock")
        shutil.rmtree(self.incoming, ignore_errors=True)
        self.incoming.mkdir()
        self._repositories: dict[tuple[str, str], Repository] = {}
        for path in sorted((self.directory / "repos").glob("*/*/*.json")):
            repo = _read_repository(path)
            self._repositories[repo.kind, repo.id] = repo

    def close(self) -> None:
        """Let another process serve the directory."""
        self._held.close()

    def get(self, kind: str, repo_id: str) -> Repository | None:
        """Return the repository of this id, or None."""
        return self._repositories.get((kind, repo_id))

    def successor(self, kind: str, repo_id: str) -> Repository | None:
        """Return the repository that once had this id and has moved, or None."""
        moved = (repo for repo in self.all(kind) if repo_id in repo.former)
        return next(moved, None)

    def all(self, kind: str) -> list[Repository]:
        """Return every repository of a kind, sorted by id."""
        with self.lock:
            found = [repo for repo in self._repositories.values() if repo.kind == kind]
        return sorted(found, key=lambda repo: repo.id)

    def put(self, repo: Repository) -> None:
        """Write a repository to disk, then show it."""
        with self.lock:
            self.write_json(self._path(repo.kind, repo.id), to_json(repo))
            self._repositories[repo.kind, repo.id] = repo

    def remove(self, repo: Repository) -> None:
        """Forget a repository. Its blobs stay: others may share them."""
        with self.lock:
            self._path(repo.kind, repo.id).unlink(missing_ok=True)
            del self._repositories[repo.kind, repo.id]

    def move(self, repo: Repository, new_id: str) -> None:
        """Give a repository another id and remember the one it had."""
        with self.lock:
            self.put(replace(repo, id=new_id, former=(*repo.former, repo.id)))
            self.remove(repo)

    def blob(self, sha256: str) -> Path:
        """Return where the bytes of this sha256 are, or would be."""
        return self.directory / "blobs" / sha256[:2] / sha256

    def size(self, sha256: str) -> int | None:
        """Return the size of a blob, or None where there is none."""
        try:
            return self.blob(sha256).stat().st_size
        except FileNotFoundError:
            return None

    def add(self, data: bytes) -> File:
        """Keep the bytes of a regular file."""
        with Upload(self) as upload:
            upload.write(data)
            upload.keep(self.blob(upload.sha256))
        return File(git_id("blob", data), upload.sha256, len(data), lfs=False)

    def large(self, sha256: str) -> File | None:
        """Return a blob as an LFS file, or None where it has not been uploaded."""
        size = self.size(sha256)
        if size is None:
            return None
        return File(git_id("blob", pointer(sha256, size)), sha256, size, lfs=True)

    def read(self, file: File) -> bytes:
        """Return all bytes of a file."""
        return self.blob(file.sha256).read_bytes()

    def write_json(self, path: Path, data: Any) -> None:
        """Replace a JSON file as a whole, readable by its owner only."""
        with Upload(self) as upload:
            upload.write(json.dumps(data).encode())
            upload.keep(path)

    def _path(self, kind: str, repo_id: str) -> Path:
        return self.directory / "repos" / kind / f"{repo_id}.json"


@contextmanager
def blocks(path: Path, start: int, stop: int, size: int = 1 << 20) -> Iterator[Iterator[bytes]]:
    """Open a file and give its bytes from `start` to `stop` in blocks."""
    with path.open("rb") as file:
        file.seek(start)
        lengths = range(start, stop, size)
        yield (file.read(min(size, stop - position)) for position in lengths)


def _read_repository(path: Path) -> Repository:
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ZooError(
            f"{path} is not a repository of this Hub ({error}); move it away to serve the others"
        ) from error


def _hold(path: Path) -> IO[bytes]:
    """Lock a file until it is closed or the process dies."""
    file = path.open("ab")
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ZooError(
                f"{path.parent} is served by another Hub; stop it or choose another directory"
            ) from error
    return file
