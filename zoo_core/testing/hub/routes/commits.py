"""Commits, their history, and the pull requests that carry them."""

from __future__ import annotations

import base64
import binascii
import json
import re
from typing import Any

from starlette.responses import JSONResponse, Response

from zoo_core.testing.hub import changes
from zoo_core.testing.hub.access import at_revision, no_revision, open_to, visible, writable
from zoo_core.testing.hub.changes import Add, Change, Note, Remove
from zoo_core.testing.hub.repository import Commit, File, Pull, Repository, iso
from zoo_core.testing.hub.routes.chunks import rebuilt
from zoo_core.testing.hub.wire import Call, Refusal, Router, ok, paged

router = Router()

_SHA256 = re.compile(r"[0-9a-f]{64}")


@router.on("POST", "/api/<repo>/commit/{rev}")
async def commit(call: Call) -> Response:
    """Commit to a branch, or propose the commit in a new pull request."""
    proposal = call.flag("create_pr")
    repo = open_to(call, proposal=proposal)
    ref = _branch(repo, call.args["rev"])
    head, listed = await _read(call)
    note = Note(
        title=str(head.get("summary") or "commit"),
        message=str(head.get("description") or ""),
        author=_author(call),
        parent=head.get("parentCommit"),
    )
    extra = {}
    if proposal:
        made, pull = changes.propose(call.store, repo, ref, listed, note)
        extra["pullRequestUrl"] = f"{_url(call, repo)}/discussions/{pull.number}"
    else:
        made = changes.commit(call.store, repo, ref, listed, note)
    return ok(commitOid=made.oid, commitUrl=f"{_url(call, repo)}/commit/{made.oid}", **extra)


async def _read(call: Call) -> tuple[dict[str, Any], list[Change]]:
    """Read the lines of a commit: a header, then changes."""
    head: dict[str, Any] = {}
    listed: list[Change] = []
    for line in (await call.request.body()).splitlines():
        try:
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                head = value
            elif key == "file":
                data = base64.b64decode(value["content"], validate=True)
                listed.append(Add(value["path"], call.store.add(data)))
            elif key == "lfsFile":
                listed.append(Add(value["path"], await _large(call, value)))
            elif key in ("deletedFile", "deletedFolder"):
                listed.append(Remove(value["path"], folder=key == "deletedFolder"))
            else:
                raise Refusal(400, f"a commit line may not be {key!r}")
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise Refusal(400, f"a commit line cannot be read: {error!r}") from error
    return head, listed


async def _large(call: Call, value: dict[str, Any]) -> File:
    """Return an LFS file whose bytes have been uploaded, building it from chunks if need be."""
    sha256 = value["oid"]
    if not _SHA256.fullmatch(sha256) or value.get("algo", "sha256") != "sha256":
        raise Refusal(400, f"{sha256!r} is not a sha256")
    file = call.store.large(sha256)
    chunks = call.services.chunks
    recipe = chunks.recipe_of(sha256) if chunks and not file else None
    if recipe:
        await rebuilt(call, recipe)
        file = call.store.large(sha256)
    if file is None or value.get("size", file.size) != file.size:
        raise Refusal(400, f"{value['path']!r}: the LFS object {sha256} has not been uploaded")
    return file


@router.on("GET", "/api/<repo>/commits/{rev}")
async def history(call: Call) -> Response:
    """List the commits of a revision, newest first."""
    repo = visible(call)
    states = list(repo.history(at_revision(call, repo)))
    return paged(call, states, _describe, call.services.page)


def _describe(state: Commit) -> dict[str, Any]:
    return {
        "id": state.oid,
        "title": state.title,
        "message": state.message,
        "date": iso(state.date),
        "authors": [{"user": state.author}],
        "formatted": {"title": state.title, "message": state.message},
    }


@router.on("POST", "/api/<repo>/super-squash/{rev}")
async def squash(call: Call) -> Response:
    """Make one commit of the history of a branch."""
    repo = writable(call)
    ref = _branch(repo, call.args["rev"])
    note = Note(str((await call.json()).get("message") or "squash"), _author(call))
    return ok(commitOid=changes.squash(call.store, repo, ref, note).oid)


@router.on("GET", "/api/<repo>/discussions")
async def discussions(call: Call) -> Response:
    """List pull requests, newest first."""
    repo = visible(call)
    status = call.request.query_params.get("status")
    shown = [_summary(repo, pull) for pull in repo.pulls if status in (None, "all", pull.status)]
    return JSONResponse({"discussions": shown[::-1], "count": len(shown), "start": 0})


@router.on("GET", "/api/<repo>/discussions/{number}")
async def discussion(call: Call) -> Response:
    """Describe a pull request."""
    repo = visible(call)
    pull = _pull(repo, call.args["number"])
    base = {"base": pull.base, "mergeCommitId": None}
    more = {"events": [], "changes": base, "filesWithConflicts": [], "diff": ""}
    return JSONResponse({**_summary(repo, pull), **more})


@router.on("POST", "/api/<repo>/discussions/{number}/merge")
async def merge(call: Call) -> Response:
    """Merge a pull request."""
    repo = writable(call)
    pull = _pull(repo, call.args["number"])
    if pull.status != "open":
        raise Refusal(400, f"pull request {pull.number} is {pull.status}")
    merged = changes.merge(call.store, repo, pull, author=_author(call))
    event = {
        "id": merged.oid,
        "type": "status-change",
        "createdAt": iso(merged.date),
        "author": {"name": merged.author},
        "data": {"status": "merged"},
    }
    return JSONResponse({"newStatus": event})


def _summary(repo: Repository, pull: Pull) -> dict[str, Any]:
    return {
        "num": pull.number,
        "title": pull.title,
        "author": {"name": pull.author},
        "createdAt": iso(pull.date),
        "status": pull.status,
        "isPullRequest": True,
        "repo": {"name": repo.id, "type": repo.kind[:-1]},
    }


def _pull(repo: Repository, number: str) -> Pull:
    for pull in repo.pulls:
        if str(pull.number) == number:
            return pull
    raise Refusal(404, f"{repo.id!r} has no pull request {number}")


def _branch(repo: Repository, name: str) -> str:
    """Return the ref of a branch or pull request that can take commits."""
    for ref in (f"refs/heads/{name}", name):
        if ref in repo.refs and not ref.startswith("refs/tags/"):
            return ref
    raise no_revision(repo, name)


def _author(call: Call) -> str:
    return call.account.user if call.account else ""


def _url(call: Call, repo: Repository) -> str:
    return f"{call.base}/{repo.prefix}{repo.id}"
