"""Who is calling: accounts, their tokens, and signatures for URLs that carry no token."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import string
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from zoo_core.errors import ZooError
from zoo_core.testing.hub.store import Store

_XET_SECONDS = 3600


@dataclass(frozen=True)
class Account:
    """One token: its name in the log, the user it belongs to and what it may do."""

    name: str
    user: str
    role: str
    token: str
    orgs: tuple[str, ...] = ()

    def owns(self, namespace: str) -> bool:
        """Tell whether the namespace is this user's own or an organisation of theirs."""
        return namespace == self.user or namespace in self.orgs


@dataclass(frozen=True)
class Tokens:
    """The tokens a test needs, as strings.

    `write` and `read` belong to the user `zoo` (a member of `lab`), `guest` is another user's write
    token, `unknown` is well formed but nobody's.
    """

    write: str
    read: str
    guest: str
    unknown: str


class Accounts:
    """All accounts of a Hub, kept in its directory so that tokens survive a restart."""

    def __init__(self, store: Store) -> None:
        path = store.directory / "hub.json"
        if not path.exists():
            accounts = [asdict(account) for account in _first_accounts()]
            store.write_json(path, {"format": 1, "accounts": accounts})
        self._by_token = {account.token: account for account in _read(path)}
        named = {account.name: account.token for account in self._by_token.values()}
        self.tokens = Tokens(
            **{name: named.get(name, _new_token()) for name in ("write", "read", "guest")},
            unknown=_new_token(),
        )

    def find(self, token: str) -> Account | None:
        """Return the account of a token, or None for an unknown or revoked one."""
        return self._by_token.get(token)

    def revoke(self, token: str) -> None:
        """Stop accepting a token, until the Hub starts again."""
        self._by_token.pop(token, None)


class Signer:
    """Signs what a URL or a short-lived token allows, with a key that dies with the process.

    This is why the storage origin needs no token: whoever has the link may use the link.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def sign(self, *what: str) -> str:
        """Return the signature of a few words."""
        return hmac.new(self._key, "\0".join(what).encode(), hashlib.sha256).hexdigest()[:32]

    def signed(self, signature: str, *what: str) -> bool:
        """Tell whether `sign` gave this signature for these words."""
        return hmac.compare_digest(self.sign(*what).encode(), signature.encode())

    def xet_token(self, scope: str) -> tuple[str, int]:
        """Return a token for the chunk store and the second at which it expires."""
        expires = int(time.time()) + _XET_SECONDS
        return f"xet-{scope}-{expires}-{self.sign('xet', scope, str(expires))}", expires

    def xet_scope(self, token: str) -> str | None:
        """Return the scope of a live chunk store token: "read", "write" or None."""
        parts = token.split("-")
        if len(parts) != 4 or parts[0] != "xet" or not parts[2].isdecimal():
            return None
        live = int(parts[2]) > time.time() and self.signed(parts[3], "xet", parts[1], parts[2])
        return parts[1] if live else None


def bearer(headers: Mapping[str, str]) -> str | None:
    """Return the token of an Authorization header, or None where there is no header."""
    value = headers.get("authorization")
    return None if value is None else value.removeprefix("Bearer ").strip()


def _first_accounts() -> tuple[Account, ...]:
    return (
        Account("write", "zoo", "write", _new_token(), orgs=("lab",)),
        Account("read", "zoo", "read", _new_token(), orgs=("lab",)),
        Account("guest", "guest", "write", _new_token()),
    )


def _new_token() -> str:
    return "hf_" + "".join(secrets.choice(string.ascii_letters) for _ in range(34))


def _read(path: Path) -> list[Account]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [
            Account(**{**account, "orgs": tuple(account["orgs"])}) for account in data["accounts"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ZooError(
            f"{path} does not list accounts ({error}); correct it, or delete it for new tokens"
        ) from error
