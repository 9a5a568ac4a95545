"""The loopback Hub and the real client: large files, over classic LFS and over real hf-xet."""

from __future__ import annotations

import hashlib
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import HfApi, close_session, hf_hub_download, snapshot_download

from zoo_core.testing.hub import Hub
from zoo_core.testing.hub.cas import ChunkStore, Recipe, Term, parse_shard
from zoo_core.testing.hub.store import Store

WEIGHTS = random.Random(0).randbytes(300_000)


@pytest.fixture
def parts_hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(part=100_000) as running:
        yield running
    close_session()


def upload(api: HfApi, data: bytes = WEIGHTS, path: str = "model.safetensors") -> None:
    api.upload_file(repo_id="zoo/model", path_in_repo=path, path_or_fileobj=data)


def put(hub: Hub, url: str, data: bytes) -> httpx2.Response:
    with httpx2.Client(trust_env=False) as client:
        return client.put(url, content=data)


def batch(hub: Hub, data: bytes, **changes: object) -> dict[str, object]:
    """Ask for permission to upload, as the client would."""
    asked = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), **changes}
    with httpx2.Client(trust_env=False) as client:
        answer = client.post(
            f"{hub.endpoint}/zoo/model.git/info/lfs/objects/batch",
            json={"operation": "upload", "transfers": ["basic"], "objects": [asked]},
            headers={"Authorization": f"Bearer {hub.tokens.write}"},
        )
    (answered,) = answer.json()["objects"]
    return answered


