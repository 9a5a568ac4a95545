"""Model cards: the YAML at the top of README.md, checked and turned into tags as the Hub does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_TAGGED = {"license": "license", "base_model": "base_model", "datasets": "dataset", "language": ""}


def metadata(text: str) -> dict[str, Any]:
    """Return the metadata of a card, empty where there is none. Raises ValueError if malformed."""
    found = _FRONT_MATTER.match(text)
    if not found:
        return {}
    try:
        data = yaml.safe_load(found[1])
    except yaml.YAMLError as error:
        raise ValueError(f"the metadata is not YAML: {error}") from error
    if not isinstance(data, dict | None):
        raise ValueError("the metadata must be a mapping")
    return data or {}


def problems(data: Mapping[str, Any]) -> list[str]:
    """Return what the Hub would refuse in the metadata of a model card."""
    texts = [
        f'"{key}" must be a string'
        for key in ("library_name", "pipeline_tag")
        if not isinstance(data.get(key, ""), str)
    ]
    lists = [
        f'"{key}" must be a string or a list of strings'
        for key in ("base_model", "datasets", "language", "license", "metrics")
        if not all(isinstance(item, str) for item in _listed(data.get(key)))
    ]
    tags = data.get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        lists.append('"tags" must be a list of strings')
    return [*texts, *lists, *_result_problems(data.get("model-index") or [])]


def facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the Hub derives from a card: tags, pipeline_tag and library_name."""
    tags = [data[key] for key in ("library_name", "pipeline_tag") if data.get(key)]
    tags += _listed(data.get("tags"))
    for key, prefix in _TAGGED.items():
        tags += [f"{prefix}:{item}" if prefix else item for item in _listed(data.get(key))]
    named = {key: data[key] for key in ("library_name", "pipeline_tag") if data.get(key)}
    return {"tags": list(dict.fromkeys(map(str, tags))), **named}


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _result_problems(index: Any) -> list[str]:
    if not isinstance(index, list):
        return ['"model-index" must be a list']
    found = []
    for number, model in enumerate(index):
        place = f'"model-index[{number}]'
        if not isinstance(model, dict) or not isinstance(model.get("name"), str):
            found.append(f'{place}.name" is required')
        elif not isinstance(model.get("results"), list):
            found.append(f'{place}.results" must be a list')
        else:
            found += [
                f'{place}.results[{n}].{key}" is required'
                for n, result in enumerate(model["results"])
                for key in ("task", "dataset", "metrics")
                if not isinstance(result, dict) or not result.get(key)
            ]
    return found
