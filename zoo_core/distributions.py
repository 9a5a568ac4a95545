"""Which installed distributions declare zoo plugins, read from their metadata without importing.

Read by hand where importlib.metadata would let one distribution's damage stop all others, or
would parse whole README files to learn a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from zoo_core.isolation import describe
from zoo_core.names import DISTRIBUTION

GROUP = "zoo_core.plugins"

_VALUE = re.compile(r"[\w.]+\s*(:\s*[\w.]+\s*)?(\[.*\]\s*)?")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry point of the group. `problem` says why it cannot be used, if so."""

    distribution: str
    version: str
    name: str = ""
    value: str = ""
    problem: str = ""

    def load(self) -> Any:
        """Import the module and return the object that `value` names. Raises what they raise."""
        return metadata.EntryPoint(self.name, self.value, GROUP).load()


def normalise(distribution: str) -> str:
    """A distribution's name as PEP 503 compares it: "Zoo_Core" is "zoo-core"."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def entries() -> list[Entry]:
    """All entry points of the group, by distribution and name, whatever the order on sys.path.

    Of two copies of one distribution the first on sys.path counts, as it does for imports.
    """
    found: list[Entry] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        name, version = _identity(distribution)
        key = normalise(name)
        if key not in seen:
            found.extend(_declared(distribution, key, version))
            seen |= {key} - {""}
    return sorted(found, key=lambda entry: (entry.distribution, entry.name, entry.value))


def _identity(distribution: metadata.Distribution) -> tuple[str, str]:
    """Name and version. `Distribution.name` would parse all of METADATA, README included."""
    try:
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    except (OSError, UnicodeDecodeError):
        text = ""
    header = re.split(r"\r?\n\r?\n", text, maxsplit=1)[0]
    name, version = (
        re.search(rf"^{key}:[ \t]*(.*?)[ \t\r]*$", header, re.MULTILINE)
        for key in ("Name", "Version")
    )
    return name[1] if name else "", version[1] if version else ""


def _declared(distribution: metadata.Distribution, name: str, version: str) -> Iterator[Entry]:
    """The entries of one distribution, or one that says why they cannot be read."""
    try:
        if GROUP not in (distribution.read_text("entry_points.txt") or ""):
            return
        points = distribution.entry_points.select(group=GROUP)
    except Exception as error:
        problem = f"entry_points.txt cannot be read: {describe(error)}"
        yield Entry(distribution=name, version=version, problem=problem)
        return
    valid = DISTRIBUTION.fullmatch(name)
    nameless = "" if valid else f"METADATA names no valid distribution: {name!r}"
    for point in points:
        malformed = (
            "" if _VALUE.fullmatch(point.value) else f"{point.value!r} is not 'module:object'"
        )
        yield Entry(
            distribution=name,
            version=version,
            name=point.name,
            value=point.value,
            problem=nameless or malformed,
        )


def requirement(distribution: str) -> str:
    """The line of a requirements file that installs this distribution again."""
    import json

    installed = metadata.distribution(distribution)
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if not origin:
        return f"{distribution}=={installed.version}"
    if origin.get("dir_info", {}).get("editable"):
        return f"-e {origin['url']}"
    vcs = origin.get("vcs_info")
    url = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else origin["url"]
    return f"{distribution} @ {url}"
