"""A checkpoint in the cache: its description is there and checked, its weights come on demand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zoo_core.checkpoint import adopting, host_config, layout
from zoo_core.checkpoint.digest import sha256_of
from zoo_core.checkpoint.manifest import Manifest
from zoo_core.errors import HubError
from zoo_core.hub.client import Client
from zoo_core.hub.listing import COMPANIONS, Listing, RemoteFile
from zoo_core.hub.reference import Reference, Source


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One commit of a repository, and the folder of the cache that holds its files."""

    client: Client
    repo: str
    commit: str
    listing: Listing
    manifest: Manifest
    directory: Path

    def __str__(self) -> str:
        return f"{self.repo}@{self.commit}"

    @property
    def weights(self) -> list[RemoteFile]:
        """The weight files. A model that stock tools saved has no manifest that names them."""
        if self.manifest.files:
            return [self.listing.require(name) for name in self.manifest.files]
        if layout.WEIGHTS in self.listing:
            return [self.listing[layout.WEIGHTS]]
        found = [file for name, file in self.listing.items() if layout.is_weights(name)]
        return [*found, self.listing.require(layout.INDEX)]

    def fetch_weights(self) -> None:
        """Bring the weights. Those in a manifest are hashed when they are read, all others here."""
        for file in self.weights:
            recorded = self.manifest.files.get(file.name)
            if recorded is not None and recorded.sha256 == file.sha256:
                self.client.download(self.repo, self.commit, file)
            else:
                self.client.fetch(self.repo, self.commit, file)

    def fetch_companions(self) -> None:
        """Bring tokenizer and processor files, so that stock tools find them without a network."""
        for name in sorted(COMPANIONS & self.listing.keys()):
            self.client.fetch(self.repo, self.commit, self.listing[name])

    def discard_damaged(self) -> list[str]:
        """Delete the weights that are not those of the commit; their names."""
        paths = [(file, self.directory / file.name) for file in self.weights]
        damaged = [(file, path) for file, path in paths if path.exists() and not file.is_at(path)]
        for _, path in damaged:
            self.client.discard(path)
        return [file.name for file, _ in damaged]

    def source(self) -> Source:
        """What to remember on the model."""
        files = {name: record.sha256 for name, record in self.manifest.files.items()}
        for name in self.listing:
            path = self.directory / name
            if name not in files and path.exists():
                files[name] = sha256_of(path)
        base = self.manifest.base
        return Source(
            endpoint=self.client.endpoint,
            repo=self.repo,
            commit=self.commit,
            files=dict(sorted(files.items())),
            base=f"{base.repo}@{base.commit}" if base else None,
        )


def open_snapshot(client: Client, reference: Reference) -> Snapshot:
    """Resolve once, list that commit, and bring zoo.json and config.json. No weights yet.

    Raises HubError, or CheckpointError for what these two files say.
    """
    repo, commit = reference.repo, client.commit_of(reference)
    listing = client.listing(repo, commit)
    config = client.fetch(repo, commit, listing.require(layout.CONFIG))
    if layout.MANIFEST in listing:
        client.fetch(repo, commit, listing[layout.MANIFEST])
    client.remember(reference, commit)
    snapshot = Snapshot(
        client=client,
        repo=repo,
        commit=commit,
        listing=listing,
        manifest=_manifest(client, listing, config),
        directory=config.parent,
    )
    _check_agreement(snapshot, reference)
    return snapshot


def _manifest(client: Client, listing: Listing, config: Path) -> Manifest:
    directory = config.parent
    # Whatever other tools put beside the files, readers would look there first.
    if (directory / layout.PENDING).exists():
        raise HubError(f"{directory} has a folder {layout.PENDING}; delete it")
    told = host_config.read(directory, root=client.cache)
    if layout.MANIFEST not in listing:
        if (directory / layout.MANIFEST).exists():
            raise HubError(f"{directory} has a {layout.MANIFEST}, the commit has none; delete it")
        if "zoo" not in told:
            raise HubError(
                f"{listing.where} has no {layout.MANIFEST}: it looks like a stock model, which "
                'zoo.build(..., pretrained="owner/name@revision") loads and patches'
            )
    return adopting.read(directory, root=client.cache)


def _check_agreement(snapshot: Snapshot, reference: Reference) -> None:
    """Tree, manifest and catalogue must say the same of the weights, before any is fetched."""
    for name, record in snapshot.manifest.files.items():
        file = snapshot.listing.require(name)
        if file.size != record.size or file.sha256 not in (None, record.sha256):
            raise HubError(
                f"{snapshot}: {layout.MANIFEST} and the repository disagree about {name}; "
                "one of them was changed without the other, push the model again"
            )
    for name, sha256 in reference.files.items():
        pinned = snapshot.manifest.files.get(name)
        if (pinned.sha256 if pinned else _sha256(snapshot, name)) != sha256:
            raise HubError(f"{snapshot}: {name} is not the one that the catalogue pins")


def _sha256(snapshot: Snapshot, name: str) -> str:
    """The hash of a file; of one that is not fetched otherwise, after fetching it."""
    file = snapshot.listing.require(name)
    path = snapshot.client.fetch(snapshot.repo, snapshot.commit, file)
    return sha256_of(path)
