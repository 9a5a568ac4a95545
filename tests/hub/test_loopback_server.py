"""The loopback Hub as a server: its directory, its port, its process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import HfApi

from zoo_core.errors import ZooError
from zoo_core.testing.hub import Hub

SERVE = """
import sys
from zoo_core.testing.hub import serve

def ready(hub):
    print(hub.endpoint, hub.tokens.write, flush=True)

serve(sys.argv[1], ready=ready)
"""


def test_a_directory_keeps_repositories_and_tokens(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    with Hub(tmp_path / "hub") as hub:
        hub.create("zoo/m", files, private=True, gated="manual")
        head, tokens = hub.head("zoo/m"), hub.tokens
        repo = hub.repository("zoo/m")
    with Hub(tmp_path / "hub") as hub:
        assert (hub.tokens.write, hub.tokens.read) == (tokens.write, tokens.read)
        assert hub.repository("zoo/m") == repo
        assert hub.head("zoo/m") == head
        api = HfApi(endpoint=hub.endpoint, token=hub.tokens.read)
        assert set(files) <= set(api.list_repo_files("zoo/m"))


def test_tokens_are_for_the_owner_only(tmp_path: Path) -> None:
    with Hub(tmp_path) as hub:
        file = tmp_path / "hub.json"
        assert hub.tokens.write in file.read_text()
        assert file.stat().st_mode & 0o077 == 0
        tokens = {hub.tokens.write, hub.tokens.read, hub.tokens.guest, hub.tokens.unknown}
        assert len(tokens) == 4
    with Hub() as other:
        assert other.tokens.write not in tokens


def test_one_hub_for_a_directory_and_one_for_a_port(tmp_path: Path) -> None:
    with Hub(tmp_path) as hub:
        with pytest.raises(ZooError, match="served by another Hub"):
            Hub(tmp_path)
        port = int(hub.endpoint.rpartition(":")[2])
        with pytest.raises(ZooError, match=f"port {port} .* cannot be used"):
            Hub(port=port)
    with Hub(tmp_path, port):
        pass


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("repos/models/zoo/m.json", "{"),
        ("repos/models/zoo/m.json", '{"format": 2}'),
        ("hub.json", '{"accounts": [{}]}'),
    ],
    ids=["half", "newer", "accounts"],
)
def test_a_damaged_directory_is_named(tmp_path: Path, path: str, content: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    with pytest.raises(ZooError, match=str(file)):
        Hub(tmp_path)
    file.unlink()
    with Hub(tmp_path):
        pass


def test_only_the_loopback_interface_listens(hub: Hub) -> None:
    port = int(hub.endpoint.rpartition(":")[2])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: asks for the address a route would use
        address = probe.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("no other interface here")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port), timeout=2)


def test_another_host_name_is_refused(hub: Hub) -> None:
    hub.create("zoo/m")
    with httpx2.Client(trust_env=False) as client:
        for host, status in (("evil.example", 421), ("localhost", 200), ("127.0.0.1", 200)):
            answer = client.get(f"{hub.endpoint}/api/models/zoo/m", headers={"Host": host})
            assert answer.status_code == status


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_serve_survives_a_kill(tmp_path: Path) -> None:
    def start() -> tuple[subprocess.Popen[str], str, str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(tmp_path / "hub")],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        endpoint, token = process.stdout.readline().split()
        return process, endpoint, token

    process, endpoint, token = start()
    api = HfApi(endpoint=endpoint, token=token)
    api.create_repo("zoo/m")
    with httpx2.Client(trust_env=False) as client:
        head = client.post(
            f"{endpoint}/api/models/zoo/m/commit/main",
            content=json.dumps(
                {"key": "file", "value": {"path": "a.txt", "content": "YQ==", "encoding": "base64"}}
            ),
            headers={"Authorization": f"Bearer {token}"},
        ).json()["commitOid"]
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()

    process, endpoint, again = start()
    api = HfApi(endpoint=endpoint, token=token)
    assert again == token
    assert api.model_info("zoo/m").sha == head
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0, "Ctrl-C is a normal end"
    process.stdout.close()


def test_without_starlette_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['starlette'] = None; sys.modules['uvicorn'] = None\n"
        "import zoo_core.testing\n"
        "from zoo_core.errors import ZooError\n"
        "try:\n"
        "    from zoo_core.testing.hub import Hub\n"
        "except ZooError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'zoo-core[test]'" in done.stdout


def test_env_gives_every_subprocess_its_hub(hub: Hub, tmp_path: Path) -> None:
    values = hub.env(home=tmp_path)
    assert values["HF_ENDPOINT"] == hub.endpoint
    assert values["HF_TOKEN"] == hub.tokens.write
    assert values["HF_HUB_DISABLE_XET"] == "1"
    inside = ("HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE", "HF_TOKEN_PATH", "HF_MODULES_CACHE")
    assert all(Path(values[name]).is_relative_to(tmp_path) for name in inside)
    assert hub.env(None)["HF_TOKEN"] == ""
    assert hub.env(xet=True)["HF_HUB_DISABLE_XET"] == "0"
    home = Path(hub.env()["HF_HOME"])
    assert home == Path(hub.env("read")["HF_HOME"])
    assert not os.path.exists(home)
