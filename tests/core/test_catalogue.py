from __future__ import annotations

import os
from pathlib import Path

import pytest

import zoo_core as zoo
from zoo_core import catalogue, plan, registry
from zoo_core.errors import CatalogueError, PluginError

COMMIT, SHA = "a" * 40, "b" * 64

WHOLE = f"""
schema = 1

[plugins.Zoo_Omega]
summary = "Omega."
mechanisms = ["omega"]
architectures = ["arch"]
version = ">=1.2, <2"
url = "https://example.org"

[presets.single]
summary = "One mechanism."
architecture = "bert:tiny"
attention = "zoo-core/local"
options = {{ window = 7 }}
layers = "0-3"
max_length = 4096
model = {{ num_hidden_layers = 6, sizes = [1, 2], nested = {{ a = 1.5 }} }}

[presets.rules]
summary = "Two."
architecture = "bert"
attention = {{ "0-3" = "local", "4-" = ["linformer", {{ rank = 128 }}] }}

[checkpoints.small]
summary = "Weights."
repo = "owner/name"
revision = "{COMMIT}"
architecture = "bert"
attention = "linformer"
files = {{ "model.safetensors" = "{SHA}" }}
metrics = {{ cosine = 0.97, steps = 100 }}
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "some.toml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def user(live_site, write, monkeypatch):
    """Make files the user's own catalogues, in this order."""

    def user(*texts: str) -> list[Path]:
        paths = [write(text, f"user{index}.toml") for index, text in enumerate(texts)]
        monkeypatch.setenv("ZOO_REGISTRY", os.pathsep.join(map(str, paths)))
        return paths

    return user


def preset(name: str, attention: str = '"local"', more: str = "") -> str:
    return (
        f'schema = 1\n[presets.{name}]\nsummary = "S."\narchitecture = "bert"\n'
        f"attention = {attention}\n{more}\n"
    )


def test_everything_the_schema_has(write):
    path = write(WHOLE)
    found = catalogue.parse(path)
    row = found.plugins["zoo-omega"]
    assert row.requirement == "zoo-omega>=1.2, <2"
    assert found.offering("mechanisms", "omega") == [row]
    assert found.offering("architectures", "omega") == []
    single = found.presets["single"]
    assert single.attention == {"0-3": ("zoo-core/local", {"window": 7})}
    assert (single.architecture, single.max_length) == ("bert:tiny", 4096)
    assert single.model_kwargs == {"num_hidden_layers": 6, "sizes": [1, 2], "nested": {"a": 1.5}}
    assert single.source == path
    rules = found.presets["rules"]
    assert rules.attention == {"0-3": "local", "4-": ("linformer", {"rank": 128})}
    assert rules.mechanisms == ("local", "linformer")
    checkpoint = found.checkpoints["small"]
    assert (checkpoint.repo, checkpoint.revision) == ("owner/name", COMMIT)
    assert checkpoint.files == {"model.safetensors": SHA}
    assert checkpoint.metrics == {"cosine": 0.97, "steps": 100.0}


def test_records_cannot_be_changed(write):
    found = catalogue.parse(write(WHOLE)).presets["single"]
    with pytest.raises(TypeError):
        found.model_kwargs["num_hidden_layers"] = 1
    with pytest.raises(AttributeError):
        found.name = "other"


def test_an_empty_file_with_a_schema_is_a_catalogue(write):
    assert catalogue.parse(write("schema = 1")) == catalogue.Catalogue()


BROKEN = {
    "no-toml": ("schema = ", "cannot be read"),
    "no-schema": ("", "schema is missing"),
    "newer": ("schema = 2", "schema is 2, this zoo-core reads 1"),
    "schema-text": ('schema = "1"', "schema is '1'"),
    "schema-true": ("schema = true", "schema is True"),
    "top-key": ("schema = 1\npreset = 1", "has no key 'preset'.*did you mean 'presets'"),
    "kind-no-table": ("schema = 1\npresets = 1", "presets = 1 must be a table"),
    "row-no-table": ("schema = 1\n[presets]\nx = 1", r"\[presets.x\] must be a table"),
    "row-twice": (preset("x") + preset("x").removeprefix("schema = 1"), "cannot be read"),
    "name-upper": (preset("Upper"), "'Upper' must be a lower_snake name"),
    "unknown-key": (preset("x", more="atention = 1"), r"\[presets.x\] has no key 'atention'"),
    "missing-key": ('schema = 1\n[presets.x]\nsummary = "S."', "architecture is missing"),
    "empty-text": (preset("x").replace('"S."', '""'), "summary: '' must be a text"),
    "number-for-text": (preset("x").replace('"S."', "3"), "summary: 3 must be a text"),
    "attention-number": (preset("x", "3"), "attention: 3 must be a name or distribution/name"),
    "attention-list": (preset("x", '["a", "b"]'), 'must be "name" or \\["name", {option = value}'),
    "attention-empty": (preset("x", "{}"), "carry their own options and layers"),
    "attention-nested": (preset("x", '{ "0" = { "1" = "a" } }'), "must be a name"),
    "rules-and-options": (
        preset("x", '{ "0-" = "local" }', "options = { window = 1 }"),
        "carry their own options",
    ),
    "layers-odd": (preset("x", more='layers = "all; rm"'), "must be layers such as"),
    "option-nan": (preset("x", more="options = { a = nan }"), "options: nan must be"),
    "option-date": (preset("x", more="model = { a = 2020-01-01 }"), "model: .* must be a string"),
    "length-zero": (preset("x", more="max_length = 0"), "max_length = 0 must be a positive"),
    "length-true": (preset("x", more="max_length = true"), "max_length = True must be"),
    "revision-tag": (WHOLE.replace(COMMIT, "main"), "'main' must be a commit of 40 hex digits"),
    "sha-short": (WHOLE.replace(SHA, "abc"), "'abc' must be a sha256 of 64 hex digits"),
    "files-missing": (WHOLE.replace("files =", "# files ="), "files is missing"),
    "metric-text": (WHOLE.replace("0.97", '"high"'), "cosine = 'high' must be a number"),
    "repo-url": (WHOLE.replace('"owner/name"', '"https://x/y"'), "must be owner/name"),
    "version-is-an-option": (WHOLE.replace(">=1.2, <2", " --index-url x"), "version specifier"),
    "distribution-odd": (WHOLE.replace("Zoo_Omega", '"-r file"'), "must be a distribution's name"),
    "url-script": (WHOLE.replace("https://example.org", "javascript:x"), "https:// address"),
    "mechanisms-text": (WHOLE.replace('["omega"]', '"omega"'), "must be a list of names"),
    "names-itself": (preset("x", '"x"'), "'x' is a preset; name a mechanism"),
}


