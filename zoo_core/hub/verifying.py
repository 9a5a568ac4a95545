"""zoo.hub.verify: check every byte of a checkpoint on a Hub without loading it."""

from __future__ import annotations

from zoo_core.checkpoint import layout
from zoo_core.checkpoint import verify as verify_directory
from zoo_core.errors import HubError
from zoo_core.hub.client import Client
from zoo_core.hub.listing import COMPANIONS
from zoo_core.hub.reference import PinnedRef, catalogue_row, look_up
from zoo_core.hub.snapshot import open_snapshot


def verify(
    ref: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    offline: bool = False,
) -> list[str]:
    """Every way in which the files are not those of the commit, in words; empty if all is well.

    What is not cached yet is fetched. Plugins need not be installed; nothing is deleted.
    Arguments as for zoo.pull. Raises HubError or CheckpointError for a checkpoint that cannot be
    had at all.
    """
    client = Client(endpoint=endpoint, token=token, offline=offline)
    snapshot = open_snapshot(client, look_up(ref, revision))
    companions = [snapshot.listing[name] for name in sorted(COMPANIONS & snapshot.listing.keys())]
    problems = []
    for file in [*snapshot.weights, *companions]:
        if not file.is_at(client.download(snapshot.repo, snapshot.commit, file)):
            problems.append(f"{file.name} does not have the hash of {snapshot}")
    if problems or not snapshot.manifest.files:
        return problems
    return verify_directory(snapshot.directory, root=client.cache)


def pin(
    ref: str, *, name: str = "", token: str | None = None, endpoint: str | None = None
) -> PinnedRef:
    """The commit that a reference means now, and its row for a registry.toml.

    Of the files only the small ones are fetched; that all of them are there is checked, and for a
    checkpoint of the catalogue, that they are the pinned ones. name: of the row.
    Raises HubError or CheckpointError for what could not be pulled.
    """
    client = Client(endpoint=endpoint, token=token)
    snapshot = open_snapshot(client, look_up(ref))
    sha256 = snapshot.source().files.get(layout.MANIFEST)
    if sha256 is None:
        raise HubError(f"{snapshot} has no {layout.MANIFEST} to pin; publish it with zoo.push")
    row = catalogue_row(
        snapshot.repo, snapshot.commit, snapshot.manifest, manifest_sha256=sha256, name=name
    )
    return PinnedRef(snapshot.repo, snapshot.commit, row=row, changed=False)
