"""A Hub in a thread, for tests, and a Hub as a server, for a lab without internet."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from zoo_core.errors import ZooError
from zoo_core.testing.hub import changes
from zoo_core.testing.hub.accounts import Accounts, Signer
from zoo_core.testing.hub.app import App
from zoo_core.testing.hub.attributes import is_large, large_patterns
from zoo_core.testing.hub.cas import ChunkStore
from zoo_core.testing.hub.changes import Add, Change, Note, Remove
from zoo_core.testing.hub.faults import Faults
from zoo_core.testing.hub.log import RequestLog
from zoo_core.testing.hub.repository import MAIN, File, Repository
from zoo_core.testing.hub.routes.repos import new_repository
from zoo_core.testing.hub.store import Store
from zoo_core.testing.hub.wire import Services


class Hub:
    """A Hub on the loopback interface, for as long as the `with` block runs.

        with Hub() as hub:
            api = HfApi(endpoint=hub.endpoint, token=hub.tokens.write)

    Without a `directory` it forgets everything at the end. `port` 0 takes a free one. `xet` False
    makes a Hub without chunk storage, on which clients must set HF_HUB_DISABLE_XET=1; `page` is the
    number of items in a page of a listing, `part` the bytes above which LFS uploads go in parts.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        port: int = 0,
        *,
        xet: bool = True,
        page: int = 1000,
        part: int = 1_000_000_000,
    ) -> None:
        self.log = RequestLog()
        self.faults = Faults()
        self._at_close = ExitStack()
        try:
            self._socket = self._at_close.enter_context(_bind(port))
            self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
            self.store = Store(Path(directory or self._scratch / "hub"))
            self._at_close.callback(self.store.close)
            self.accounts = Accounts(self.store)
            chunks = ChunkStore(self.store) if xet and find_spec("hf_xet") else None
        except BaseException:
            self.close()
            raise
        self.tokens = self.accounts.tokens
        services = Services(self.store, self.accounts, Signer(), chunks, page, part)
        self._server = _server(App(services, self.log, self.faults))
        self._thread = threading.Thread(target=self.run, name="zoo-hub", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise ZooError(f"the Hub at {self.endpoint} did not start; its log says why")
            time.sleep(0.002)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.close()

    def run(self) -> None:
        """Serve in this thread, until a signal or the end of the `with` block."""
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        """Release the directory and the port of a Hub that no longer runs."""
        self._at_close.close()

    def env(
        self,
        token: str | None = "write",
        *,
        xet: bool = False,
        home: str | os.PathLike[str] | None = None,
    ) -> dict[str, str]:
        """Return the environment for a subprocess whose Hub this is: `{**os.environ, **hub.env()}`.

        `token` names an account ("write", "read", "guest", "unknown") or is None for an anonymous
        client. `home` is HF_HOME with all caches; by default one that is shared by all callers and
        removed with the Hub.
        """
        home = Path(home or self._scratch / "home").absolute()
        values = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_XET_CACHE": str(home / "xet"),
            "HF_ASSETS_CACHE": str(home / "assets"),
            "HF_MODULES_CACHE": str(home / "modules"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_TOKEN": getattr(self.tokens, token) if token else "",
            "HF_HUB_DISABLE_XET": "0" if xet else "1",
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
        }
        quiet = ("TELEMETRY", "PROGRESS_BARS", "UPDATE_CHECK")
        direct = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return {**values, **{f"HF_HUB_DISABLE_{name}": "1" for name in quiet}, **direct}

    def create(
        self,
        repo_id: str,
        files: Mapping[str, bytes] | None = None,
        *,
        kind: str = "models",
        private: bool = False,
        gated: str | bool = False,
    ) -> str:
        """Create a repository without a client and return its head; see `commit` for `files`."""
        author = repo_id.split("/")[0]
        new_repository(self.store, kind, repo_id, author=author, private=private, gated=gated)
        return self.commit(repo_id, files or {}, kind=kind)

    def commit(
        self,
        repo_id: str,
        files: Mapping[str, bytes | None],
        *,
        branch: str = "main",
        kind: str = "models",
        title: str = "commit",
    ) -> str:
        """Commit files (None removes one) without a client and return the new head.

        Large files by .gitattributes become LFS files, as they would through a client.
        """
        repo = self.repository(repo_id, kind)
        changed: list[Change] = []
        for path, data in files.items():
            changed.append(
                Remove(path) if data is None else Add(path, self._file(repo, path, data))
            )
        ref = f"refs/heads/{branch}"
        return changes.commit(self.store, repo, ref, changed, Note(title, repo.owner)).oid

    def head(self, repo_id: str, revision: str = "main", *, kind: str = "models") -> str:
        """Return the commit id of a branch or tag."""
        commit = self.repository(repo_id, kind).resolve(revision)
        if commit is None:
            raise ZooError(f"{repo_id} has no revision {revision!r} on {self.endpoint}")
        return commit.oid

    def repository(self, repo_id: str, kind: str = "models") -> Repository:
        """Return a repository as it is now."""
        repo = self.store.get(kind, repo_id)
        if repo is None:
            raise ZooError(f"there is no {kind[:-1]} {repo_id!r} on {self.endpoint}; create it")
        return repo

    @cached_property
    def _scratch(self) -> Path:
        """Return a directory that lives as long as the Hub, made on first need."""
        scratch = tempfile.TemporaryDirectory(prefix="zoo-hub-", ignore_cleanup_errors=True)
        return Path(self._at_close.enter_context(scratch))

    def _file(self, repo: Repository, path: str, data: bytes) -> File:
        file = self.store.add(data)
        attributes = repo.commits[repo.refs[MAIN]].files.get(".gitattributes")
        patterns = large_patterns(self.store.read(attributes).decode()) if attributes else []
        return (is_large(path, len(data), patterns) and self.store.large(file.sha256)) or file


def serve(
    directory: str | os.PathLike[str],
    port: int = 0,
    *,
    ready: Callable[[Hub], None] = lambda hub: None,
) -> None:
    """Serve the repositories of a directory until Ctrl-C; they are there again the next time.

    `ready` is called once, when the port is bound: print `hub.endpoint` and `hub.tokens` there.
    Raises ZooError if the port is taken or another Hub serves the directory.
    """
    hub = Hub(directory, port)
    try:
        ready(hub)
        with suppress(KeyboardInterrupt):
            hub.run()
    finally:
        hub.close()


class _Protocol(H11Protocol):
    """Shows each request its transport, so that a fault can cut the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}


def _server(app: App) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=_Protocol,
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def _bind(port: int) -> socket.socket:
    """Listen on the loopback interface only; connections wait until the server runs."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ZooError(
            f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); choose another, or 0"
        ) from error
    return listener
