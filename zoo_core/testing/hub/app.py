"""The ASGI application: identifies the caller, finds the route, applies faults, keeps the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from zoo_core.testing.hub.access import identify
from zoo_core.testing.hub.accounts import bearer
from zoo_core.testing.hub.faults import Fault, Faults
from zoo_core.testing.hub.log import Exchange, RequestLog
from zoo_core.testing.hub.routes import router
from zoo_core.testing.hub.wire import Call, Refusal, Services

_LOCAL = ("127.0.0.1", "localhost")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class App:
    """The Hub as an ASGI application; the server puts its transport into the scope's state."""

    services: Services
    log: RequestLog
    faults: Faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = self._begin(scope)
        struck = self.faults.take(exchange.method, exchange.path)
        exchange.faults += [fault.name for fault in struck]
        connection = _Connection(scope, receive, send, exchange, struck)
        try:
            for fault in struck:
                await asyncio.sleep(fault.delay)
                if fault.before:
                    await asyncio.to_thread(fault.before)
            if any(fault.drop == "before" for fault in struck):
                raise ClientDisconnect
            response = await self._answer(scope, connection.receive, struck)
            if any(fault.drop == "after" for fault in struck):
                raise ClientDisconnect
            await response(scope, connection.receive, connection.send)
        except ClientDisconnect:
            await connection.cut()

    def _begin(self, scope: Scope) -> Exchange:
        headers = Headers(scope=scope)
        exchange = Exchange(
            method=scope["method"],
            path=unquote(scope["raw_path"].decode("latin-1")),
            query=scope["query_string"].decode("latin-1"),
            host=headers.get("host", ""),
            auth=self._name(bearer(headers)),
            agent=headers.get("user-agent", ""),
            range=headers.get("range"),
        )
        self.log.add(exchange)
        return exchange

    def _name(self, token: str | None) -> str | None:
        """Return how the log calls a token."""
        if token is None:
            return None
        account = self.services.accounts.find(token)
        if account:
            return account.name
        return "xet" if self.services.signer.xet_scope(token) else "unknown"

    async def _answer(self, scope: Scope, receive: Receive, struck: Sequence[Fault]) -> Response:
        response = await self._response(scope, receive, struck)
        response.headers["X-Request-Id"] = uuid4().hex
        return response

    async def _response(self, scope: Scope, receive: Receive, struck: Sequence[Fault]) -> Response:
        request = Request(scope, receive)
        try:
            for fault in struck:
                if fault.status:
                    raise Refusal(fault.status, "this is a fault, made on purpose")
            return await self._route(request)
        except Refusal as refusal:
            return refusal.response()
        except ClientDisconnect:
            raise
        except Exception:
            logger.exception("the Hub failed at %s %s", scope["method"], request.url.path)
            return Refusal(500, "the Hub itself failed; its log says why").response()

    async def _route(self, request: Request) -> Response:
        host = request.headers.get("host", "").partition(":")[0]
        if host not in _LOCAL:
            # A page in a browser may reach this port under a name of its own (DNS rebinding).
            raise Refusal(421, f"this Hub answers only as {' or '.join(_LOCAL)}")
        found = router.find(request.method, request.scope["raw_path"])
        if found is None:
            raise Refusal(404, f"there is nothing at {request.method} {request.url.path}")
        handler, args = found
        xet = request.url.path.startswith("/xet/")
        account = None if xet else identify(self.services.accounts, bearer(request.headers))
        return await handler(Call(self.services, request, account, args))


class _Connection:
    """The two ends of a request, counting what passes and spoiling it as the faults say."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        exchange: Exchange,
        faults: Sequence[Fault],
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._exchange, self._faults = exchange, faults
        self._change = [fault.change for fault in faults if fault.change]
        self._truncate = next((f.truncate for f in faults if f.truncate is not None), None)
        self._start: Message | None = None
        self._body = b""

    async def cut(self) -> None:
        """Break the connection at once, and wait until it is broken."""
        self._scope["state"]["transport"].abort()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def receive(self) -> Message:
        """Pass on a message from the client."""
        message = await self._receive()
        self._exchange.received += len(message.get("body", b""))
        for fault in self._faults:
            if fault.cut_upload is not None and self._exchange.received > fault.cut_upload:
                raise ClientDisconnect
        return message

    async def send(self, message: Message) -> None:
        """Pass on a message to the client."""
        if message["type"] == "http.response.start":
            self._exchange.status = message["status"]
            self._spoil_headers(MutableHeaders(raw=message["headers"]))
            if self._change:
                self._start = message
                return
        elif self._change:
            await self._send_changed(message)
            return
        await self._send_counted(message)

    def _spoil_headers(self, headers: MutableHeaders) -> None:
        for fault in self._faults:
            for name, value in fault.headers.items():
                del headers[name]
                if value is not None:
                    headers[name] = value

    async def _send_changed(self, message: Message) -> None:
        """Collect the body; at its end, change it and send it with its new length."""
        self._body += message.get("body", b"")
        if message.get("more_body") or self._start is None:
            return
        if self._scope["method"] != "HEAD":
            for change in self._change:
                self._body = change(self._body)
            MutableHeaders(raw=self._start["headers"])["content-length"] = str(len(self._body))
        await self._send_counted(self._start)
        await self._send_counted({"type": "http.response.body", "body": self._body})

    async def _send_counted(self, message: Message) -> None:
        body = message.get("body", b"")
        if self._truncate is not None and self._exchange.sent + len(body) > self._truncate:
            body = body[: self._truncate - self._exchange.sent]
            await self._send({**message, "body": body, "more_body": True})
            self._exchange.sent += len(body)
            await self._flush()
            raise ClientDisconnect
        self._exchange.sent += len(body)
        await self._send(message)

    async def _flush(self) -> None:
        """Wait until what was sent has left: an abort would take it back."""
        while self._scope["state"]["transport"].get_write_buffer_size():
            await asyncio.sleep(0.01)
