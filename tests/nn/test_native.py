"""Compiling and loading native kernels: what can go wrong ends in words, and on the plain path."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from zoo_core.errors import NativeError
from zoo_core.nn import choice, native

#: In place of the compiler: writes a library, and talks as torch and compilers do.
TALKS = """
import json, pathlib, sys
print("compiling"), print("No CUDA runtime is found", file=sys.stderr)
call = json.loads(sys.argv[1])
pathlib.Path(call["build_directory"], call["name"] + ".so").write_bytes(b"library")
"""
FAILS = """
import sys
print("[1/2] c++ -MMD -MF tiles.o.d -c tiles.cpp")
for n in range(50):
    print(f"{sys.argv[0]}tiles.cpp:{n}:1: error: no such thing", file=sys.stderr)
raise SystemExit(1)
"""
TAKES_LOCAL = """
import torch, zoo_core as zoo
[record] = zoo.mechanisms("local")
site = zoo.Site(dim=16, heads=1, head_dim=16, scale=1.0, max_len=256)
module = record.factory(site, record.options(window=8))
for _ in range(2):
    module(*torch.ones(3, 1, 1, 200, 16), zoo.Context())
from zoo_core.nn import native
print(native.loaded(), native._is_whole(native.place()))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for kernels, of which none is there; what is written there counts as whole."""
    monkeypatch.setenv("ZOO_NATIVE", str(tmp_path / "native"))
    monkeypatch.setattr(native, "problem", lambda library: None)
    monkeypatch.setattr(native, "obstacle", lambda: None)
    return tmp_path / "native"


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/*")}


def test_an_empty_zoo_native_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_NATIVE", "")
    native._load.cache_clear()
    assert native.built() is None
    assert not native.loaded()
    with pytest.raises(NativeError, match="unset it"):
        native.build()


def test_without_a_home_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    for name in ("ZOO_NATIVE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert native.built() is None
    with pytest.raises(NativeError, match=r"name a directory .* in ZOO_NATIVE"):
        native.build()


def test_a_directory_that_cannot_be_written_is_named(folder: Path) -> None:
    folder.write_text("a file")
    assert native.built() is None
    with pytest.raises(NativeError, match=r"cannot be written .*name another directory"):
        native.build()


def test_a_build_says_nothing_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = native.place().parent / f"{native._BUILDING}killed"
    killed.mkdir(parents=True)
    (killed / "tiles.o").touch()
    monkeypatch.setattr(native, "_LOAD", TALKS)
    assert native.build() == native.built() == native.place()
    assert left(folder) == {"zoo_native.so", "zoo_native.sha256", "zoo_native.so.lock"}
    assert capfd.readouterr() == ("", "")


def test_a_compiler_that_fails_is_quoted_in_short(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "_LOAD", FAILS)
    with pytest.raises(NativeError, match=r"tiles.cpp:0:1: error: no such thing;") as caught:
        native.build()
    assert len(str(caught.value)) < 300
    [note] = caught.value.__notes__
    assert note.count("\n") < 15
    assert native.built() is None
    assert left(folder) <= {"zoo_native.so.lock"}
    assert capfd.readouterr() == ("", "")


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "ninja", lambda: None)
    monkeypatch.setattr(native, "_setuptools", lambda: False)
    monkeypatch.setenv("ZOO_NATIVE", str(tmp_path))
    monkeypatch.setenv("CXX", sys.executable)
    wanted = r"ninja and setuptools cannot be found; pip install 'zoo-core\[native\]'"
    with pytest.raises(NativeError, match=wanted):
        native.build()
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(NativeError, match="CXX names no-such-compiler, which is not there"):
        native.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeError, match=r"there is no C\+\+ compiler; install"):
        native.build()


def test_of_two_builds_at_once_one_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_slowly(library: Path) -> None:
        time.sleep(0.2)
        compiled.append(library)
        library.touch()

    monkeypatch.setattr(native, "_compile", compile_slowly)
    threads = [threading.Thread(target=native.build) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [native.place()]


def test_the_key_differs_where_kernels_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> str:
        return native._key.__wrapped__()

    (tmp_path / "a.cpp").write_text("int a;")
    monkeypatch.setattr(native, "_SOURCES", tmp_path)
    keys = [key(), key()]
    assert keys[0] == keys.pop()
    (tmp_path / "a.h").write_text("int b;")
    keys.append(key())
    monkeypatch.setattr(torch, "__version__", "99.0")
    keys.append(key())
    monkeypatch.setattr(native, "_processor", lambda: "another")
    keys.append(key())
    monkeypatch.setattr(native, "FLAGS", ("-O0",))
    keys.append(key())
    assert len(set(keys)) == 5


def test_a_damaged_library_is_left_out_with_one_warning(
    native_kernels: None, tmp_path: Path
) -> None:
    whole = native.place()
    damaged = tmp_path / whole.parent.name
    damaged.mkdir()
    (damaged / whole.name).write_bytes(whole.read_bytes()[:5000])
    (damaged / "zoo_native.sha256").write_bytes(whole.with_suffix(".sha256").read_bytes())
    run = subprocess.run(
        [sys.executable, "-c", TAKES_LOCAL],
        env={**os.environ, "ZOO_NATIVE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "False False\n"
    assert run.stderr.count("is not what was compiled; `zoo native --build`") == 1
    assert "Traceback" not in run.stderr


def test_kernels_are_taken_for_what_they_compute(native_kernels: None) -> None:
    x = torch.ones(1, 2, 5, 32)
    assert native.suits(x, x, x)
    assert native.suits(torch.nn.Parameter(x))


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(1, 2, 5, 32, dtype=torch.float64),
        torch.ones(1, 2, 5, 32, dtype=torch.bfloat16),
        torch.ones(1, 2, 5, 24),
        torch.ones(1, 2, 0, 32),
        torch.ones(1, 2, 5, 32, device="meta"),
        torch.ones(1, 2, 5, 32).as_subclass(Subclass),
    ],
    ids=["double", "half", "width", "empty", "meta", "subclass"],
)
def test_other_tensors_are_refused(x: Tensor, native_kernels: None) -> None:
    assert not native.suits(torch.ones(1, 2, 5, 32), x)


def test_other_modes_are_refused(native_kernels: None) -> None:
    x, answers = torch.ones(1, 2, 5, 32), {}

    def ask(where: str, x: Tensor) -> Tensor:
        answers[where] = native.suits(x)
        return x.sum()

    with choice.plain_only():
        ask("plain_only", x)
    with torch.autocast("cpu", torch.bfloat16):
        ask("autocast", x)
    torch.func.grad(lambda x: ask("grad", x))(x)
    torch.func.vmap(lambda x: ask("vmap", x))(x)
    torch.jit.trace(lambda x: ask("trace", x), x, check_trace=False)
    assert answers == dict.fromkeys(["plain_only", "autocast", "grad", "vmap", "trace"], False)


def test_compiled_code_is_told(native_kernels: None) -> None:
    """Whether it may take kernels, as other code is."""
    x = torch.ones(1, 2, 5, 32)

    def told(x: Tensor) -> Tensor:
        return x + native.suits(x)

    def told_by_vmap(x: Tensor) -> Tensor:
        return torch.func.vmap(told)(x)

    def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return torch.compile(function, fullgraph=True, backend="eager")

    assert torch.equal(compiled(told)(x), x + 1)
    assert torch.equal(compiled(told_by_vmap)(x), x)
    with choice.plain_only():
        assert torch.equal(compiled(told)(x), x)
