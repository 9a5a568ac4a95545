"""What was asked of a Hub, in order, for tests to look at. Tokens are named, never kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

_KEPT = 20_000


@dataclass
class Exchange:
    """One request and its answer.

    `host` is the Host header, so the storage origin can be told from the endpoint. `auth` names the
    account ("write", "read", "guest"), or is "xet" for a chunk store token, "unknown" for a token
    of nobody, None without an Authorization header. `status` is 0 while no answer has begun: for
    ever, if the connection broke first. Sizes are bytes of bodies.
    """

    method: str
    path: str
    query: str
    host: str
    auth: str | None
    agent: str
    range: str | None
    status: int = 0
    received: int = 0
    sent: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        query = f"?{self.query}" if self.query else ""
        return f"{self.method} {self.host}{self.path}{query} -> {self.status} ({self.auth})"


class RequestLog:
    """The latest exchanges, oldest first. Iterable; safe to read while the Hub runs."""

    def __init__(self) -> None:
        self._exchanges: deque[Exchange] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def add(self, exchange: Exchange) -> None:
        """Append an exchange that has just begun."""
        with self._lock:
            self._exchanges.append(exchange)

    def clear(self) -> None:
        """Forget everything up to now."""
        with self._lock:
            self._exchanges.clear()

    def find(self, path: str = "*", *, method: str | None = None) -> list[Exchange]:
        """Return the exchanges whose path matches; `*` also matches `/`."""
        return [
            exchange
            for exchange in self
            if fnmatchcase(exchange.path, path) and method in (None, exchange.method)
        ]

    def __iter__(self) -> Iterator[Exchange]:
        with self._lock:
            return iter(list(self._exchanges))

    def __len__(self) -> int:
        return len(self._exchanges)

    def __str__(self) -> str:
        return "\n".join(map(str, self))
