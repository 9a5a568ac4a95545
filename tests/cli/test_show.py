from __future__ import annotations

import json

import pytest

EVERYTHING = """
    from dataclasses import dataclass

    from records import *
    from zoo_core import Paper, option


    @dataclass(frozen=True, kw_only=True)
    class AllOptions(Options):
        rank: int = option(64, low=1, at_most="max_len", help="how many")
        ratio: float | None = option(None, low=0.0, high=1.0)
        share: str = option("no", choices=("no", "yes"), help="whether")


    @hookimpl
    def zoo_mechanisms():
        return [
            mechanism(
                "whole",
                aliases=("full_form",),
                formula="softmax(q k^T) v",
                paper=Paper(title="A Paper", year=2021, arxiv="2101.00001"),
                time="n**2*d",
                options=AllOptions,
                supports=Supports(
                    causal=True, lengths="fixed", grid="required", needs=frozenset({"carry"})
                ),
                deviations="many",
                exact_at=EXACT,
            )
        ]
"""


def test_everything_a_mechanism_says(zoo, live_site):
    exact = "lambda site: AllOptions(rank=site.max_len)"
    live_site.install("acme", EVERYTHING.replace("EXACT", exact), version="3.1")
    run = zoo("show", "whole")
    for text in (
        "whole  acme 3.1",
        "softmax(q k^T) v",
        "A Paper (2021)",
        "https://arxiv.org/abs/2101.00001",
        "full_form",
        "n²·d",
        "at most that of the model it was built for",
        "equals softmax attention at 512 tokens with rank=512",
        "many",
        "int, 1..max_len",
        "float or None, 0.0..1.0",
        "one of no, yes",
        "how many",
    ):
        assert text in run.out
    assert "supports    causal\n" in run.out
    assert "refuses     padding, cross-attention, bias, attention map\n" in run.out
    assert max(map(len, run.out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("exact", "text"),
    [
        ("None", "never equals softmax attention"),
        ("lambda site: None", "never equals softmax attention"),
        ("lambda site: AllOptions() if site.grid else None", "softmax attention on a grid of one "),
        ("lambda site: AllOptions()", "exact       equals softmax attention\n"),
        ("lambda site: 1 / 0", "unknown: ZeroDivisionError: division by zero"),
    ],
)
def test_the_exact_limit(zoo, live_site, exact, text):
    live_site.install("acme", EVERYTHING.replace("EXACT", exact))
    run = zoo("show", "whole")
    assert run.code == 0
    assert text in run.out


def test_json(zoo, live_site):
    live_site.install("acme", EVERYTHING.replace("EXACT", "None"))
    row = json.loads(zoo("show", "acme/full_form", "--json").out)
    assert row["qualified"] == "acme/whole"
    assert row["paper"]["link"] == "https://arxiv.org/abs/2101.00001"
    assert row["supports"]["needs"] == ["carry"]
    assert [option["name"] for option in row["options"]] == ["rank", "ratio", "share"]
    assert row["options"][0] == {
        "name": "rank",
        "type": "int",
        "default": 64,
        "low": 1,
        "high": None,
        "choices": None,
        "at_most": "max_len",
        "help": "how many",
    }


def test_every_mechanism_of_ours_can_be_shown(zoo):
    for row in json.loads(zoo("list", "--json").out):
        run = zoo("show", row["name"])
        assert run.code == 0
        assert run.out.startswith(f"{row['name']}  zoo-core")
        assert max(map(len, run.out.splitlines())) <= 80


def test_an_architecture(zoo):
    assert "transformers" in zoo("show", "bert").out
    assert json.loads(zoo("show", "zoo-core/bert", "--json").out)["name"] == "bert"


def test_a_preset(zoo):
    assert "preset" in zoo("show", "mixed_layers").out
    assert json.loads(zoo("show", "exact_limit", "--json").out)["architecture"] == "bert"


def test_a_contested_name_must_be_qualified(zoo, live_site):
    live_site.offer("acme", "both")
    live_site.offer("beta", "both")
    run = zoo("show", "both")
    assert run.code == 1
    assert "write 'acme/both' or 'beta/both'" in run.err
    assert zoo("show", "beta/both").code == 0
