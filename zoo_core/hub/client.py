"""One conversation with a Hub: each answer is checked, each failure becomes a HubError."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

import zoo_core
from zoo_core.checkpoint import strict_json
from zoo_core.errors import HubError, ZooError
from zoo_core.hub.listing import Listing, RemoteFile
from zoo_core.hub.reference import Reference, check_endpoint, is_commit
from zoo_core.hub.watching import FileWatch, ListingWatch, watching
from zoo_core.isolation import one_line

_TOKEN = re.compile(r"[\x21-\x7e]{1,1000}")
_LISTING_LIMIT = 16 * 2**20


class Client:
    """A Hub and a cache. Its messages never contain the token.

    endpoint: by default huggingface_hub's, which HF_ENDPOINT sets.
    token: by default the one that is stored for that default endpoint; no other gets to see it.
    offline: answer from the cache alone; HF_HUB_OFFLINE does the same.
    """

    def __init__(self, *, endpoint: str | None, token: str | None, offline: bool = False) -> None:
        usual = constants.ENDPOINT.rstrip("/")
        self.endpoint = check_endpoint(usual if endpoint is None else endpoint)
        if token is not None and not (isinstance(token, str) and _TOKEN.fullmatch(token)):
            raise HubError("token must be one word of printable characters, such as hf_...")
        self.token: str | bool | None = token
        if token is None and self.endpoint != usual:
            self.token = False
        self.offline = offline or constants.is_offline_mode()
        self.api = HfApi(
            endpoint=self.endpoint,
            token=self.token,
            library_name="zoo-core",
            library_version=zoo_core.__version__,
        )

    @property
    def cache(self) -> Path:
        """The folder that everything is downloaded to, and that nothing may leave."""
        return Path(constants.HF_HUB_CACHE).expanduser().resolve()

    def folder(self, repo: str) -> Path:
        """Where the cache keeps a repository."""
        return self.cache / f"models--{repo.replace('/', '--')}"

    def commit_of(self, reference: Reference) -> str:
        """The full commit id that the revision means now, or meant when it was last pulled."""
        if reference.is_pinned:
            return reference.revision
        ref = self.folder(reference.repo) / "refs" / reference.revision
        if self.offline:
            commit = ref.read_text().strip() if ref.is_file() else ""
            if not is_commit(commit):
                raise HubError(self.uncached(str(reference)))
            return commit
        with self.translated(f"{reference} could not be looked up"):
            sha = self.api.model_info(reference.repo, revision=reference.revision).sha
        if not is_commit(sha):
            raise HubError(
                f"{self.endpoint} answers {str(sha)[:80]!r} for {reference}, which is no commit id"
            )
        return str(sha)

    def remember(self, reference: Reference, commit: str) -> None:
        """Note what a branch or tag meant, where huggingface_hub looks when it is offline."""
        if reference.is_pinned or self.offline:
            return
        ref = self.folder(reference.repo) / "refs" / reference.revision
        with suppress(OSError):  # A cache may be read-only; it is only a note.
            _replace(ref, commit.encode())

    def listing(self, repo: str, commit: str) -> Listing:
        """The checkpoint's files at a commit; asked once and kept, for a commit cannot change."""
        where = f"{repo}@{commit}"
        # Another Hub may call something else by the same names.
        hub = hashlib.sha256(self.endpoint.encode()).hexdigest()[:16]
        kept = self.folder(repo) / "zoo" / f"{commit}-{hub}.json"
        if kept.is_file():
            return Listing(where, strict_json.read(kept, _LISTING_LIMIT))
        if self.offline:
            raise HubError(self.uncached(where))
        listing = self.head(repo, commit)
        listing.refuse_pickles()
        with suppress(OSError):
            _replace(kept, strict_json.dump([vars(file) for file in listing.values()], where))
        return listing

    def head(self, repo: str, commit: str) -> Listing:
        """The checkpoint's files at a commit, asked now."""
        return Listing(f"{repo}@{commit}", self._tree(repo, commit))

    def _tree(self, repo: str, commit: str) -> Iterator[dict[str, Any]]:
        what = f"the files of {repo}@{commit} could not be listed"
        with self.translated(what), watching(ListingWatch(_LISTING_LIMIT)):
            for entry in self.api.list_repo_tree(repo, revision=commit):
                lfs = getattr(entry, "lfs", None)
                yield {
                    "name": entry.path,
                    "size": lfs.size if lfs else getattr(entry, "size", 0),
                    "oid": getattr(entry, "blob_id", None),
                    "sha256": lfs.sha256 if lfs else None,
                }

    def download(self, repo: str, commit: str, file: RemoteFile) -> Path:
        """The local path of one file, downloaded unless it is cached. Its bytes are not checked."""
        with self.translated(f"{file.name} of {repo}@{commit} could not be fetched"):
            try:
                with watching(FileWatch(commit, file)):
                    path = hf_hub_download(
                        repo,
                        file.name,
                        revision=commit,
                        endpoint=self.endpoint,
                        token=self.token,
                        local_files_only=self.offline,
                        library_name="zoo-core",
                        library_version=zoo_core.__version__,
                    )
            except LocalEntryNotFoundError as error:
                if not self.offline:
                    raise (error.__cause__ or error) from error
                raise HubError(
                    f"{file.name} of {repo}@{commit} is not in the cache, which holds only a part "
                    "of it; pull it once without offline"
                ) from error
        if not Path(path).resolve().is_relative_to(self.cache):
            raise HubError(f"{path} is a link out of the cache {self.cache}; delete it")
        return Path(path)

    def fetch(self, repo: str, commit: str, file: RemoteFile) -> Path:
        """Like `download`, and the bytes are those of the commit. Wrong ones are not kept."""
        was_cached = (self.folder(repo) / "snapshots" / commit / file.name).exists()
        path = self.download(repo, commit, file)
        if not file.is_at(path):
            self.discard(path)
            if not was_cached or self.offline:
                raise HubError(
                    f"{file.name} of {repo}@{commit} does not have the hash of that commit: it is "
                    "damaged or was tampered with; it was deleted from the cache, pull it again"
                )
            return self.fetch(repo, commit, file)
        return path

    def discard(self, path: Path) -> None:
        """Delete a file from the cache, and its bytes unless they are another commit's good ones.

        The cache names bytes by their hash, and commits link to them.
        """
        target = path.resolve()
        if not target.is_relative_to(self.cache):
            path.unlink()
            return
        hashed = {40: {"oid": target.name}, 64: {"oid": "", "sha256": target.name}}
        name = hashed.get(len(target.name))
        size = target.stat().st_size
        if name is None or not RemoteFile(name=path.name, size=size, **name).is_at(target):
            target.unlink()
        path.unlink(missing_ok=True)

    @contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Turn whatever the client raises inside into a HubError that begins with `what`."""
        try:
            yield
        except ZooError:
            raise
        except Exception as error:
            raise HubError(f"{what}: {self._reason(error)}") from error

    def _reason(self, error: Exception) -> str:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        if isinstance(error, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, which allows no request"
        if isinstance(error, GatedRepoError):
            return (
                f"access is gated; ask for it on {self.endpoint}, then give a token "
                f"({self._where_tokens_go()})"
            )
        if isinstance(error, RevisionNotFoundError):
            return "the repository has no such revision"
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"{self.endpoint} has no such repository, or it is private and needs a token that "
                f"may see it ({self._where_tokens_go()})"
            )
        if status == 401 and not self._sends_a_token():
            return (
                f"{self.endpoint} asks for a token, and none was given ({self._where_tokens_go()})"
            )
        if status == 401:
            return (
                f"the token is not accepted; it was revoked or mistyped ({self._where_tokens_go()})"
            )
        if status == 403:
            return "the token may not do this; it needs the right to write to this namespace"
        if type(error) is ConnectionError and self.endpoint != "https://huggingface.co":
            return (
                f"{self.said(error)}; {self.endpoint} may have no Xet storage, set "
                "HF_HUB_DISABLE_XET=1 before Python starts"
            )
        if isinstance(error, httpx2.TransportError):
            return f"{self.endpoint} could not be reached, or broke off ({self.said(error)})"
        return self.said(error)

    def _where_tokens_go(self) -> str:
        if self.endpoint == constants.ENDPOINT.rstrip("/"):
            return "HF_TOKEN, hf auth login, or token="
        return "token=, or ZOO_HUB_TOKEN for the command line"

    def _sends_a_token(self) -> bool:
        return self.token is not False and bool(self.token or get_token())

    def said(self, error: Exception) -> str:
        """An error in one line, without any token."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(self.token, str):
            text = text.replace(self.token, "hf_***")
        return one_line(re.sub(r"hf_[A-Za-z]{20,}", "hf_***", text))

    def uncached(self, what: str) -> str:
        """What to say offline of what was never fetched."""
        return f"{what} is not in the cache {self.cache}; pull it once without offline"


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{hashlib.sha256(content).hexdigest()[:8]}.part")
    beside.write_bytes(content)
    beside.replace(path)
