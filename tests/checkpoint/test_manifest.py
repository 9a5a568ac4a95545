"""zoo.json: strict in, canonical out."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo_core.checkpoint import Base, FileRecord, Manifest, read_manifest, strict_json
from zoo_core.errors import CheckpointError

HEX = "0123456789abcdef"
EXAMPLE: dict[str, Any] = {
    "schema": 1,
    "architecture": "zoo-core/bert",
    "library": "transformers",
    "library_version": "5.24.0",
    "class": "BertModel",
    "config": {"hidden_size": 384},
    "attention": [
        {
            "mechanism": "linformer",
            "options": {"rank": 256},
            "layers": [0, 1, 2],
            "distribution": "zoo-core",
            "version": "0.1.0",
        }
    ],
    "holds": "model",
    "files": {"model.safetensors": {"sha256": "a" * 64, "size": 90868376}},
    "tied": {"alias": "kept name"},
    "base": {"repo": "owner/name", "commit": "b" * 40, "sha256": "c" * 64},
    "calibration": None,
    "created_with": {"zoo-core": "0.1.0", "torch": "2.14.1"},
}


def parse(**changes: Any) -> Manifest:
    return Manifest.from_json(json.dumps({**EXAMPLE, **changes}).encode())


def test_the_documented_example_comes_back_as_written() -> None:
    manifest = parse()
    assert manifest.files == {"model.safetensors": FileRecord(sha256="a" * 64, size=90868376)}
    assert manifest.base == Base(repo="owner/name", commit="b" * 40, sha256="c" * 64)
    assert json.loads(manifest.to_json()) == EXAMPLE


def is_finite(value: Any) -> bool:
    return value not in (float("inf"), float("-inf"))


numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
scalars = numbers | st.text()
values = st.recursive(
    scalars.filter(is_finite),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
names = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8).filter(
    lambda name: name[0] != "_"
)
distributions = names.filter(lambda name: name[-1] != "_")
lines = st.text(st.characters().filter(str.isprintable), max_size=8)
records = st.builds(
    FileRecord, sha256=st.text(HEX, min_size=64, max_size=64), size=st.integers(0, 2**53 - 1)
)
entries = st.fixed_dictionaries(
    {
        "mechanism": names,
        "options": st.dictionaries(names, numbers.filter(is_finite) | lines, max_size=3),
        "layers": st.lists(st.integers(0, 99), min_size=1, max_size=4),
        "distribution": st.just("") | distributions,
        "version": lines,
    },
    optional={"kind": st.sampled_from(["self", "cross"])},
)
bases = st.builds(
    Base,
    repo=st.just("owner/name"),
    commit=st.text(HEX, min_size=40, max_size=40),
    sha256=st.text(HEX, min_size=64, max_size=64),
)
manifests = st.builds(
    Manifest,
    architecture=st.builds("{}/{}".format, distributions, names) | names,
    library=st.sampled_from(["transformers", "timm"]),
    library_version=lines,
    model_class=names,
    config=st.dictionaries(st.text(max_size=8).map("x{}".format), values, max_size=3),
    attention=st.lists(entries, max_size=3).map(tuple),
    holds=st.just("model"),
    files=st.fixed_dictionaries({"model.safetensors": records}),
    tied=st.dictionaries(names.map("alias.{}".format), names.map("kept.{}".format), max_size=3),
    buffers=st.dictionaries(names, st.sampled_from(["F16", "BF16", "F64"]), max_size=2),
    base=st.none() | bases,
    trained=st.none() | lines,
    calibration=st.none() | st.dictionaries(st.text(max_size=8), values, max_size=3),
    created_with=st.dictionaries(lines, lines, max_size=3),
)


@given(manifests)
def test_every_manifest_survives_the_round_trip(manifest: Manifest) -> None:
    text = manifest.to_json()
    assert Manifest.from_json(text) == manifest
    assert Manifest.from_json(text).to_json() == text
    assert text.isascii()


def entry(**changes: Any) -> list[dict[str, Any]]:
    return [{**EXAMPLE["attention"][0], **changes}]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": 2}, r"schema 2, this zoo-core reads up to 1; pip install --upgrade zoo-core"),
        ({"schema": "1"}, "schema is '1'"),
        ({"schema": True}, "schema is True"),
        ({"atention": []}, "unknown key 'atention'; did you mean 'attention'"),
        ({"class": "os.system('x')"}, "class is .*must be the name of a class"),
        ({"library": "keras"}, "library is 'keras'.*'transformers', 'timm'"),
        ({"architecture": "../bert"}, "architecture"),
        ({"architecture": "zoo-core/Bert"}, "architecture"),
        ({"config": {"pretrained": "evil/model"}}, "config may not contain 'pretrained'"),
        ({"config": {"variant": "hf-hub:evil/model"}}, "config.variant"),
        ({"attention": {}}, "attention is .*must be of type list"),
        ({"attention": entry(mechanism="a/b")}, r"attention\[0\].mechanism"),
        ({"attention": entry(distribution="-r evil.txt")}, r"attention\[0\].distribution"),
        ({"attention": entry(options={"rank": [1]})}, r"attention\[0\].options.rank"),
        ({"attention": entry(layers=[])}, r"attention\[0\].layers"),
        ({"attention": entry(layers=[True])}, r"attention\[0\].layers"),
        ({"attention": entry(layers=[-1])}, r"attention\[0\].layers"),
        ({"attention": entry(code="x")}, r"attention\[0\] has an unknown key 'code'"),
        ({"holds": "everything"}, "holds is 'everything'"),
        ({"holds": "attention", "base": None}, "names no base"),
        ({"files": {"../evil.safetensors": {}}}, "files names '../evil.safetensors'"),
        ({"files": {"pytorch_model.bin": {}}}, "files names 'pytorch_model.bin'"),
        ({"files": {"model-00001-of-00002.safetensors": {}}}, "all of its numbered shards"),
        ({"files": {"model.safetensors": {"sha256": "A" * 64, "size": 1}}}, "64 hex digits"),
        ({"files": {"model.safetensors": {"sha256": "a" * 64, "size": -1}}}, "size is -1"),
        ({"files": {"model.safetensors": {"sha256": "a" * 64}}}, "lacks the key 'size'"),
        ({"tied": {"a": "b", "b": "c"}}, "'a' points at 'b', itself an alias"),
        ({"tied": {"a": 1}}, "tied"),
        ({"buffers": {"a": "C64"}}, "buffers"),
        ({"trained": True}, "trained"),
        ({"base": {"repo": "../x", "commit": "b" * 40, "sha256": "c" * 64}}, "base.repo"),
        ({"base": {"repo": "o/n", "commit": "main", "sha256": "c" * 64}}, "base.commit"),
        ({"created_with": {"torch": 2}}, "created_with"),
        ({"created_with": {"torch\x1b[2J": "2"}}, "created_with is .*control characters"),
        ({"created_with": {"torch": "2\n# Run me"}}, "created_with is .*control characters"),
        ({"library_version": "5\x1b]0;x\x07"}, "library_version is .*control characters"),
        ({"trained": "all\n"}, "trained is .*control characters"),
        ({"attention": entry(version="1\r")}, "version is .*control characters"),
        ({"attention": entry(options={"a": "x\u2028y"})}, "options.a is .*control characters"),
        ({"attention": entry(options={"a\x9b": 1})}, "options is .*control characters"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        parse(**changes)


@pytest.mark.parametrize("key", [key for key in EXAMPLE if key != "schema"])
def test_a_missing_key_is_named(key: str) -> None:
    data = {name: value for name, value in EXAMPLE.items() if name != key}
    with pytest.raises(CheckpointError, match=f"lacks the key '{key}'"):
        Manifest.from_json(json.dumps(data).encode())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"schema": 1, "schema": 1}', "the key 'schema' stands twice"),
        (b'{"a": {"b": 1, "b": 2}}', "the key 'b' stands twice"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "the number 1e999 is too large"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"9" * 5000, "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"{}x", "is not valid JSON"),
    ],
    ids=["twice", "nested", "nan", "inf", "overflow", "deep", "utf16", "digits", "empty", "tail"],
)
def test_json_that_others_accept_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        strict_json.parse(text, "zoo.json")


def test_a_manifest_of_no_files_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "zoo.json").write_text(json.dumps({**EXAMPLE, "files": {}}))
    with pytest.raises(CheckpointError, match=r"zoo\.json: files names no weights"):
        read_manifest(tmp_path)


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "zoo.json").open("wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(CheckpointError, match="is larger than"):
        read_manifest(tmp_path)


def test_reading_and_verifying_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "zoo.json").write_text(json.dumps(EXAMPLE))
    program = (
        "import sys; from zoo_core.checkpoint import read_manifest, verify\n"
        f"read_manifest({str(tmp_path)!r}); verify({str(tmp_path)!r})\n"
        "print({'torch', 'timm', 'transformers', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
