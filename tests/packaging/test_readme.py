"""README is run: its Python blocks work, its tables are current, its two commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)


# Each file as a program of its own, in a fork: only what others than zoo_core take long to import
# is there already.
RUN = """
import os, runpy, sys
import torch, transformers.models.bert.modeling_bert

for path in sys.argv[1:]:
    if not os.fork():
        sys.argv = [path]
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    if os.wait()[1]:
        sys.exit(f"{path} failed")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_python_blocks_run(tmp_path) -> None:
    """All but the first, which builds models of full size."""
    paths = []
    for number, block in enumerate(PYTHON[1:], start=1):
        paths.append(tmp_path / f"block_{number}.py")
        paths[-1].write_text(block)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *paths], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_its_plugin_keeps_every_rule(fake_site) -> None:
    files = re.findall(r"```python\n# (my_mean/\w+\.py)[^\n]*\n(.*?)```", README, re.DOTALL)
    (fake_site.path / "my_mean").mkdir()
    for name, code in files:
        (fake_site.path / name).write_text(code)
    fake_site.install("my-mean", None)
    doctor = "from zoo_core.cli import main; main(['plugins', 'doctor', 'my-mean', '--quick'])"
    done = fake_site.run("-c", doctor)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my-mean/my_mean passes" in done.stdout


def test_the_first_block_names_what_exists() -> None:
    import zoo_core as zoo

    for architecture, attention in re.findall(r'build\("(\w+)", attention="(\w+)"', PYTHON[0]):
        assert zoo.architectures(architecture)
        assert zoo.mechanisms(attention)


def test_there_are_two_commands_of_one_line_each() -> None:
    assert len(SHELL) == 2
    assert all(len(block.strip().splitlines()) == 1 for block in SHELL)
    assert "examples/quickstart.py" in SHELL[0]
    assert "-m pytest" in SHELL[1]


def test_the_quick_tables_are_current() -> None:
    command = [sys.executable, ROOT / "examples" / "readme.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_measured_table_has_every_mechanism() -> None:
    import zoo_core as zoo

    table = README.split("<!-- quickstart -->")[1].split("<!-- /quickstart -->")[0]
    for record in zoo.mechanisms(distribution="zoo-core"):
        if not zoo.why("bert", record.name):
            assert f"| {record.name} " in table


def test_what_a_swap_promises_is_what_was_measured() -> None:
    import zoo_core as zoo

    swaps = {record.name: record.swap for record in zoo.mechanisms(distribution="zoo-core")}
    cosines: dict[str, float] = {}
    for block in ("healed-images", "quickstart"):  # of the first, what a text model cannot have
        table = README.split(f"<!-- {block} -->")[1].split(f"<!-- /{block} -->")[0]
        rows = re.findall(r"^\| (\w+) \| ([\d.]+) \|", table, re.MULTILINE)
        cosines |= {name: float(cosine) for name, cosine in rows}
    assert set(cosines) == set(swaps) - {"uniform"}
    for name, cosine in cosines.items():
        swap = "approximate" if cosine >= 0.8 else "needs-training"
        assert swaps[name] == ("exact" if swaps[name] == "exact" else swap), name
        assert cosine == 1 or swaps[name] != "exact", name


def test_the_table_of_speed_has_every_mechanism() -> None:
    import zoo_core as zoo

    table = README.split("<!-- speed -->")[1].split("<!-- /speed -->")[0]
    for record in zoo.mechanisms(distribution="zoo-core"):
        assert f"| `{record.name}` |" in table


def test_console_verbs_exist() -> None:
    from zoo_core.cli.app import VERBS

    verbs = re.findall(r"^\$ zoo (\w+)", README, re.MULTILINE)
    assert verbs
    assert set(verbs) <= set(VERBS)
