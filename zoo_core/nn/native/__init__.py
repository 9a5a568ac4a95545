"""Kernels in C++ for CPUs, compiled on request, that stand in for plain torch.

`zoo native --build` compiles them for this machine, once, which takes a C++ compiler and
`pip install 'zoo-core[native]'`; they are never needed, and every process that starts later takes
them where they compute the same: fp32 on a CPU, widths that are multiples of 16, outside
autocast. Everything else takes the plain path, and so does everything within
`zoo_core.nn.choice.plain_only()`. What a batch holds has no say in it.

They lie in `ZOO_NATIVE`, a directory, or where it is not set in the user's cache; ZOO_NATIVE=""
means to do without.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.errors import NativeError
from zoo_core.isolation import describe, one_line
from zoo_core.nn import choice
from zoo_core.nn.native import shapes

#: The widths that kernels take are multiples of so many, which is the longest vector.
STEP = 16

#: For this machine's processor, and threads as torch runs them.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp")

_NAME = "zoo_native"
_SOURCES = Path(__file__).parent
_BUILDING = "building-"
#: What of a compiler's output goes with an error, from the first that it reports on.
_LINES, _LONGEST = 10, 160

#: In a process of its own torch's remarks reach nobody, and what does not load crashes nothing.
_LOAD = """
import json, sys
from torch.utils import cpp_extension
cpp_extension.load(**json.loads(sys.argv[1]))
"""


def suits(*tensors: Tensor) -> bool:
    """Whether kernels may stand in for such q, k, v (..., width)."""
    return may_be_taken(*tensors) and all(
        x.dtype is torch.float32 and x.shape[-1] % STEP == 0 for x in tensors
    )


def may_be_taken(*tensors: Tensor) -> bool:
    """Whether kernels may compute with such tensors now, whatever their dtypes and widths."""
    return (
        # What is exported or traced has to run elsewhere.
        not torch.compiler.is_exporting()
        and torch._C._get_tracing_state() is None
        and not _transformed()
        and choice.kernels_allowed()
        # Autocast asks for half precision, which the other parts of a mechanism then give.
        and not torch.is_autocast_enabled("cpu")
        and all(
            type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" and x.numel() > 0
            for x in tensors
        )
        and loaded()
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _transformed() -> bool:
    """Whether within vmap, grad or another transform of torch.func.

    vmap has no rule for kernels, and grad asks for a second derivative.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def loaded() -> bool:
    """Whether kernels built for this machine are there, and have been loaded.

    Warns, once, where they are there and cannot be.
    """
    return _load()


@cache
def _load() -> bool:
    library = built()
    if library is None:
        return False
    if (reason := problem(library)) is not None:
        warnings.warn(
            f"the native kernels are left out, and plain torch computes the same: {reason}; "
            '`zoo native --build` compiles them anew, ZOO_NATIVE="" does without',
            stacklevel=2,
        )
        return False
    return True


def built() -> Path | None:
    """The compiled kernels for this machine, this torch and these sources, if there are any."""
    try:
        library = place()
    except NativeError:
        return None
    # Not Path.is_file, which raises for a directory that may not be read.
    return library if os.path.isfile(library) else None


def problem(library: Path) -> str | None:
    """Load compiled kernels; gives why they cannot be, in words, or None."""
    if hasattr(torch.ops.zoo_core, "tiles"):  # another library would define the same names
        return None
    try:
        # A library that was cut off would end the process.
        if _digest(library) != _digest_file(library).read_text(encoding="ascii"):
            return f"{library} is not what was compiled"
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        shapes.register()
    except (OSError, RuntimeError, ValueError) as error:
        return one_line(f"{library} cannot be loaded ({error.__cause__ or error})")
    return None


def place() -> Path:
    """Where the kernels for this machine, this torch and these sources belong.

    Raises NativeError in words if they are switched off, or the user has no home directory.
    """
    directory = os.environ.get("ZOO_NATIVE")
    if directory == "":
        raise NativeError('ZOO_NATIVE="" means to do without native kernels; unset it to use them')
    try:
        if directory is None:
            cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            directory = str(Path(cache_home) / "zoo_core" / "native")
        return Path(directory).expanduser().absolute() / _key() / f"{_NAME}.so"
    except (OSError, RuntimeError) as error:
        raise NativeError(f"name a directory for native kernels in ZOO_NATIVE: {error}") from error


