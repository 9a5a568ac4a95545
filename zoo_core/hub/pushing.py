"""zoo.push: publish a checkpoint in one commit, or leave the repository as it was."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from huggingface_hub import CommitOperationDelete
from huggingface_hub.errors import (
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import nn

from zoo_core.checkpoint import layout
from zoo_core.checkpoint.loading import load_directory
from zoo_core.checkpoint.manifest import Holds, read_manifest
from zoo_core.checkpoint.tensors import is_own
from zoo_core.errors import CheckpointError, HubError, PatchError
from zoo_core.hosts import unwrap
from zoo_core.hub.card import card, completed, metadata, speed_section
from zoo_core.hub.client import Client
from zoo_core.hub.listing import Listing
from zoo_core.hub.pulling import fetch_base
from zoo_core.hub.reference import (
    MAIN,
    PinnedRef,
    Reference,
    catalogue_row,
    check_repo,
    check_revision,
    is_commit,
    parse,
)
from zoo_core.hub.sending import Operations, Sent
from zoo_core.hub.staging import Staged, stage_directory, stage_model, with_companions


@dataclass(frozen=True, kw_only=True)
class PushPlan:
    """What a push would publish: sizes in bytes by file name, and the card of a new repository."""

    repo: str
    revision: str
    private: bool
    files: Mapping[str, int]
    card: str


@overload
def push(
    model: Any, repo_id: str, *, dry_run: Literal[False] = False, **wishes: Any
) -> PinnedRef: ...
@overload
def push(model: Any, repo_id: str, *, dry_run: Literal[True], **wishes: Any) -> PushPlan: ...
@overload
def push(model: Any, repo_id: str, *, dry_run: bool, **wishes: Any) -> PinnedRef | PushPlan: ...
def push(  # type: ignore[misc]  # the overloads name only what decides the result
    model: Any,
    repo_id: str,
    *,
    private: bool = True,
    revision: str | None = None,
    tokenizer: Any = None,
    message: str | None = None,
    holds: Holds = "model",
    base: str | None = None,
    max_shard_size: int | str = "5GB",
    license: str | None = None,
    speed: str | Path | None = None,
    dry_run: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
) -> PinnedRef | PushPlan:
    """Publish a model, or a directory that zoo.save wrote, as one commit of `repo_id`.

    private: of a repository that is made; one that exists stays as visible as it is.
    revision: a branch, made if need be; main by default.
    tokenizer: a tokenizer or image processor that travels with the model.
    holds, max_shard_size: see zoo.save; a directory is published in the files that it has, unless
        holds="attention" takes from it only what the attention added.
    base: "owner/name@revision" of the stock model that the attention was added to, for the card
        and for holds="attention"; by default the one that the model was built from.
    license: the Hub's name of a license, for the card. An existing card keeps its text, and gets
        the metadata that it lacks. What `zoo.calibrate` measured stands in a new card and in
        its metadata.
    speed: a file that `zoo bench --save` wrote, whose table a new card shows.
    dry_run: ask and change nothing, return what would be published.
    token, endpoint: by default huggingface_hub's; the stored token is for the default endpoint.

    Returns the pinned reference, which zoo.pull takes; `.row` is its table for a registry.toml.
    Publishing what is there already changes nothing. Weights of an earlier push are removed.
    Raises CheckpointError, before any request, for a model that could not be pulled again, and
    HubError for what the Hub does; the repository is then as it was.
    """
    check_repo(repo_id)
    if base is not None:
        parse(base)
    branch = check_revision(MAIN if revision is None else revision)
    if is_commit(branch):
        raise HubError(f"{branch} is a commit, which cannot be added to; name a branch")
    speed_table = None if speed is None else speed_section(Path(speed))
    client = Client(endpoint=endpoint, token=token)
    operations = Operations()
    with tempfile.TemporaryDirectory(prefix="zoo-push-") as name:
        folder = Path(name)
        saved = Path(model) if isinstance(model, str | Path) else None
        if saved is not None and (holds == "model" or read_manifest(saved).holds == holds):
            staged = stage_directory(saved, folder, tokenizer=tokenizer, digest=operations.sha256)
        else:
            staged = _stage_model(
                client,
                folder,
                model,
                base,
                holds=holds,
                max_shard_size=max_shard_size,
                tokenizer=tokenizer,
                digest=operations.sha256,
            )
        base_model = _base_model(staged, model) if base is None else parse(base).repo
        about = metadata(staged.manifest, license=license, base_model=base_model)
        if staged.card is not None:
            text = completed(staged.card, about, layout.CARD)
        else:
            text = card(staged.manifest, repo_id, about, staged.companions, speed_table)
        if dry_run:
            sizes = {name: path.stat().st_size for name, path in sorted(staged.files.items())}
            sizes[layout.CARD] = len(text.encode())
            return PushPlan(repo=repo_id, revision=branch, private=private, files=sizes, card=text)
        target = Reference(repo=repo_id, revision=branch)
        head = _prepare(client, target, private=private)
        before = client.head(repo_id, head)
        if layout.CARD in before:
            kept = client.fetch(repo_id, head, before[layout.CARD]).read_text(encoding="utf-8")
            text = completed(kept, about, f"{layout.CARD} of {repo_id}")
        readme = folder / layout.CARD
        readme.write_bytes(text.encode())
        sent = Sent({**staged.files, layout.CARD: readme}, operations)
        commit = _publish(client, target, head, before, sent, message or staged.manifest.title)
        sha256 = operations.sha256(sent.files[layout.MANIFEST])
    row = catalogue_row(repo_id, commit, staged.manifest, manifest_sha256=sha256)
    return PinnedRef(repo_id, commit, row=row, changed=commit != head)


def _stage_model(
    client: Client, folder: Path, model: Any, base: str | None, *, holds: Holds, **how: Any
) -> Staged:
    """Save a model to a folder; one of only "attention" together with what it belongs on."""
    if holds == "model":
        return stage_model(folder, model, **how)
    directory = Path(model) if isinstance(model, str | Path) else None
    if directory is not None:
        model = load_directory(directory)
    resolved = _resolve_base(client, model, base)
    staged = stage_model(folder, model, holds=holds, base=resolved, **how)
    _check_base(client, model, staged)
    return staged if directory is None else with_companions(staged, directory)


def _prepare(client: Client, target: Reference, *, private: bool) -> str:
    """The head of the branch; repository and branch are made where they are missing."""
    try:
        return client.commit_of(target)
    except HubError as error:
        cause = error.__cause__
        if not isinstance(cause, RepositoryNotFoundError | RevisionNotFoundError):
            raise
    with client.translated(f"{target} could not be made"):
        if isinstance(cause, RepositoryNotFoundError):
            client.api.create_repo(target.repo, private=private, exist_ok=True)
        if target.revision != MAIN:
            client.api.create_branch(target.repo, branch=target.revision, exist_ok=True)
    return client.commit_of(target)


def _publish(
    client: Client,
    target: Reference,
    head: str,
    before: Listing,
    sent: Sent,
    message: str,
) -> str:
    """Commit what differs from the head, and only on top of it. Returns the commit."""
    changed = sent.missing_in(before)
    weights = [name for name in before if layout.is_weights(name) or name == layout.INDEX]
    gone = [name for name in weights if name not in sent.files]
    if not changed and not gone:
        return head
    deletions = [CommitOperationDelete(path_in_repo=name) for name in gone]
    try:
        with client.translated(f"{target} could not be pushed to"):
            commit = client.api.create_commit(
                target.repo,
                [*sent.additions(changed), *deletions],
                commit_message=message,
                revision=target.revision,
                parent_commit=head,
            ).oid
    except HubError as error:
        return _made_anyway(client, target, head, sent, error)
    if not is_commit(commit):
        raise HubError(f"{client.endpoint} answers {str(commit)[:80]!r}, which is no commit id")
    after = client.head(target.repo, commit)
    made = f"{target.repo}@{commit} was made"
    if touched := sent.changed():
        raise HubError(
            f"{made}, but {' and '.join(touched)} changed on the disk during the push; do not use "
            "that commit, push again"
        )
    if wrong := sent.missing_in(after):
        raise HubError(
            f"{made}, but its {' and '.join(wrong)} is not what was sent; do not use that commit, "
            "push again"
        )
    return commit


def _made_anyway(client: Client, target: Reference, head: str, sent: Sent, error: HubError) -> str:
    """The commit that was made although its answer was lost; raises `error` if there is none."""
    cause = error.__cause__
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else 0
    if 400 <= status < 500 and status != 412:
        raise error
    try:
        now = client.commit_of(target)
        if now != head and not [*sent.missing_in(client.head(target.repo, now)), *sent.changed()]:
            return now
    except HubError:
        raise error from None
    if status == 412:
        raise HubError(
            f"{target} has moved to {now} since this push began; nothing was changed, push again"
        ) from error
    raise error


def _resolve_base(client: Client, model: Any, base: str | None) -> dict[str, str]:
    """The stock model on the Hub, as a manifest names it."""
    if base is None:
        loaded = getattr(unwrap(model), "zoo_loaded", None)
        base = loaded.source if loaded is not None else None
    if base is None or Path(base).exists():
        raise CheckpointError(
            'holds="attention" needs base="owner/name@revision" (--base), the published model that '
            "the attention was added to"
        )
    reference = parse(base)
    commit = client.commit_of(reference)
    weights = client.listing(reference.repo, commit).require(layout.WEIGHTS)
    if weights.sha256 is None:
        raise HubError(f"{reference} does not tell the sha256 of its {layout.WEIGHTS}")
    return {"repo": reference.repo, "commit": commit, "sha256": weights.sha256}


def _check_base(client: Client, model: Any, staged: Staged) -> None:
    """Raise CheckpointError unless the model is its base plus what the attention added."""
    host = unwrap(model)
    ours = host.state_dict()
    theirs = fetch_base(client, staged.manifest).state_dict()
    for name, tensor in ours.items():
        if is_own(name):
            continue
        other = theirs.get(name)
        if other is None or not _equal(tensor, other):
            raise CheckpointError(
                f"{name!r} is not as in the base {staged.manifest.base}: it was trained or "
                'replaced; holds="model" publishes everything'
            )


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype == other.dtype and torch.equal(tensor.detach().cpu(), other)


def _base_model(staged: Staged, model: Any) -> str | None:
    """The repository to name as base_model, where one is known."""
    if staged.manifest.base is not None:
        return staged.manifest.base.repo
    if not isinstance(model, nn.Module):
        return None
    try:
        loaded = getattr(unwrap(model), "zoo_loaded", None)
        return parse(loaded.source).repo if loaded is not None else None
    except (HubError, PatchError):
        return None
