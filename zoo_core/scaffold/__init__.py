"""Write a new plugin distribution from the templates beside this module. Imports no torch."""

from __future__ import annotations

import importlib.util
import keyword
import re
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined

import zoo_core
from zoo_core import registry
from zoo_core.errors import ZooError
from zoo_core.mechanism import NAME

_DISTRIBUTION = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

Kind = Literal["mechanism", "architecture"]

#: Template -> where its text goes. {kind}: the kind of plugin; {package}: its import name.
_FILES = {
    "common/pyproject.toml.jinja": "pyproject.toml",
    "common/workflow.yml.jinja": ".github/workflows/test.yml",
    "common/gitignore.jinja": ".gitignore",
    "{kind}/README.md.jinja": "README.md",
    "{kind}/card.py.jinja": "{package}/__init__.py",
    "{kind}/tests.py.jinja": "tests/test_{record}.py",
}
_MECHANISM_FILES = {"mechanism/attention.py.jinja": "{package}/attention.py"}


class ScaffoldError(ZooError, ValueError):
    """A name that cannot be used for a new distribution, or a folder that cannot be written."""


@dataclass(frozen=True)
class Names:
    """What a new distribution calls things, all derived from its own name, `my-attention`."""

    distribution: str
    kind: Kind = "mechanism"

    @cached_property
    def package(self) -> str:
        """The import name, `my_attention`."""
        return self.distribution.replace("-", "_")

    @cached_property
    def record(self) -> str:
        """The record's name: that of the package, without the `zoo_` that many put in front."""
        return self.package.removeprefix("zoo_")

    @cached_property
    def title(self) -> str:
        """The start of class names, `MyAttention`; it does not end in `Attention` twice."""
        words = "".join(word.title() for word in self.record.split("_"))
        return words.removesuffix("Attention") or words

    @cached_property
    def constant(self) -> str:
        """The name of the record in its module, `MY_ATTENTION`."""
        return self.record.upper()

    def as_dict(self) -> dict[str, str]:
        """What the templates may use."""
        return {
            "distribution": self.distribution,
            "kind": {"mechanism": "attention mechanism", "architecture": "model family"}[self.kind],
            "package": self.package,
            "record": self.record,
            "title": self.title,
            "constant": self.constant,
            "zoo_version": zoo_core.__version__,
        }


def create(name: str, parent: Path, *, kind: Kind = "mechanism") -> Path:
    """Write the distribution `name` into the new folder `parent / name`, whole or not at all.

    Raises ScaffoldError for a name that is malformed or taken, and where the folder exists.
    """
    names = _checked(name, kind)
    target = parent / name
    if target.exists() or target.is_symlink():
        raise ScaffoldError(f"{target} exists; nothing was written, choose another name")
    texts = _rendered(names)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=parent) as staging:
            folder = Path(staging, name)
            for path, text in texts.items():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            folder.rename(target)
    except OSError as error:
        raise ScaffoldError(f"{target} could not be written: {error}") from error
    return target


def _checked(name: str, kind: Kind) -> Names:
    """The names of a distribution, if it can be packaged, imported and told from all others."""
    if not _DISTRIBUTION.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")
        hint = f"; did you mean {near!r}?" if _DISTRIBUTION.fullmatch(near) else ""
        raise ScaffoldError(
            f"distribution name {name!r} must be lower-case ASCII words joined by hyphens, such as "
            f"'my-attention'{hint}"
        )
    names = Names(name, kind)
    if not NAME.fullmatch(names.record):
        raise ScaffoldError(
            f"{name!r} would call its {kind} {names.record!r}, which is not lower_snake of "
            "at most 64 characters; choose another name"
        )
    if keyword.iskeyword(names.package) or names.package == "tests":
        raise ScaffoldError(f"{name!r} cannot be imported as {names.package!r}; choose another")
    if importlib.util.find_spec(names.package) is not None:
        raise ScaffoldError(
            f"a package {names.package!r} is installed already and would hide yours; choose "
            "another name"
        )
    shelf: Literal["mechanisms", "architectures"] = (
        "mechanisms" if kind == "mechanism" else "architectures"
    )
    if owners := registry.owners(names.record, kind=shelf):
        raise ScaffoldError(
            f"{name!r} would offer {kind} {names.record!r}, as {', '.join(owners)} does; "
            "choose another name, see `zoo list`"
        )
    return names


def _rendered(names: Names) -> dict[str, str]:
    """Path in the new folder -> text."""
    environment = Environment(
        loader=PackageLoader(__name__, "."),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    values = names.as_dict()
    files = _FILES | (_MECHANISM_FILES if names.kind == "mechanism" else {})
    return {
        path.format(**values): environment.get_template(template.format(kind=names.kind)).render(
            values
        )
        for template, path in files.items()
    }
