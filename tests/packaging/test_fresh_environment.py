"""A third-party plugin over its whole life, in a virtual environment of its own and on a Hub."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from zoo_core.testing.hub import Hub

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a virtual environment of POSIX")

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party"
OFFLINE = "--no-deps --no-build-isolation --no-index --disable-pip-version-check".split()

PUSH = """
import torch, zoo_core as zoo
from zoo_core import registry
model = zoo.build("bert", "hydra", seed=0, **registry.architecture("bert").adapter().tiny()).eval()
zoo.save(model, "saved")
torch.save(model(torch.arange(5, 14)[None])[0].detach(), "expected.pt")
print(zoo.push(model, "zoo/hydra"))
"""
PULL = """
import sys, torch, zoo_core as zoo
for model in (zoo.load("saved"), zoo.pull(sys.argv[1])):
    assert torch.equal(model(torch.arange(5, 14)[None])[0], torch.load("expected.pt"))
print(zoo.inspect(model).sites[0].mechanism)
"""


MISSED = """
import sys, zoo_core as zoo
for load, reference in ((zoo.pull, sys.argv[1]), (zoo.load, "saved")):
    try:
        load(reference)
    except zoo.ZooError as error:
        print(type(error).__name__, " ".join(str(error).split()))
    else:
        print("loaded", reference)
"""


class Environment:
    """A virtual environment that sees this one's packages, but for its installers."""

    def __init__(self, folder: Path, *, pip: bool, **variables: str) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        venv.create(folder / "venv", with_pip=pip)
        borrowed = folder / "borrowed"
        borrowed.mkdir()
        for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for found in Path(path).iterdir():
                if found.name.partition("-")[0] not in ("pip", "uv"):
                    (borrowed / found.name).symlink_to(found)
        [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
        # addsitedir, unlike a plain line, also finds what is installed here as editable.
        (packages / "borrowed.pth").write_text(f"import site; site.addsitedir({str(borrowed)!r})")
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ZOO_")}
        kept["ZOO_NATIVE"] = ""
        self.variables = {**kept, **variables}

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
        )

    def out(self, *arguments: str | Path) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def zoo(self, *arguments: str | Path) -> str:
        return self.out("-c", "from zoo_core.cli import main; main()", *arguments)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    with Hub() as hub:
        yield Environment(tmp_path, pip=True, **hub.env(home=tmp_path / "home"))


@pytest.mark.slow
def test_uv_installs_and_removes_where_there_is_no_pip(tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not installed")
    # It does not see borrowed packages: leave the example's requirements out of the resolution.
    (tmp_path / "none.txt").write_text(
        "torch; python_version < '3'\nzoo-core; python_version < '3'"
    )
    environment = Environment(
        tmp_path,
        pip=False,
        PATH=os.pathsep.join([str(uv.parent), os.environ["PATH"]]),
        UV_OFFLINE="1",
        UV_NO_INDEX="1",
        UV_NO_BUILD_ISOLATION="1",
        UV_OVERRIDE=str(tmp_path / "none.txt"),
        UV_CACHE_DIR=str(tmp_path / "cache"),
    )
    out = environment.zoo("plugins", "install", EXAMPLE)
    assert f"$ {uv} pip install --python" in out
    assert "zoo-hydra 0.1.0 is installed" in out
    assert '"zoo-hydra"' in environment.zoo("list", "--json")
    environment.zoo("plugins", "uninstall", "zoo-hydra")
    assert "hydra" not in environment.zoo("list", "--json")


@pytest.mark.slow
def test_installed_published_missed_and_installed_again(environment: Environment) -> None:
    assert "hydra" not in environment.zoo("list", "--json")
    environment.out("-m", "pip", "install", *OFFLINE, EXAMPLE)
    assert '"zoo-hydra"' in environment.zoo("list", "--json")
    assert "zoo-hydra" in environment.zoo("plugins")
    ref = environment.out("-c", PUSH).strip()
    assert ref.startswith("zoo/hydra@")

    environment.zoo("plugins", "uninstall", "zoo-hydra")
    assert "hydra" not in environment.zoo("list", "--json")
    for missed in environment.out("-c", MISSED, ref).splitlines():
        assert missed.startswith("UnknownName ")
        assert "needs zoo-hydra/hydra (saved with version 0.1.0)" in missed
        assert "pip install zoo-hydra" in missed

    environment.out("-m", "pip", "install", *OFFLINE, EXAMPLE)
    assert environment.out("-c", PULL, ref).strip() == "zoo-hydra/hydra"