@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_refused_by_file_table_and_key(user, text, reason):
    [path] = user(text)
    with pytest.raises(CatalogueError, match=reason) as error:
        catalogue.load()
    assert str(error.value).startswith(f"{path}: ")


def test_a_file_that_is_missing_or_not_utf8(user, tmp_path, monkeypatch):
    [path] = user("schema = 1")
    path.write_bytes(b'schema = 1 # \xff"')
    with pytest.raises(CatalogueError, match="cannot be read"):
        catalogue.load()
    path.unlink()
    with pytest.raises(CatalogueError, match=r"user0\.toml: cannot be read"):
        catalogue.load()


# --- layers ------------------------------------------------------------------------------------


def test_later_files_add(user):
    user(preset("one"), preset("two"))
    assert {"one", "two", "exact_limit"} <= set(catalogue.load().presets)


@pytest.mark.parametrize("name", ["one", "exact_limit"])
def test_later_files_never_redefine(user, name):
    user(preset("one"), preset(name))
    with pytest.raises(CatalogueError, match=rf"user1.toml: \[presets.{name}\] is already defined"):
        catalogue.load()


def test_a_file_listed_twice_counts_once(user, monkeypatch):
    [path] = user(preset("one"))
    monkeypatch.setenv("ZOO_REGISTRY", os.pathsep.join([str(path), "", str(path)]))
    assert "one" in catalogue.load().presets


def test_a_changed_file_is_read_again(user):
    [path] = user(preset("one"))
    assert "one" in catalogue.load().presets
    path.write_text(preset("two"))
    os.utime(path, ns=(1, 1))
    assert "one" not in catalogue.load().presets
    assert "two" in catalogue.load().presets


OFFER = """
from pathlib import Path
from records import *

@hookimpl
def zoo_catalogues():
    return [Path(__file__).with_name("offered.toml")]
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [(preset("exact_limit"), "is already defined in"), ("schema = 7", "schema is 7")],
    ids=["redefines", "newer"],
)
def test_a_plugins_broken_catalogue_is_left_out_whole_and_recorded(
    live_site, monkeypatch, text, reason
):
    live_site.install("offers", OFFER)
    path = live_site.path / "offered.toml"
    path.write_text(text + preset("extra").removeprefix("schema = 1") if "7" not in text else text)
    found = catalogue.load()
    assert reason in found.failures[path].reason
    assert "extra" not in found.presets
    assert found.presets["exact_limit"].source == catalogue.shipped()
    monkeypatch.setenv("ZOO_STRICT", "1")
    monkeypatch.setenv("ZOO_PLUGINS", "offers")
    registry.forget()
    with pytest.raises(PluginError, match="plugin offers: "):
        catalogue.load()


def test_a_plugins_catalogue_is_added(live_site):
    live_site.install("offers", OFFER)
    (live_site.path / "offered.toml").write_text(preset("extra"))
    assert "extra" in {one.name for one in zoo.presets()}
    assert catalogue.load().failures == {}


# --- presets -----------------------------------------------------------------------------------


def test_the_shipped_file_stands_beside_the_package():
    assert catalogue.shipped().name == "registry.toml"
    assert catalogue.shipped().parent in Path(catalogue.__file__).parents


def test_shipped_presets_name_what_zoo_core_offers(live_site, monkeypatch):
    monkeypatch.setenv("ZOO_PLUGINS", "zoo-core")
    names = [one.name for one in zoo.presets()]
    assert names == ["exact_limit", "fast_vit", "long_document_bert", "mixed_layers"]
    for preset in zoo.presets():
        assert plan.rules(preset.attention)
        assert registry.architecture(preset.architecture.partition(":")[0])


def test_presets_are_found_by_pattern_and_name(user):
    user(preset("one"), preset("only"))
    assert [one.name for one in zoo.presets("on*")] == ["one", "only"]
    assert registry.preset("one").name == "one"
    assert registry.attention_preset("one") == "local"
    for missing in ("two", "one/x", 3, {"0": "local"}):
        assert registry.preset(missing) is None
        assert registry.attention_preset(missing) is None


def test_the_name_of_a_record_is_never_a_presets(user):
    user(preset("softmax"), preset("bert"))
    assert registry.attention_preset("softmax") is None
    assert registry.attention_preset("sdpa") is None
    assert registry.preset("softmax").name == "softmax"
    assert registry.preset("bert") is None
