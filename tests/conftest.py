from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from zoo_core import registry


def pytest_configure() -> None:
    """One thread per test process: the suite runs on every core already, shapes are tiny.

    No native kernels, whatever the user has built: only tests that ask for `native_kernels`.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["ZOO_NATIVE"] = ""


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for ZOO_NATIVE with kernels, compiled once for all processes of the run."""
    from zoo_core.nn import native

    if (reason := native.obstacle()) is not None:
        pytest.skip(f"no native kernels: {reason}")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "native"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_NATIVE", str(folder))
        native.build()
    native._load.cache_clear()
    return folder


@pytest.fixture
def native_kernels(compiled_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take native kernels for the length of a test, in this process."""
    from zoo_core.nn import native

    monkeypatch.setenv("ZOO_NATIVE", str(compiled_kernels))
    native._load.cache_clear()
    assert native.loaded()
    yield
    native._load.cache_clear()


FAULT = "fault"


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Enter a row into the table of faults that ends the report, see `pytest_terminal_summary`."""

    def enter(where: str, outcome: str, what: str = "") -> None:
        row = [where, what or request.node.name.removeprefix("test_"), outcome]
        request.node.user_properties.append((FAULT, row))

    return enter


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show every broken or hostile input that the tests tried, and what came of it."""
    reports = [r for found in terminalreporter.stats.values() for r in found if hasattr(r, "when")]
    failed = {report.nodeid for report in reports if report.failed}
    rows = sorted(
        [where, what, "FAILED" if report.nodeid in failed else " ".join(outcome.split())]
        for report in reports
        if report.when == "teardown"
        for name, (where, what, outcome) in (p for p in report.user_properties if p[0] == FAULT)
    )
    if not rows:
        return
    right = sum(outcome != "FAILED" for *_, outcome in rows)
    terminalreporter.section(f"faults: {right} of {len(rows)} end as they should")
    width = max(120, shutil.get_terminal_size().columns)
    for where, what, outcome in rows:
        terminalreporter.write_line(f"{where:8}{what:44} {outcome}"[:width])
    counts = Counter(where for where, *_ in rows)
    terminalreporter.write_line(", ".join(f"{where}: {n}" for where, n in counts.items()))


RECORDS = """
from dataclasses import dataclass

from zoo_core import Architecture, Mechanism, Options, Supports, hookimpl


@dataclass(frozen=True, kw_only=True)
class NoOptions(Options):
    pass


def factory(site, options):
    raise NotImplementedError


def mechanism(name, **changes):
    fields = {
        "summary": "A test.", "family": "test", "paper": None, "time": "n", "memory": "n",
        "supports": Supports(), "options": NoOptions, "swap": "exact", "factory": factory,
    }
    return Mechanism(name=name, **{**fields, **changes})


def architecture(name, **changes):
    fields = {"library": "timm", "summary": "A test.", "default": "x", "adapter": factory}
    return Architecture(name=name, **{**fields, **changes})
"""


class FakeSite:
    """A directory for sys.path with installed distributions, as pip would lay them out.

    Its module `records` makes records in one line: `from records import *`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        (path / "records.py").write_text(RECORDS, encoding="utf-8")

    def install(
        self,
        distribution: str,
        code: str | bytes | None = "",
        *,
        module: str | None = None,
        entries: Mapping[str, str] | None = None,
        version: str = "1.0",
        metadata: str | None = None,
        entry_points: bytes | None = None,
    ) -> None:
        """Write a module (None: none) and a dist-info directory whose entry points name it."""
        module = module or distribution.replace("-", "_")
        if code is not None:
            source = code if isinstance(code, bytes) else dedent(code).encode()
            (self.path / f"{module}.py").write_bytes(source)
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        if metadata is None:
            metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        if entry_points is None:
            points = entries if entries is not None else {module: module}
            lines = [f"{name} = {value}\n" for name, value in points.items()]
            entry_points = "".join(["[zoo_core.plugins]\n", *lines]).encode()
        (info / "entry_points.txt").write_bytes(entry_points)

    def offer(self, distribution: str, *names: str, **how: Any) -> None:
        """Install a plugin that offers mechanisms of these names."""
        made = ", ".join(f"mechanism({name!r})" for name in names)
        code = f"""
            from records import *

            @hookimpl
            def zoo_mechanisms():
                return [{made}]
        """
        self.install(distribution, code, **how)

    def run(
        self, *arguments: str, timeout: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python on this site in a fresh process; stdout and stderr are captured."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment(**environment),
            cwd=self.path,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=timeout,
        )

    def environment(self, **changes: str) -> dict[str, str]:
        """The environment of a process on this site, without the user's zoo settings."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ZOO_")}
        path = os.pathsep.join(filter(None, [str(self.path), kept.get("PYTHONPATH")]))
        ours = {"PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", "ZOO_NATIVE": ""}
        return {**kept, **ours, **changes}


@pytest.fixture
def fake_site(tmp_path: Path) -> FakeSite:
    """An empty site for other processes."""
    return FakeSite(tmp_path / "site")


@pytest.fixture
def live_site(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """A site of this process: install, then ask the registry."""
    monkeypatch.syspath_prepend(fake_site.path)
    for variable in ("ZOO_PLUGINS", "ZOO_BLOCK", "ZOO_STRICT", "ZOO_REGISTRY"):
        monkeypatch.delenv(variable, raising=False)
    modules = set(sys.modules)
    registry.forget()
    yield fake_site
    for name in set(sys.modules) - modules:
        if str(fake_site.path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    registry.forget()
