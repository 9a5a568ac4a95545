"""What mechanisms hand from layer to layer within one forward, in both bridges."""

from __future__ import annotations

from typing import Any


class Carry:
    """State handed from layer to layer within one forward. Not a dict: wrappers copy dicts."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    def get(self, key: str | None) -> Any:
        """What the site `key` wrote in this forward, or None."""
        return self._state.get(key) if key is not None else None

    def __setitem__(self, key: str, value: Any) -> None:
        self._state[key] = value
