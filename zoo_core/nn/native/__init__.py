"""Kernels in C++ for CPUs, compiled on request, that stand in for plain torch.

`zoo native --build` compiles them for this machine, once, which takes a C++ compiler and
`pip install 'zoo-core[native]'`; they are never needed, and every process that starts later takes
them where they compute the same: fp32 on a CPU, widths that are multiples of 16, outside compiled
code. Everything else takes the plain path, and so does everything within
`zoo_core.nn.choice.plain_only()`. What a batch holds has no say in it.

They lie in `ZOO_NATIVE`, a directory, or where it is not set in the user's cache; ZOO_NATIVE=""
means to do without.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor, nn

from zoo_core.errors import NativeError
from zoo_core.isolation import describe
from zoo_core.nn import choice

#: The widths that kernels take are multiples of so many, which is the longest vector.
STEP = 16

#: For this machine's processor, and threads as torch runs them.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp")

_NAME = "zoo_native"
_SOURCES = Path(__file__).parent


def suits(*tensors: Tensor) -> bool:
    """Whether kernels may stand in for such q, k, v (..., width)."""
    return (
        # Compiled code fuses by itself, and what is exported has to run elsewhere.
        not torch.compiler.is_compiling()
        and choice.kernels_allowed()
        and all(
            type(x) in (Tensor, nn.Parameter)
            and x.device.type == "cpu"
            and x.dtype is torch.float32
            and x.shape[-1] % STEP == 0
            and x.numel() > 0
            for x in tensors
        )
        and loaded()
    )


@cache
def loaded() -> bool:
    """Whether kernels built for this machine are there, and have been loaded."""
    library = built()
    if library is None:
        return False
    torch.ops.load_library(str(library))
    return True


def built() -> Path | None:
    """The compiled kernels for this machine, this torch and these sources, if there are any."""
    place = _place()
    return place if place is not None and place.exists() else None


def build() -> Path:
    """Compile the kernels, unless they are there already; gives the library.

    Raises NativeError in words if there is no compiler, or it fails.
    """
    place = _place()
    if place is None:
        raise NativeError('ZOO_NATIVE="" means to do without native kernels; unset it to build them')
    from filelock import FileLock

    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{place}.lock"):
            if not place.exists():
                _compile(place)
    except OSError as error:
        raise NativeError(
            f"{place.parent} cannot be written ({describe(error)}); name another directory in "
            "ZOO_NATIVE"
        ) from error
    loaded.cache_clear()
    return place


def _compile(place: Path) -> None:
    """Compile beside `place` and move there what is whole: no process finds half of it."""
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise NativeError(
            f"torch's compiler of extensions cannot be imported ({describe(error)}); "
            "pip install 'zoo-core[native]'"
        ) from error
    with tempfile.TemporaryDirectory(dir=place.parent) as directory:
        said = StringIO()
        try:
            with redirect_stdout(said):
                cpp_extension.load(
                    _NAME,
                    [str(path) for path in _files("*.cpp")],
                    extra_cflags=list(FLAGS),
                    extra_ldflags=["-fopenmp"],
                    build_directory=directory,
                    is_python_module=False,
                )
        except Exception as error:
            raise NativeError(
                "the native kernels were not compiled, and plain torch goes on computing what "
                f"they would: {describe(error)}; they take a C++ compiler (g++ 10 or clang 12, or "
                "newer) and pip install 'zoo-core[native]'"
            ) from error
        (Path(directory) / place.name).replace(place)


def _place() -> Path | None:
    directory = os.environ.get("ZOO_NATIVE")
    if directory == "":
        return None
    if directory is None:
        cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = str(Path(cache_home) / "zoo_core" / "native")
    return Path(directory).expanduser() / _key() / f"{_NAME}.so"


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
