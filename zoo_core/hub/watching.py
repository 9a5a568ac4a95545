"""Look at each answer of a Hub before huggingface_hub acts on it.

The client joins some headers to paths (the blob of a file is named by its ETag), and reads bodies
of any size. Both would be too late to check afterwards.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import get_session

from zoo_core.errors import HubError
from zoo_core.hub.listing import RemoteFile

Watch = Callable[[httpx2.Response], None]

_ETAG = re.compile(r'(W/)?"?[0-9A-Za-z][0-9A-Za-z_-]{0,199}"?')
_PAGES = 100
_LOCK = threading.Lock()


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Show every answer to `watch`, which raises HubError to end the request.

    The client's session is the whole process's; answers to other threads are none of ours.
    """
    session = get_session()
    thread = threading.get_ident()

    def hook(response: httpx2.Response) -> None:
        if threading.get_ident() == thread:
            watch(response)

    with _LOCK:
        hooks = session.event_hooks
        session.event_hooks = {**hooks, "response": [*hooks["response"], hook]}
    try:
        yield
    finally:
        with _LOCK:
            hooks = session.event_hooks
            others = [other for other in hooks["response"] if other is not hook]
            session.event_hooks = {**hooks, "response": others}


class FileWatch:
    """Refuses a file whose headers are not those of the listed one."""

    def __init__(self, commit: str, file: RemoteFile) -> None:
        self.commit = commit
        self.file = file

    def __call__(self, response: httpx2.Response) -> None:
        """Check the answer to a HEAD request, which decides where bytes go and how many."""
        headers = response.headers
        if response.request.method != "HEAD" or response.status_code >= 400:
            return
        for name in ("ETag", "X-Linked-Etag"):
            if name in headers and not _ETAG.fullmatch(headers[name]):
                self._refuse(name, headers[name])
        if headers.get("X-Repo-Commit", self.commit) != self.commit:
            self._refuse("X-Repo-Commit", headers["X-Repo-Commit"])
        size = headers.get("X-Linked-Size")
        if size is None and response.status_code == 200:
            size = headers.get("Content-Length")
        if size is not None and size != str(self.file.size):
            self._refuse("the size", size)

    def _refuse(self, what: str, value: str) -> None:
        raise HubError(f"the Hub answers {value[:80]!r} as {what} of {self.file.name}; refused")


class ListingWatch:
    """Refuses listings that do not end."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pages = 0

    def __call__(self, response: httpx2.Response) -> None:
        """Count pages, and believe no page that is announced too large."""
        self.pages += 1
        length = response.headers.get("Content-Length", "0")
        if self.pages > _PAGES or not length.isdecimal() or int(length) > self.limit:
            raise HubError(f"the Hub's listing has more than {_PAGES} pages, or too large ones")
