"""The loopback Hub and the real client: commits, files, revisions and pull requests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import httpx2
import numpy as np
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.numpy import save

from zoo_core.testing.hub import Hub


@pytest.fixture
def repo(hub: Hub) -> str:
    hub.create("zoo/model", {"config.json": b"{}", "sub/a.txt": b"a", "sub/deep/b.txt": b"b"})
    return "zoo/model"


def add(path: str, data: bytes = b"new") -> CommitOperationAdd:
    return CommitOperationAdd(path, data)


def paths(api: HfApi, repo: str, revision: str = "main") -> list[str]:
    return sorted(set(api.list_repo_files(repo, revision=revision)) - {".gitattributes"})


def test_a_commit_is_one_atomic_state(hub: Hub, api: HfApi, repo: str) -> None:
    before = hub.head(repo)
    info = api.create_commit(
        repo,
        [
            add("model.safetensors", save({"w": np.arange(4.0)})),
            add("config.json", b'{"a": 1}'),
            CommitOperationDelete("sub/a.txt"),
        ],
        commit_message="change all",
        commit_description="for a test",
        parent_commit=before,
    )
    assert info.oid == hub.head(repo)
    assert info.commit_url == f"{hub.endpoint}/{repo}/commit/{info.oid}"
    assert paths(api, repo) == ["config.json", "model.safetensors", "sub/deep/b.txt"]
    assert paths(api, repo, before) == ["config.json", "sub/a.txt", "sub/deep/b.txt"]
    commits = api.list_repo_commits(repo)
    assert [commit.title for commit in commits] == ["change all", "commit", "initial commit"]
    assert (commits[0].message, commits[0].authors) == ("for a test", ["zoo"])
    assert Path(hf_hub_download(repo, "config.json", revision=before)).read_bytes() == b"{}"
    assert Path(hf_hub_download(repo, "config.json")).read_bytes() == b'{"a": 1}'


def test_a_commit_of_nothing_new_is_none(hub: Hub, repo: str) -> None:
    head = hub.head(repo)
    assert hub.commit(repo, {"config.json": b"{}"}, title="again") == head
    assert hub.commit(repo, {"config.json": b"[]"}, title="new") != head


def test_a_stale_parent_is_412_and_changes_nothing(hub: Hub, api: HfApi, repo: str) -> None:
    stale = hub.head(repo)
    newer = hub.commit(repo, {"config.json": b"[]"})
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as error:
        api.create_commit(repo, [add("b.txt")], commit_message="late", parent_commit=stale)
    assert error.value.response.status_code == 412
    assert hub.head(repo) == newer


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        (CommitOperationDelete("nowhere.txt"), EntryNotFoundError),
        (CommitOperationDelete("nowhere/"), EntryNotFoundError),
        (add("sub"), BadRequestError),
        (add("config.json/inside"), BadRequestError),
    ],
    ids=["no-file", "no-folder", "file-over-folder", "file-under-file"],
)
def test_an_impossible_change_spoils_the_whole_commit(
    hub: Hub, api: HfApi, repo: str, operation: object, error: type[Exception]
) -> None:
    before = hub.head(repo)
    with pytest.raises(error):
        api.create_commit(repo, [add("b.txt"), operation], commit_message="no")
    assert hub.head(repo) == before


@pytest.mark.parametrize("path", ["../up", "/abs", "a/../b", ".git/config", "a//b", "a\\b", "a\nb"])
def test_paths_that_leave_the_repository_are_refused(hub: Hub, repo: str, path: str) -> None:
    lines = (
        '{"key": "header", "value": {"summary": "x"}}\n'
        '{"key": "file", "value": {"content": "eA==", "encoding": "base64", "path": %s}}\n'
    )
    quoted = path.replace("\\", "\\\\").replace("\n", "\\n")
    with httpx2.Client(trust_env=False) as client:
        answer = client.post(
            f"{hub.endpoint}/api/models/{repo}/commit/main",
            content=lines % f'"{quoted}"',
            headers={"Authorization": f"Bearer {hub.tokens.write}"},
        )
    assert answer.status_code == 400
    assert repr(path) in answer.json()["error"]


def test_folders_and_copies(hub: Hub, api: HfApi, repo: str) -> None:
    hub.commit(repo, {"model.safetensors": save({"w": np.zeros(3)})})
    api.create_commit(
        repo,
        [
            CommitOperationCopy("model.safetensors", "old/model.safetensors"),
            CommitOperationCopy("config.json", "old/config.json"),
        ],
        commit_message="copy",
    )
    api.delete_folder("sub", repo)
    assert paths(api, repo) == [
        "config.json",
        "model.safetensors",
        "old/config.json",
        "old/model.safetensors",
    ]
    assert not hub.log.find("*/batch"), "an LFS copy sends no bytes"


def test_upload_folder_honours_gitignore_and_skips_what_is_there(
    hub: Hub, api: HfApi, repo: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    (folder / "runs").mkdir(parents=True)
    (folder / ".gitignore").write_text("*.log\nruns/\n!keep.log\n")
    for name in ("a.txt", "b.log", "keep.log", "runs/1.txt", "w.safetensors"):
        (folder / name).write_bytes(name.encode())
    api.upload_folder(repo_id=repo, folder_path=folder)
    first = hub.head(repo)
    assert {"a.txt", "keep.log", "w.safetensors"} <= set(paths(api, repo))
    assert not {"b.log", "runs/1.txt"} & set(paths(api, repo))
    (folder / "b.log").unlink()
    shutil.rmtree(folder / "runs")
    hub.log.clear()
    api.upload_folder(repo_id=repo, folder_path=folder)
    assert hub.head(repo) == first
    assert not hub.log.find("*/commit/*")


def test_tree_lists_levels_pages_and_last_changes(tmp_path: Path) -> None:
    with Hub(page=2) as hub:
        hub.create("zoo/m", {"a/b/c.txt": b"c", "a/d.txt": b"d", "e.txt": b"e"})
        hub.commit("zoo/m", {"a/d.txt": b"D"}, title="second")
        api = HfApi(endpoint=hub.endpoint, token=False)
        top = {entry.path for entry in api.list_repo_tree("zoo/m")}
        assert top == {".gitattributes", "a", "e.txt"}
        inside = {entry.path for entry in api.list_repo_tree("zoo/m", "a/b")}
        assert inside == {"a/b/c.txt"}
        deep = api.list_repo_tree("zoo/m", recursive=True, expand=True)
        last = {entry.path: entry.last_commit.title for entry in deep}
        assert last == {
            ".gitattributes": "initial commit",
            "a": "second",
            "a/b": "commit",
            "a/b/c.txt": "commit",
            "a/d.txt": "second",
            "e.txt": "commit",
        }
        assert len(hub.log.find("*/tree/main")) == 2 + 3
        with pytest.raises(RemoteEntryNotFoundError):
            list(api.list_repo_tree("zoo/m", "nowhere"))


def test_paths_info_leaves_out_what_is_missing(api: HfApi, repo: str) -> None:
    found = api.get_paths_info(repo, ["config.json", "sub", "nowhere", ""])
    assert [type(entry).__name__ for entry in found] == ["RepoFile", "RepoFolder"]


def test_missing_things_have_their_own_errors(hub: Hub, api: HfApi, repo: str) -> None:
    with pytest.raises(RevisionNotFoundError):
        api.model_info(repo, revision="nowhere")
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download(repo, "config.json", revision="0" * 40)
    with pytest.raises(RemoteEntryNotFoundError) as error:
        hf_hub_download(repo, "nowhere.json")
    assert error.value.response.headers["X-Repo-Commit"] == hub.head(repo)
    assert not api.file_exists(repo, "nowhere.json")
    assert not api.revision_exists(repo, "nowhere")


def test_branches_and_tags_may_hold_slashes_and_odd_letters(
    hub: Hub, api: HfApi, repo: str
) -> None:
    first = hub.head(repo)
    api.create_branch(repo, branch="feat/x.1")
    api.create_tag(repo, tag="v1/rc-1", tag_message="first")
    hub.commit(repo, {"odd name/%41+ä.txt": b"odd"}, branch="feat/x.1")
    odd = hf_hub_download(repo, "odd name/%41+ä.txt", revision="feat/x.1")
    assert Path(odd).read_bytes() == b"odd"
    refs = api.list_repo_refs(repo)
    assert {branch.name for branch in refs.branches} == {"main", "feat/x.1"}
    assert [(tag.name, tag.ref, tag.target_commit) for tag in refs.tags] == [
        ("v1/rc-1", "refs/tags/v1/rc-1", first)
    ]
    assert api.model_info(repo, revision="v1/rc-1").sha == first
    assert api.model_info(repo, revision=first[:7]).sha == first
    for create in (
        lambda **more: api.create_branch(repo, branch="feat/x.1", **more),
        lambda **more: api.create_tag(repo, tag="v1/rc-1", **more),
    ):
        with pytest.raises(HfHubHTTPError) as error:
            create()
        assert error.value.response.status_code == 409
        create(exist_ok=True)
    api.delete_branch(repo, branch="feat/x.1")
    api.delete_tag(repo, tag="v1/rc-1")
    assert not api.revision_exists(repo, "feat/x.1")
    with pytest.raises(HfHubHTTPError, match="cannot be deleted"):
        api.delete_branch(repo, branch="main")
    with pytest.raises(RevisionNotFoundError):
        api.create_commit(repo, [add("x.txt")], commit_message="x", revision=first)


def test_a_guest_proposes_and_the_owner_merges(hub: Hub, api: HfApi, repo: str) -> None:
    before = hub.head(repo)
    guest = HfApi(endpoint=hub.endpoint, token=hub.tokens.guest)
    info = guest.create_commit(
        repo,
        [add("w.safetensors", b"weights"), CommitOperationDelete("sub/a.txt")],
        commit_message="proposal",
        create_pr=True,
    )
    assert (info.pr_num, info.pr_revision) == (1, "refs/pr/1")
    assert info.pr_url == f"{hub.endpoint}/{repo}/discussions/1"
    assert hub.head(repo) == before
    assert "w.safetensors" in paths(api, repo, "refs/pr/1")
    (pull,) = api.get_repo_discussions(repo)
    assert (pull.title, pull.author, pull.status, pull.is_pull_request) == (
        "proposal",
        "guest",
        "open",
        True,
    )
    hub.commit(repo, {"config.json": b"[]"})
    with pytest.raises(HfHubHTTPError):
        guest.merge_pull_request(repo, 1)
    api.merge_pull_request(repo, 1)
    assert paths(api, repo) == ["config.json", "sub/deep/b.txt", "w.safetensors"]
    assert api.get_discussion_details(repo, 1).status == "merged"
    refs = api.list_repo_refs(repo, include_pull_requests=True)
    assert [ref.name for ref in refs.pull_requests or []] == ["refs/pr/1"]


def test_a_merge_of_both_sides_changes_is_refused(hub: Hub, api: HfApi, repo: str) -> None:
    api.create_commit(repo, [add("config.json")], commit_message="mine", create_pr=True)
    head = hub.commit(repo, {"config.json": b"theirs"})
    with pytest.raises(HfHubHTTPError, match="both sides changed config"):
        api.merge_pull_request(repo, 1)
    assert hub.head(repo) == head


def test_squash_leaves_one_commit_with_the_same_files(hub: Hub, api: HfApi, repo: str) -> None:
    before, files = hub.head(repo), paths(api, repo)
    api.super_squash_history(repo, commit_message="all of it")
    assert [commit.title for commit in api.list_repo_commits(repo)] == ["all of it"]
    assert paths(api, repo) == files
    assert api.model_info(repo, revision=before).sha == before


def test_safetensors_headers_are_read_by_range(hub: Hub, api: HfApi, repo: str) -> None:
    hub.commit(repo, {"model.safetensors": save({"w": np.zeros((300, 300))})})
    metadata = api.get_safetensors_metadata(repo)
    assert metadata.files_metadata["model.safetensors"].tensors["w"].shape == [300, 300]
    fetched = hub.log.find("/storage/*", method="GET")
    assert [(each.range, each.status) for each in fetched] == [("bytes=0-100000", 206)]


@pytest.mark.parametrize(
    ("header", "status", "body"),
    [
        (None, 200, b"0123456789"),
        ("bytes=2-4", 206, b"234"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-3", 206, b"789"),
        ("bytes=8-99", 206, b"89"),
        ("bytes=-99", 206, b"0123456789"),
        ("bytes=10-", 416, None),
        ("bytes=-0", 416, None),
        ("bytes=4-2", 200, b"0123456789"),
        ("bytes=1-2,4-5", 200, b"0123456789"),
        ("lines=1-2", 200, b"0123456789"),
    ],
)
def test_ranges(hub: Hub, header: str | None, status: int, body: bytes | None) -> None:
    hub.create("zoo/m", {"digits.txt": b"0123456789"})
    headers = {"Range": header} if header else {}
    with httpx2.Client(trust_env=False) as client:
        answer = client.get(f"{hub.endpoint}/zoo/m/resolve/main/digits.txt", headers=headers)
        head = client.head(f"{hub.endpoint}/zoo/m/resolve/main/digits.txt", headers=headers)
    assert answer.status_code == head.status_code == status
    if body is None:
        assert answer.headers["Content-Range"] == "bytes */10"
    else:
        assert answer.content == body
        assert head.headers["Content-Length"] == str(len(body))
        assert head.content == b""


def test_a_snapshot_is_of_one_commit_and_warm_without_requests(
    hub: Hub, api: HfApi, repo: str
) -> None:
    folder = Path(snapshot_download(repo, token=hub.tokens.read))
    assert folder.name == hub.head(repo)
    assert (folder / "sub/deep/b.txt").read_bytes() == b"b"
    hub.log.clear()
    assert snapshot_download(repo, revision=hub.head(repo), token=hub.tokens.read) == str(folder)
    assert len(hub.log) == 0


def test_object_ids_are_those_of_git(hub: Hub, api: HfApi, tmp_path: Path) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("no git here")
    files = {"a.txt": b"a", "a/b.txt": b"b", "a-b/c.txt": b"c", "z/y/x.txt": b"x"}
    files = {f"t/{path}": data for path, data in files.items() if path != "a.txt"} | {"t.x": b"t"}
    hub.create("zoo/m", files)

    def run(*words: str) -> str:
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [git, "-C", str(tmp_path / "g"), *words],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    (tmp_path / "g").mkdir()
    run("init", "-q")
    for path in api.list_repo_files("zoo/m"):
        target = tmp_path / "g" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(hf_hub_download("zoo/m", path), target)
    run("add", "-A", "--force")
    run("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-q", "-m", "x")
    listed = run("ls-tree", "-r", "-t", "HEAD").splitlines()
    expected = {line.split("\t")[1]: line.split()[2] for line in listed}
    tree = api.list_repo_tree("zoo/m", recursive=True)
    assert {each.path: getattr(each, "blob_id", None) or each.tree_id for each in tree} == expected
