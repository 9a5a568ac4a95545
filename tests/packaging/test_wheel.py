"""The wheel holds everything, and works from another place than the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*command, "-w", folder, ROOT], check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("zoo_core-*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def run(site: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r})\n{code}"],
        capture_output=True,
        text=True,
        cwd=site,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_packages_catalogue_and_both_commands(unpacked: Path) -> None:
    tops = {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"zoo_core", "zoo_attention", "zoo_architectures"}
    sources = {path.name for path in (ROOT / "zoo_core/nn/native").iterdir() if path.is_file()}
    assert {"vectors.h", "tiles.cpp"} < sources
    assert {path.name for path in (unpacked / "zoo_core/nn/native").iterdir()} == sources
    assert (unpacked / "zoo_core" / "registry.toml").read_text() == (
        ROOT / "registry.toml"
    ).read_text()
    entry_points = next(unpacked.glob("*.dist-info/entry_points.txt")).read_text()
    assert "zoo = zoo_core.cli:main" in entry_points
    assert "hf-zoo = zoo_core.cli:main" in entry_points


def test_the_wheel_works_by_itself(unpacked: Path) -> None:
    code = (
        "import json, zoo_core as zoo\n"
        "print(json.dumps([zoo.__file__, len(zoo.mechanisms()), len(zoo.presets())]))"
    )
    file, mechanisms, presets = json.loads(run(unpacked, code))
    assert Path(file).is_relative_to(unpacked)
    assert mechanisms >= 8
    assert presets >= 4


def test_nothing_else_lies_at_the_top_of_the_repository() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    tops = {line.split("/")[0] for line in listed.stdout.splitlines()}
    expected = {
        "zoo_core",
        "plugins",
        "registry.toml",
        "tests",
        "examples",
        "pyproject.toml",
        "README.md",
    }
    assert {top for top in tops if not top.startswith(".")} == expected
