"""Things that go wrong on purpose: each fault waits for matching requests and spoils them.

    hub.faults.truncate(100, path="*/resolve/*")
    hub.faults.error(500, path="*/commit/*")              # once
    hub.faults.meanwhile(lambda: hub.commit("zoo/m", {"a": b"2"}), path="*/tree/*")

`path` is matched against the decoded path without the query; `*` also matches `/`. A fault passes
over the first `skip` matches, then strikes `times` times (None: for ever).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypedDict, Unpack


class Where(TypedDict, total=False):
    """Which requests a fault strikes."""

    path: str
    method: str
    skip: int
    times: int | None


@dataclass
class Fault:
    """What happens to a request. `hits` counts the requests it has struck.

    drop          "before": cut the connection unread; "after": do the work, then cut without answer
    cut_upload    cut the connection after this many bytes of the request body
    truncate      announce the whole body, send this many bytes of it, cut
    change        replace the body; the announced length follows
    """

    name: str
    path: str = "*"
    method: str | None = None
    skip: int = 0
    times: int | None = 1
    before: Callable[[], object] | None = None
    delay: float = 0.0
    status: int | None = None
    drop: str | None = None
    cut_upload: int | None = None
    truncate: int | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)
    change: Callable[[bytes], bytes] | None = None
    hits: int = 0

    def strikes(self, method: str, path: str) -> bool:
        """Tell whether this request is struck, and count it."""
        if self.method not in (None, method) or not fnmatchcase(path, self.path):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        self.hits += 1
        return True


class Faults:
    """The faults in wait. Every method adds one and returns it."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()

    def error(self, status: int = 500, **where: Unpack[Where]) -> Fault:
        """Answer with an error and do nothing. Clients retry 429 and 5xx after a second or more."""
        return self._add(Fault("error", status=status, **where))

    def slow(self, seconds: float, **where: Unpack[Where]) -> Fault:
        """Wait before handling the request."""
        return self._add(Fault("slow", delay=seconds, **where))

    def drop(self, *, answered: bool = False, **where: Unpack[Where]) -> Fault:
        """Cut the connection without an answer; with `answered` the work has been done."""
        return self._add(Fault("drop", drop="after" if answered else "before", **where))

    def cut_upload(self, after: int, **where: Unpack[Where]) -> Fault:
        """Cut the connection when more than `after` bytes of the request body have come."""
        return self._add(Fault("cut upload", cut_upload=after, **where))

    def truncate(self, after: int, **where: Unpack[Where]) -> Fault:
        """Cut the connection after `after` bytes of a body announced in full."""
        return self._add(Fault("truncate", truncate=after, **where))

    def corrupt(self, offset: int = -1, **where: Unpack[Where]) -> Fault:
        """Invert one byte of the body: the right size, the right headers, the wrong bytes."""
        return self._add(Fault("corrupt", change=lambda body: _invert(body, offset), **where))

    def body(self, change: Callable[[bytes], bytes], **where: Unpack[Where]) -> Fault:
        """Replace the body by what `change` makes of it."""
        return self._add(Fault("body", change=change, **where))

    def rewrite(self, change: Callable[[Any], Any], **where: Unpack[Where]) -> Fault:
        """Replace a JSON body by what `change` makes of its value: hostile names, ids, sizes."""
        return self._add(
            Fault("rewrite", change=lambda body: _dumps(change(json.loads(body))), **where)
        )

    def headers(self, headers: Mapping[str, str | None], **where: Unpack[Where]) -> Fault:
        """Set or (None) remove response headers: ETag, X-Linked-Etag, X-Repo-Commit, Location."""
        return self._add(Fault("headers", headers=headers, **where))

    def meanwhile(self, action: Callable[[], object], **where: Unpack[Where]) -> Fault:
        """Run something, such as a commit to the branch, just before the request is handled."""
        return self._add(Fault("meanwhile", before=action, **where))

    def clear(self) -> None:
        """Remove every fault."""
        with self._lock:
            self._faults.clear()

    def take(self, method: str, path: str) -> list[Fault]:
        """Return the faults that strike this request, oldest first."""
        with self._lock:
            return [fault for fault in self._faults if fault.strikes(method, path)]

    def _add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def _invert(body: bytes, offset: int) -> bytes:
    if not body:
        return body
    spoiled = bytearray(body)
    spoiled[offset] ^= 0xFF
    return bytes(spoiled)
