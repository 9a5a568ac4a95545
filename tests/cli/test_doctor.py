"""`zoo plugins doctor`: what an author reads of a plugin that works, misbehaves, or fails."""

from __future__ import annotations

import json
import textwrap

import pytest

from zoo_core.testing import suite

RULES = ("all_padding", "truncation", "dtypes")
PLUGIN = """
import zoo_core as zoo


@zoo.from_function(name={name!r})
def attention(q, k, v, key_padding):
{body}


@zoo.hookimpl
def zoo_mechanisms():
    return [attention]
"""
MEAN = """
    if key_padding is None:
        return v.mean(-2, keepdim=True).expand(*q.shape[:-1], -1)
    v = v.masked_fill(~key_padding[:, None, :, None], 0)
    count = key_padding.sum(-1).clamp(min=1)[:, None, None, None]
    return (v.sum(-2, keepdim=True) / count).to(v.dtype).expand(*q.shape[:-1], -1)
"""
DEAF = """
    return v.mean(-2, keepdim=True).expand(*q.shape[:-1], -1)
"""
QUITS = """
    raise SystemExit(0)
"""


@pytest.fixture
def offer(live_site, monkeypatch):
    """Install a plugin of one function; doctor asks of it three checks that take no time."""
    whole, asked = suite.mechanism_checks, []

    def few(mechanism, **how):
        asked.append(how)
        checks = whole(mechanism, quick=True, combinations=False)
        return [check for check in checks if check.name in RULES]

    monkeypatch.setattr(suite, "mechanism_checks", few)

    def offer(distribution: str, body: str, name: str = "test_mean") -> list:
        code = PLUGIN.format(name=name, body=textwrap.indent(textwrap.dedent(body), "    "))
        live_site.install(distribution, code)
        return asked

    return offer


def test_a_sound_plugin(zoo, offer):
    asked = offer("sound", MEAN)
    run = zoo("plugins", "doctor", "sound")
    assert run.code == 0, run.out
    assert "sound 1.0, sound = sound" in run.out
    assert "sound/test_mean passes" in run.out
    assert "passed, nothing failed" in run.out
    assert asked == [{"quick": False, "combinations": True}]


def test_quick_asks_for_less(zoo, offer):
    asked = offer("sound", MEAN)
    assert zoo("plugins", "doctor", "sound", "--quick").code == 0
    assert asked == [{"quick": True, "combinations": False}]


def test_a_broken_rule_is_told_with_shape_and_expectation(zoo, offer):
    offer("deaf", DEAF)
    run = zoo("plugins", "doctor", "deaf")
    assert run.code == 1
    [at] = [n for n, line in enumerate(run.out.splitlines()) if "breaks rule2" in line]
    heading, where, expected, got, rule = run.out.splitlines()[at : at + 5]
    assert heading == "  failed deaf/test_mean breaks rule2 (truncation)"
    assert where.startswith("    where:    ")
    assert "v (1, 2," in where
    assert expected.startswith("    expected: ")
    assert got.startswith("    got:      ")
    assert rule.startswith("    the rule: ")
    assert "failed deaf/test_mean fails " in run.out
    assert "ok " not in run.out
    assert "checks failed" in run.out


def test_json_has_each_check(zoo, offer):
    offer("deaf", DEAF)
    run = zoo("plugins", "doctor", "deaf", "--json")
    assert run.code == 1
    [row] = json.loads(run.out)
    assert (row["distribution"], row["entry"], row["passed"]) == ("deaf", "deaf", False)
    by_name = {check["check"]: check for check in row["checks"]}
    assert by_name["truncation"]["rule"] == "rule2"
    assert by_name["truncation"]["passed"] is False
    assert by_name["truncation"]["expected"]
    assert by_name["dtypes"]["passed"] is True


def test_a_plugin_that_exits_or_prints_fails_its_checks_only(zoo, offer):
    offer("quits", "    print('noise')\n" + QUITS)
    run = zoo("plugins", "doctor", "quits", "--json")
    assert run.code == 1
    [row] = json.loads(run.out)
    assert len(row["checks"]) > 1
    assert all("SystemExit: 0" in check["got"] for check in row["checks"])


def test_one_that_does_not_load(zoo, live_site):
    live_site.install("broken", "raise RuntimeError('boom')")
    run = zoo("plugins", "doctor", "broken")
    assert run.code == 1
    assert "failed at import: RuntimeError: boom (broken.py:1)" in run.out
    assert "1 plugin did not load whole" in run.out


def test_one_that_is_left_out_did_not_fail(zoo, live_site, monkeypatch):
    live_site.offer("shut", "shut_m")
    monkeypatch.setenv("ZOO_BLOCK", "shut")
    run = zoo("plugins", "doctor", "shut")
    assert run.code == 0
    assert "left out: ZOO_BLOCK names shut" in run.out


def test_remarks(zoo, offer, live_site):
    offer("first", MEAN)
    offer("second", MEAN)
    live_site.install("empty", "from records import *\n@hookimpl\ndef zoo_mechanisms(): return []")
    assert "users must write 'first/test_mean'" in " ".join(
        zoo("plugins", "doctor", "first").out.split()
    )
    assert "offers nothing" in zoo("plugins", "doctor", "empty").out


def test_an_unknown_distribution(zoo, live_site):
    live_site.offer("acme", "acme_m")
    run = zoo("plugins", "doctor", "acne")
    assert run.code == 1
    assert "no installed distribution 'acne' has plugins; did you mean 'acme'?" in run.err
