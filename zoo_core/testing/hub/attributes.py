"""Which uploads are large (`.gitattributes`) and which are to be left out (`.gitignore`)."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

LARGE_BYTES = 10 * 1024 * 1024

_LARGE = (
    "*.7z *.arrow *.bin *.bz2 *.ckpt *.gz *.h5 *.joblib *.model *.msgpack *.npy *.npz *.onnx *.ot "
    "*.parquet *.pb *.pickle *.pkl *.pt *.pth *.rar *.safetensors *.tar *.tar.* *.tflite *.tgz "
    "*.wasm *.xz *.zip *.zst *tfevents*"
).split()

GITATTRIBUTES = "".join(f"{name} filter=lfs diff=lfs merge=lfs -text\n" for name in _LARGE)


def large_patterns(gitattributes: str) -> list[str]:
    """Return the patterns that go to LFS."""
    lines = (line.split() for line in gitattributes.splitlines())
    return [words[0] for words in lines if "filter=lfs" in words[1:]]


def is_large(path: str, size: int, patterns: Iterable[str]) -> bool:
    """Tell whether a file goes to LFS: by its size, or by a pattern for its name or path."""
    name = path.rpartition("/")[2]
    return size > LARGE_BYTES or any(
        fnmatchcase(path if "/" in pattern else name, pattern) for pattern in patterns
    )


def is_ignored(path: str, gitignore: str) -> bool:
    """Tell whether a .gitignore leaves a path out. The last matching line decides, as in git."""
    ignored = False
    for line in map(str.strip, gitignore.splitlines()):
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            if _matches(path, pattern):
                ignored = pattern == line
    return ignored


def _matches(path: str, pattern: str) -> bool:
    """Match a pattern against the path or one of its folders; a slash inside anchors it."""
    parts = path.split("/")
    folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
    candidates = folders if pattern.endswith("/") else [*folders, path]
    pattern = pattern.rstrip("/")
    if "/" in pattern:
        return any(fnmatchcase(candidate, pattern.lstrip("/")) for candidate in candidates)
    return any(fnmatchcase(candidate.rpartition("/")[2], pattern) for candidate in candidates)
