"""zoo.pull: a checkpoint from a Hub, of one commit, checked before any of it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo_core import registry
from zoo_core.checkpoint import host_config, layout
from zoo_core.checkpoint.loading import load_directory
from zoo_core.checkpoint.manifest import Manifest
from zoo_core.checkpoint.rebuilding import require_plugins
from zoo_core.errors import CheckpointError, HubError
from zoo_core.hub.client import Client
from zoo_core.hub.reference import look_up
from zoo_core.hub.snapshot import open_snapshot


def pull(
    ref: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    offline: bool = False,
    require_pin: bool = False,
) -> nn.Module:
    """The model of a checkpoint on the Hub, on the CPU, in evaluation mode.

    ref: "owner/name", "owner/name@revision", or the name of a checkpoint of the catalogue.
    revision: a branch, tag or commit; the main branch unless given here or in `ref`.
    token, endpoint: by default huggingface_hub's; the stored token is for the default endpoint.
    offline: take everything from the cache, as HF_HUB_OFFLINE does.
    require_pin: refuse a branch or a tag, which others can move.

    The revision is resolved once; a commit that is in the cache needs no request. Tokenizer and
    processor files come along, for `AutoTokenizer.from_pretrained`. Where the model came from
    stands in `model.zoo_source`, which zoo.inspect shows.
    Raises HubError for what the Hub does, UnknownName for a plugin to install, before the weights
    are fetched, and CheckpointError for what is in the files.
    """
    reference = look_up(ref, revision)
    if require_pin and not reference.is_pinned:
        raise HubError(
            f"{reference} is no commit, and require_pin refuses what can move; write "
            f"{reference.repo}@ and the 40 hex digits of a commit"
        )
    client = Client(endpoint=endpoint, token=token, offline=offline)
    snapshot = open_snapshot(client, reference)
    require_plugins(snapshot.manifest, snapshot)
    manifest = snapshot.manifest
    base = fetch_base(client, manifest) if manifest.holds == "attention" else None
    snapshot.fetch_weights()
    snapshot.fetch_companions()
    try:
        model = load_directory(snapshot.directory, root=client.cache, base=base)
    except CheckpointError as error:
        if damaged := snapshot.discard_damaged():
            raise CheckpointError(
                f"{snapshot}: {' and '.join(damaged)} did not have the hash of that commit: it was "
                f"damaged or tampered with, and is deleted from the cache; pull again ({error})"
            ) from error
        raise
    model.zoo_source = snapshot.source()  # type: ignore[assignment]
    return model


def fetch_base(client: Client, manifest: Manifest) -> nn.Module:
    """The stock model that a checkpoint of only "attention" belongs on, at its recorded commit.

    Raises HubError unless its weights are the recorded ones and fill the whole model.
    """
    base = manifest.base
    if base is None:
        raise HubError(f'{layout.MANIFEST} holds "attention" but names no base')
    where = f"the base {base.repo}@{base.commit}"
    listing = client.listing(base.repo, base.commit)
    weights = listing.require(layout.WEIGHTS)
    if weights.sha256 != base.sha256:
        raise HubError(f"{where} has other weights than {layout.MANIFEST} records; refused")
    config = client.fetch(base.repo, base.commit, listing.require(layout.CONFIG))
    client.fetch(base.repo, base.commit, weights)
    arguments: dict[str, Any] = host_config.safe(manifest.config)
    if manifest.library == "transformers":
        arguments["class"] = manifest.model_class
    adapter = registry.architecture(manifest.architecture).adapter()
    with torch.random.fork_rng(devices=[]):
        model = adapter.create(None, pretrained=str(config.parent), **arguments)
    loaded: Any = model.zoo_loaded
    if loaded.new:
        raise HubError(
            f"{where} does not hold {loaded.new[0]!r}, which {manifest.model_class} needs"
        )
    return model