class TestLfs:
    def test_bytes_travel_to_another_origin_without_a_token(self, hub: Hub, api: HfApi) -> None:
        hub.create("zoo/model")
        upload(api)
        assert Path(hf_hub_download("zoo/model", "model.safetensors")).read_bytes() == WEIGHTS
        port = hub.endpoint.rpartition(":")[2]
        (sent,) = hub.log.find("/storage/*", method="PUT")
        (fetched,) = hub.log.find("/storage/*", method="GET")
        assert (sent.host, sent.auth, sent.received) == (f"localhost:{port}", None, len(WEIGHTS))
        assert (fetched.host, fetched.auth, fetched.sent) == (
            f"localhost:{port}",
            None,
            len(WEIGHTS),
        )
        assert {each.auth for each in hub.log if each.host.startswith("127.")} == {"write", None}
        assert hub.tokens.write not in str(hub.log)

    def test_the_tree_tells_sha256_and_pointer(self, hub: Hub, api: HfApi) -> None:
        hub.create("zoo/model")
        upload(api)
        (info,) = api.get_paths_info("zoo/model", "model.safetensors")
        sha256 = hashlib.sha256(WEIGHTS).hexdigest()
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize 300000\n"
        blob = f"blob {len(text)}\0{text}".encode()
        assert (info.lfs.sha256, info.size, info.lfs.pointer_size) == (sha256, 300_000, len(text))
        assert info.blob_id == hashlib.sha1(blob).hexdigest()

    def test_parts_are_joined(self, parts_hub: Hub, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        parts_hub.create("zoo/model")
        upload(HfApi(endpoint=parts_hub.endpoint, token=parts_hub.tokens.write), WEIGHTS[:250_001])
        assert [each.received for each in parts_hub.log.find("/storage/*", method="PUT")] == [
            100_000,
            100_000,
            50_001,
        ]
        assert len(parts_hub.log.find("*/complete")) == 1
        file = parts_hub.repository("zoo/model").resolve("main").files["model.safetensors"]
        assert parts_hub.store.read(file) == WEIGHTS[:250_001]
        assert not list(parts_hub.store.incoming.iterdir())

    def test_what_is_there_is_not_sent_again(self, hub: Hub, api: HfApi) -> None:
        hub.create("zoo/model")
        upload(api)
        upload(api, path="copy.safetensors")
        assert len(hub.log.find("/storage/*", method="PUT")) == 1
        assert len(hub.log.find("*/commit/main")) == 2
        upload(api)
        assert len(hub.log.find("*/commit/main")) == 2, "the same content again is no commit"

    def test_wrong_bytes_are_refused(self, hub: Hub) -> None:
        hub.create("zoo/model")
        url = batch(hub, WEIGHTS)["actions"]["upload"]["href"]
        wrong = bytes([WEIGHTS[0] ^ 1]) + WEIGHTS[1:]
        answer = put(hub, url, wrong)
        assert answer.status_code == 400
        assert hashlib.sha256(wrong).hexdigest() in answer.json()["error"]
        assert put(hub, url, WEIGHTS).status_code == 200
        assert not list(hub.store.incoming.iterdir())

    @pytest.mark.parametrize("query", ["", "?sig=", "?sig=" + "0" * 32], ids=["no", "empty", "bad"])
    def test_storage_takes_only_signed_links(self, hub: Hub, query: str) -> None:
        hub.create("zoo/model", {"w.safetensors": WEIGHTS})
        sha256 = hashlib.sha256(WEIGHTS).hexdigest()
        with httpx2.Client(trust_env=False) as client:
            url = f"{hub.endpoint}/storage/{sha256}"
            assert client.put(url + query, content=b"x").status_code == 403
            assert client.get(f"{url}/w.safetensors{query}").status_code == 403

    @pytest.mark.parametrize(
        "change", [{"oid": "../../x"}, {"oid": "A" * 64}, {"size": -1}], ids=str
    )
    def test_malformed_objects_are_refused_one_by_one(self, hub: Hub, change) -> None:
        hub.create("zoo/model")
        assert batch(hub, WEIGHTS, **change)["error"]["code"] == 422

    def test_a_commit_of_bytes_never_sent_is_refused(self, hub: Hub) -> None:
        hub.create("zoo/model")
        before = hub.head("zoo/model")
        line = '{"key": "lfsFile", "value": {"path": "w.bin", "algo": "sha256", "oid": "%s"}}'
        with httpx2.Client(trust_env=False) as client:
            answer = client.post(
                f"{hub.endpoint}/api/models/zoo/model/commit/main",
                content=line % ("0" * 64),
                headers={"Authorization": f"Bearer {hub.tokens.write}"},
            )
        assert answer.status_code == 400
        assert "has not been uploaded" in answer.json()["error"]
        assert hub.head("zoo/model") == before


UPLOAD = """
from huggingface_hub import HfApi
HfApi().upload_file(repo_id="zoo/model", path_in_repo="{path}", path_or_fileobj="{file}")
"""

UPLOAD_FOLDER = """
from huggingface_hub import HfApi
HfApi().upload_folder(repo_id="zoo/model", folder_path="folder")
"""

DOWNLOAD = """
import hashlib
from huggingface_hub import snapshot_download
data = open(snapshot_download("zoo/model") + "/model.safetensors", "rb").read()
print(hashlib.sha256(data).hexdigest())
"""


@pytest.mark.skipif(not find_spec("hf_xet"), reason="hf-xet is not installed")
class TestXet:
    @pytest.fixture(autouse=True)
    def files(self, hub: Hub, tmp_path: Path) -> None:
        hub.create("zoo/model")
        (tmp_path / "w.bin").write_bytes(WEIGHTS)

    def test_up_and_down_in_processes_of_their_own(
        self, hub: Hub, python: Callable[..., str], api: HfApi, tmp_path: Path
    ) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder/config.json").write_bytes(b"{}")
        (tmp_path / "folder/model.safetensors").write_bytes(WEIGHTS)
        python(UPLOAD_FOLDER, xet=True, home="up")
        assert api.file_exists("zoo/model", "config.json")
        (info,) = api.get_paths_info("zoo/model", "model.safetensors")
        assert len(info.xet_hash or "") == 64
        assert info.lfs.sha256 == hashlib.sha256(WEIGHTS).hexdigest()
        assert not hub.log.find("/storage/*"), "the bytes went as chunks"
        asked = [each.path for each in hub.log]
        rebuilt = asked.index(f"/xet/v1/reconstructions/{info.xet_hash}")
        assert rebuilt < asked.index("/api/models/zoo/model/commit/main"), (
            "the Hub checks the bytes before the commit, which has little time"
        )

        hub.log.clear()
        found = python(DOWNLOAD, token="read", xet=True, home="down")
        assert found == info.lfs.sha256
        assert hub.log.find("/api/models/zoo/model/xet-read-token/*")
        assert not hub.log.find("/storage/*")
        chunked = [each for each in hub.log if each.path.startswith("/xet/")]
        assert {each.auth for each in chunked} == {"xet", None}
        assert all(each.host.startswith("localhost:") for each in chunked)

        plain = hf_hub_download("zoo/model", "model.safetensors", token=hub.tokens.read)
        assert Path(plain).read_bytes() == WEIGHTS, "a client without Xet gets it too"

    def test_two_uploaders_at_once_and_shared_chunks(
        self, hub: Hub, python: Callable[..., str], api: HfApi, tmp_path: Path
    ) -> None:
        (tmp_path / "v.bin").write_bytes(WEIGHTS + os.urandom(200_000))
        failures: list[BaseException] = []

        def one(name: str) -> None:
            try:
                path = f"{name}.safetensors"
                python(UPLOAD.format(path=path, file=f"{name}.bin"), xet=True, home=name)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=one, args=(name,)) for name in "wv"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        folder = Path(snapshot_download("zoo/model", token=hub.tokens.read))
        for name in "wv":
            expected = (tmp_path / f"{name}.bin").read_bytes()
            assert (folder / f"{name}.safetensors").read_bytes() == expected

    def test_a_hub_without_xet_is_told_apart(self, tmp_path: Path) -> None:
        with Hub(xet=False) as plain:
            plain.create("zoo/model")
            with httpx2.Client(trust_env=False) as client:
                answer = client.get(
                    f"{plain.endpoint}/api/models/zoo/model/xet-write-token/main",
                    headers={"Authorization": f"Bearer {plain.tokens.write}"},
                )
        assert answer.status_code == 404
        assert "HF_HUB_DISABLE_XET=1" in answer.json()["error"]

    def test_only_writers_get_a_write_token_and_readers_cannot_write(self, hub: Hub) -> None:
        route = f"{hub.endpoint}/api/models/zoo/model/xet"
        with httpx2.Client(trust_env=False) as client:

            def token(scope: str, account: str) -> httpx2.Response:
                bearer = getattr(hub.tokens, account)
                headers = {"Authorization": f"Bearer {bearer}"}
                return client.get(f"{route}-{scope}-token/main", headers=headers)

            assert token("write", "read").status_code == 403
            assert token("write", "guest").status_code == 403
            given = token("read", "guest").json()
            headers = {"Authorization": f"Bearer {given['accessToken']}"}
            url = f"{given['casUrl']}/v1/xorbs/default/{'0' * 64}"
            assert client.post(url, content=b"x", headers=headers).status_code == 401
            headers = {"Authorization": f"Bearer {hub.tokens.write}"}
            assert client.post(url, content=b"x", headers=headers).status_code == 401

    def test_shards_that_lie_are_refused(self, hub: Hub) -> None:
        with httpx2.Client(trust_env=False) as client:
            given = client.get(
                f"{hub.endpoint}/api/models/zoo/model/xet-write-token/main",
                headers={"Authorization": f"Bearer {hub.tokens.write}"},
            ).json()
            headers = {"Authorization": f"Bearer {given['accessToken']}"}
            for body, complaint in (
                (b"junk", "magic"),
                (shard()[:100], "ends in the middle"),
                (shard(), "is not here"),
            ):
                answer = client.post(f"{given['casUrl']}/v1/shards", content=body, headers=headers)
                assert answer.status_code == 400
                assert complaint in answer.json()["error"]


