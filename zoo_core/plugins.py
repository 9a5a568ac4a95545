"""Load plugins and ask each one, by itself, what it offers.

A plugin is an entry point of the group `zoo_core.plugins` in any installed distribution. It names
a module, an object, or a class (which is instantiated without arguments) that implements hooks of
`zoo_core.hookspecs`. zoo_core's own plugins take the same route. What fails is recorded with its
distribution, phase and reason, and silences nobody else.

    ZOO_PLUGINS=a,b   use only these; set but empty: none at all
    ZOO_BLOCK=a,b     use everything but these
    ZOO_STRICT=1      raise PluginError at the first failure

Both lists hold names of distributions, entry points and records (mechanisms, architectures), each
also as `distribution/name`. A plugin left out by its distribution or entry point is not imported;
one record among several can only be left out after the import.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from zoo_core import hookspecs
from zoo_core.architecture import Architecture
from zoo_core.distributions import Entry, entries
from zoo_core.errors import PluginError, RecordError
from zoo_core.isolation import ForeignError, Isolation, one_line
from zoo_core.mechanism import Mechanism
from zoo_core.policy import Policy

if TYPE_CHECKING:
    from torch import nn

    from zoo_core.patching import Patch

APIS = (1,)

_MOST_RECORDS = 1000
_HEAVY = ("torch", "transformers", "timm")
_SLOW = 0.5

R = TypeVar("R", Mechanism, Architecture)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong with a plugin.

    phase: "metadata", "import", "register", or the hook that was called.
    reason: one line; for an exception its kind, its text and the plugin's line that raised it.
    """

    phase: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One entry point: what it adds, what failed, what was left out and why.

    distribution: its PEP 503 name. entry, value: the entry point's name and "module:object".
    blocked: one line for everything that ZOO_PLUGINS or ZOO_BLOCK leaves out.
    notes: what is allowed but costs every user, such as a slow import, and deprecated hooks.
    """

    distribution: str
    version: str
    entry: str
    value: str
    mechanisms: tuple[Mechanism, ...] = ()
    architectures: tuple[Architecture, ...] = ()
    catalogues: tuple[Path, ...] = ()
    failures: tuple[Failure, ...] = ()
    blocked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    hooks: pluggy.HookRelay | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Discovery:
    """Every installed plugin, and the policy it was loaded under."""

    plugins: tuple[Plugin, ...]
    policy: Policy


class Host:
    """Loads every plugin once, on first use."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._discovery: Discovery | None = None
        self._busy = False

    def discovery(self) -> Discovery:
        """What is installed. Raises PluginError for a call from inside a plugin's own loading."""
        with self._lock:
            if self._busy:
                raise PluginError(
                    "the registry was asked while plugins are still loading; a plugin only returns "
                    "its records from hooks, and looks up others when its factory is called"
                )
            if self._discovery is None:
                self._busy = True
                try:
                    self._discovery = _discover()
                finally:
                    self._busy = False
            return self._discovery

    def forget(self) -> None:
        """Load plugins anew on next use; modules that were imported stay imported."""
        with self._lock:
            importlib.invalidate_caches()
            self._discovery = None


_host = Host()
discovery = _host.discovery
forget = _host.forget


def installed() -> tuple[Plugin, ...]:
    """Every installed plugin, failed and blocked ones included, by distribution and entry."""
    return discovery().plugins


def _discover() -> Discovery:
    found = entries()
    policy = Policy(found)
    seen: dict[tuple[type, str, str], object] = {}
    with Isolation() as isolation:
        loaded = tuple(_Loader(entry, policy, isolation, seen).load() for entry in found)
    return Discovery(loaded, policy)


