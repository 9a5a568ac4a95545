"""What a reference means: a directory, or a repository of which small files come to the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo_core.checkpoint import host_config, layout
from zoo_core.errors import HubError
from zoo_core.hub.reference import parse

_ALWAYS = frozenset({layout.CONFIG, layout.MANIFEST})


@dataclass(frozen=True)
class Place:
    """A directory that may hold a checkpoint, stock weights, or a tokenizer.

    root: the folder that links may not leave; the directory itself unless given.
    """

    directory: Path
    root: Path | None = None

    @property
    def is_checkpoint(self) -> bool:
        """Whether zoo.load reads the model here, and not `pretrained=` of zoo.build."""
        manifest = layout.find(self.directory, layout.MANIFEST, root=self.root)
        return manifest is not None or "zoo" in self.config()

    def config(self) -> Mapping[str, Any]:
        """What config.json says; nothing where there is none."""
        return host_config.read(self.directory, root=self.root)


def find_place(reference: str | Path, files: frozenset[str] = frozenset()) -> Place:
    """Where a directory or "owner/name@revision" is on this disk; no weights are fetched.

    files: what to bring from a repository, where it has them, besides its config and manifest.
    Raises HubError where there is neither such a directory nor such a repository.
    """
    if Path(reference).is_dir():
        return Place(Path(reference))
    with asking_the_hub(reference):
        return _fetched(str(reference), files)


@contextmanager
def asking_the_hub(reference: str | Path) -> Iterator[None]:
    """Say, where the Hub has no answer, that there is no such directory: that may be a typo."""
    try:
        yield
    except HubError as error:
        raise HubError(f"{error} (nor is there a directory {str(reference)!r})") from error


def _fetched(ref: str, files: frozenset[str]) -> Place:
    from zoo_core.hub.client import Client  # only needed here

    client, reference = Client(endpoint=None, token=None), parse(ref)
    commit = client.commit_of(reference)
    directory = client.folder(reference.repo) / "snapshots" / commit
    if not client.offline:
        listing = client.head(reference.repo, commit)
        for name in sorted((files | _ALWAYS) & listing.keys()):
            client.fetch(reference.repo, commit, listing[name])
        client.remember(reference, commit)
    # Offline, whatever the cache has will do: stock tools may have brought it.
    elif not any((directory / name).exists() for name in files or _ALWAYS):
        raise HubError(client.uncached(ref))
    return Place(directory, client.cache)
