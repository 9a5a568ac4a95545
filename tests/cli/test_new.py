"""`zoo new` writes a distribution that works, or nothing."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from zoo_core import plugins, registry

FILES = {
    ".github/workflows/test.yml",
    ".gitignore",
    "README.md",
    "my_attention/__init__.py",
    "my_attention/attention.py",
    "pyproject.toml",
    "tests/test_my_attention.py",
}
PIP = [
    *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
    *("--no-index", "--disable-pip-version-check"),
]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_it_writes_a_complete_distribution(zoo) -> None:
    run = zoo("new", "my-attention")
    assert run.code == 0, run.err
    assert "pip install -e '.[test]'" in run.out
    written = {str(p.relative_to("my-attention")) for p in Path("my-attention").rglob("*")}
    assert written >= FILES
    for path in FILES:
        text = Path("my-attention", path).read_text()
        assert "jinja" not in text
        assert text.endswith("\n")
        assert not text.endswith("\n\n")
        if path.endswith(".py"):
            ast.parse(text)
    project = tomllib.loads(Path("my-attention/pyproject.toml").read_text())["project"]
    assert project["name"] == "my-attention"
    assert project["entry-points"]["zoo_core.plugins"] == {"my_attention": "my_attention"}
    assert "${{ matrix.python }}" in Path("my-attention/.github/workflows/test.yml").read_text()
    assert os.listdir() == ["my-attention"]


def test_the_card_is_a_plugin(zoo, live_site, monkeypatch) -> None:
    zoo("new", "zoo-sharp")
    monkeypatch.syspath_prepend(Path("zoo-sharp").resolve())
    live_site.install("zoo-sharp", None, module="zoo_sharp")
    registry.forget()
    record = registry.mechanism("zoo-sharp/sharp")
    assert record.options().as_dict() == {"sharpness": 2.0}
    [row] = [one for one in zoo("plugins").out.splitlines() if one.startswith("zoo-sharp")]
    assert row.endswith("1 mechanism: sharp")


def test_a_family_is_a_plugin(zoo, live_site, monkeypatch) -> None:
    run = zoo("new", "my-family", "--architecture")
    assert run.code == 0, run.err
    assert not Path("my-family/my_family/attention.py").exists()
    assert "parametrize_architectures" in Path("my-family/tests/test_my_family.py").read_text()
    monkeypatch.syspath_prepend(Path("my-family").resolve())
    live_site.install("my-family", None, module="my_family")
    registry.forget()
    record = registry.architecture("my-family/my_family")
    assert record.library == "transformers"
    [plugin] = [one for one in plugins.installed() if one.distribution == "my-family"]
    assert plugin.failures == ()


def test_a_family_of_a_name_that_is_taken(zoo) -> None:
    run = zoo("new", "zoo-bert", "--architecture")
    assert run.code == 1
    assert "would offer architecture 'bert', as zoo-core does" in run.err


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "My_Attention": "did you mean 'my-attention'?",
        "../up": "did you mean 'up'?",
        "a/b": "did you mean 'a-b'?",
        "my-äther": "lower-case ASCII",
        "2fast": "did you mean 'fast'?",
        "": "lower-case ASCII",
        "x-": "did you mean 'x'?",
        "x" * 65: "at most 64",
        "zoo-2": "not lower_snake",
        "class": "cannot be imported",
        "tests": "cannot be imported",
        "json": "installed already",
        "linear": "as zoo-core does",
        "zoo-linear": "as zoo-core does",
    }.items(),
)
def test_names_that_are_refused(zoo, name, said) -> None:
    run = zoo("new", name)
    assert run.code == 1
    assert said in run.err
    assert not os.listdir()


def test_an_existing_folder_is_left_alone(zoo) -> None:
    Path("my-attention").mkdir()
    run = zoo("new", "my-attention")
    assert run.code == 1
    assert "exists; nothing was written" in run.err
    assert not os.listdir("my-attention")


def test_a_failing_disk_leaves_nothing(zoo, monkeypatch) -> None:
    write, left = Path.write_text, [3]

    def failing(path, *arguments, **how):
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        return write(path, *arguments, **how)

    monkeypatch.setattr(Path, "write_text", failing)
    run = zoo("new", "my-attention")
    assert run.code == 1
    assert "No space left" in run.err
    assert not os.listdir()


@pytest.mark.slow
def test_it_installs_and_passes_its_own_tests(zoo, in_an_empty_folder) -> None:
    """All but the combinations, which the kit's own tests run for every mechanism here."""
    zoo("new", "my-attention")
    site = in_an_empty_folder / "installed"
    subprocess.run([*PIP, "--target", site, "./my-attention"], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "not combination"],
        cwd="my-attention",
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
