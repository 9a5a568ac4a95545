"""References to checkpoints on a Hub, checked before any request. Imports no torch, no client."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from zoo_core.checkpoint import layout
from zoo_core.checkpoint.manifest import Manifest, mechanism_name
from zoo_core.errors import HubError, UnknownName, did_you_mean
from zoo_core.names import COMMIT, REPOSITORY

MAIN = "main"

_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A repository and a revision of it. `files`: sha256 by name, where a catalogue pins them."""

    repo: str
    revision: str = MAIN
    files: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a full commit id, which can never come to mean another."""
        return is_commit(self.revision)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a pulled model came from; kept on it as `model.zoo_source`.

    files: sha256 of every file that was read, by name. base: the pinned reference of the model
    that a checkpoint of only "attention" was added to.
    """

    endpoint: str
    repo: str
    commit: str
    files: Mapping[str, str]
    base: str | None = None


class PinnedRef(str):
    """`owner/name@commit` of a published checkpoint, which zoo.pull takes, and what was published.

    changed: whether this push made the commit; False if everything was there already.
    row: the table to add to a registry.toml, after which zoo.pull takes the short name too.
    """

    repo: str
    commit: str
    row: str
    changed: bool

    def __new__(cls, repo: str, commit: str, *, row: str, changed: bool) -> PinnedRef:
        """Make the text `repo@commit`."""
        made = super().__new__(cls, f"{repo}@{commit}")
        made.repo, made.commit, made.row, made.changed = repo, commit, row, changed
        return made


def parse(ref: str, revision: str | None = None) -> Reference:
    """Check `owner/name` or `owner/name@revision`. Raises HubError for any other form."""
    if not isinstance(ref, str):
        raise HubError(f"{ref!r} is no reference; write 'owner/name@revision'")
    repo, at, written = ref.partition("@")
    if at and revision is not None and revision != written:
        raise HubError(f"{ref!r} has a revision already, revision={revision!r} is another one")
    chosen = written if at else (MAIN if revision is None else revision)
    return Reference(repo=check_repo(repo), revision=check_revision(chosen))


def look_up(ref: str, revision: str | None = None) -> Reference:
    """Like `parse`; a name without a slash is that of a checkpoint of the catalogue.

    Raises UnknownName where the catalogue has no such name.
    """
    if not isinstance(ref, str) or "/" in ref or "@" in ref:
        return parse(ref, revision)
    from zoo_core import catalogue

    rows = catalogue.load().checkpoints
    if ref not in rows:
        raise UnknownName(
            f"no catalogue has a checkpoint {ref!r}; write 'owner/name' for a repository on the Hub"
            f"{did_you_mean(ref, rows)}"
        )
    row = rows[ref]
    if revision not in (None, row.revision):
        raise HubError(
            f"checkpoint {ref!r} is pinned to {row.revision}; for another revision write "
            f"{row.repo}@{revision}"
        )
    return Reference(repo=row.repo, revision=row.revision, files=row.files)


def check_repo(repo: str) -> str:
    """Check the form owner/name. Raises HubError."""
    if not isinstance(repo, str) or not REPOSITORY.fullmatch(repo) or ".." in repo or "--" in repo:
        raise HubError(
            f"{_shown(repo)} is not a repository's name; write owner/name with letters, digits and "
            "single '-', '_', '.' inside"
        )
    return repo


def check_revision(revision: str) -> str:
    """Check the form of a branch, tag or commit. Raises HubError."""
    if (
        not isinstance(revision, str)
        or not _REVISION.fullmatch(revision)
        or ".." in revision
        or "//" in revision
        or revision.endswith(("/", ".lock"))
    ):
        raise HubError(f"{_shown(revision)} is not a revision; name a branch, a tag or a commit")
    return revision


def is_commit(text: object) -> bool:
    """Whether this is a full commit id."""
    return isinstance(text, str) and COMMIT.fullmatch(text) is not None


def check_endpoint(endpoint: str) -> str:
    """Check that a Hub is reached through https, or on this machine. Raises HubError."""
    try:
        parts = urlsplit(endpoint)
        valid = bool(parts.hostname) and not (parts.username or parts.query or parts.fragment)
    except (ValueError, AttributeError, TypeError):
        valid = False
    if not valid:
        raise HubError("the endpoint must be an address such as https://huggingface.co")
    local = parts.scheme == "http" and parts.hostname in _LOOPBACK
    if parts.scheme != "https" and not local:
        raise HubError(
            f"endpoint {_shown(endpoint)} is not encrypted; use https:// (http:// is for this "
            "machine only)"
        )
    return endpoint.rstrip("/")


def short_name(repo: str) -> str:
    """What a catalogue calls the checkpoint of a repository, where nobody names it."""
    name = re.sub(r"[^a-z0-9]+", "_", repo.partition("/")[2].lower()).strip("_")
    return name if name[:1].isalpha() else f"checkpoint_{name}"


def catalogue_row(
    repo: str, commit: str, manifest: Manifest, *, manifest_sha256: str, name: str = ""
) -> str:
    """One [checkpoints] table of a registry.toml, which pins the manifest and the weights.

    name: by default made from the repository's.
    """
    mechanisms = list(dict.fromkeys(map(mechanism_name, manifest.attention)))
    lines = [
        f"[checkpoints.{name or short_name(repo)}]",
        f"summary = {_quoted(f'{manifest.title}.')}",
        f"repo = {_quoted(repo)}",
        f"revision = {_quoted(commit)}",
        f"architecture = {_quoted(manifest.architecture)}",
    ]
    if len(mechanisms) == 1:
        lines.append(f"attention = {_quoted(mechanisms[0])}")
    pins = {name: record.sha256 for name, record in manifest.files.items()}
    pins[layout.MANIFEST] = manifest_sha256
    files = ", ".join(f"{_quoted(name)} = {_quoted(sha256)}" for name, sha256 in pins.items())
    return "\n".join([*lines, f"files = {{ {files} }}"]) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _shown(value: object) -> str:
    return repr(value)[:120]
