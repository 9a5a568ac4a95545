"""`zoo plugins install` and `uninstall`: which command runs; test_third_party runs it for real."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import pytest

from zoo_core import installing

PIP = [sys.executable, "-m", "pip"]
CATALOGUE = """
schema = 1

[plugins.zoo-far]
summary = "Far away."
mechanisms = ["far_away", "common"]
version = ">=1.2"

[plugins.zoo-near]
summary = "Near."
mechanisms = ["common"]
"""


@pytest.fixture
def ran(live_site, monkeypatch, tmp_path) -> list[list[str]]:
    """The commands that were run; none is."""
    (tmp_path / "more.toml").write_text(CATALOGUE)
    monkeypatch.setenv("ZOO_REGISTRY", str(tmp_path / "more.toml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    commands: list[list[str]] = []

    def run(command, check):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(installing.subprocess, "run", run)
    return commands


@pytest.mark.parametrize(
    ("what", "requirement"),
    {
        "far_away": "zoo-far>=1.2",
        "Zoo_Far": "zoo-far>=1.2",
        "zoo-unheard": "zoo-unheard",
        "zoo-far==1.3": "zoo-far==1.3",
        "./folder": "./folder",
        "git+https://example.org/zoo.git": "git+https://example.org/zoo.git",
    }.items(),
)
def test_what_is_installed(zoo, ran, what, requirement) -> None:
    run = zoo("plugins", "install", what)
    assert run.code == 0, run.err
    assert ran == [[*PIP, "install", requirement]]
    assert run.out.startswith("$ ")
    assert "-m pip install" in run.out
    assert "No plugin is new" in run.err


@pytest.mark.parametrize(
    ("what", "said"),
    {
        "linear": "is installed already, it comes with zoo-core",
        "common": "is offered by zoo-far, zoo-near; name one of them",
        "./nowhere": "there is no ./nowhere",
        "-r": "is no name, requirement or path",
        "": "is no name, requirement or path",
    }.items(),
)
def test_what_is_refused(zoo, ran, what, said) -> None:
    run = zoo("plugins", "install", "--", what)
    assert run.code == 1
    assert said in run.err
    assert ran == []


def test_a_new_plugin_is_named(zoo, ran, live_site, monkeypatch) -> None:
    def run(command, check):
        live_site.offer("acme", "acme_m", version="1.2")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(installing.subprocess, "run", run)
    out = zoo("plugins", "install", "acme").out
    assert "acme 1.2 is installed" in out
    assert "zoo plugins doctor acme" in out


def test_uninstall(zoo, ran, live_site) -> None:
    live_site.offer("acme", "acme_m")
    assert zoo("plugins", "uninstall", "Acme").code == 0
    assert ran == [[*PIP, "uninstall", "--yes", "acme"]]


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "zoo_core": "zoo-core is the zoo itself",
        "pytest": "no installed plugin distribution 'pytest'",
        "acne": "did you mean 'acme'?",
        "acme_m": "it is offered by acme, name that",
    }.items(),
)
def test_what_is_not_uninstalled(zoo, ran, live_site, name, said) -> None:
    live_site.offer("acme", "acme_m")
    run = zoo("plugins", "uninstall", name)
    assert run.code == 1
    assert said in run.err
    assert ran == []


@pytest.mark.parametrize("verb", ["install", "uninstall"])
def test_uv_where_there_is_no_pip(zoo, ran, live_site, monkeypatch, verb) -> None:
    live_site.offer("acme", "acme_m")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/uv" if name == "uv" else None)
    assert zoo("plugins", verb, "acme").code == 0
    assert ran == [["/bin/uv", "pip", verb, "--python", sys.executable, "acme"]]


@pytest.mark.parametrize(
    ("verb", "words"), [("install", ["inject"]), ("uninstall", ["uninject", "--leave-deps"])]
)
def test_pipx_where_it_manages_the_environment(
    zoo, ran, live_site, monkeypatch, tmp_path, verb, words
) -> None:
    live_site.offer("acme", "acme_m")
    managed = tmp_path / "venvs" / "zoo-core"
    managed.mkdir(parents=True)
    (managed / "pipx_metadata.json").write_text("{}")
    monkeypatch.setattr(sys, "prefix", str(managed))
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert zoo("plugins", verb, "acme").code == 0
    assert ran == [["/bin/pipx", *words, "zoo-core", "acme"]]


def test_neither_pip_nor_uv(zoo, ran, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    run = zoo("plugins", "install", "acme")
    assert run.code == 1
    assert "has no pip, and no uv or pipx that manages it is on PATH" in run.err


def test_a_failing_installer_fails_us(zoo, ran, monkeypatch) -> None:
    monkeypatch.setattr(
        installing.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 3)
    )
    run = zoo("plugins", "install", "acme")
    assert run.code == 1
    assert "failed with exit code 3" in run.err