def build() -> Path:
    """Compile the kernels, unless they are there already; gives the library.

    Raises NativeError in words if there is no compiler, or it fails; some lines that it said are a
    note of the error.
    """
    library = place()
    if not _is_whole(library):
        from filelock import FileLock

        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{library}.lock"):
                if not _is_whole(library):
                    _compile(library)
        except OSError as error:
            raise NativeError(
                f"{library.parent} cannot be written ({describe(error)}); name another directory "
                "in ZOO_NATIVE"
            ) from error
    _load.cache_clear()
    return library


def compiler() -> str | None:
    """The C++ compiler that `build` takes: $CXX, or the first on the PATH; None = there is none."""
    if named := os.environ.get("CXX", "").split():
        return " ".join(named) if shutil.which(named[0]) else None
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def ninja() -> str | None:
    """The program that runs the compiler, on the PATH or beside this Python."""
    return shutil.which("ninja", path=_path())


def obstacle() -> str | None:
    """Why nothing can be compiled here, and what to do about it, or None."""
    if compiler() is None:
        if named := os.environ.get("CXX", "").split():
            return f"CXX names {named[0]}, which is not there; name a C++ compiler, or unset it"
        return "there is no C++ compiler; install g++ 10 or clang 12, or newer, or name it in CXX"
    missing = [
        name for name, there in (("ninja", ninja()), ("setuptools", _setuptools())) if not there
    ]
    if missing:
        return f"{' and '.join(missing)} cannot be found; pip install 'zoo-core[native]'"
    return None


def _setuptools() -> bool:
    return find_spec("setuptools") is not None


def _path() -> str:
    """Where programs are looked for; pip puts its own beside Python, which need not be on PATH."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def _is_whole(library: Path) -> bool:
    return os.path.isfile(library) and problem(library) is None


def _compile(library: Path) -> None:
    """Compile beside `library` and move there what is whole: no process finds half of it."""
    if (reason := obstacle()) is not None:
        raise NativeError(f"the native kernels cannot be compiled: {reason}")
    for left in library.parent.glob(f"{_BUILDING}*"):  # by processes that were killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=_BUILDING, dir=library.parent, ignore_cleanup_errors=True
    ) as directory:
        call = {
            "name": _NAME,
            "sources": [str(path) for path in _files("*.cpp")],
            "extra_cflags": FLAGS,
            "extra_ldflags": ["-fopenmp"],
            "build_directory": directory,
            "is_python_module": False,
        }
        run = subprocess.run(
            [sys.executable, "-P", "-c", _LOAD, json.dumps(call)],
            env={**os.environ, "PATH": _path(), "CXX": compiler() or "", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if run.returncode:
            raise _failure(run.stdout)
        new = Path(directory) / library.name
        _digest_file(library).write_text(_digest(new), encoding="ascii")
        new.replace(library)


def _failure(said: str) -> NativeError:
    """What a compiler that failed said: its first error, and as a note what follows."""
    lines = [line for line in said.splitlines() if line.strip() and " -MMD " not in line]
    errors = [n for n, line in enumerate(lines) if "error:" in line]
    raised = [n for n, line in enumerate(lines) if re.match(r"[\w.]+Error: ", line)]
    first = (errors or raised or [0])[0]
    shown = [line.replace(f"{_SOURCES}{os.sep}", "")[:_LONGEST] for line in lines[first:]]
    error = NativeError(
        f"the native kernels were not compiled by {compiler()}, and plain torch goes on computing "
        f"the same: {shown[0] if shown else 'no word'}; they take g++ 10 or clang 12, or newer"
    )
    error.add_note("\n".join(shown[:_LINES]))
    return error


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


@cache
def _key() -> str:
    """Differs where the kernels would: by sources, torch and processor."""
    digest = hashlib.sha256()
    for path in _files("*.cpp", "*.h"):
        digest.update(path.read_bytes())
    for part in (torch.__version__, torch.backends.cpu.get_cpu_capability(), _processor(), *FLAGS):
        digest.update(str(part).encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: one home directory may serve several kinds of machine."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            found = sorted({line for line in lines if line.startswith(("model name", "flags"))})
    except OSError:
        found = []
    return "".join(found) or f"{platform.processor()} {platform.machine()}"


def _files(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in _SOURCES.glob(pattern))


def rows(x: Tensor) -> Tensor:
    """x (..., width) with the numbers of a row side by side, which kernels ask for."""
    return x if x.stride(-1) == 1 else x.contiguous()


def call(name: str, *arguments: Any) -> Any:
    """The kernel of that name, of arguments whose tensors have `rows`."""
    # A list: a generator among the arguments of a call is more than torch.compile follows.
    ready = [rows(x) if isinstance(x, Tensor) else x for x in arguments]
    return getattr(torch.ops.zoo_core, name)(*ready)
