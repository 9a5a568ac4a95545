"""The chunk store that real hf-xet talks to: xorbs, shards and the recipes to rebuild files.

hf-xet cuts a file into chunks, packs new ones into xorbs and describes the file in a shard. Both
are kept as they come. A file is rebuilt from byte ranges of xorbs, which the client unpacks itself.
Formats: the public Xet specification (https://huggingface.co/docs/xet), version 1 of the API.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from zoo_core.testing.hub.store import Store, Upload

_RECORD = 48
_MAGIC = b"HFRepoMetaData\0"
_BOOKEND = b"\xff" * 32
_HAS_VERIFICATION, _HAS_SHA256 = 1 << 31, 1 << 30


@dataclass(frozen=True)
class Term:
    """A run of chunks of one xorb, `length` bytes when unpacked; chunk numbers as (start, stop)."""

    xorb: str
    start: int
    stop: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """Where a chunk ends in its xorb, header included, and how long it is when unpacked."""

    end: int
    length: int


@dataclass(frozen=True)
class Recipe:
    """How to build a file. `sha256` is what the uploader says; nothing here proves it."""

    file: str
    sha256: str | None
    terms: tuple[Term, ...]

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return sum(term.length for term in self.terms)


class ChunkStore:
    """Xorbs and recipes in a directory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.directory = store.directory / "xet"
        self._recipes: dict[str, Recipe] = {}
        self._by_sha256: dict[str, Recipe] = {}
        self._chunks: dict[str, Sequence[Chunk]] = {}
        self._rebuilding: dict[str, asyncio.Task[None]] = {}
        for path in sorted(self.directory.glob("shards/*")):
            self._learn(parse_shard(path.read_bytes()))

    def recipe(self, file: str) -> Recipe | None:
        """Return the recipe of a Xet file hash."""
        return self._recipes.get(file)

    def recipe_of(self, sha256: str) -> Recipe | None:
        """Return the recipe of the file that was uploaded under this sha256."""
        return self._by_sha256.get(sha256)

    def add_shard(self, data: bytes) -> list[Recipe]:
        """Keep a shard and return its recipes.

        Raises ValueError if it is not a shard or needs xorbs that are not here.
        """
        recipes = parse_shard(data)
        for term in (term for recipe in recipes for term in recipe.terms):
            if not self.xorb(term.xorb).exists():
                raise ValueError(
                    f"the xorb {term.xorb} is not here: the client's cache is of another Hub, "
                    "clear its HF_XET_CACHE"
                )
        with Upload(self._store) as upload:
            upload.write(data)
            upload.keep(self.directory / "shards" / upload.sha256)
        self._learn(recipes)
        return recipes

    def xorb(self, name: str) -> Path:
        """Return where a xorb is, or would be."""
        return self.directory / "xorbs" / name

    def plan(self, recipe: Recipe, start: int, stop: int) -> tuple[int, list[Term]]:
        """Return the terms that cover bytes `start` to `stop`, and the bytes to skip in the first.

        Whole chunks only: a chunk cannot be unpacked in part.
        """
        skip, position = 0, 0
        terms: list[Term] = []
        for term in recipe.terms:
            lengths = [chunk.length for chunk in self.chunks(term.xorb)[term.start : term.stop]]
            ends = list(accumulate(lengths, initial=position))
            position = ends[-1]
            if position <= start or ends[0] >= stop:
                continue
            first = max(0, bisect_right(ends, start) - 1)
            last = min(len(lengths), bisect_left(ends, stop))
            if not terms:
                skip = max(0, start - ends[first])
            length = ends[last] - ends[first]
            terms.append(Term(term.xorb, term.start + first, term.start + last, length))
        return skip, terms

    async def rebuild(self, recipe: Recipe, endpoint: str, token: tuple[str, int]) -> bool:
        """Make a file from its chunks and keep it as a blob, if it has the sha256 it claims.

        hf-xet does the work as a client of this very Hub at `endpoint`; `token` with the second it
        expires. Tells whether the blob is there. Calls for the same file share the work.
        """
        if recipe.file not in self._rebuilding:
            job = {
                "endpoint": endpoint,
                "token": token[0],
                "expires": token[1],
                "file": recipe.file,
                "size": recipe.size,
            }
            work = asyncio.to_thread(self._unpack, recipe, job)
            self._rebuilding[recipe.file] = asyncio.create_task(work)
        try:
            await asyncio.shield(self._rebuilding[recipe.file])
        finally:
            self._rebuilding.pop(recipe.file, None)
        return recipe.sha256 is not None and self._store.size(recipe.sha256) is not None

    def _unpack(self, recipe: Recipe, job: dict[str, object]) -> None:
        home = str(self._store.incoming / "xet-home")
        settings = {
            "HF_HOME": home,
            "HF_XET_CACHE": home,
            "NO_PROXY": "*",
            # It asks this very Hub: what fails once fails again.
            "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "1",
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "100ms",
        }
        with (
            Upload(self._store) as upload,
            subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("unpack.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **settings},
            ) as process,
        ):
            if process.stdin is None or process.stdout is None:
                return
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
            while piece := process.stdout.read(1 << 20):
                upload.write(piece)
            if process.wait() == 0 and upload.sha256 == recipe.sha256:
                upload.keep(self._store.blob(upload.sha256))

    def span(self, term: Term) -> tuple[int, int]:
        """Return the byte range (start, stop) of a term in its xorb."""
        chunks = self.chunks(term.xorb)
        return (chunks[term.start - 1].end if term.start else 0), chunks[term.stop - 1].end

    def chunks(self, xorb: str) -> Sequence[Chunk]:
        """Return the chunks of a xorb, from the headers in it."""
        if xorb not in self._chunks:
            self._chunks[xorb] = list(read_chunks(self.xorb(xorb)))
        return self._chunks[xorb]

    def _learn(self, recipes: Sequence[Recipe]) -> None:
        for recipe in recipes:
            self._recipes[recipe.file] = recipe
            if recipe.sha256:
                self._by_sha256[recipe.sha256] = recipe


