"""A repository as data: files, commits and refs, with the object ids that git itself would give.

Everything here is frozen. A change makes a new `Repository`, which the store writes to disk before
anybody can see it; a reader that resolved a revision keeps what it resolved.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

KINDS = ("models", "datasets", "spaces", "kernels")
MAIN = "refs/heads/main"

_NAME = re.compile(r"(?!.*(\.\.|--))[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_REF_NAME = re.compile(
    r"(?!.*(\.\.|//|@\{|/\.|\.lock$))[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}(?<![./])"
)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True)
class File:
    """One file of one commit. `oid` is git's blob id: of the bytes, or of the LFS pointer."""

    oid: str
    sha256: str
    size: int
    lfs: bool

    @property
    def etag(self) -> str:
        """Return what identifies the bytes to a client: sha256 of LFS files, git's id of others."""
        return self.sha256 if self.lfs else self.oid

    @property
    def lfs_sizes(self) -> dict[str, int]:
        """Return the sizes of the bytes and of the pointer, as the Hub lists them."""
        return {"size": self.size, "pointerSize": len(pointer(self.sha256, self.size))}


@dataclass(frozen=True)
class Commit:
    """One immutable state of all files. `date` is in whole seconds since the epoch."""

    oid: str
    parents: tuple[str, ...]
    title: str
    message: str
    date: int
    author: str
    files: Mapping[str, File]


@dataclass(frozen=True)
class Pull:
    """A pull request; its commits live under `refs/pr/<number>`."""

    number: int
    title: str
    author: str
    base: str
    date: int
    status: str = "open"

    @property
    def ref(self) -> str:
        """Return the ref that carries the proposed commits."""
        return f"refs/pr/{self.number}"


@dataclass(frozen=True)
class Repository:
    """A repository at one moment: who may see it, its refs, and every commit they ever had."""

    kind: str
    id: str
    private: bool
    created: int
    gated: str | bool = False
    granted: frozenset[str] = frozenset()
    former: tuple[str, ...] = ()
    refs: Mapping[str, str] = field(default_factory=dict)
    commits: Mapping[str, Commit] = field(default_factory=dict)
    pulls: tuple[Pull, ...] = ()

    @property
    def owner(self) -> str:
        """Return the namespace: a user or an organisation."""
        return self.id.split("/")[0]

    @property
    def prefix(self) -> str:
        """Return what stands before the id in web URLs: nothing for models, else `<kind>/`."""
        return "" if self.kind == "models" else f"{self.kind}/"

    def resolve(self, revision: str) -> Commit | None:
        """Find a commit by branch, tag, full ref, 40-hex id or an unambiguous prefix (7 up)."""
        for ref in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if ref in self.refs:
                return self.commits[self.refs[ref]]
        if not _COMMIT.fullmatch(revision):
            return None
        found = [oid for oid in self.commits if oid.startswith(revision)]
        return self.commits[found[0]] if len(found) == 1 else None

    def history(self, commit: Commit) -> Iterator[Commit]:
        """Yield `commit` and its first parents, newest first."""
        while True:
            yield commit
            if not commit.parents:
                return
            commit = self.commits[commit.parents[0]]

    def with_commit(self, ref: str, commit: Commit) -> Repository:
        """Return a repository in which `ref` points to `commit`."""
        return replace(
            self,
            refs={**self.refs, ref: commit.oid},
            commits={**self.commits, commit.oid: commit},
        )

    def without_ref(self, ref: str) -> Repository:
        """Return a repository without `ref`; its commits stay reachable by id."""
        return replace(self, refs={name: oid for name, oid in self.refs.items() if name != ref})


def valid_id(repo_id: str) -> bool:
    """Tell whether this is `namespace/name`, safe to use as a path."""
    parts = repo_id.split("/")
    return len(parts) == 2 and all(_NAME.fullmatch(part) for part in parts)


