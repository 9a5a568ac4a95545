"""Each fault of the loopback Hub, as the real client meets it."""

from __future__ import annotations

import random
from pathlib import Path
from time import monotonic

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import FileMetadataError, HfHubHTTPError, LocalEntryNotFoundError

from zoo_core.testing.hub import Hub

WEIGHTS = bytes(range(256)) * 400


@pytest.fixture(autouse=True)
def repo(hub: Hub, api: HfApi) -> None:
    hub.create("zoo/m", {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS})


def weights(hub: Hub) -> bytes:
    path = hf_hub_download("zoo/m", "model.safetensors", token=hub.tokens.read)
    return Path(path).read_bytes()


def test_error_once_is_retried_where_the_client_retries(hub: Hub, api: HfApi) -> None:
    fault = hub.faults.error(503, path="*/preupload/*")
    api.upload_file(repo_id="zoo/m", path_in_repo="b.txt", path_or_fileobj=b"b")
    assert fault.hits == 1
    assert [each.status for each in hub.log.find("*/preupload/*")] == [503, 200]
    hub.faults.error(500, path="*/commit/*")
    before = hub.head("zoo/m")
    with pytest.raises(HfHubHTTPError, match="made on purpose"):
        api.upload_file(repo_id="zoo/m", path_in_repo="c.txt", path_or_fileobj=b"c")
    assert hub.head("zoo/m") == before


def test_truncated_bytes_are_resumed_from_where_they_ended(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100)
    hub.faults.truncate(1000, path="/storage/*", method="GET")
    assert weights(hub) == WEIGHTS
    first, second = hub.log.find("/storage/*", method="GET")
    assert (first.status, first.sent, first.faults) == (200, 1000, ["truncate"])
    assert (second.status, second.range, second.sent) == (206, "bytes=1000-", len(WEIGHTS) - 1000)


def test_wrong_bytes_of_the_right_size_pass_the_client(hub: Hub) -> None:
    """Why whoever pulls must hash: the client does not."""
    hub.faults.corrupt(path="/storage/*", method="GET")
    assert weights(hub) == WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 0xFF])
    (served,) = hub.log.find("/storage/*", method="GET")
    assert served.sent == len(WEIGHTS)


def test_another_body_of_another_size_does_not(hub: Hub) -> None:
    hub.faults.body(lambda body: body[:10], path="/storage/*", method="GET")
    with pytest.raises(OSError, match="Consistency check failed"):
        weights(hub)


def test_slow_and_dropped(hub: Hub, api: HfApi) -> None:
    hub.faults.slow(0.3, path="*/revision/*")
    before = monotonic()
    api.model_info("zoo/m", revision="main")
    assert monotonic() - before >= 0.3
    fault = hub.faults.drop(path="*/resolve/*", method="HEAD", times=None)
    with pytest.raises(Exception, match="disconnected without sending a response"):
        weights(hub)
    assert fault.hits >= 1
    assert {each.status for each in hub.log.find("*/resolve/*")} == {0}


def test_a_lost_answer_leaves_the_commit_made(hub: Hub, api: HfApi) -> None:
    before = hub.head("zoo/m")
    hub.faults.drop(path="*/commit/*", answered=True)
    operations = [CommitOperationAdd("b.txt", b"b")]
    with pytest.raises(Exception, match=r"disconnected|reset"):
        api.create_commit("zoo/m", operations, commit_message="x", parent_commit=before)
    after = hub.head("zoo/m")
    assert after != before
    with pytest.raises(HfHubHTTPError) as error:
        api.create_commit("zoo/m", operations, commit_message="x", parent_commit=before)
    assert error.value.response.status_code == 412
    assert hub.head("zoo/m") == after


def test_an_upload_cut_in_the_middle_is_sent_again(hub: Hub, api: HfApi) -> None:
    fault = hub.faults.cut_upload(50_000, path="/storage/*", method="PUT")
    data = WEIGHTS[::-1]
    api.upload_file(repo_id="zoo/m", path_in_repo="model.safetensors", path_or_fileobj=data)
    assert fault.hits == 1
    sent = hub.log.find("/storage/*", method="PUT")
    assert [each.status for each in sent] == [0, 200]
    assert weights(hub) == data
    assert not list(hub.store.incoming.iterdir())


def test_the_branch_moves_between_two_requests(hub: Hub, api: HfApi) -> None:
    first = hub.head("zoo/m")
    hub.faults.meanwhile(lambda: hub.commit("zoo/m", {"config.json": b'{"a": 2}'}), path="*/tree/*")
    folder = Path(snapshot_download("zoo/m", token=hub.tokens.read))
    assert folder.name == first
    assert (folder / "config.json").read_bytes() == b'{"a": 1}', "a snapshot is of one commit"
    assert hub.head("zoo/m") != first


