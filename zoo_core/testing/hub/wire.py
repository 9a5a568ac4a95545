"""How the Hub speaks HTTP: routes on the raw path, calls, refusals, pages and byte ranges."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, unquote, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from zoo_core.errors import ZooError
from zoo_core.testing.hub.accounts import Account, Accounts, Signer
from zoo_core.testing.hub.cas import ChunkStore
from zoo_core.testing.hub.repository import KINDS
from zoo_core.testing.hub.store import Store, blocks

Item = TypeVar("Item")


class Refusal(ZooError):
    """An error answer. `code` is what the client turns into an exception class."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers = dict(headers or {})
        self.body = {"error": message, **body}

    def response(self) -> Response:
        """Return the answer: JSON, with the code and the message in headers too."""
        line = self.message.encode("ascii", "backslashreplace").decode().replace("\n", " ")
        headers = {**self.headers, "X-Error-Message": line}
        if self.code:
            headers["X-Error-Code"] = self.code
        return JSONResponse(self.body, self.status, headers)


@dataclass(frozen=True)
class Services:
    """What the routes work with. `page` is items a page, `part` bytes a part of an LFS upload."""

    store: Store
    accounts: Accounts
    signer: Signer
    chunks: ChunkStore | None
    page: int
    part: int


@dataclass(frozen=True)
class Call:
    """One request on its route: who calls, with which arguments of the path."""

    services: Services
    request: Request
    account: Account | None
    args: Mapping[str, str]

    @property
    def store(self) -> Store:
        """Return the store of the Hub."""
        return self.services.store

    @property
    def base(self) -> str:
        """Return the origin the client used, without a trailing slash."""
        return f"http://{self.request.headers['host']}"

    @property
    def storage(self) -> str:
        """Return the other name of this machine: another origin, as the real Hub's storage is."""
        host, _, port = self.request.headers["host"].partition(":")
        return f"http://{'localhost' if host == '127.0.0.1' else '127.0.0.1'}:{port}"

    def flag(self, name: str) -> bool:
        """Return a boolean of the query."""
        return self.request.query_params.get(name, "").lower() in ("1", "true")

    async def json(self) -> dict[str, Any]:
        """Return the JSON object of the body, refusing anything else."""
        body = await self.request.body()
        try:
            data = json.loads(body or b"{}")
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise Refusal(400, "the body must be a JSON object")
        return data


class Handler(Protocol):
    """A function that answers the calls of one route."""

    async def __call__(self, call: Call) -> Response:
        """Answer a call."""


@dataclass(frozen=True)
class Route:
    """A method, a path pattern and its handler.

    Segments of a pattern: literal; `{name}`, one segment, unquoted; `{name*}`, all that follow;
    `<repo>` or `<repo>.git`, a kind and an id (after /api the kind is always there; elsewhere
    models have none).
    """

    method: str
    parts: tuple[str, ...]
    handler: Handler

    def match(self, segments: Sequence[str]) -> dict[str, str] | None:
        """Return the arguments in a path of this route, or None for another path."""
        args: dict[str, str] = {}
        rest = list(segments)
        for position, part in enumerate(self.parts):
            if part.endswith("*}"):
                return {**args, part[1:-2]: "/".join(rest)} if rest else None
            if part.startswith("<repo>"):
                found = _take_repo(rest, part.removeprefix("<repo>"), api=position > 0)
                if found is None:
                    return None
                args |= found
            elif not rest:
                return None
            elif part.startswith("{"):
                args[part[1:-1]] = rest.pop(0)
            elif rest.pop(0) != part:
                return None
        return None if rest else args


@dataclass
class Router:
    """Routes in the order they were declared."""

    routes: list[Route] = field(default_factory=list)

    def on(self, method: str, pattern: str) -> Callable[[Handler], Handler]:
        """Declare the decorated function as the handler of a route."""

        def declare(handler: Handler) -> Handler:
            self.routes.append(Route(method, tuple(pattern.strip("/").split("/")), handler))
            return handler

        return declare

    def find(self, method: str, raw_path: bytes) -> tuple[Handler, dict[str, str]] | None:
        """Return the handler of a request, or None.

        The path is split while it is still quoted: a branch `feat/x` is one segment, `feat%2Fx`.
        """
        segments = [unquote(part) for part in raw_path.decode("latin-1").strip("/").split("/")]
        for route in self.routes:
            if route.method == method:
                args = route.match(segments)
                if args is not None:
                    return route.handler, args
        return None


class Bytes(Response):
    """A part of a file, read while it is sent."""

    def __init__(self, path: Path, start: int, stop: int, status: int, headers: Mapping[str, str]):
        super().__init__(
            b"",
            status,
            {**headers, "Content-Length": str(stop - start), "Accept-Ranges": "bytes"},
            "application/octet-stream",
        )
        self._path, self._start, self._stop = path, start, stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the head, then (unless asked for the head only) the bytes."""
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        if scope["method"] != "HEAD":
            with blocks(self._path, self._start, self._stop) as pieces:
                for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def serve_file(request: Request, path: Path, headers: Mapping[str, str]) -> Response:
    """Answer with a file or with the part that the Range header asks for."""
    size = path.stat().st_size
    span = parse_range(request.headers.get("range"), size)
    if span is None:
        return Bytes(path, 0, size, 200, headers)
    start, stop = span
    return Bytes(
        path, start, stop, 206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    )


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return (start, stop) of a single byte range, or None where the whole is to be sent.

    As HTTP wants, what is not a valid single range is ignored, and one outside the file is 416.
    """
    unit, _, spec = (header or "").partition("=")
    first, dash, last = spec.strip().partition("-")
    if unit.strip() != "bytes" or not dash or not all(n.isdecimal() for n in (first, last) if n):
        return None
    if first:
        start, stop = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    elif last:
        start, stop = max(0, size - int(last)), size
    else:
        return None
    if start >= stop:
        raise Refusal(
            416,
            f"range {header} is outside {size} bytes",
            None,
            {"Content-Range": f"bytes */{size}"},
        )
    return start, stop


def paged(call: Call, items: Sequence[Item], render: Callable[[Item], Any], size: int) -> Response:
    """Answer with one page of items and, where there are more, a link to the next."""
    query = call.request.query_params
    cursor = query.get("cursor", "0")
    start = int(cursor) if cursor.isdecimal() else 0
    limit = query.get("limit", "")
    size = min(size, int(limit)) if limit.isdecimal() and int(limit) else size
    headers = {}
    if start + size < len(items):
        again = [(key, value) for key, value in query.multi_items() if key != "cursor"]
        path = quote(call.request.scope["raw_path"].decode("latin-1"), safe="/%")
        url = f"{call.base}{path}?{urlencode([*again, ('cursor', str(start + size))])}"
        headers["Link"] = f'<{url}>; rel="next"'
    return JSONResponse([render(item) for item in items[start : start + size]], headers=headers)


def ok(**body: Any) -> Response:
    """Answer with success."""
    return JSONResponse({"success": True, **body})


def _take_repo(rest: list[str], suffix: str, *, api: bool) -> dict[str, str] | None:
    """Take kind, namespace and name off the front of the segments."""
    kind = "models"
    if api or (rest and rest[0] in KINDS[1:]):
        kind = rest.pop(0) if rest else ""
    if kind not in KINDS or len(rest) < 2 or not rest[1].endswith(suffix):
        return None
    owner, name = rest.pop(0), rest.pop(0).removesuffix(suffix)
    return {"kind": kind, "repo": f"{owner}/{name}"}
