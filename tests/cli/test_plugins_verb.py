from __future__ import annotations

import json
import os

import pytest


@pytest.fixture
def mixed(live_site, monkeypatch):
    """One good, one broken, one blocked, one slow plugin."""
    live_site.offer("acme", "acme_m", version="1.2")
    live_site.install("broken", "raise RuntimeError('[red]boom')", version="0.1")
    live_site.offer("shut", "shut_m")
    live_site.offer("heavy", "heavy_m")
    path = live_site.path / "heavy.py"
    path.write_text("import time; time.sleep(0.6)\n" + path.read_text())
    monkeypatch.setenv("ZOO_BLOCK", "shut,nothing_like_it")
    return live_site


def test_the_report(zoo, mixed):
    run = zoo("plugins")
    assert run.code == 0
    adds = run.out.partition("failed")[0]
    for line in (
        "acme          1.2      1 mechanism: acme_m",
        "broken        0.1      nothing",
        "shut          1.0      nothing",
    ):
        assert line in adds
    assert "architectures: " in adds
    failed, _, rest = run.out.partition("failed\n")[2].partition("left out\n")
    assert (
        "broken 0.1, broken = broken\n     import: RuntimeError: [red]boom (broken.py:1)" in failed
    )
    left_out, _, noted = rest.partition("noted\n")
    assert "shut 1.0, shut = shut\n     ZOO_BLOCK names shut" in left_out
    assert "heavy 1.0, heavy = heavy\n     takes 0." in noted
    assert "ZOO_BLOCK names nothing_like_it, which is no installed distribution" in run.err
    assert max(map(len, run.out.splitlines())) <= 80


@pytest.mark.parametrize("arguments", [["--json"], ["--format", "json"]], ids=" ".join)
def test_json(zoo, mixed, arguments):
    found = {row["distribution"]: row for row in json.loads(zoo("plugins", *arguments).out)}
    assert found["acme"] == {
        "distribution": "acme",
        "version": "1.2",
        "entry": "acme",
        "value": "acme",
        "mechanisms": ["acme_m"],
        "architectures": [],
        "catalogues": [],
        "failures": [],
        "blocked": [],
        "notes": [],
    }
    assert found["broken"]["failures"] == [
        {"phase": "import", "reason": "RuntimeError: [red]boom (broken.py:1)"}
    ]
    assert found["shut"]["blocked"] == ["ZOO_BLOCK names shut"]


def test_requirements_restore_the_set(zoo, mixed):
    lines = zoo("plugins", "--format", "requirements").out.splitlines()
    assert {"acme==1.2", "broken==0.1", "shut==1.0", "heavy==1.0"} <= set(lines)
    assert any("zoo-core" in line or line.startswith("-e ") for line in lines)


def test_a_broken_catalogue_of_a_plugin_is_a_failure_of_that_plugin(zoo, live_site):
    live_site.install(
        "offers",
        """
        from pathlib import Path
        from records import *

        @hookimpl
        def zoo_catalogues():
            return [Path(__file__).with_name("offered.toml")]
        """,
    )
    (live_site.path / "offered.toml").write_text("schema = 9")
    rows = {row["distribution"]: row for row in json.loads(zoo("plugins", "--json").out)}
    [failure] = rows["offers"]["failures"]
    assert failure["phase"] == "zoo_catalogues"
    assert "schema is 9" in failure["reason"]


def test_the_users_own_broken_catalogue_does_not_hide_the_report(zoo, live_site, monkeypatch):
    path = live_site.path / "mine.toml"
    path.write_text("schema =")
    monkeypatch.setenv("ZOO_REGISTRY", os.fspath(path))
    run = zoo("plugins")
    assert run.code == 0
    assert "zoo-core" in run.out
    assert "mine.toml: cannot be read" in run.err


def test_strict_stops_with_one_line(zoo, live_site, monkeypatch):
    live_site.install("broken", "1 / 0")
    monkeypatch.setenv("ZOO_STRICT", "1")
    monkeypatch.setenv("ZOO_PLUGINS", "broken")
    run = zoo("plugins")
    assert run.code == 1
    assert run.err.startswith("zoo: plugin broken (broken = broken) failed at import: ZeroDivision")
