from __future__ import annotations

import json

import pytest


def rows(run) -> list[dict]:
    assert run.code == 0, run.err
    return json.loads(run.out)


def test_json_is_an_array_of_objects_and_nothing_else(zoo):
    found = rows(zoo("list", "--json"))
    for row in found:
        assert {"name", "family", "distribution"} <= row.keys()
    assert [row["name"] for row in found] == sorted(row["name"] for row in found)
    [softmax] = [row for row in found if row["name"] == "softmax"]
    assert softmax["distribution"] == "zoo-core"
    assert softmax["supports"]["causal"] is True
    assert softmax["contested"] is False


@pytest.mark.parametrize(
    ("arguments", "inside", "outside"),
    [
        (["lin*"], "linear", "softmax"),
        (["sdpa"], "softmax", "linear"),
        (["--family", "kernel"], "linear", "softmax"),
        (["--swap", "exact"], "softmax", "linear"),
        (["--supports", "causal", "--supports", "cross"], "softmax", "linformer"),
        (["--distribution", "zoo_core"], "softmax", None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_filters(zoo, arguments, inside, outside):
    names = {row["name"] for row in rows(zoo("list", *arguments, "--json"))}
    assert inside in names
    assert outside not in names


def test_the_table_fits_80_columns(zoo):
    run = zoo("list")
    lines = run.out.splitlines()
    assert lines[0].split() == ["name", "family", "time", "swap", "supports"]
    assert max(map(len, lines)) <= 80
    [softmax] = [line for line in lines if line.startswith("softmax")]
    assert softmax.split() == ["softmax", "softmax", "n²·d", "exact", "P", "C", "X", "B", "M"]


def test_formulas_break_after_signs(zoo):
    lines = zoo("list", "l*").out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("lsh "))
    assert [lines[at].split()[2], lines[at + 1].strip()] == ["n·rounds·(chunk+", "buckets)·d"]


def test_a_wide_terminal_shows_summaries(zoo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    run = zoo("list")
    assert "summary" in run.out.splitlines()[0]
    assert max(map(len, run.out.splitlines())) <= 120


def test_very_long_texts_stay_in_their_columns(zoo, live_site):
    live_site.install(
        "wordy",
        """
        from records import *

        @hookimpl
        def zoo_mechanisms():
            return [mechanism("m" * 64, family="f" * 500, time="n" * 90, summary="s\\n" * 50)]
        """,
    )
    run = zoo("list")
    assert run.code == 0
    assert max(map(len, run.out.splitlines())) <= 80


def test_contested_names_are_listed_once_per_owner_and_marked(zoo, live_site):
    live_site.offer("acme", "both")
    live_site.offer("beta", "both")
    run = zoo("list", "both")
    names = [line.split()[0] for line in run.out.splitlines() if "/both" in line]
    assert names == ["acme/both", "beta/both"]
    assert "claimed twice, write distribution/name: both" in run.err
    assert [row["contested"] for row in rows(zoo("list", "both", "--json"))] == [True, True]


def test_nothing_found_says_why_on_stderr(zoo, monkeypatch):
    monkeypatch.setenv("ZOO_PLUGINS", "")
    run = zoo("list")
    assert (run.code, run.out) == (0, "")
    assert "No mechanisms fit." in run.err
    assert "ZOO_PLUGINS is set and empty" in run.err
    assert rows(zoo("list", "--json")) == []


def test_failed_plugins_are_mentioned_on_stderr(zoo, live_site):
    live_site.install("broken", "1 / 0")
    run = zoo("list")
    assert "failed to load, see `zoo plugins`" in run.err
    assert "softmax" in run.out


def test_architectures(zoo):
    found = rows(zoo("list", "--architectures", "--json"))
    assert {"bert", "vit", "deit"} <= {row["name"] for row in found}
    assert {row["library"] for row in found} <= {"transformers", "timm"}
    run = zoo("list", "--architectures", "b*")
    assert run.out.splitlines()[2].startswith("bert ")
    assert "vit" not in run.out.split()


def test_presets(zoo):
    found = {row["name"]: row for row in rows(zoo("list", "--presets", "--json"))}
    assert found["long_document_bert"]["attention"] == ["local", {"window": 128}]
    assert found["mixed_layers"]["attention"]["4-7"] == ["nystromformer", {"landmarks": 128}]
    assert "exact_limit" in zoo("list", "--presets").out
    assert zoo("list", "--presets", "nothing*").err == "No preset fits.\n"


def test_colours_only_on_a_terminal(zoo):
    assert "\x1b" not in zoo("list").out
