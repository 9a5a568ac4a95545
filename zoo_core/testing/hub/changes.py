"""Making commits: a list of changes becomes the next state of a branch, or nothing does."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zoo_core.testing.hub.repository import (
    Commit,
    File,
    Pull,
    Repository,
    make_commit,
    valid_path,
)
from zoo_core.testing.hub.store import Store
from zoo_core.testing.hub.wire import Refusal


@dataclass(frozen=True)
class Add:
    """Put a file at a path, in the place of any that is there."""

    path: str
    file: File

    def apply(self, files: dict[str, File]) -> None:
        """Change the files."""
        folders = ["/".join(self.path.split("/")[:depth]) for depth in range(1, self.depth)]
        clash = next((folder for folder in folders if folder in files), None)
        inside = next((path for path in files if path.startswith(f"{self.path}/")), None)
        if clash or inside:
            raise Refusal(400, f"{clash or inside!r} is in the way of {self.path!r}")
        files[self.path] = self.file

    @property
    def depth(self) -> int:
        """Return the number of segments of the path."""
        return self.path.count("/") + 1


@dataclass(frozen=True)
class Remove:
    """Take away a file, or everything in a folder."""

    path: str
    folder: bool = False

    def apply(self, files: dict[str, File]) -> None:
        """Change the files."""
        inside = f"{self.path.rstrip('/')}/"
        gone = [
            path
            for path in files
            if (path.startswith(inside) if self.folder else path == self.path)
        ]
        if not gone:
            raise Refusal(404, f"A file with this name doesn't exist: {self.path}", "EntryNotFound")
        for path in gone:
            del files[path]


Change = Add | Remove


@dataclass(frozen=True)
class Note:
    """What is said about a commit. `parent` is the head its author believes in, if they say so."""

    title: str
    author: str
    message: str = ""
    parent: str | None = None


def commit(
    store: Store, repo: Repository, ref: str, changes: Sequence[Change], note: Note
) -> Commit:
    """Apply changes to the head of `ref` and return its new head: the old one if nothing changes.

    Refuses with 412 if the head is not the one the note speaks of.
    """
    with store.lock:
        repo, head = _latest(store, repo, ref)
        new = _next(head, changes, note)
        if new is not head:
            store.put(repo.with_commit(ref, new))
        return new


def propose(
    store: Store, repo: Repository, base: str, changes: Sequence[Change], note: Note
) -> tuple[Commit, Pull]:
    """Apply changes to the head of `base` in a new pull request."""
    with store.lock:
        repo, head = _latest(store, repo, base)
        new = _next(head, changes, note)
        pull = Pull(len(repo.pulls) + 1, note.title, note.author, base, new.date)
        store.put(replace(repo.with_commit(pull.ref, new), pulls=(*repo.pulls, pull)))
        return new, pull


def merge(store: Store, repo: Repository, pull: Pull, *, author: str) -> Commit:
    """Bring the files that a pull request changed into its base, refusing what both changed."""
    with store.lock:
        repo, ours = _latest(store, repo, pull.base)
        theirs = repo.commits[repo.refs[pull.ref]]
        mainline = {state.oid for state in repo.history(ours)}
        fork = next(state for state in repo.history(theirs) if state.oid in mainline)
        changed = _changed(fork.files, theirs.files)
        both = changed & _changed(fork.files, ours.files)
        if both:
            raise Refusal(409, f"both sides changed {', '.join(sorted(both))}")
        files = {path: file for path, file in ours.files.items() if path not in changed}
        files |= {path: theirs.files[path] for path in changed & theirs.files.keys()}
        note = Note(f"{pull.title} (#{pull.number})", author)
        merged = _make(files, (ours, theirs), note)
        pulls = [replace(each, status="merged") if each == pull else each for each in repo.pulls]
        store.put(replace(repo.with_commit(pull.base, merged), pulls=tuple(pulls)))
        return merged


def squash(store: Store, repo: Repository, ref: str, note: Note) -> Commit:
    """Replace the history of `ref` by one commit without parents."""
    with store.lock:
        repo, head = _latest(store, repo, ref)
        only = _make(head.files, (), note)
        store.put(repo.with_commit(ref, only))
        return only


def _next(head: Commit, changes: Sequence[Change], note: Note) -> Commit:
    if note.parent not in (None, head.oid):
        raise Refusal(412, f"A commit has happened since {note.parent}: the head is {head.oid}")
    files = dict(head.files)
    for change in changes:
        if not valid_path(change.path.rstrip("/") if isinstance(change, Remove) else change.path):
            raise Refusal(400, f"{change.path!r} is not a path a repository may hold")
        change.apply(files)
    return head if files == head.files else _make(files, (head,), note)


def _make(files: Mapping[str, File], parents: tuple[Commit, ...], note: Note) -> Commit:
    """Build a commit of now, or of its youngest parent's time if the clock went back."""
    return make_commit(
        files,
        parents=tuple(parent.oid for parent in parents),
        title=note.title,
        message=note.message,
        date=max(int(time.time()), *(parent.date for parent in parents), 0),
        author=note.author,
    )


def _latest(store: Store, repo: Repository, ref: str) -> tuple[Repository, Commit]:
    """Return the repository and the head of `ref` as they are now.

    Both may have changed while the body of a request was being received.
    """
    latest = store.get(repo.kind, repo.id)
    if latest is None:
        raise Refusal(404, f"{repo.id!r} has been deleted", "RepoNotFound")
    if ref not in latest.refs:
        raise Refusal(404, f"{ref!r} has been deleted from {repo.id!r}", "RevisionNotFound")
    return latest, latest.commits[latest.refs[ref]]


def _changed(before: Mapping[str, File], after: Mapping[str, File]) -> set[str]:
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