class _Loader:
    """Loads one entry point. `seen` holds the records of those before it."""

    def __init__(
        self,
        entry: Entry,
        policy: Policy,
        isolation: Isolation,
        seen: dict[tuple[type, str, str], object],
    ) -> None:
        self.entry = entry
        self.policy = policy
        self.isolation = isolation
        self.seen = seen
        self.failures: list[Failure] = []
        self.blocked: list[str] = []
        self.notes: list[str] = []

    def load(self) -> Plugin:
        """Import, register, and call every hook that returns records."""
        heavy = [name for name in _HEAVY if name not in sys.modules]
        start = time.perf_counter()
        hooks = self._hooks()
        mechanisms = self._offers(hooks, "zoo_mechanisms", partial(self._record, Mechanism))
        architectures = self._offers(
            hooks, "zoo_architectures", partial(self._record, Architecture)
        )
        catalogues = self._offers(hooks, "zoo_catalogues", self._catalogue)
        return Plugin(
            distribution=self.entry.distribution,
            version=self.entry.version,
            entry=self.entry.name,
            value=self.entry.value,
            mechanisms=mechanisms,
            architectures=architectures,
            catalogues=catalogues,
            failures=tuple(self.failures),
            blocked=tuple(self.blocked),
            notes=(*self.notes, *_costs(heavy, time.perf_counter() - start)),
            hooks=hooks,
        )

    def _fail(self, phase: str, reason: str, cause: BaseException | None = None) -> None:
        if self.policy.strict:
            where = f"{self.entry.distribution} ({self.entry.name} = {self.entry.value})"
            raise PluginError(f"plugin {where} failed at {phase}: {reason}") from cause
        self.failures.append(Failure(phase=phase, reason=reason))

    def _hooks(self) -> pluggy.HookRelay | None:
        """The plugin's hooks, or None for a plugin that is left out or fails."""
        if reason := self.policy.bars(self.entry):
            self.blocked.append(reason)
            return None
        if self.entry.problem:
            self._fail("metadata", self.entry.problem)
            return None
        phase = "import"
        try:
            found = self.isolation.attempt(self.entry.load)
            phase = "register"
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                hooks = self.isolation.attempt(partial(_register, found, self.entry.value))
        except ForeignError as error:
            self._fail(phase, str(error), error.__cause__)
            return None
        self._deprecate(caught)
        return hooks

    def _deprecate(self, caught: Iterable[warnings.WarningMessage]) -> None:
        """Say which hooks and arguments that a plugin implements will go; see `hookspecs`."""
        for warning in caught:
            if issubclass(warning.category, DeprecationWarning):
                self.notes.append(f"deprecated: {one_line(str(warning.message))}")
                message = (
                    f"plugin {self.entry.distribution} {self.entry.version}: {warning.message}"
                )
                # Seen by users too: unlike a DeprecationWarning, which Python hides from them.
                warnings.warn(message, FutureWarning, stacklevel=2)

    def _offers(
        self, hooks: pluggy.HookRelay | None, hook: str, check: Callable[[Any], T | None]
    ) -> tuple[T, ...]:
        """What a hook returns, each piece checked by itself; nothing if the hook fails half-way."""
        if hooks is None:
            return ()
        try:
            offers = self.isolation.attempt(partial(_collect, getattr(hooks, hook)))
        except ForeignError as error:
            self._fail(hook, str(error), error.__cause__)
            return ()
        sound = []
        for offered in offers:
            try:
                checked = self.isolation.attempt(partial(check, offered))
            except ForeignError as error:
                self._fail(hook, str(error), error.__cause__)
            else:
                sound += [] if checked is None else [checked]
        return tuple(sound)

    def _record(self, kind: type[R], offered: Any) -> R | None:
        """A copy of a record with its origin; None for one that is left out or known already."""
        if type(offered) is not kind:
            raise ForeignError(
                f"returned a {type(offered).__name__} where a {kind.__name__} belongs"
            )
        try:
            check_record(offered)
        except RecordError as error:
            raise ForeignError(str(error)) from None
        record = replace(offered, distribution=self.entry.distribution, version=self.entry.version)
        if self._is_barred(record.name):
            return None
        key = (kind, self.entry.distribution, record.name)
        if self.seen.setdefault(key, record) is record:
            return record
        if self.seen[key] != record:
            raise ForeignError(
                f"{record.name!r} is offered twice by {self.entry.distribution}, by two different "
                "records; the first one is kept"
            )
        return None

    def _catalogue(self, offered: Any) -> Path | None:
        path = Path(offered) if isinstance(offered, str | os.PathLike) else None
        if path is None or not path.is_absolute():
            shown = one_line(repr(offered), 80)
            raise ForeignError(f"returned {shown} where an absolute path belongs")
        return None if self._is_barred(path.name) else path

    def _is_barred(self, name: str) -> bool:
        reason = self.policy.bars_record(self.entry, name)
        if reason:
            self.blocked.append(f"{name}: {reason}")
        return bool(reason)


