"""Names -> records: lookup, wildcards, filters, and records of this process.

A name beats an alias. A name that two distributions claim is contested: it must be written
`distribution/name`, which always works, so that no package can take another's name.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args

from zoo_core import plugins
from zoo_core.architecture import Architecture
from zoo_core.distributions import normalise
from zoo_core.errors import ContestedName, RecordError, UnknownName, did_you_mean
from zoo_core.mechanism import Grid, Lengths, Mechanism, Need, Supports, Swap, check_choice
from zoo_core.unknown import Kind, explain

if TYPE_CHECKING:
    from zoo_core.catalogue import Attention, Preset

R = TypeVar("R", bound=Mechanism | Architecture)

_CHOICES: dict[str, tuple[Any, ...]] = {
    **{spec.name: (True, False) for spec in fields(Supports) if isinstance(spec.default, bool)},
    "swap": get_args(Swap),
    "lengths": get_args(Lengths),
    "grid": get_args(Grid),
    "needs": get_args(Need),
}
_OWN_FILTERS = [
    spec.name
    for spec in fields(Mechanism)
    if spec.name not in ("supports", "options", "factory", "exact_at", "paper")
]
_FILTERS = [*_OWN_FILTERS, *(spec.name for spec in fields(Supports))]


class _Shelf(Generic[R]):
    """All records of one kind: those that plugins offer, and those registered in this process."""

    def __init__(self, kind: Kind, offered: Callable[[plugins.Plugin], tuple[R, ...]]) -> None:
        self.kind = kind
        self.noun = kind.removesuffix("s")
        self.offered = offered
        self.local: dict[str, R] = {}

    def records(self) -> list[R]:
        """Sorted by name, then distribution."""
        everything = [*self._installed(), *self.local.values()]
        return sorted(everything, key=lambda record: (record.name, record.distribution))

    def matching(self, pattern: str) -> list[R]:
        """The records of which the name, an alias or the qualified name fits the wildcard."""
        return [
            record
            for record in self.records()
            if any(
                fnmatchcase(name, pattern)
                for name in (record.name, *record.aliases, record.qualified)
            )
        ]

    def claims(self, name: str) -> list[R]:
        """The records that `name` may mean: by name if any has it, else by alias."""
        owner, slash, short = name.rpartition("/")
        records = self.records()
        if slash:
            records = [one for one in records if one.distribution == normalise(owner)]
        named = [one for one in records if one.name == short]
        return named or [one for one in records if short in one.aliases]

    def find(self, name: str) -> R:
        """The one record that `name` means. Raises UnknownName or ContestedName."""
        if not isinstance(name, str):
            raise UnknownName(f"{self.noun} {name!r} must be a name")
        claims = self.claims(name)
        if not claims:
            raise UnknownName(explain(self.kind, name, self.records()))
        if len(claims) > 1:
            owners = " and ".join(one.distribution or "this process" for one in claims)
            forms = " or ".join(repr(one.qualified) for one in claims if one.distribution)
            raise ContestedName(f"{self.noun} {name!r} is claimed by {owners}; write {forms}")
        return claims[0]

    def register(self, record: R, *, replaces: bool) -> R:
        """Keep a record without a distribution; an installed one that equals it is returned."""
        for owner in self._installed():
            if owner.name == record.name:
                if _unowned(owner) == _unowned(record):
                    return owner
                raise ContestedName(
                    f"{self.noun} {record.name!r} belongs to {owner.distribution}; "
                    "register yours under another name"
                )
        earlier = self.local.get(record.name)
        if earlier is not None and _home(earlier) != _home(record) and not replaces:
            raise ContestedName(
                f"{self.noun} {record.name!r} is registered already, by {_home(earlier)}; use "
                "another name, or register(record, replaces=True)"
            )
        self.local[record.name] = _unowned(record)
        return self.local[record.name]

    def _installed(self) -> list[R]:
        return [record for plugin in plugins.installed() for record in self.offered(plugin)]


_MECHANISMS = _Shelf[Mechanism]("mechanisms", lambda plugin: plugin.mechanisms)
_ARCHITECTURES = _Shelf[Architecture]("architectures", lambda plugin: plugin.architectures)
_SHELVES: dict[Kind, _Shelf[Any]] = {"mechanisms": _MECHANISMS, "architectures": _ARCHITECTURES}


def mechanism(name: str) -> Mechanism:
    """The mechanism of that name, alias or `distribution/name`.

    Raises UnknownName, with what may help, or ContestedName, with the qualified forms.
    """
    return _MECHANISMS.find(name)


def architecture(name: str) -> Architecture:
    """The architecture of that name, alias or `distribution/name`; raises as `mechanism` does."""
    return _ARCHITECTURES.find(name)


def mechanisms(pattern: str = "*", **filters: Any) -> list[Mechanism]:
    """The mechanisms that fit a wildcard pattern and every filter, sorted by name.

    pattern: matches names, aliases and qualified names; "zoo-core/*", "*former".
    filters: fields of Mechanism or Supports, such as family="kernel", swap="exact", causal=True,
        distribution="zoo-core", needs="carry".
    Raises UnknownName for a filter that is no such field, RecordError for an impossible value.
    """
    for key, value in filters.items():
        _check_filter(key, value)
    found = _MECHANISMS.matching(pattern)
    return [one for one in found if all(_fits(one, key, filters[key]) for key in filters)]


def architectures(pattern: str = "*") -> list[Architecture]:
    """The architectures of which name, alias or qualified name fits the pattern, by name."""
    return _ARCHITECTURES.matching(pattern)


def owners(name: str, *, kind: Kind = "mechanisms") -> list[str]:
    """The distributions that claim a name; more than one means that it is contested.

    "" stands for a record registered in this process.
    """
    return [record.distribution for record in _SHELVES[kind].claims(name)]


def contested(*, kind: Kind = "mechanisms") -> set[str]:
    """The names that more than one distribution claims."""
    counts = Counter(record.name for record in _SHELVES[kind].records())
    return {name for name, count in counts.items() if count > 1}


def register(record: R, *, replaces: bool = False) -> R:
    """Add a mechanism or architecture to this process, as a notebook does; returns it.

    It has no distribution: whoever loads a model saved with it must register it as well.
    Doing so again, or running the cell that defines it again, is quiet. Another definition of a
    name is refused unless `replaces`; a name that an installed plugin offers always is.
    """
    if type(record) not in (Mechanism, Architecture):
        raise RecordError(
            f"register takes a Mechanism or an Architecture, not a {type(record).__name__}"
        )
    plugins.check_record(record)
    shelf = _SHELVES["mechanisms" if isinstance(record, Mechanism) else "architectures"]
    registered: R = shelf.register(record, replaces=replaces)
    return registered


def forget() -> None:
    """Drop what `register` added, and load plugins and catalogues anew on next use."""
    plugins.forget()
    for shelf in _SHELVES.values():
        shelf.local.clear()


def presets(pattern: str = "*") -> list[Preset]:
    """The presets of the catalogue whose name fits the pattern, by name."""
    found = _presets()
    return [found[name] for name in sorted(found) if fnmatchcase(name, pattern)]


def preset(name: str) -> Preset | None:
    """The preset of that name, or None; the name of an architecture is never a preset's."""
    return _preset_unless(name, "architectures")


