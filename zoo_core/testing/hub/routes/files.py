"""Listing and fetching files: tree, paths-info, resolve, and the storage of LFS files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

from starlette.responses import JSONResponse, Response

from zoo_core.testing.hub.access import at_revision, no_entry, readable, visible
from zoo_core.testing.hub.repository import Commit, File, Repository, folder_ids, iso
from zoo_core.testing.hub.wire import Call, Refusal, Router, paged, serve_file

router = Router()


@router.on("GET", "/api/<repo>/tree/{rev}")
async def tree(call: Call) -> Response:
    """List the files and folders of a revision."""
    return _list(call, "")


@router.on("GET", "/api/<repo>/tree/{rev}/{path*}")
async def subtree(call: Call) -> Response:
    """List the files and folders of a folder."""
    return _list(call, call.args["path"])


@router.on("POST", "/api/<repo>/paths-info/{rev}")
async def paths_info(call: Call) -> Response:
    """Describe the paths of a form; missing ones are left out."""
    repo = visible(call)
    commit = at_revision(call, repo)
    form = parse_qs((await call.request.body()).decode())
    paths = [path.strip("/") for path in form.get("paths", [])]
    folders = folder_ids(commit.files)
    found = [path for path in paths if path in commit.files or (path and path in folders)]
    expand = form.get("expand", [""])[0].lower() == "true"
    return JSONResponse(_entries(call, repo, commit, found, folders, expand=expand))


def _list(call: Call, folder: str) -> Response:
    repo = visible(call)
    commit = at_revision(call, repo)
    folders = folder_ids(commit.files)
    if folder not in folders:
        raise no_entry(repo, commit, folder)
    inside = f"{folder}/" if folder else ""
    paths = [path for path in (*folders, *commit.files) if path and path.startswith(inside)]
    if not call.flag("recursive"):
        paths = [path for path in paths if "/" not in path.removeprefix(inside)]
    entries = _entries(call, repo, commit, sorted(paths), folders, expand=call.flag("expand"))
    return paged(call, entries, lambda entry: entry, call.services.page)


def _entries(
    call: Call,
    repo: Repository,
    commit: Commit,
    paths: Sequence[str],
    folders: Mapping[str, str],
    *,
    expand: bool,
) -> list[dict[str, Any]]:
    entries = []
    for path in paths:
        file = commit.files.get(path)
        entry: dict[str, Any] = (
            {"type": "directory", "oid": folders[path], "size": 0, "path": path}
            if file is None
            else {"type": "file", "oid": file.oid, "size": file.size, "path": path}
        )
        if file is not None and file.lfs:
            entry["lfs"] = {"oid": file.sha256, **file.lfs_sizes}
            if xet := _xet_hash(call, file):
                entry["xetHash"] = xet
        if expand:
            last = _last_change(repo, commit, path)
            entry["lastCommit"] = {"id": last.oid, "title": last.title, "date": iso(last.date)}
        entries.append(entry)
    return entries


def _last_change(repo: Repository, commit: Commit, path: str) -> Commit:
    """Return the newest commit that changed a file or anything in a folder."""

    def below(state: Commit) -> dict[str, File]:
        return {
            name: file
            for name, file in state.files.items()
            if name == path or name.startswith(f"{path}/")
        }

    for state in repo.history(commit):
        if not state.parents or below(state) != below(repo.commits[state.parents[0]]):
            return state
    return commit


@router.on("HEAD", "/<repo>/resolve/{rev}/{path*}")
@router.on("GET", "/<repo>/resolve/{rev}/{path*}")
async def resolve(call: Call) -> Response:
    """Send a regular file; send the client on to the storage for an LFS file."""
    repo = readable(call)
    commit = at_revision(call, repo)
    file = commit.files.get(call.args["path"])
    if file is None:
        raise no_entry(repo, commit, call.args["path"])
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.etag}"'}
    if not file.lfs:
        return serve_file(call.request, call.store.blob(file.sha256), headers)
    headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
    if xet := _xet_hash(call, file):
        kind, repo_id = call.args["kind"], call.args["repo"]
        route = f"{call.base}/api/{kind}/{repo_id}/xet-read-token/{commit.oid}"
        headers |= {"X-Xet-Hash": xet, "Link": f'<{route}>; rel="xet-auth"'}
    query = urlencode({"sig": call.services.signer.sign("get", file.sha256)})
    headers["Location"] = f"{call.storage}/storage/{file.sha256}/{_quoted_name(call)}?{query}"
    return Response(status_code=302, headers=headers)


@router.on("HEAD", "/storage/{sha256}/{name}")
@router.on("GET", "/storage/{sha256}/{name}")
async def storage(call: Call) -> Response:
    """Send the bytes of an LFS file to whoever has a signed link."""
    sha256 = call.args["sha256"]
    if not call.services.signer.signed(call.request.query_params.get("sig", ""), "get", sha256):
        raise Refusal(403, "this link is not signed")
    return serve_file(call.request, call.store.blob(sha256), {"ETag": f'"{sha256}"'})


def _xet_hash(call: Call, file: File) -> str | None:
    chunks = call.services.chunks
    recipe = chunks.recipe_of(file.sha256) if chunks else None
    return recipe.file if recipe else None


def _quoted_name(call: Call) -> str:
    return quote(call.args["path"].rpartition("/")[2], safe="")