def valid_ref_name(name: str) -> bool:
    """Tell whether git would take this as the name of a branch or tag."""
    return bool(_REF_NAME.fullmatch(name))


def valid_path(path: str) -> bool:
    """Tell whether this is a relative path that stays inside the repository and outside `.git`."""
    parts = path.split("/")
    printable = "\\" not in path and all(ord(letter) >= 32 for letter in path)
    return printable and all(part not in ("", ".", "..", ".git") for part in parts)


def pointer(sha256: str, size: int) -> bytes:
    """Return the text that git stores in the place of an LFS file."""
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    )


def git_id(kind: str, body: bytes) -> str:
    """Return git's object id: sha1 over a header and the body."""
    return hashlib.sha1(f"{kind} {len(body)}\0".encode() + body).hexdigest()


def folder_ids(files: Mapping[str, File]) -> dict[str, str]:
    """Return git's tree id of every folder, the root under the empty path."""
    children: dict[str, dict[str, str | None]] = {"": {}}
    for path in files:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            children["/".join(parts[: depth - 1])][parts[depth - 1]] = None
            children.setdefault(folder, {})
        children["/".join(parts[:-1])][parts[-1]] = files[path].oid

    ids: dict[str, str] = {}
    for folder in sorted(children, key=lambda path: path.count("/") + bool(path), reverse=True):
        lines = []
        for name, oid in children[folder].items():
            inside = ids[f"{folder}/{name}" if folder else name] if oid is None else oid
            mode, sort_key = ("40000", f"{name}/") if oid is None else ("100644", name)
            lines.append((sort_key.encode(), f"{mode} {name}\0".encode() + bytes.fromhex(inside)))
        ids[folder] = git_id("tree", b"".join(line for _, line in sorted(lines)))
    return ids


def make_commit(
    files: Mapping[str, File],
    *,
    parents: tuple[str, ...],
    title: str,
    message: str,
    date: int,
    author: str,
) -> Commit:
    """Build a commit with the id that git would compute for it."""
    who = f"{author} <{author}@localhost> {date} +0000"
    lines = [f"tree {folder_ids(files)['']}", *(f"parent {parent}" for parent in parents)]
    text = "\n".join([*lines, f"author {who}", f"committer {who}", "", title, "", message])
    ordered = dict(sorted(files.items()))
    oid = git_id("commit", text.encode())
    return Commit(oid, parents, title, message, date, author, ordered)


def iso(date: int) -> str:
    """Return seconds since the epoch as the Hub writes times."""
    return datetime.fromtimestamp(date, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def to_json(repo: Repository) -> dict[str, Any]:
    """Return everything about a repository as JSON values."""
    return {
        "format": 1,
        "kind": repo.kind,
        "id": repo.id,
        "private": repo.private,
        "gated": repo.gated,
        "granted": sorted(repo.granted),
        "former": list(repo.former),
        "created": repo.created,
        "refs": dict(repo.refs),
        "pulls": [vars(pull) for pull in repo.pulls],
        "commits": [
            {
                **{key: value for key, value in vars(commit).items() if key != "files"},
                "files": {path: list(vars(file).values()) for path, file in commit.files.items()},
            }
            for commit in repo.commits.values()
        ],
    }


def from_json(data: Mapping[str, Any]) -> Repository:
    """Read what `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    if data["format"] != 1:
        raise ValueError(f"repository format {data['format']!r} is not 1")
    commits = [
        Commit(
            **{
                **commit,
                "parents": tuple(commit["parents"]),
                "files": {path: File(*values) for path, values in commit["files"].items()},
            }
        )
        for commit in data["commits"]
    ]
    return Repository(
        kind=data["kind"],
        id=data["id"],
        private=data["private"],
        gated=data["gated"],
        granted=frozenset(data["granted"]),
        former=tuple(data["former"]),
        created=data["created"],
        refs=data["refs"],
        commits={commit.oid: commit for commit in commits},
        pulls=tuple(Pull(**pull) for pull in data["pulls"]),
    )