def attention_preset(name: str) -> Attention | None:
    """The attention of a preset, or None; the name of a mechanism is never a preset's."""
    found = _preset_unless(name, "mechanisms")
    return found.attention if found else None


def _preset_unless(name: str, kind: Kind) -> Preset | None:
    if not isinstance(name, str) or owners(name, kind=kind):
        return None
    return _presets().get(name)


def _presets() -> dict[str, Preset]:
    from zoo_core import catalogue  # tomllib costs `zoo list` what it does not need

    return catalogue.load().presets


def _unowned(record: R) -> R:
    return replace(record, distribution="", version="")


def _home(record: Mechanism | Architecture) -> str:
    """Where the code of a record is defined; running a notebook cell again does not change it."""
    code = inspect.unwrap(record.factory if isinstance(record, Mechanism) else record.adapter)
    return f"{code.__module__}.{getattr(code, '__qualname__', type(code).__name__)}"


def _check_filter(key: str, value: Any) -> None:
    if key not in _FILTERS:
        hint = did_you_mean(key, _FILTERS)
        raise UnknownName(f"mechanisms have no filter {key!r} (has: {', '.join(_FILTERS)}){hint}")
    if key in _CHOICES:
        check_choice(f"filter {key}", value, _CHOICES[key])


def _fits(record: Mechanism, key: str, wanted: Any) -> bool:
    value = getattr(record if key in _OWN_FILTERS else record.supports, key)
    if isinstance(value, tuple | frozenset):
        return wanted in value
    return bool(value == (normalise(wanted) if key == "distribution" else wanted))
