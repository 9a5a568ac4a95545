"""Branches and tags."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from zoo_core.testing.hub.access import no_revision, visible, writable
from zoo_core.testing.hub.repository import MAIN, valid_ref_name
from zoo_core.testing.hub.wire import Call, Refusal, Router, ok

router = Router()

_HEADS, _TAGS, _PULLS = "refs/heads/", "refs/tags/", "refs/pr/"


@router.on("GET", "/api/<repo>/refs")
async def listing(call: Call) -> Response:
    """List branches and tags, and pull requests if asked to."""
    repo = visible(call)

    def under(prefix: str, *, full: bool = False) -> list[dict[str, Any]]:
        return [
            {"name": ref if full else ref.removeprefix(prefix), "ref": ref, "targetCommit": oid}
            for ref, oid in repo.refs.items()
            if ref.startswith(prefix)
        ]

    body = {"branches": under(_HEADS), "tags": under(_TAGS), "converts": []}
    if call.flag("include_prs"):
        body["pullRequests"] = under(_PULLS, full=True)
    return JSONResponse(body)


@router.on("POST", "/api/<repo>/branch/{name}")
async def create_branch(call: Call) -> Response:
    """Create a branch."""
    start = str((await call.json()).get("startingPoint") or "main")
    return _create(call, _HEADS + call.args["name"], start)


@router.on("POST", "/api/<repo>/tag/{rev}")
async def create_tag(call: Call) -> Response:
    """Create a tag."""
    return _create(call, _TAGS + str((await call.json()).get("tag")), call.args["rev"])


@router.on("DELETE", "/api/<repo>/branch/{name}")
async def delete_branch(call: Call) -> Response:
    """Delete a branch."""
    return _delete(call, _HEADS + call.args["name"])


@router.on("DELETE", "/api/<repo>/tag/{name}")
async def delete_tag(call: Call) -> Response:
    """Delete a tag."""
    return _delete(call, _TAGS + call.args["name"])


def _create(call: Call, ref: str, start: str) -> Response:
    if not valid_ref_name(ref):
        raise Refusal(400, f"{ref!r} is not a name for a branch or tag")
    with call.store.lock:
        repo = writable(call)
        if ref in repo.refs:
            raise Refusal(409, f"{ref!r} exists already in {repo.id!r}")
        commit = repo.resolve(start)
        if commit is None:
            raise no_revision(repo, start)
        call.store.put(repo.with_commit(ref, commit))
    return ok()


def _delete(call: Call, ref: str) -> Response:
    with call.store.lock:
        repo = writable(call)
        if ref == MAIN:
            raise Refusal(403, "the branch 'main' cannot be deleted")
        if ref not in repo.refs:
            raise no_revision(repo, ref)
        call.store.put(repo.without_ref(ref))
    return ok()
