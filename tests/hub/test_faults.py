"""Hostile and broken repositories, answers and tokens: one table for pull, one for push.

After each: a clear ZooError or success, what was there before is intact, nothing is written outside
the cache, and the token is in no message, no log and on no other origin.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hub_models as models
import pytest
import torch
from huggingface_hub import HfApi, constants
from safetensors.torch import load, save

import zoo_core as zoo
from zoo_core.errors import HubError, ZooError
from zoo_core.hub.client import Client
from zoo_core.hub.reference import parse
from zoo_core.hub.snapshot import open_snapshot
from zoo_core.testing.hub import Hub

REPO = "zoo/tiny"
BIAS = "pooler.dense.bias"


@functools.cache
def good_files(folder: Path) -> dict[str, bytes]:
    zoo.save(models.bert(), folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return good_files(tmp_path_factory.mktemp("good") / "saved")


@dataclass
class Case:
    """A Hub with one good commit, and ways to spoil what comes after it."""

    hub: Hub
    good: dict[str, bytes]
    home: Path
    reference: str = REPO
    how: dict[str, Any] = field(default_factory=dict)

    def commit(self, **changes: bytes | None) -> None:
        named = {name.replace("__", "."): data for name, data in changes.items()}
        self.hub.commit(REPO, named)

    def manifest(self, change: Callable[[dict[str, Any]], object]) -> None:
        data = json.loads(self.good["zoo.json"])
        change(data)
        self.commit(zoo__json=json.dumps(data).encode())

    def weights(self, content: bytes) -> None:
        """Other weights, on which the manifest agrees."""
        record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        data = json.loads(self.good["zoo.json"])
        data["files"]["model.safetensors"] = record
        self.commit(model__safetensors=content, zoo__json=json.dumps(data).encode())

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load(self.good["model.safetensors"])
        change(tensors)
        self.weights(save(tensors, {"format": "pt"}))

    def header(self, change: Callable[[bytes], bytes]) -> None:
        data = self.good["model.safetensors"]
        (length,) = struct.unpack("<Q", data[:8])
        header = change(data[8 : 8 + length])
        self.weights(struct.pack("<Q", len(header)) + header + data[8 + length :])

    def tree(self, change: Callable[[list[dict[str, Any]]], object]) -> None:
        """Commit something, and let the tree of it be told wrongly, for ever."""
        self.commit(new__txt=b"new")
        self.hub.faults.rewrite(change, path="*/tree/*", times=None)

    def entry(self, name: str, **changes: Any) -> None:
        def change(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [{**each, **changes} if each["path"] == name else each for each in entries]

        self.tree(change)

    def add(self, *names: str) -> None:
        blob = {"type": "file", "oid": "0" * 40, "size": 1}
        self.tree(lambda entries: [*entries, *({**blob, "path": name} for name in names)])


SUCCESS = None
PULL: dict[str, tuple[Callable[[Case], object], str | None]] = {}


def pulling(says: str | None) -> Callable[[Callable[[Case], object]], Callable[[Case], object]]:
    """Add a case: what goes wrong, and what the error says (None: the pull succeeds)."""

    def add(spoil: Callable[[Case], object]) -> Callable[[Case], object]:
        PULL[spoil.__name__] = spoil, says
        return spoil

    return add


def case(name: str, says: str | None, spoil: Callable[[Case], object]) -> None:
    PULL[name] = spoil, says


# Bytes that are not those of the commit.
def _corrupt(path: str, **how: Any) -> Callable[[Case], object]:
    def spoil(c: Case) -> None:
        c.tensors(lambda t: t[BIAS].add_(1))
        c.hub.faults.corrupt(path=path, method="GET", times=None, **how)

    return spoil


case("wrong_bytes_of_weights", "did not have the hash", _corrupt("/storage/*"))
case("wrong_bytes_of_manifest", "does not have the hash", _corrupt("*/resolve/*/zoo.json"))
case("wrong_bytes_in_a_header", "did not have the hash", _corrupt("/storage/*", offset=40))


@pulling(SUCCESS)
def truncated_once(c: Case) -> None:
    c.tensors(lambda t: t[BIAS].add_(0))
    c.hub.faults.truncate(1000, path="/storage/*", method="GET")


@pulling("Consistency check failed")
def body_of_another_size(c: Case) -> None:
    c.tensors(lambda t: t[BIAS].add_(1))
    c.hub.faults.body(lambda body: body[:10], path="/storage/*", method="GET", times=None)


@pulling(SUCCESS)
def branch_moves_between_config_and_weights(c: Case) -> None:
    c.commit(note__txt=b"1")
    c.hub.faults.meanwhile(
        lambda: c.hub.commit(REPO, {"zoo.json": b"{}", "model.safetensors": b"evil"}),
        path="*/resolve/*/config.json",
    )


# Answers about the commit and its tree.
for value in ("../../x", "0" * 39, "main", "A" * 40):

    def _commit_id(c: Case, value: str = value) -> None:
        c.hub.faults.rewrite(lambda info: {**info, "sha": value}, path="*/revision/*")

    case(f"commit_id_{value[:7]}", "which is no commit id", _commit_id)

for name in (
    *("../../evil", "/etc/evil", "C:\\evil", "..\\evil", "a//b", "./a", "...", "x\0y"),
    *(".git/config", ".cache/huggingface/x", "zoo.json/x", "model.safetensors/x"),
):
    case(f"extra_name_{name!r}", SUCCESS, lambda c, name=name: c.add(name))
case("extra_name_of_9999_letters", SUCCESS, lambda c: c.add("x" * 9999))
case("pending_folder", "has a folder .zoo-pending", lambda c: c.add(".zoo-pending"))
case("pending_file", "has a folder .zoo-pending", lambda c: c.add(".zoo-pending/zoo.json"))
case("huge_tree", "more than 5000 files", lambda c: c.add(*map(str, range(6000))))
case("a_name_twice", "twice", lambda c: c.add("zoo.json"))
case("name_is_a_number", "could not be listed|as no name", lambda c: c.entry("zoo.json", path=7))
case(
    "manifest_renamed",
    SUCCESS,  # config.json says the same
    lambda c: c.entry("zoo.json", path="../zoo.json"),
)
case("huge_manifest", "so many are refused", lambda c: c.entry("zoo.json", size=10**9))
case("size_is_negative", "with size", lambda c: c.entry("zoo.json", size=-1))
case("size_is_a_text", "with size", lambda c: c.entry("zoo.json", size="9"))
case("size_is_another", "as the size of zoo.json", lambda c: c.entry("zoo.json", size=9))
case("git_hash_is_a_path", "no git hash", lambda c: c.entry("zoo.json", oid="../../../x"))
case("git_hash_is_another", "does not have the hash", lambda c: c.entry("zoo.json", oid="0" * 40))


def _lfs(**changes: Any) -> Callable[[Case], object]:
    lfs = {"oid": "0" * 64, "size": 10, "pointerSize": 1, **changes}
    return lambda c: c.entry("model.safetensors", lfs=lfs)


case("sha256_is_a_path", "no sha256", _lfs(oid="../../x"))
case("sha256_is_another", "disagree about model.safetensors", _lfs())
case("weights_are_huge", "so many are refused", _lfs(size=10**13))


@pulling("more than 100 pages|could not be listed")
def endless_listing(c: Case) -> None:
    c.commit(new__txt=b"new")
    link = f'<{c.hub.endpoint}/api/models/{REPO}/tree/main>; rel="next"'
    c.hub.faults.headers({"Link": link}, path="*/tree/*", times=None)
    c.hub.faults.rewrite(lambda _: [], path="*/tree/*", times=None)


@pulling("could not be listed")
def listing_is_no_json(c: Case) -> None:
    c.commit(new__txt=b"new")
    c.hub.faults.body(lambda _: b"<html>", path="*/tree/*", times=None)


# Headers that name files of the cache.
def _header(name: str, value: str) -> Callable[[Case], object]:
    def spoil(c: Case) -> None:
        c.commit(zoo__json=c.good["zoo.json"] + b"\n")
        shown = value.replace("HOME", str(c.home))
        c.hub.faults.headers({name: shown}, path="*/resolve/*", method="HEAD", times=None)

    return spoil


case("etag_traverses", "as ETag of .*refused", _header("ETag", '"../../../evil"'))
case("etag_is_absolute", "as ETag of .*refused", _header("ETag", '"HOME/evil"'))
case("etag_is_dots", "as ETag of .*refused", _header("ETag", '".."'))
case("linked_etag", "as X-Linked-Etag of .*refused", _header("X-Linked-Etag", '"../../evil"'))
case("repo_commit", "as X-Repo-Commit of", _header("X-Repo-Commit", "../../../evil"))
case("another_commit", "as X-Repo-Commit of", _header("X-Repo-Commit", "1" * 40))
case("linked_size", "as the size of", _header("X-Linked-Size", "99999999999"))


# Who asks, and for what.
@pulling("private and needs a token|no such repository")
def anonymous_at_a_private_one(c: Case) -> None:
    c.hub.create("zoo/secret", c.good, private=True)
    c.reference, c.how = "zoo/secret", {"token": None}


@pulling("no such repository")
def a_guest_at_a_private_one(c: Case) -> None:
    c.hub.create("zoo/secret", c.good, private=True)
    c.reference, c.how = "zoo/secret", {"token": c.hub.tokens.guest}


@pulling("gated")
def a_gated_one(c: Case) -> None:
    c.hub.create("zoo/gated", c.good, gated="manual")
    c.reference, c.how = "zoo/gated", {"token": c.hub.tokens.guest}


@pulling("token is not accepted|no such repository")
def a_revoked_token(c: Case) -> None:
    c.hub.accounts.revoke(c.hub.tokens.read)


case(
    "unknown_token",
    "token is not accepted|no such repository",
    lambda c: c.how.update(token=c.hub.tokens.unknown),
)
case(
    "token_with_a_line_break",
    "one word",
    lambda c: c.how.update(token=c.hub.tokens.read + "\nX: y"),
)
case("unknown_repo", "no such repository", lambda c: setattr(c, "reference", "zoo/none"))
case("unknown_revision", "no such revision", lambda c: setattr(c, "reference", f"{REPO}@none"))
for text in (
    "tiny/../x",
    "../x",
    "a/b/c",
    "/etc/passwd",
    "zoo/tiny@../../x",
    "zoo/tiny@",
    "zoo/tiny@-x",
    "zoo/t\0",
    "zoo/tiny@a b",
    "zoo/x--y",
):
    case(f"reference_{text!r}", "not a re", lambda c, text=text: setattr(c, "reference", text))
for text in (
    "http://example.com",
    "ftp://127.0.0.1",
    "file:///etc",
    "https://a:b@example.com",
    "nonsense",
):
    case(f"endpoint_{text}", "endpoint", lambda c, text=text: c.how.update(endpoint=text))


# What is in the repository.
def _put(**files: bytes | None) -> Callable[[Case], object]:
    return lambda c: c.commit(**files)


def _manifest(**changes: Any) -> Callable[[Case], object]:
    return lambda c: c.manifest(lambda data: data.update(changes))


case(
    "no_manifest",
    "has no zoo.json|holds a patched|missing",
    lambda c: c.hub.commit(REPO, {"zoo.json": None, "config.json": b'{"model_type": "bert"}'}),
)
case("no_config", "has no config.json", _put(config__json=None))
case("no_weights", "has no model.safetensors", _put(model__safetensors=None))
case(
    "only_pickles",
    "can run code",
    lambda c: c.hub.commit(REPO, {"model.safetensors": None, "pytorch_model.bin": b"\x80"}),
)
case(
    "more_files",
    SUCCESS,
    lambda c: c.hub.commit(
        REPO,
        {"pytorch_model.bin": b"\x80", "modeling_x.py": b"import os", "adapter_config.json": b"{}"},
    ),
)
case("manifest_is_no_json", "not valid JSON", _put(zoo__json=b"{"))
case("manifest_is_a_list", "must be of type dict", _put(zoo__json=b"[]"))
case("manifest_has_a_key_twice", "stands twice", _put(zoo__json=b'{"schema": 1, "schema": 1}'))
case("manifest_has_nan", "not a JSON number", _put(zoo__json=b'{"schema": NaN}'))
case("manifest_is_deep", "not valid JSON", _put(zoo__json=b"[" * 100_000))
case("manifest_has_an_unknown_key", "unknown key", _manifest(code="x.py"))
case("newer_schema", "pip install --upgrade zoo-core", _manifest(schema=2))
case(
    "weights_traverse",
    "must be 'model.safetensors'",
    _manifest(files={"../../x": {"sha256": "0" * 64, "size": 1}}),
)
case(
    "sha256_of_manifest_is_another",
    "disagree about",
    lambda c: c.manifest(lambda d: d["files"]["model.safetensors"].update(sha256="0" * 64)),
)
case(
    "size_of_manifest_is_another",
    "disagree about",
    lambda c: c.manifest(lambda d: d["files"]["model.safetensors"].update(size=1)),
)
case("config_is_a_list", "must be of type dict", _put(config__json=b"[]"))
case("config_has_a_key_twice", "stands twice", _put(config__json=b'{"a": 1, "a": 2}'))
case("config_names_code", SUCCESS, _put(config__json=b'{"auto_map": {"AutoModel": "evil--x.Y"}}'))
case(
    "host_config_names_a_source",
    "may not contain 'pretrained'",
    lambda c: c.manifest(lambda d: d["config"].update(pretrained="evil/x")),
)
case(
    "host_config_names_code",
    SUCCESS,
    lambda c: c.manifest(
        lambda d: d["config"].update(
            auto_map={"AutoModel": "x"},
            attn_implementation="evil/kernel",
            _attn_implementation_internal="evil/kernel",
            quantization_config={},
        )
    ),
)
case("attention_without_base", "names no base", _manifest(holds="attention"))
case(
    "base_is_not_there",
    "zoo/gone",
    _manifest(holds="attention", base={"repo": "zoo/gone", "commit": "0" * 40, "sha256": "0" * 64}),
)
case(
    "base_has_other_weights",
    "other weights than",
    lambda c: c.manifest(
        lambda d: d.update(
            holds="attention", base={"repo": REPO, "commit": c.hub.head(REPO), "sha256": "0" * 64}
        )
    ),
)
case(
    "plugin_is_missing",
    "pip install zoo-nowhere",
    lambda c: c.manifest(lambda d: d["attention"][0].update(distribution="zoo-nowhere")),
)
case(
    "mechanism_is_missing",
    "needs zoo-core/nothing",
    lambda c: c.manifest(lambda d: d["attention"][0].update(mechanism="nothing")),
)
case(
    "architecture_is_missing", "needs zoo-core/nothing", _manifest(architecture="zoo-core/nothing")
)
case("alias_of_an_alias", "itself an alias", _manifest(tied={"a": "b", "b": "c"}))
case("alias_of_nothing", "which is not stored", _manifest(tied={"a": "b"}))
case("not_finite", "NaN or infinity", lambda c: c.tensors(lambda t: t[BIAS].fill_(float("nan"))))
case(
    "wrong_dtype", "has dtype I64", lambda c: c.tensors(lambda t: t.update({BIAS: t[BIAS].long()}))
)
case(
    "wrong_shape", "has shape", lambda c: c.tensors(lambda t: t.update({BIAS: t[BIAS][:3].clone()}))
)
case("missing_tensor", "missing 'pooler.dense.bias'", lambda c: c.tensors(lambda t: t.pop(BIAS)))
case(
    "unknown_tensor",
    "unknown '../../x'",
    lambda c: c.tensors(lambda t: t.update({"../../x": torch.ones(1)})),
)
case(
    "header_too_long",
    "not a safetensors file",
    lambda c: c.weights(struct.pack("<Q", 2**62) + b"{}"),
)
case(
    "header_over_the_limit",
    "more than 25000000 is refused",
    lambda c: c.weights(struct.pack("<Q", 25_000_001) + b" " * 25_000_001),
)
case(
    "header_has_a_key_twice",
    "stands twice",
    lambda c: c.header(lambda h: h.rstrip()[:-1] + b',"' + BIAS.encode() + b'":{}}'),
)
case("weights_are_cut", "is damaged", lambda c: c.weights(c.good["model.safetensors"][:-9]))
case(
    "weights_are_a_pickle", "not a safetensors file|header", lambda c: c.weights(b"\x80\x04" * 100)
)


def world(home: Path) -> set[Path]:
    """All that lies outside the cache, but for what the client keeps beside it."""
    cache = home / "hub"
    return {p for p in home.rglob("*") if p != cache and cache not in p.parents}


@pytest.fixture
def spoiled(hub: Hub, api: HfApi, files: dict[str, bytes], tmp_path: Path) -> Case:
    hub.create(REPO, files)
    return Case(hub=hub, good=files, home=tmp_path)


@pytest.fixture(autouse=True)
def no_token_anywhere(
    hub: Hub, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    printed = "".join([caplog.text, *capfd.readouterr(), str(hub.log)])
    for token in vars(hub.tokens).values():
        assert token not in printed
    assert {each.auth for each in hub.log if each.host.startswith("localhost")} <= {None}


def refused(says: str, action: Callable[[], object], hub: Hub) -> ZooError:
    with pytest.raises(ZooError) as caught:
        action()
    said = str(caught.value)
    assert re.search(says, said), said
    assert not any(token in said for token in vars(hub.tokens).values())
    return caught.value


def told(error: ZooError) -> str:
    """An error for the table: without what differs from run to run, and unprintable letters."""
    text = re.sub(r"/\S+/(?=[\w.]+)", "", re.sub(r"\b[0-9a-f]{40}\b", "COMMIT", str(error)))
    return f"{type(error).__name__}: {text}".encode("unicode_escape").decode()


@pytest.mark.parametrize("name", PULL)
def test_pull(name: str, spoiled: Case, fault: Callable[..., None]) -> None:
    spoil, says = PULL[name]
    hub = spoiled.hub
    first = f"{REPO}@{hub.head(REPO)}"
    where = {"endpoint": hub.endpoint, "token": hub.tokens.read}
    open_snapshot(Client(**where), parse(first)).fetch_weights()
    outside = world(spoiled.home)
    spoil(spoiled)

    def attempt() -> torch.nn.Module:
        return zoo.pull(spoiled.reference, **{**where, **spoiled.how})

    if says is None:
        assert attempt().zoo_source.repo == REPO
        fault("pull", "harmless: pulled", name)
    else:
        fault("pull", told(refused(says, attempt, hub)), name)
    assert world(spoiled.home) == outside
    asked = len(hub.log)
    models.assert_same(models.bert(), zoo.pull(first, endpoint=hub.endpoint, offline=True))
    assert len(hub.log) == asked


def test_a_missing_plugin_stops_before_the_weights(spoiled: Case) -> None:
    PULL["plugin_is_missing"][0](spoiled)
    where = {"endpoint": spoiled.hub.endpoint, "token": spoiled.hub.tokens.read}
    refused("pip install zoo-nowhere", lambda: zoo.pull(REPO, **where), spoiled.hub)
    assert not spoiled.hub.log.find("*/model.safetensors")


def test_a_link_out_of_the_cache(spoiled: Case) -> None:
    where = {"endpoint": spoiled.hub.endpoint, "token": spoiled.hub.tokens.read}
    zoo.pull(REPO, **where)
    (path,) = Path(constants.HF_HUB_CACHE).rglob("snapshots/*/model.safetensors")
    outside = spoiled.home / "outside"
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    refused("a link out of the cache", lambda: zoo.pull(REPO, **where), spoiled.hub)
    assert outside.exists()


# Push -----------------------------------------------------------------------------------------


PUSH: dict[str, tuple[Callable[[Case], object], str | None]] = {
    "another_push_comes_first": (
        lambda c: c.hub.faults.meanwhile(
            lambda: c.hub.commit(REPO, {"theirs.txt": b"1"}), path="*/commit/*"
        ),
        "has moved to",
    ),
    "answer_of_the_commit_is_lost": (
        lambda c: c.hub.faults.drop(path="*/commit/*", answered=True),
        SUCCESS,
    ),
    "commit_is_dropped": (lambda c: c.hub.faults.drop(path="*/commit/*"), "broke off"),
    "commit_fails": (lambda c: c.hub.faults.error(500, path="*/commit/*"), "could not be pushed"),
    "upload_is_cut": (
        lambda c: c.hub.faults.cut_upload(5_000, path="/storage/*", method="PUT"),
        SUCCESS,
    ),
    "upload_is_refused": (
        lambda c: c.hub.faults.error(403, path="/storage/*", method="PUT"),
        "could not be pushed",
    ),
    "upload_is_not_verified": (
        lambda c: c.hub.faults.error(400, path="*/verify*", times=None),
        "could not be pushed",
    ),
    "preupload_is_no_json": (
        lambda c: c.hub.faults.body(lambda _: b"<html>", path="*/preupload/*", times=None),
        "could not be pushed",
    ),
    "card_is_refused": (
        lambda c: c.hub.faults.error(400, path="*/validate-yaml"),
        "could not be pushed",
    ),
    "card_of_the_repository_is_broken": (
        lambda c: c.commit(README__md=b"---\n[: {\n---\n"),
        "metadata of README.md of zoo/tiny",
    ),
    "commit_id_is_a_path": (
        lambda c: c.hub.faults.rewrite(
            lambda answer: {**answer, "commitOid": "../../x"}, path="*/commit/*"
        ),
        "no commit id",
    ),
    "head_is_a_path": (
        lambda c: c.hub.faults.rewrite(
            lambda info: {**info, "sha": "../../x"}, path="*/revision/*"
        ),
        "no commit id",
    ),
    "what_was_stored_is_not_what_was_sent": (
        lambda c: c.hub.faults.rewrite(
            lambda entries: [{**each, "size": 1, "lfs": None} for each in entries],
            path="*/tree/*",
            skip=1,
        ),
        "is not what was sent",
    ),
    "read_only_token": (lambda c: c.how.update(token=c.hub.tokens.read), "may not do this"),
    "token_of_another": (lambda c: c.how.update(token=c.hub.tokens.guest), "may not do this"),
    "no_token": (lambda c: c.how.update(token=None), "could not be pushed"),
    "revoked_token": (
        lambda c: c.hub.accounts.revoke(c.hub.tokens.write),
        "token is not accepted|no such repository",
    ),
    "token_with_a_line_break": (
        lambda c: c.how.update(token=c.hub.tokens.write + "\r\nX: y"),
        "one word",
    ),
    "endpoint_in_the_clear": (
        lambda c: c.how.update(endpoint="http://example.com"),
        "not encrypted",
    ),
}
# The only ones after which the head may be another.
_MOVES = {
    "another_push_comes_first",
    "card_of_the_repository_is_broken",
    "commit_id_is_a_path",
    "what_was_stored_is_not_what_was_sent",
}


@pytest.mark.parametrize("name", PUSH)
def test_push(name: str, spoiled: Case, fault: Callable[..., None]) -> None:
    spoil, says = PUSH[name]
    hub = spoiled.hub
    before, outside = hub.head(REPO), world(spoiled.home)
    spoil(spoiled)
    how = {"endpoint": hub.endpoint, "token": hub.tokens.write, **spoiled.how}

    def attempt() -> str:
        return zoo.push(models.bert(seed=1), REPO, **how)

    if says is None:
        assert attempt() == f"{REPO}@{hub.head(REPO)}"
        assert hub.head(REPO) != before
        fault("push", "harmless: pushed", name)
    else:
        fault("push", told(refused(says, attempt, hub)), name)
        assert name in _MOVES or hub.head(REPO) == before
    assert world(spoiled.home) == outside
    old = zoo.pull(f"{REPO}@{before}", endpoint=hub.endpoint, token=hub.tokens.read)
    models.assert_same(models.bert(), old)


def test_a_hub_without_xet_says_so(spoiled: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_xet(*_: Any, **__: Any) -> None:
        raise ConnectionError("Network error: 404 Not Found")

    monkeypatch.setattr(HfApi, "create_commit", no_xet)
    where = {"endpoint": spoiled.hub.endpoint, "token": spoiled.hub.tokens.write}
    error = refused(
        "HF_HUB_DISABLE_XET=1", lambda: zoo.push(models.bert(seed=1), REPO, **where), spoiled.hub
    )
    assert isinstance(error, HubError)
