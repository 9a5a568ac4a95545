"""What to tell someone whose name was not found: near names, what is absent and why, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from zoo_core import plugins
from zoo_core.architecture import Architecture
from zoo_core.errors import did_you_mean
from zoo_core.mechanism import Mechanism

Kind = Literal["mechanisms", "architectures"]

_SHOWN_NAMES, _SHOWN_PLUGINS = 12, 3


def explain(kind: Kind, name: str, records: Sequence[Mechanism | Architecture]) -> str:
    """The message of UnknownName; `records` are those that would have been found."""
    from zoo_core import catalogue

    short = name.rpartition("/")[2]
    rows = catalogue.load()
    names = dict.fromkeys(record.name for record in records)
    aliases = {alias for record in records for alias in record.aliases}
    offered = {one for row in rows.plugins.values() for one in getattr(row, kind)}
    hint = did_you_mean(short, {*names, *aliases, *offered}) or "."
    parts = [
        f"no {kind.removesuffix('s')} {name!r}{hint}",
        _loaded(kind, list(names)),
        *absences(short),
    ]
    for row in rows.offering(kind, short):
        parts.append(f"{row.name} offers it: pip install '{row.requirement}'")
    return " ".join(parts)


def absences(name: str = "") -> list[str]:
    """Which plugins failed and which are left out, with reasons; those named alike come first."""
    failed: dict[str, None] = {}
    left_out: dict[str, None] = {}
    for plugin in sorted(plugins.installed(), key=lambda one: one.entry != name):
        origin = f"{plugin.distribution} {plugin.version}"
        for failure in plugin.failures:
            failed[f"{origin} ({plugin.entry}) at {failure.phase}: {failure.reason}"] = None
        for reason in plugin.blocked:
            left_out[f"{origin} ({reason})"] = None
    lines = {"Failed": list(failed), "Left out": list(left_out)}
    return [f"{what}: {_few(some)}." for what, some in lines.items() if some]


def _loaded(kind: Kind, names: Sequence[str]) -> str:
    if not names:
        return f"No {kind} are loaded."
    more = len(names) - _SHOWN_NAMES
    tail = f" and {more} more, see `zoo list`" if more > 0 else ""
    return f"Loaded: {', '.join(names[:_SHOWN_NAMES])}{tail}."


def _few(lines: Sequence[str]) -> str:
    more = len(lines) - _SHOWN_PLUGINS
    tail = f"; and {more} more, see `zoo plugins`" if more > 0 else ""
    return "; ".join(lines[:_SHOWN_PLUGINS]) + tail