def parse_shard(data: bytes) -> list[Recipe]:
    """Read the recipes of a shard. Raises ValueError if it is not a shard."""
    if not data.startswith(_MAGIC):
        raise ValueError("not a shard: wrong magic")
    records = [data[at : at + _RECORD] for at in range(_RECORD, len(data) - _RECORD + 1, _RECORD)]
    recipes, at = [], 0
    try:
        while records[at][:32] != _BOOKEND:
            flags, count = struct.unpack_from("<II", records[at], 32)
            body = at + 1
            after = body + count * (2 if flags & _HAS_VERIFICATION else 1)
            terms = tuple(map(_term, records[body : body + count]))
            sha256 = _hash(records[after]) if flags & _HAS_SHA256 else None
            recipes.append(Recipe(_hash(records[at]), sha256, terms))
            at = after + bool(flags & _HAS_SHA256)
    except IndexError as error:
        raise ValueError("not a shard: it ends in the middle") from error
    return recipes


def _term(record: bytes) -> Term:
    length, start, stop = struct.unpack_from("<III", record, 36)
    return Term(_hash(record), start, stop, length)


def _hash(record: bytes) -> str:
    """Return a hash as text: four little-endian words, each written big end first."""
    return b"".join(record[at : at + 8][::-1] for at in range(0, 32, 8)).hex()


def read_chunks(xorb: Path) -> Iterator[Chunk]:
    """Walk the chunk headers of a xorb: version 1 byte, packed length 3, scheme 1, length 3.

    A footer may follow the chunks; it starts with a letter where a chunk has version 0. Raises
    ValueError if a chunk runs past the end.
    """
    size, at = xorb.stat().st_size, 0
    with xorb.open("rb") as file:
        while len(header := file.read(8)) == 8 and header[0] == 0:
            at += 8 + int.from_bytes(header[1:4], "little")
            if at > size:
                raise ValueError("not a xorb: a chunk runs past its end")
            yield Chunk(at, int.from_bytes(header[5:8], "little"))
            file.seek(at)
