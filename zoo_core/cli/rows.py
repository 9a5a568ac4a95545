"""Records as JSON objects, for `zoo list --json` and `zoo show --json`."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from zoo_core.architecture import Architecture
from zoo_core.mechanism import Mechanism, Options

if TYPE_CHECKING:
    from zoo_core.catalogue import Preset

Row = dict[str, Any]


def mechanism(record: Mechanism, *, contested: bool) -> Row:
    """What a list shows of a mechanism."""
    supports = asdict(record.supports)
    return {
        "name": record.name,
        "family": record.family,
        "distribution": record.distribution,
        "version": record.version,
        "qualified": record.qualified,
        "contested": contested,
        "aliases": list(record.aliases),
        "summary": record.summary,
        "swap": record.swap,
        "time": record.time,
        "memory": record.memory,
        "supports": {**supports, "needs": sorted(supports["needs"])},
    }


def mechanism_details(record: Mechanism, *, contested: bool) -> Row:
    """Everything a mechanism says about itself."""
    paper = record.paper
    return {
        **mechanism(record, contested=contested),
        "formula": record.formula,
        "paper": {**asdict(paper), "link": paper.link} if paper else None,
        "options": options(record.options),
        "deviations": record.deviations,
        "api": record.api,
    }


def options(kind: type[Options]) -> list[Row]:
    """One object for each option: type, default, bounds, choices, cap and help."""
    hints = get_type_hints(kind)
    return [
        {
            "name": spec.name,
            "type": _type_name(hints[spec.name]),
            "default": spec.default,
            **{key: spec.metadata.get(key) for key in ("low", "high", "choices", "at_most")},
            "help": spec.metadata.get("help", ""),
        }
        for spec in fields(kind)
    ]


def _type_name(hint: Any) -> str:
    parts = get_args(hint) or (hint,)
    return " or ".join("None" if one is types.NoneType else one.__name__ for one in parts)


def architecture(record: Architecture, *, contested: bool) -> Row:
    """Everything a model family says about itself."""
    return {
        "name": record.name,
        "library": record.library,
        "distribution": record.distribution,
        "version": record.version,
        "qualified": record.qualified,
        "contested": contested,
        "aliases": list(record.aliases),
        "summary": record.summary,
        "default": record.default,
    }


def preset(record: Preset) -> Row:
    """Everything the catalogue says about a preset."""
    return {
        "name": record.name,
        "architecture": record.architecture,
        "attention": _plain(record.attention),
        "max_length": record.max_length,
        "model": _plain(record.model_kwargs),
        "summary": record.summary,
        "source": str(record.source),
    }


def _plain(value: Any) -> Any:
    """Read-only mappings and tuples as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value
