"""Which plugins may load: the environment variables ZOO_PLUGINS, ZOO_BLOCK and ZOO_STRICT."""

from __future__ import annotations

import os
from collections.abc import Iterable

from zoo_core.distributions import Entry, normalise


class Names:
    """A comma separated list of names, each a distribution, an entry point or a record.

    `distribution/name` names an entry point or record of that distribution alone.
    """

    def __init__(self, text: str) -> None:
        self.tokens = [token for part in text.split(",") if (token := part.strip())]
        self.unmatched = set(self.tokens)

    def find(self, distribution: str, *names: str) -> str:
        """The first token that names `distribution` or one of its `names`, or an empty string."""
        for token in self.tokens:
            if _matches(token, distribution, names):
                self.unmatched.discard(token)
                return token
        return ""


def _matches(token: str, distribution: str, names: Iterable[str]) -> bool:
    owner, slash, name = token.rpartition("/")
    if slash:
        return normalise(owner) == distribution and name in names
    return token in names or normalise(token) == distribution


class Policy:
    """The three variables as they were when discovery began."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        allow = os.environ.get("ZOO_PLUGINS")
        self.allow = None if allow is None else Names(allow)
        self.block = Names(os.environ.get("ZOO_BLOCK", ""))
        self.strict = os.environ.get("ZOO_STRICT", "0") not in ("", "0")
        if self.allow is not None:
            for entry in entries:
                self.allow.find(entry.distribution, entry.name)
            # What is no distribution and no entry point may be a record, which only imports tell.
            self._maybe_records = set(self.allow.unmatched)

    def bars(self, entry: Entry) -> str:
        """Why this plugin must not be imported, or an empty string."""
        if token := self.block.find(entry.distribution, entry.name):
            return f"ZOO_BLOCK names {token}"
        if self.allow is None or self.allow.find(entry.distribution, entry.name):
            return ""
        if not self.allow.tokens:
            return "ZOO_PLUGINS is set and empty"
        owners = (token.rpartition("/")[0] for token in self._maybe_records)
        if any(normalise(owner) in ("", entry.distribution) for owner in owners):
            return ""
        return "ZOO_PLUGINS does not name it"

    def bars_record(self, entry: Entry, name: str) -> str:
        """Why a record of a plugin that was imported must be left out, or an empty string."""
        if token := self.block.find(entry.distribution, name):
            return f"ZOO_BLOCK names {token}"
        if self.allow is None or self.allow.find(entry.distribution, entry.name, name):
            return ""
        return "ZOO_PLUGINS does not name it"

    def unmatched(self) -> list[str]:
        """One line for each name in the lists that fits nothing installed."""
        lists = {"ZOO_PLUGINS": self.allow, "ZOO_BLOCK": self.block}
        return [
            f"{variable} names {token}, which is no installed distribution, entry point or record"
            for variable, names in lists.items()
            if names is not None
            for token in names.tokens
            if token in names.unmatched
        ]
