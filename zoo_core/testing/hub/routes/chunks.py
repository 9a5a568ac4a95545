"""The Xet way for large files: tokens from the Hub, chunks to and from the storage origin."""

from __future__ import annotations

import re

from starlette.responses import JSONResponse, Response

from zoo_core.testing.hub.access import open_to, readable
from zoo_core.testing.hub.accounts import bearer
from zoo_core.testing.hub.cas import ChunkStore, Recipe
from zoo_core.testing.hub.store import Upload
from zoo_core.testing.hub.wire import Call, Refusal, Router, parse_range, serve_file

router = Router()

_HASH = re.compile(r"[0-9a-f]{64}")


@router.on("GET", "/api/<repo>/xet-write-token/{rev}")
async def write_token(call: Call) -> Response:
    """Let the client upload chunks."""
    open_to(call, proposal=call.flag("create_pr"))
    return _connection(call, "write")


@router.on("GET", "/api/<repo>/xet-read-token/{rev}")
async def read_token(call: Call) -> Response:
    """Let the client download chunks."""
    readable(call)
    return _connection(call, "read")


def _connection(call: Call, scope: str) -> Response:
    _chunks(call)
    token, expires = call.services.signer.xet_token(scope)
    url = f"{call.storage}/xet"
    headers = {
        "X-Xet-Cas-Url": url,
        "X-Xet-Access-Token": token,
        "X-Xet-Token-Expiration": str(expires),
    }
    body = {"casUrl": url, "accessToken": token, "exp": expires}
    return JSONResponse(body, headers=headers)


@router.on("POST", "/xet/v1/xorbs/default/{hash}")
async def put_xorb(call: Call) -> Response:
    """Take a pack of chunks."""
    path = _granted(call, "write").xorb(_checked(call.args["hash"]))
    new = not path.exists()
    with Upload(call.store) as upload:
        async for piece in call.request.stream():
            upload.write(piece)
        if new:
            upload.keep(path)
    return JSONResponse({"was_inserted": new})


@router.on("POST", "/xet/v1/shards")
async def put_shard(call: Call) -> Response:
    """Take the recipes of files."""
    chunks = _granted(call, "write")
    try:
        recipes = chunks.add_shard(await call.request.body())
    except ValueError as error:
        raise Refusal(400, str(error)) from error
    # Here and not in the commit: hf-xet waits minutes for an answer, the Hub client ten seconds.
    for recipe in recipes:
        await rebuilt(call, recipe)
    return JSONResponse({"result": 1})


async def rebuilt(call: Call, recipe: Recipe) -> None:
    """Make sure that the bytes of an uploaded file are there, with the sha256 it claims."""
    if recipe.sha256 is None or call.store.size(recipe.sha256) is not None:
        return
    token = call.services.signer.xet_token("read")
    if not await _chunks(call).rebuild(recipe, f"{call.base}/xet", token):
        raise Refusal(400, f"the chunks of {recipe.file} do not make a file of {recipe.sha256}")


@router.on("GET", "/xet/v1/reconstructions/{hash}")
async def reconstruction(call: Call) -> Response:
    """Tell how to build a file, or a byte range of it."""
    chunks = _granted(call, "read")
    recipe = chunks.recipe(_checked(call.args["hash"]))
    if recipe is None:
        raise Refusal(404, "no file has this hash")
    asked = parse_range(call.request.headers.get("range"), recipe.size)
    skip, terms = chunks.plan(recipe, *(asked or (0, recipe.size)))
    fetch: dict[str, list[dict[str, object]]] = {}
    listed = []
    for term in terms:
        start, stop = chunks.span(term)
        run = {"start": term.start, "end": term.stop}
        listed.append({"hash": term.xorb, "unpacked_length": term.length, "range": run})
        signature = call.services.signer.sign("xorb", term.xorb)
        fetch.setdefault(term.xorb, []).append(
            {
                "range": run,
                "url": f"{call.base}/xet/xorbs/{term.xorb}?sig={signature}",
                "url_range": {"start": start, "end": stop - 1},
            }
        )
    body = {"offset_into_first_range": skip, "terms": listed, "fetch_info": fetch}
    return JSONResponse(body)


@router.on("GET", "/xet/xorbs/{hash}")
async def get_xorb(call: Call) -> Response:
    """Send bytes of a xorb to whoever has a signed link."""
    name = _checked(call.args["hash"])
    if not call.services.signer.signed(call.request.query_params.get("sig", ""), "xorb", name):
        raise Refusal(403, "this link is not signed")
    return serve_file(call.request, _chunks(call).xorb(name), {})


def _chunks(call: Call) -> ChunkStore:
    if call.services.chunks is None:
        raise Refusal(404, "this Hub has no Xet storage: set HF_HUB_DISABLE_XET=1")
    return call.services.chunks


def _granted(call: Call, scope: str) -> ChunkStore:
    """Return the chunk store if the Xet token allows this."""
    token = bearer(call.request.headers) or ""
    if call.services.signer.xet_scope(token) not in (scope, "write"):
        raise Refusal(401, f"this needs a live Xet token to {scope}")
    return _chunks(call)


def _checked(name: str) -> str:
    if not _HASH.fullmatch(name):
        raise Refusal(400, "a Xet hash is 64 hex digits")
    return name