def shard() -> bytes:
    """A shard of one file: 10 bytes, chunks 0 to 2 of one xorb, with a sha256."""
    head = b"HFRepoMetaData\0".ljust(32, b"\1") + struct.pack("<QQ", 2, 200)
    file = b"\1" * 32 + struct.pack("<IIQ", 1 << 30, 1, 0)
    term = bytes(range(32)) + struct.pack("<IIII", 0, 10, 0, 2)
    return head + file + term + b"\2" * 48 + b"\xff" * 32 + bytes(16) + bytes(48)


def test_shards_are_read_as_the_specification_says() -> None:
    (recipe,) = parse_shard(shard())
    # Four little-endian words: each group of eight bytes is written in reverse.
    assert recipe.terms[0].xorb.startswith("0706050403020100" + "0f0e0d0c0b0a0908")
    assert recipe == Recipe("01" * 32, "02" * 32, (Term(recipe.terms[0].xorb, 0, 2, 10),))


def test_a_range_takes_the_chunks_that_cover_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    chunks = ChunkStore(store)
    lengths = [3, 4, 5, 6]
    body = b"".join(
        bytes([0, 2, 0, 0, 0, length, 0, 0]) + b"zz" for length in lengths
    )  # packed: two bytes each
    (tmp_path / "xet/xorbs").mkdir(parents=True)
    for name in ("x", "y"):
        chunks.xorb(name).write_bytes(body + b"XETBLOB and a footer")
    recipe = Recipe("f", None, (Term("x", 0, 4, 18), Term("y", 1, 3, 9)))
    stream = "".join(
        letter * length for letter, length in zip("abcdfg", [3, 4, 5, 6, 4, 5], strict=True)
    )
    content = {("x", n): c * lengths[n] for n, c in enumerate("abcd")}
    content |= {("y", 1): "ffff", ("y", 2): "ggggg"}
    for start in range(27):
        for stop in range(start + 1, 28):
            skip, terms = chunks.plan(recipe, start, stop)
            text = "".join(
                content[term.xorb, n] for term in terms for n in range(term.start, term.stop)
            )
            assert text[skip : skip + stop - start] == stream[start:stop]
            assert sum(term.length for term in terms) == len(text)
            first, last = terms[0], terms[-1]
            assert skip < len(content[first.xorb, first.start]), "no chunk too many in front"
            assert len(text) - skip - (stop - start) < len(content[last.xorb, last.stop - 1])
    assert chunks.span(Term("x", 1, 3, 9)) == (10, 30)
    store.close()
