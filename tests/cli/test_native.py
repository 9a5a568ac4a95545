"""`zoo native`: what is there, what is missing, and what to do next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zoo_core.errors import NativeError
from zoo_core.nn import native


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for kernels, of which none is there, on a machine that could compile them."""
    monkeypatch.setenv("ZOO_NATIVE", str(tmp_path))
    monkeypatch.setattr(native, "compiler", lambda: "/usr/bin/c++")
    monkeypatch.setattr(native, "ninja", lambda: "/usr/bin/ninja")
    monkeypatch.setattr(native, "obstacle", lambda: None)
    return tmp_path


def compile_nothing(library: Path) -> None:
    library.write_bytes(b"library")


def test_it_tells_what_is_there_and_the_next_step(zoo, folder):
    run = zoo("native")
    assert (run.code, run.err) == (0, "")
    assert "kernels   not built" in run.out
    assert "compiler  /usr/bin/c++\nninja     /usr/bin/ninja\n" in run.out
    assert run.out.endswith("to compile them: zoo native --build\n")


def test_it_tells_what_keeps_from_compiling(zoo, folder, monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: None)
    monkeypatch.setattr(native, "obstacle", lambda: "there is no C++ compiler; install one")
    run = zoo("native")
    assert run.code == 0
    assert "compiler  none" in run.out
    assert "there is no C++ compiler; install one" in run.out


def test_it_tells_that_they_are_switched_off(zoo, monkeypatch):
    monkeypatch.setenv("ZOO_NATIVE", "")
    run = zoo("native")
    assert run.code == 0
    assert "switched off" in run.out
    assert 'ZOO_NATIVE="" means to do without' in run.out
    assert "--build" not in run.out
    run = zoo("native", "--build")
    assert (run.code, run.out) == (1, "")
    assert "unset it" in run.err


def test_build_compiles_and_tells_the_place(zoo, folder, monkeypatch):
    monkeypatch.setattr(native, "_compile", compile_nothing)
    monkeypatch.setattr(native, "problem", lambda library: None)
    run = zoo("native", "--build")
    assert (run.code, run.err) == (0, "")
    assert "built, and taken" in run.out
    found = json.loads(zoo("native", "--json").out)
    assert found["built"] is found["taken"] is True
    assert found["place"] == str(native.place())
    assert found["problem"] is found["obstacle"] is None


def test_a_library_that_cannot_be_loaded_is_told(zoo, folder, monkeypatch):
    native.place().parent.mkdir()
    compile_nothing(native.place())
    monkeypatch.setattr(native, "problem", lambda library: "it is not what was compiled")
    run = zoo("native")
    assert run.code == 0
    assert "built, but cannot be loaded" in run.out
    assert "it is not what was compiled" in run.out
    assert "zoo native --build" in run.out


def test_a_build_that_fails_exits_with_1_and_some_lines(zoo, folder, monkeypatch):
    def fail(library: Path) -> None:
        error = NativeError("the native kernels were not compiled by c++: error: no such thing")
        error.add_note("a.cpp:1:1: error: no such thing\n  1 | int")
        raise error

    monkeypatch.setattr(native, "_compile", fail)
    run = zoo("native", "--build", "--json")
    assert (run.code, run.out) == (1, "")
    assert run.err.splitlines() == [
        "a.cpp:1:1: error: no such thing",
        "  1 | int",
        "zoo: the native kernels were not compiled by c++: error: no such thing",
    ]


def test_misuse_exits_with_2(zoo):
    assert zoo("native", "bulid").code == 2
