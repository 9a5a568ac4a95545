"""The command itself: exit codes, streams, and what every verb has in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zoo_core.cli import app, main

ZOO = Path(sys.executable).with_name("zoo")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_verb(zoo, flag):
    run = zoo(flag)
    assert run.code == 0
    for verb in app.VERBS:
        assert f"\n  {verb} " in run.out


@pytest.mark.parametrize("verb", app.VERBS)
def test_every_verb_has_help_that_fits_a_terminal(zoo, verb):
    run = zoo(verb, "--help")
    assert run.code == 0
    assert run.out.startswith(f"Usage: zoo {verb} ")
    assert max(map(len, run.out.splitlines())) <= 80


def test_version(zoo):
    assert zoo("--version").out.startswith("zoo-core 0.")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["lst"], "No such command 'lst'"),
        (["list", "--famly", "x"], "No such option"),
        (["list", "--swap", "maybe"], "'maybe' is not one of"),
        (["list", "--supports", "flight"], "'flight' is not one of"),
        (["list", "--presets", "--architectures"], "choose one"),
        (["list", "--presets", "--family", "x"], "are for mechanisms"),
        (["show"], "Missing argument"),
        (["build", "bert"], "Missing option '-o'"),
        (["why", "bert", "linear", "--option", "rank"], "must be KEY=VALUE"),
        (["why", "bert", "linear", "--option", "a=1", "--option", "a=2"], "given twice"),
        (["why", "bert", "linear", "--set", "task=x"], "is not a setting of the host model"),
        (["plugins", "--format", "yaml"], "'yaml' is not one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_exits_with_2(zoo, arguments, reason):
    run = zoo(*arguments)
    assert run.code == 2
    assert reason in run.err
    assert run.out == ""


def test_an_error_is_one_line_on_stderr(zoo):
    run = zoo("show", "linfomer")
    assert run.code == 1
    assert run.err.startswith("zoo: no mechanism 'linfomer'; did you mean 'linformer'")
    assert run.err.count("\n") == 1
    assert run.out == ""


def test_an_error_of_several_lines_becomes_one(monkeypatch, capsys):
    from zoo_core import registry
    from zoo_core.errors import CatalogueError

    def broken(*arguments, **filters):
        raise CatalogueError("one\n  two")

    monkeypatch.setattr(registry, "mechanisms", broken)
    with pytest.raises(SystemExit, match="1"):
        main(["list"])
    assert capsys.readouterr().err == "zoo: one two\n"


def test_the_installed_command_runs():
    run = subprocess.run([ZOO, "list", "softmax"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0
    assert "softmax" in run.stdout


def test_a_closed_pipe_is_quiet():
    command = f"'{ZOO}' list --json | head -n 1"
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert run.stdout == "[\n"
    assert "Traceback" not in run.stderr


def test_an_ascii_terminal_gets_ascii():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    run = subprocess.run([ZOO, "list"], env=environment, capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr
    text = run.stdout.decode("ascii")
    assert "n**2*d" in text
    assert "----" in text