def check_record(record: Mechanism | Architecture) -> None:
    """Raise RecordError for a record written for another api than this zoo-core supports."""
    if type(record.api) is not int or record.api not in APIS:
        raise RecordError(
            f"{record.name!r} is written for api {one_line(repr(record.api), 40)}, this zoo-core "
            f"supports {', '.join(map(str, APIS))}; install a version that fits"
        )


class _Manager(pluggy.PluginManager):
    """Holds a single plugin, so that nothing it does to hooks reaches another."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        """Look at functions only: to read a property or a lazy module attribute would run code."""
        if isinstance(plugin, ModuleType):
            found = vars(plugin).get(name)
        else:
            found = inspect.getattr_static(plugin, name, None)
        if not isinstance(found, FunctionType | staticmethod | classmethod):
            return None
        return super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(
        self, module_or_class: ModuleType | type, name: str
    ) -> pluggy.HookspecOpts | None:
        """Skip what our page of hooks imports; it is read once for every plugin."""
        return (
            super().parse_hookspec_opts(module_or_class, name) if name.startswith("zoo_") else None
        )


def _register(found: object, name: str) -> pluggy.HookRelay:
    """Check the hooks of a plugin against their specifications."""
    plugin = found() if isinstance(found, type) else found
    manager = _Manager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=name)
    manager.check_pending()
    if not manager.get_hookcallers(plugin):
        raise ForeignError(
            f"{type(plugin).__name__} {name} implements no hook; decorate zoo_mechanisms (or "
            "another one) with zoo_core.hookimpl"
        )
    return manager.hook


def _collect(hook: pluggy.HookCaller) -> list[Any]:
    """Call one hook of one plugin and list what it returns."""
    expected = [one for one in hook.get_hookimpls() if not (one.wrapper or one.hookwrapper)]
    if not expected:
        return []
    results = hook()
    if len(results) < len(expected):  # pluggy leaves None out
        raise ForeignError("returned None, must return a list")
    return [record for result in results for record in _listed(result)]


def _listed(result: Any) -> list[Any]:
    if isinstance(result, str | bytes | dict) or not isinstance(result, Iterable):
        raise ForeignError(f"returned a {type(result).__name__}, must return a list")
    records = list(itertools.islice(result, _MOST_RECORDS + 1))
    if len(records) > _MOST_RECORDS:
        raise ForeignError(f"returned more than {_MOST_RECORDS} records")
    return records


def _costs(heavy: list[str], seconds: float) -> list[str]:
    """What a plugin's loading costs every user, in words. `heavy`: modules not imported before."""
    notes = [
        f"imports {name} while it loads, which slows every command down"
        for name in heavy
        if name in sys.modules
    ]
    return [*notes, f"takes {seconds:.1f} s to load"] if seconds > _SLOW else notes


def notify_patched(model: nn.Module, patch: Patch) -> None:
    """Call every plugin's `zoo_patched`; one that raises is reported as a warning."""
    for plugin in installed():
        if plugin.hooks is None or not plugin.hooks.zoo_patched.get_hookimpls():
            continue
        with Isolation() as isolation:
            try:
                isolation.attempt(partial(plugin.hooks.zoo_patched, model=model, patch=patch))
            except ForeignError as crash:
                message = f"plugin {plugin.distribution} failed at zoo_patched: {crash}"
                if discovery().policy.strict:
                    raise PluginError(message) from crash.__cause__
                warnings.warn(message, RuntimeWarning, stacklevel=2)
