"""Uploading: which files go where, and the classic LFS way for large ones.

The batch call answers with signed links on the storage origin; the client sends the bytes there
without a token and asks for verification here with one.
"""

from __future__ import annotations

import asyncio
import re
from math import ceil
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from zoo_core.testing.hub.access import no_revision, open_to
from zoo_core.testing.hub.attributes import is_ignored, is_large, large_patterns
from zoo_core.testing.hub.repository import Commit
from zoo_core.testing.hub.store import Upload, blocks
from zoo_core.testing.hub.wire import Call, Refusal, Router, ok

router = Router()

_SHA256 = re.compile(r"[0-9a-f]{64}")
_LFS_JSON = "application/vnd.git-lfs+json"


@router.on("POST", "/api/<repo>/preupload/{rev}")
async def preupload(call: Call) -> Response:
    """Say for each file: LFS or regular, ignored or not, and what is there now."""
    repo = open_to(call, proposal=call.flag("create_pr"))
    commit = repo.resolve(call.args["rev"])
    if commit is None:
        raise no_revision(repo, call.args["rev"])
    body = await call.json()
    patterns = large_patterns(_text(call, commit, ".gitattributes"))
    ignore = str(body.get("gitIgnore") or _text(call, commit, ".gitignore"))
    answers = []
    for asked in body.get("files", []):
        path, size = str(asked["path"]), int(asked["size"])
        current = commit.files.get(path)
        answers.append(
            {
                "path": path,
                "uploadMode": "lfs" if is_large(path, size, patterns) else "regular",
                "shouldIgnore": is_ignored(path, ignore),
                "oid": current.etag if current else None,
            }
        )
    return JSONResponse({"files": answers, "commitOid": commit.oid})


@router.on("POST", "/<repo>.git/info/lfs/objects/batch")
async def batch(call: Call) -> Response:
    """Say where the bytes of LFS objects go."""
    # The batch call does not say whether the commit will be a proposal; the commit call checks.
    open_to(call, proposal=True)
    body = await call.json()
    if body.get("operation") != "upload" or body.get("hash_algo", "sha256") != "sha256":
        raise Refusal(422, "only uploads by sha256")
    multipart = "multipart" in body.get("transfers", [])
    objects = [_actions(call, asked, multipart=multipart) for asked in body.get("objects", [])]
    return JSONResponse({"transfer": "basic", "objects": objects}, media_type=_LFS_JSON)


def _actions(call: Call, asked: dict[str, Any], *, multipart: bool) -> dict[str, Any]:
    """Say how to upload one object, or nothing if its bytes are already here."""
    sha256, size = str(asked.get("oid")), asked.get("size")
    answer: dict[str, Any] = {"oid": sha256, "size": size}
    if not _SHA256.fullmatch(sha256) or not isinstance(size, int) or size < 0:
        return {**answer, "error": {"code": 422, "message": "an object needs a sha256 and a size"}}
    if call.store.size(sha256) == size:
        return answer
    part = call.services.part
    url = f"{call.storage}/storage/{sha256}"
    if multipart and size > part:
        links = {str(n): f"{url}/{n}?sig={_sign(call, sha256, str(n))}" for n in _parts(size, part)}
        upload = {
            "href": f"{url}/complete?sig={_sign(call, sha256, 'complete')}",
            "header": {"chunk_size": str(part), **links},
        }
    else:
        upload = {"href": f"{url}?sig={_sign(call, sha256, 'whole')}", "header": {}}
    verify = {"href": str(call.request.url.replace(query="")).replace("/batch", "/verify")}
    return {**answer, "actions": {"upload": upload, "verify": {**verify, "header": {}}}}


@router.on("POST", "/<repo>.git/info/lfs/objects/verify")
async def verify(call: Call) -> Response:
    """Confirm that an LFS object is here."""
    open_to(call, proposal=True)
    body = await call.json()
    sha256 = str(body.get("oid"))
    if not _SHA256.fullmatch(sha256) or call.store.size(sha256) != body.get("size"):
        raise Refusal(404, f"the object {sha256} has not been uploaded")
    return ok()


@router.on("PUT", "/storage/{sha256}")
async def put_whole(call: Call) -> Response:
    """Take the bytes of an LFS object."""
    _check_signature(call, "whole")
    with Upload(call.store) as upload:
        await _receive(call.request, upload)
        _keep(call, upload)
    return Response()


@router.on("PUT", "/storage/{sha256}/{part}")
async def put_part(call: Call) -> Response:
    """Take a part of an LFS object; its ETag goes into the completion call."""
    _check_signature(call, call.args["part"])
    with Upload(call.store) as upload:
        await _receive(call.request, upload)
        upload.keep(_part_path(call, call.args["part"], upload.sha256))
        return Response(headers={"ETag": f'"{upload.sha256}"'})


@router.on("POST", "/storage/{sha256}/complete")
async def complete(call: Call) -> Response:
    """Join the parts of an LFS object. A client that lost the answer may ask again."""
    _check_signature(call, "complete")
    if call.store.size(call.args["sha256"]) is not None:
        return ok()
    paths = []
    for number, part in enumerate((await call.json()).get("parts", []), start=1):
        etag = str(part.get("etag")).strip('"')
        if not _SHA256.fullmatch(etag) or part.get("partNumber") != number:
            raise Refusal(400, f"part {number} needs its number and its ETag")
        paths.append(_part_path(call, str(number), etag))
        if not paths[-1].exists():
            raise Refusal(400, f"part {number} with ETag {etag} has not been uploaded")
    with Upload(call.store) as upload:
        await asyncio.to_thread(_join, paths, upload)
        _keep(call, upload)
    for path in paths:
        path.unlink(missing_ok=True)
    return ok()


def _join(paths: list[Path], upload: Upload) -> None:
    for path in paths:
        with blocks(path, 0, path.stat().st_size) as pieces:
            for piece in pieces:
                upload.write(piece)


async def _receive(request: Request, upload: Upload) -> None:
    async for piece in request.stream():
        upload.write(piece)


def _keep(call: Call, upload: Upload) -> None:
    """Keep an upload if its bytes have the sha256 that was announced."""
    wanted = call.args["sha256"]
    if upload.sha256 != wanted:
        raise Refusal(400, f"the bytes have sha256 {upload.sha256}, not {wanted}")
    upload.keep(call.store.blob(wanted))


def _parts(size: int, part: int) -> range:
    return range(1, ceil(size / part) + 1)


def _part_path(call: Call, part: str, etag: str) -> Path:
    return call.store.incoming / f"{call.args['sha256']}.{part}.{etag}"


def _sign(call: Call, sha256: str, part: str) -> str:
    return call.services.signer.sign("put", sha256, part)


def _check_signature(call: Call, part: str) -> None:
    signature = call.request.query_params.get("sig", "")
    if not call.services.signer.signed(signature, "put", call.args["sha256"], part):
        raise Refusal(403, "this link is not signed")


def _text(call: Call, commit: Commit, path: str) -> str:
    file = commit.files.get(path)
    return call.store.read(file).decode(errors="replace") if file else ""
