"""examples/third_party is installed by pip, listed, and passes its own tests.

A model of it is saved, published, missed and loaded in test_fresh_environment.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party"
OFFLINE = "--no-deps --no-build-isolation --no-index --disable-pip-version-check".split()

LIST = """
import json, sys
from zoo_core import plugins
[plugin] = [one for one in plugins.installed() if one.distribution == "zoo-hydra"]
print(json.dumps({
    "version": plugin.version,
    "mechanisms": [record.qualified for record in plugin.mechanisms],
    "failures": [failure.reason for failure in plugin.failures],
    "notes": plugin.notes,
    "torch": "torch" in sys.modules,
}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder with the installed distribution, for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("third") / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *OFFLINE, "--target", folder, EXAMPLE],
        check=True,
        capture_output=True,
    )
    return folder


def python(*arguments: str, site: Path, cwd: Path, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ZOO_")}
    kept["ZOO_NATIVE"] = ""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": str(site), **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_listed_without_torch(site, tmp_path) -> None:
    assert json.loads(python("-c", LIST, site=site, cwd=tmp_path)) == {
        "version": "0.1.0",
        "mechanisms": ["zoo-hydra/hydra"],
        "failures": [],
        "notes": [],
        "torch": False,
    }


def test_the_cli_installs_it(tmp_path) -> None:
    """Into a folder, by pip's own variables, so that this environment stays as it is."""
    target = tmp_path / "site"
    out = python(
        *("-c", "from zoo_core.cli import main; main()", "plugins", "install", str(EXAMPLE)),
        site=target,
        cwd=tmp_path,
        PIP_TARGET=str(target),
        PIP_NO_DEPS="1",
        PIP_NO_INDEX="1",
        PIP_NO_BUILD_ISOLATION="0",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    assert f"$ {sys.executable} -m pip install {EXAMPLE}" in out
    assert "zoo-hydra 0.1.0 is installed" in out
    assert (target / "zoo_hydra" / "attention.py").is_file()


@pytest.mark.slow
def test_the_single_module_of_its_readme(fake_site) -> None:
    """It runs by itself, as in a notebook, and is a plugin as it stands."""
    [code] = re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 35
    (fake_site.path / "hydra_module.py").write_text(code)
    done = fake_site.run("hydra_module.py")
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 7, 64])" in done.stdout
    fake_site.install("single", None, module="hydra_module")
    show = "from zoo_core.cli import main; main(['show', 'single/hydra_function'])"
    assert "Hydra attention: each feature is a head of its own." in fake_site.run("-c", show).stdout


@pytest.mark.slow
def test_it_passes_its_own_tests(site, tmp_path) -> None:
    """All but the combinations, which the kit's own tests run for every mechanism here."""
    tests = ["-q", "-p", "no:cacheprovider", "-k", "not combination"]
    assert " passed" in python("-m", "pytest", *tests, site=site, cwd=EXAMPLE)
