"""Install and remove plugins with the environment's own installer. Nothing else ever installs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Literal

from zoo_core import catalogue, registry
from zoo_core.catalogue import PluginRow
from zoo_core.distributions import entries, normalise
from zoo_core.errors import PluginError, UnknownName, did_you_mean
from zoo_core.names import DISTRIBUTION

_OURS = "zoo-core"
_FILES = (".whl", ".tar.gz", ".zip")


def install_command(what: str) -> list[str]:
    """The command that installs a mechanism's distribution, a requirement or a path.

    what: a name that the catalogue knows, of a distribution or of what it offers; a requirement as
        pip takes it; a path, with a separator in it.
    Raises PluginError for what cannot be installed, or is installed already.
    """
    return [*_installer("install"), _requirement(what)]


def uninstall_command(distribution: str) -> list[str]:
    """The command that removes a distribution with plugins. Raises UnknownName for any other."""
    installed = plugin_distributions()
    name = normalise(distribution)
    if name == _OURS:
        raise PluginError(f"{_OURS} is the zoo itself; leave plugins of it out with ZOO_BLOCK")
    if name not in installed:
        owners = [owner for owner in _owners(distribution) if owner]
        offered = f"; it is offered by {', '.join(owners)}, name that" if owners else ""
        hint = offered or did_you_mean(name, installed - {_OURS})
        raise UnknownName(f"no installed plugin distribution {distribution!r}{hint}")
    return [*_installer("uninstall"), name]


def run(command: list[str]) -> None:
    """Run an installer, its output going where ours goes. Raises PluginError where it fails."""
    code = subprocess.run(command, check=False).returncode
    if code:
        raise PluginError(f"{' '.join(command)} failed with exit code {code}; see its output above")
    importlib.invalidate_caches()


def plugin_distributions() -> set[str]:
    """The names of the installed distributions that declare plugins; imports none of them."""
    return {entry.distribution for entry in entries()}


def _installer(verb: Literal["install", "uninstall"]) -> list[str]:
    """pipx where it manages this environment, else its pip, else uv, whose own have no pip."""
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").exists() and (pipx := shutil.which("pipx")):
        # Without --leave-deps it would take the plugin's requirements along: zoo-core itself.
        ways = {"install": ["inject"], "uninstall": ["uninject", "--leave-deps"]}
        return [pipx, *ways[verb], prefix.name]
    if importlib.util.find_spec("pip"):
        confirmed = ["--yes"] if verb == "uninstall" else []
        return [sys.executable, "-m", "pip", verb, *confirmed]
    if uv := shutil.which("uv"):
        return [uv, "pip", verb, "--python", sys.executable]
    raise PluginError(
        f"{sys.prefix} has no pip, and no uv or pipx that manages it is on PATH; get one with "
        f"`{sys.executable} -m ensurepip`"
    )


def _requirement(what: str) -> str:
    if not what or what.startswith("-"):
        raise PluginError(f"{what!r} is no name, requirement or path")
    if _is_path(what):
        if not os.path.exists(what):
            raise PluginError(f"there is no {what}; a path must lead to a folder or a wheel")
        return what
    if not DISTRIBUTION.fullmatch(what):
        return what
    if row := _row(what):
        return row.requirement
    if owners := _owners(what):
        origin = ", ".join(owner or "this process" for owner in owners)
        raise PluginError(f"{what!r} is installed already, it comes with {origin}")
    return what


def _is_path(what: str) -> bool:
    """As pip tells a path from a name; the folder `name` is `./name`."""
    separators = tuple(filter(None, (os.sep, os.altsep)))
    named_url = "://" in what or "@" in what
    return not named_url and (what.endswith(_FILES) or any(one in what for one in separators))


def _row(name: str) -> PluginRow | None:
    """The catalogue's distribution of that name, or the one that offers it."""
    rows = catalogue.load()
    named = [row for row in rows.plugins.values() if normalise(row.name) == normalise(name)]
    if named:
        return named[0]
    offering = {
        row.name: row
        for kind in ("mechanisms", "architectures")
        for row in rows.offering(kind, name)
    }
    if len(offering) > 1:
        raise PluginError(f"{name!r} is offered by {', '.join(sorted(offering))}; name one of them")
    return next(iter(offering.values()), None)


def _owners(name: str) -> list[str]:
    return [*registry.owners(name), *registry.owners(name, kind="architectures")]


def version(distribution: str) -> str:
    """The installed version of a distribution."""
    return metadata.version(distribution)
