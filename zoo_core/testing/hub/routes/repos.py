"""Who am I, and repositories as a whole: create, delete, move, settings, info, list."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from zoo_core.testing.hub import card
from zoo_core.testing.hub.access import (
    at_revision,
    lookup,
    namespace,
    readable,
    signed_in,
    visible,
    writable,
)
from zoo_core.testing.hub.attributes import GITATTRIBUTES
from zoo_core.testing.hub.repository import (
    KINDS,
    MAIN,
    Commit,
    Repository,
    iso,
    make_commit,
    valid_id,
)
from zoo_core.testing.hub.store import Store
from zoo_core.testing.hub.wire import Call, Refusal, Router, ok, paged

router = Router()


@router.on("GET", "/api/whoami-v2")
async def whoami(call: Call) -> Response:
    """Tell the owner of the token."""
    account = signed_in(call)
    orgs = [{"type": "org", "name": name, "roleInOrg": "write"} for name in account.orgs]
    token = {"role": account.role, "displayName": account.name}
    auth = {"type": "access_token", "accessToken": token}
    return JSONResponse({"type": "user", "name": account.user, "orgs": orgs, "auth": auth})


@router.on("GET", "/api/agent-harnesses")
async def agent_harnesses(call: Call) -> Response:
    """Answer what the client asks once a day to name its environment: nothing."""
    return JSONResponse({"standardEnvVars": [], "harnesses": {}})


@router.on("POST", "/api/validate-yaml")
async def validate_yaml(call: Call) -> Response:
    """Check the metadata of a README.md."""
    content = (await call.json()).get("content")
    warnings = []
    try:
        data = card.metadata(str(content))
        errors = card.problems(data)
        if not data:
            warnings.append({"message": "empty or missing yaml metadata in repo card"})
    except ValueError as error:
        errors = [str(error)]
    body = {"errors": [{"message": message} for message in errors], "warnings": warnings}
    return JSONResponse(body, 400 if errors else 200)


@router.on("POST", "/api/repos/create")
async def create(call: Call) -> Response:
    """Create a repository; 409 with its URL if it exists."""
    body = await call.json()
    kind, repo_id = _named(call, body)
    account = namespace(call, repo_id.split("/")[0])
    private = _private(body, False)
    with call.store.lock:
        repo = call.store.get(kind, repo_id)
        exists = repo is not None
        if repo is None:
            repo = new_repository(call.store, kind, repo_id, author=account.user, private=private)
    url = f"{call.base}/{repo.prefix}{repo.id}"
    if exists:
        raise Refusal(409, f"you already created this {kind[:-1]} repo", url=url)
    return JSONResponse({"url": url, "name": repo_id, "id": repo_id})


def new_repository(
    store: Store,
    kind: str,
    repo_id: str,
    *,
    author: str,
    private: bool = False,
    gated: str | bool = False,
) -> Repository:
    """Create a repository whose first commit holds `.gitattributes`."""
    if kind not in KINDS or not valid_id(repo_id):
        raise Refusal(400, f"{kind}/{repo_id} is not a valid repository name")
    now = int(time.time())
    first = make_commit(
        {".gitattributes": store.add(GITATTRIBUTES.encode())},
        parents=(),
        title="initial commit",
        message="",
        date=now,
        author=author,
    )
    repo = Repository(kind, repo_id, private, now, gated).with_commit(MAIN, first)
    store.put(repo)
    return repo


@router.on("DELETE", "/api/repos/delete")
async def delete(call: Call) -> Response:
    """Delete a repository."""
    kind, repo_id = _named(call, await call.json())
    with call.store.lock:
        repo = lookup(call, kind, repo_id)
        namespace(call, repo.owner)
        call.store.remove(repo)
    return ok()


@router.on("POST", "/api/repos/move")
async def move(call: Call) -> Response:
    """Give a repository another id; the old one redirects."""
    body = await call.json()
    old, new = str(body.get("fromRepo")), str(body.get("toRepo"))
    if not valid_id(new):
        raise Refusal(400, f"{new} is not a valid repository name")
    with call.store.lock:
        repo = lookup(call, f"{body.get('type', 'model')}s", old)
        namespace(call, repo.owner)
        namespace(call, new.split("/")[0])
        if call.store.get(repo.kind, new):
            raise Refusal(409, f"there is already a repository {new!r}")
        call.store.move(repo, new)
    return ok()


@router.on("PUT", "/api/<repo>/settings")
async def settings(call: Call) -> Response:
    """Change visibility and gating."""
    body = await call.json()
    with call.store.lock:
        repo = writable(call)
        gated = body.get("gated", repo.gated)
        if gated not in ("auto", "manual", False):
            raise Refusal(400, f'gated is "auto", "manual" or false, not {gated!r}')
        repo = replace(repo, gated=gated, private=_private(body, repo.private))
        call.store.put(repo)
    return ok(private=repo.private, gated=repo.gated)


@router.on("POST", "/api/<repo>/user-access-request/grant")
async def grant(call: Call) -> Response:
    """Let a user into a gated repository."""
    user = str((await call.json()).get("user"))
    with call.store.lock:
        repo = writable(call)
        call.store.put(replace(repo, granted=repo.granted | {user}))
    return ok()


@router.on("GET", "/api/<repo>/auth-check")
async def auth_check(call: Call) -> Response:
    """Tell whether the caller may have the files."""
    readable(call)
    return ok()


@router.on("GET", "/api/<repo>/auth-check/write")
async def auth_check_write(call: Call) -> Response:
    """Tell whether the caller may commit."""
    writable(call)
    return ok()


@router.on("GET", "/api/<repo>")
async def info(call: Call) -> Response:
    """Describe a repository at the head of main."""
    repo = visible(call)
    return JSONResponse(_describe(call, repo, repo.commits[repo.refs[MAIN]], files=True))


@router.on("GET", "/api/<repo>/revision/{rev}")
async def info_at_revision(call: Call) -> Response:
    """Describe a repository at a revision."""
    repo = visible(call)
    return JSONResponse(_describe(call, repo, at_revision(call, repo), files=True))


@router.on("GET", "/api/{kind}")
async def listing(call: Call) -> Response:
    """List repositories by author, search words and tags."""
    if call.args["kind"] not in KINDS:
        raise Refusal(404, f"there is nothing at /api/{call.args['kind']}")
    query = call.request.query_params
    shown = [
        repo
        for repo in call.store.all(call.args["kind"])
        if (not repo.private or (call.account and call.account.owns(repo.owner)))
        and query.get("author", repo.owner).lower() == repo.owner.lower()
        and query.get("search", "").lower() in repo.id.lower()
    ]
    described = [
        _describe(call, repo, repo.commits[repo.refs[MAIN]], files=False) for repo in shown
    ]
    wanted = set(query.getlist("filter"))
    kept = [item for item in described if wanted <= set(item["tags"])]
    order: Callable[[dict[str, Any]], Any] = lambda item: item.get(query.get("sort", "id"), "")  # noqa: E731
    kept.sort(key=order, reverse="sort" in query)
    return paged(call, kept, lambda item: item, call.services.page)


def _named(call: Call, body: dict[str, Any]) -> tuple[str, str]:
    """Return kind and id from a body with name, organization and type."""
    owner = body.get("organization") or signed_in(call).user
    return f"{body.get('type') or 'model'}s", f"{owner}/{body.get('name')}"


def _private(body: dict[str, Any], before: bool) -> bool:
    """Return what a body says about visibility, in its newer or its older form."""
    if "visibility" in body:
        return bool(body["visibility"] == "private")
    return bool(body.get("private", before))


def _describe(call: Call, repo: Repository, commit: Commit, *, files: bool) -> dict[str, Any]:
    """Return what the Hub tells about a repository; with `files`, at this commit."""
    readme = commit.files.get("README.md")
    try:
        metadata = card.metadata(call.store.read(readme).decode(errors="replace")) if readme else {}
    except ValueError:
        metadata = {}
    facts = {
        "_id": f"{repo.created:024x}",
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.owner,
        "sha": commit.oid,
        "lastModified": iso(commit.date),
        "createdAt": iso(repo.created),
        "private": repo.private,
        "gated": repo.gated,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        **card.facts(metadata),
    }
    if files:
        facts["cardData"] = _plain(metadata)
        facts["siblings"] = [_sibling(call, path, commit) for path in commit.files]
        facts["usedStorage"] = sum(file.size for file in commit.files.values())
    wanted = call.request.query_params.getlist("expand")
    if wanted:
        return {key: facts[key] for key in ("_id", "id", "tags", *wanted) if key in facts}
    return facts


def _sibling(call: Call, path: str, commit: Commit) -> dict[str, Any]:
    sibling: dict[str, Any] = {"rfilename": path}
    if call.flag("blobs"):
        file = commit.files[path]
        sibling |= {"blobId": file.oid, "size": file.size}
        if file.lfs:
            sibling["lfs"] = {"sha256": file.sha256, **file.lfs_sizes}
    return sibling


def _plain(value: Any) -> Any:
    """Turn what YAML may hold (dates) into JSON values."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
