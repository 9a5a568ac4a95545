"""What a repository holds at one commit: names, sizes and hashes, as its tree tells them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from zoo_core.checkpoint import layout
from zoo_core.checkpoint.digest import Digest, sha256_of
from zoo_core.errors import HubError
from zoo_core.names import COMMIT, SHA256

# More entries at the top of a repository than any checkpoint needs.
ENTRY_LIMIT = 5_000
SIZE_LIMIT = 10**12
COMPANION_LIMIT = 64 * 2**20

# What prepares a model's input, as tokenizers and image processors save it. Data only.
COMPANIONS = frozenset(
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.txt "
    "vocab.json merges.txt spiece.model sentencepiece.bpe.model tokenizer.model "
    "preprocessor_config.json processor_config.json chat_template.jinja".split()
)
_LIMITS = {
    layout.MANIFEST: layout.MANIFEST_LIMIT,
    layout.CONFIG: layout.CONFIG_LIMIT,
    layout.INDEX: layout.INDEX_LIMIT,
    **dict.fromkeys((layout.CARD, *COMPANIONS), COMPANION_LIMIT),
}
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".npz"})


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """One file of a commit. oid: git's SHA-1 of it. sha256: that of a large (LFS) file."""

    name: str
    size: int
    oid: str
    sha256: str | None = None

    def is_at(self, path: Path, digest: Digest = sha256_of) -> bool:
        """Whether a local file has exactly these bytes. digest: what hashes a large one."""
        if path.stat().st_size != self.size:
            return False
        if self.sha256 is not None:
            return digest(path) == self.sha256
        oid = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
        with path.open("rb") as file:
            while block := file.read(2**20):
                oid.update(block)
        return oid.hexdigest() == self.oid


class Listing(dict[str, RemoteFile]):
    """The files of a checkpoint at one commit, by name; all others are left out.

    Raises HubError for what no honest Hub lists.
    """

    def __init__(self, where: str, entries: Iterable[Mapping[str, Any]]) -> None:
        super().__init__()
        self.where = where
        names: set[str] = set()
        for entry in entries:
            if len(names) >= ENTRY_LIMIT:
                raise HubError(f"{where} lists more than {ENTRY_LIMIT} files; that is refused")
            name = entry.get("name")
            if not isinstance(name, str) or name in names:
                raise HubError(f"{where} lists {str(name)[:80]!r} twice, or as no name")
            names.add(name)
            # Readers of a directory look into this folder first; see zoo_core.checkpoint.layout.
            if name.partition("/")[0] == layout.PENDING:
                raise HubError(f"{where} has a folder {layout.PENDING}, which no repository may")
            if name in _LIMITS or layout.is_weights(name):
                self[name] = _file(where, entry)
        total = sum(file.size for file in self.values())
        if total > SIZE_LIMIT:
            raise HubError(f"{where} lists {total} bytes; more than {SIZE_LIMIT} is refused")
        self.pickles = sorted(name for name in names if PurePosixPath(name).suffix in _PICKLES)

    def refuse_pickles(self) -> None:
        """Raise HubError for a repository that has its weights in no other format."""
        if self.pickles and not any(map(layout.is_weights, self)):
            raise HubError(
                f"{self.where} has its weights only as {self.pickles[0][:80]!r}, a format that can "
                "run code; it is not read, ask its owner for safetensors"
            )

    def require(self, name: str) -> RemoteFile:
        """One file. Raises HubError where the commit has none of that name."""
        if name not in self:
            raise HubError(f"{self.where} has no {name}; it is not a complete zoo checkpoint")
        return self[name]


def _file(where: str, entry: Mapping[str, Any]) -> RemoteFile:
    name, size, oid, sha256 = (entry.get(key) for key in ("name", "size", "oid", "sha256"))
    if type(size) is not int or size < 0:
        raise HubError(f"{where} lists {name} with size {str(size)[:40]!r}")
    if size > _LIMITS.get(str(name), SIZE_LIMIT):
        raise HubError(f"{where} lists {name} with {size} bytes; so many are refused")
    if not isinstance(oid, str) or not COMMIT.fullmatch(oid):
        raise HubError(f"{where} lists {name} with {str(oid)[:80]!r}, which is no git hash")
    if sha256 is not None and not (isinstance(sha256, str) and SHA256.fullmatch(sha256)):
        raise HubError(f"{where} lists {name} with {str(sha256)[:80]!r}, which is no sha256")
    return RemoteFile(name=str(name), size=size, oid=oid, sha256=sha256)