def test_a_push_meets_another_push(hub: Hub, api: HfApi) -> None:
    hub.faults.meanwhile(lambda: hub.commit("zoo/m", {"theirs.txt": b"1"}), path="*/commit/*")
    with pytest.raises(HfHubHTTPError) as error:
        api.upload_file(
            repo_id="zoo/m",
            path_in_repo="ours.txt",
            path_or_fileobj=b"1",
            parent_commit=hub.head("zoo/m"),
        )
    assert error.value.response.status_code == 412
    assert "ours.txt" not in api.list_repo_files("zoo/m")


@pytest.mark.parametrize("name", ["../../evil.txt", "/etc/evil", "C:\\evil", "..\\evil"])
def test_hostile_names_in_the_tree(hub: Hub, api: HfApi, tmp_path: Path, name: str) -> None:
    def rename(entries: list[dict[str, object]]) -> list[dict[str, object]]:
        return [{**entry, "path": name} for entry in entries]

    hub.faults.rewrite(rename, path="*/tree/*")
    assert {entry.path for entry in api.list_repo_tree("zoo/m")} == {name}
    assert not list(tmp_path.rglob("*evil*"))


def test_hostile_headers(hub: Hub) -> None:
    evil = "../../../evil"
    hub.faults.headers({"X-Linked-Etag": f'"{evil}"', "X-Repo-Commit": evil}, path="*/resolve/*")
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url("zoo/m", "model.safetensors", endpoint=hub.endpoint)
    found = get_hf_file_metadata(url)
    assert (found.etag, found.commit_hash) == (evil, evil)
    hub.faults.headers({"X-Repo-Commit": None}, path="*/resolve/*", method="HEAD")
    with pytest.raises((FileMetadataError, LocalEntryNotFoundError)):
        weights(hub)


def test_a_hostile_commit_id(hub: Hub, api: HfApi) -> None:
    hub.faults.rewrite(lambda info: {**info, "sha": "../../x"}, path="/api/models/zoo/m")
    assert api.model_info("zoo/m").sha == "../../x"
    assert api.model_info("zoo/m").sha == hub.head("zoo/m"), "once only"


def test_skip_times_and_clear(hub: Hub, api: HfApi) -> None:
    fault = hub.faults.error(403, path="*/zoo/m", method="GET", skip=1, times=2)
    outcomes = []
    for _ in range(4):
        try:
            api.model_info("zoo/m")
            outcomes.append(200)
        except HfHubHTTPError as error:
            outcomes.append(error.response.status_code)
    assert outcomes == [200, 403, 403, 200]
    assert fault.hits == 2
    hub.faults.error(403, times=None)
    hub.faults.clear()
    assert api.model_info("zoo/m").id == "zoo/m"


def test_wrong_bytes_pass_hf_xet_too(hub: Hub, python, tmp_path: Path) -> None:
    pytest.importorskip("hf_xet")
    # Random, so that hf-xet does not compress it: a broken compressed chunk is retried for minutes.
    data = random.Random(0).randbytes(100_000)
    (tmp_path / "w.bin").write_bytes(data)
    python(
        "from huggingface_hub import HfApi\n"
        "HfApi().upload_file(repo_id='zoo/m', path_in_repo='w.safetensors',"
        " path_or_fileobj='w.bin')\n",
        xet=True,
    )
    hub.faults.corrupt(offset=1000, path="/xet/xorbs/*", times=None)
    python(
        "from huggingface_hub import snapshot_download\n"
        "snapshot_download('zoo/m', local_dir='other')\n",
        xet=True,
        home="other-home",
    )
    fetched = (tmp_path / "other" / "w.safetensors").read_bytes()
    assert len(fetched) == len(data)
    assert sum(x != y for x, y in zip(fetched, data, strict=True)) == 1
    assert hub.log.find("/xet/xorbs/*")[-1].faults == ["corrupt"]


def test_chunks_that_do_not_make_the_file_are_refused(hub: Hub, python, tmp_path: Path) -> None:
    pytest.importorskip("hf_xet")
    (tmp_path / "w.bin").write_bytes(random.Random(0).randbytes(100_000))
    hub.faults.corrupt(offset=1000, path="/xet/xorbs/*")
    before = hub.head("zoo/m")
    said = python(
        "from huggingface_hub import HfApi\n"
        "try:\n"
        "    HfApi().upload_file(repo_id='zoo/m', path_in_repo='w.safetensors',"
        " path_or_fileobj='w.bin')\n"
        "except Exception as error:\n"
        "    print(error)\n",
        xet=True,
    )
    assert "400" in said
    assert hub.head("zoo/m") == before
