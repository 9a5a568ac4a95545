"""A Hub for each test, and clients of it: in this process with `api`, in others with `python`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, close_session, constants

from zoo_core.testing.hub import Hub

sys.path.insert(0, str(Path(__file__).parent))  # for `hub_models`


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as running:
        yield running


@pytest.fixture
def api(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HfApi]:
    """The client in this process, owning the namespace `zoo`, over classic LFS.

    huggingface_hub reads its environment once, at import; other tests may have imported it already.
    """
    point_client_at(hub, tmp_path, monkeypatch)
    yield HfApi(endpoint=hub.endpoint, token=hub.tokens.write)
    close_session()


def point_client_at(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "AGENT_HARNESSES_PATH": str(home / "harnesses.json"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "HF_HUB_DISABLE_PROGRESS_BARS": True,
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    close_session()


@pytest.fixture
def python(hub: Hub, tmp_path: Path) -> Callable[..., str]:
    """Run code in a fresh Python whose environment points at the Hub; return what it prints."""

    def run(
        code: str, *, token: str | None = "write", xet: bool = False, home: str = "home"
    ) -> str:
        environment = {**os.environ, **hub.env(token, xet=xet, home=tmp_path / home)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            pytest.fail(f"{done.stderr}\n{hub.log}")
        return done.stdout.strip()

    return run
