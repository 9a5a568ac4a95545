from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import warnings

import pytest

from zoo_core import plugins, registry
from zoo_core.errors import ContestedName, PluginError, UnknownName

LOADED = "from zoo_core import plugins; plugins.installed(); print('loaded')"


def found(distribution: str) -> plugins.Plugin:
    [plugin] = [one for one in plugins.installed() if one.distribution == distribution]
    return plugin


def names() -> set[str]:
    return {record.qualified for record in registry.mechanisms()}


def test_a_plugin_is_recorded_with_its_origin(live_site):
    live_site.offer("Zoo_Extra.Things", "extra", module="zoo_extra", version="2.3.1")
    plugin = found("zoo-extra-things")
    assert (plugin.version, plugin.entry, plugin.value) == ("2.3.1", "zoo_extra", "zoo_extra")
    [record] = plugin.mechanisms
    assert (record.distribution, record.version) == ("zoo-extra-things", "2.3.1")
    assert registry.mechanism("zoo-extra-things/extra") is record


def test_a_plugin_cannot_forge_its_origin(live_site):
    live_site.install(
        "forger",
        """
        from records import *

        @hookimpl
        def zoo_mechanisms():
            return [mechanism("forged", distribution="zoo-core", version="9")]
        """,
    )
    assert registry.mechanism("forged").qualified == "forger/forged"


def test_every_hook_is_collected(live_site):
    live_site.install(
        "whole",
        """
        from pathlib import Path
        from records import *

        CATALOGUE = Path(__file__).with_name("whole.toml")

        @hookimpl
        def zoo_mechanisms():
            yield mechanism("whole_m")

        @hookimpl
        def zoo_architectures():
            return (architecture("whole_a"),)

        @hookimpl
        def zoo_catalogues():
            return [str(CATALOGUE)]
        """,
    )
    plugin = found("whole")
    assert [record.name for record in plugin.mechanisms] == ["whole_m"]
    assert [record.name for record in plugin.architectures] == ["whole_a"]
    assert plugin.catalogues == (live_site.path / "whole.toml",)
    assert plugin.failures == ()


def test_a_record_is_a_copy_that_its_plugin_cannot_change_any_more(live_site):
    live_site.install(
        "sly",
        """
        from records import *

        RECORD = mechanism("sly")

        @hookimpl
        def zoo_mechanisms():
            return [RECORD]
        """,
    )
    record = registry.mechanism("sly")
    object.__setattr__(sys.modules["sly"].RECORD, "name", "stolen")
    assert record.name == "sly"
    assert registry.mechanism("sly") is record


def test_two_entry_points_of_one_distribution_offering_one_name(live_site):
    live_site.offer("pair", "same", module="pair_a", entries={"a": "pair_a", "b": "pair_b"})
    (live_site.path / "pair_b.py").write_text(
        "from records import *\n@hookimpl\ndef zoo_mechanisms():\n"
        "    return [mechanism('same', family='other'), mechanism('second')]\n"
    )
    first, second = (one for one in plugins.installed() if one.distribution == "pair")
    assert [record.name for record in first.mechanisms] == ["same"]
    assert [record.name for record in second.mechanisms] == ["second"]
    [failure] = second.failures
    assert "'same' is offered twice by pair" in failure.reason


def test_of_two_copies_on_the_path_the_first_counts(live_site, tmp_path, monkeypatch):
    live_site.offer("twice", "late", version="1.0")
    early = type(live_site)(tmp_path / "early")
    early.offer("twice", "early", version="2.0")
    monkeypatch.syspath_prepend(early.path)
    assert found("twice").version == "2.0"
    assert [record.name for record in found("twice").mechanisms] == ["early"]


def test_an_earlier_copy_without_plugins_hides_a_later_one(live_site, tmp_path, monkeypatch):
    live_site.offer("twice", "late")
    early = type(live_site)(tmp_path / "early")
    early.install("twice", None, version="2.0", entries={}, entry_points=b"")
    monkeypatch.syspath_prepend(early.path)
    assert "twice" not in {one.distribution for one in plugins.installed()}


def test_a_distribution_without_a_name_is_reported(live_site):
    live_site.install("anonymous", "", metadata="Metadata-Version: 2.1\n\nName: not-a-header\n")
    plugin = found("")
    assert plugin.failures[0].phase == "metadata"
    assert "names no valid distribution" in plugin.failures[0].reason


def test_names_in_the_long_description_are_not_the_distribution(live_site):
    readme = "Metadata-Version: 2.1\nName: real\nVersion: 1.0\n\nName: fake\nVersion: 9\n"
    live_site.offer("real", "real_m", metadata=readme)
    assert found("real").version == "1.0"


def test_a_wrong_hook_argument_leaves_old_plugins_alone(live_site):
    """A plugin written against the first version of every hook."""
    live_site.install(
        "frozen",
        """
        from records import *

        calls = []

        @hookimpl
        def zoo_mechanisms():
            return [mechanism("frozen_m")]

        @hookimpl
        def zoo_architectures():
            return [architecture("frozen_a")]

        @hookimpl
        def zoo_catalogues():
            return []

        @hookimpl
        def zoo_patched(model, patch):
            calls.append((model, patch))
        """,
    )
    assert found("frozen").failures == ()
    plugins.notify_patched("model", "patch")
    assert sys.modules["frozen"].calls == [("model", "patch")]


def test_a_failing_listener_is_a_warning_and_the_next_one_is_called(live_site, monkeypatch):
    listener = "from records import *\ncalls = []\n@hookimpl\ndef zoo_patched(model): {body}\n"
    live_site.install("a-bad", listener.format(body="1 / 0"))
    live_site.install("b-good", listener.format(body="calls.append(model)"))
    with pytest.warns(RuntimeWarning, match="plugin a-bad failed at zoo_patched: ZeroDivision"):
        plugins.notify_patched("model", "patch")
    assert sys.modules["b_good"].calls == ["model"]


def test_a_listener_without_a_fault_says_nothing(live_site, capsys):
    live_site.install(
        "talker", "from records import *\n@hookimpl\ndef zoo_patched(patch): print(patch)"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugins.notify_patched("model", "patch")
    assert capsys.readouterr() == ("", "patch\n")


# --- contested names ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("a-one", "b-two"), ("b-one", "a-two")])
def test_a_name_claimed_twice_must_be_qualified_in_either_order(live_site, order):
    for distribution in order:
        live_site.offer(distribution, "both")
    live_site.offer("zz-after", "after")
    first, second = sorted(order)
    with pytest.raises(ContestedName, match=f"claimed by {first} and {second}") as error:
        registry.mechanism("both")
    assert f"'{first}/both' or '{second}/both'" in str(error.value)
    assert registry.mechanism(f"{second}/both").distribution == second
    assert registry.owners("both") == [first, second]
    assert registry.contested() == {"both"}
    assert registry.mechanism("after").name == "after"


def test_a_name_of_zoo_core_can_be_contested_but_not_taken(live_site):
    live_site.offer("aardvark", "softmax")
    with pytest.raises(ContestedName):
        registry.mechanism("softmax")
    assert registry.mechanism("zoo-core/softmax").factory.__module__ == "zoo_attention.softmax"
    assert registry.mechanism("sdpa").distribution == "zoo-core"


# --- ZOO_PLUGINS, ZOO_BLOCK, ZOO_STRICT --------------------------------------------------------


@pytest.fixture
def three(live_site):
    live_site.offer("acme", "acme_a", "acme_b", entries={"point": "acme"})
    live_site.offer("beta", "beta_m")
    live_site.install("crash", "import os; os._exit(1)")
    return live_site


@pytest.mark.parametrize(
    ("allow", "expected"),
    [
        ("acme", {"acme/acme_a", "acme/acme_b"}),
        (" Acme , beta,", {"acme/acme_a", "acme/acme_b", "beta/beta_m"}),
        ("point", {"acme/acme_a", "acme/acme_b"}),
        ("acme/point", {"acme/acme_a", "acme/acme_b"}),
        ("acme/acme_b", {"acme/acme_b"}),
        ("beta,acme/acme_b", {"acme/acme_b", "beta/beta_m"}),
        ("zoo-core/softmax", {"zoo-core/softmax"}),
        ("", set()),
    ],
)
def test_the_allow_list(three, monkeypatch, allow, expected):
    monkeypatch.setenv("ZOO_PLUGINS", allow)
    assert names() == expected
    assert "crash" not in sys.modules


def test_a_bare_mechanism_name_is_allowed_too(live_site, monkeypatch):
    live_site.offer("acme", "acme_a", "acme_b", entries={"point": "acme"})
    monkeypatch.setenv("ZOO_PLUGINS", "acme_b")
    assert names() == {"acme/acme_b"}
    assert found("acme").blocked == ("acme_a: ZOO_PLUGINS does not name it",)


@pytest.mark.parametrize(
    ("block", "gone"),
    [
        ("acme", {"acme/acme_a", "acme/acme_b"}),
        ("ACME", {"acme/acme_a", "acme/acme_b"}),
        ("point", {"acme/acme_a", "acme/acme_b"}),
        ("acme_a", {"acme/acme_a"}),
        ("acme/acme_a,beta", {"acme/acme_a", "beta/beta_m"}),
        ("beta/acme_a", set()),
    ],
)
def test_the_deny_list(three, monkeypatch, block, gone):
    monkeypatch.setenv("ZOO_BLOCK", f"{block},crash")
    everything = {"acme/acme_a", "acme/acme_b", "beta/beta_m"}
    assert names() & everything == everything - gone
    assert "zoo-core/softmax" in names()


def test_what_is_left_out_says_why(three, monkeypatch):
    monkeypatch.setenv("ZOO_BLOCK", "crash,acme_a,nonsense")
    assert found("crash").blocked == ("ZOO_BLOCK names crash",)
    assert found("acme").blocked == ("acme_a: ZOO_BLOCK names acme_a",)
    [line] = plugins.discovery().policy.unmatched()
    assert line.startswith("ZOO_BLOCK names nonsense")
    with pytest.raises(UnknownName, match=r"acme 1.0 \(acme_a: ZOO_BLOCK names acme_a\)"):
        registry.mechanism("acme_a")


def test_an_empty_allow_list_says_why_nothing_is_there(live_site, monkeypatch):
    monkeypatch.setenv("ZOO_PLUGINS", "")
    with pytest.raises(
        UnknownName, match=r"No mechanisms are loaded.*ZOO_PLUGINS is set and empty"
    ):
        registry.mechanism("softmax")


@pytest.mark.parametrize("value", ["1", "yes"])
def test_strict_raises_with_the_cause(live_site, monkeypatch, value):
    live_site.install("bad", "raise RuntimeError('boom')")
    monkeypatch.setenv("ZOO_STRICT", value)
    with pytest.raises(
        PluginError, match=r"bad \(bad = bad\) failed at import: RuntimeError: boom"
    ):
        registry.mechanisms()
    monkeypatch.setenv("ZOO_STRICT", "0")
    assert found("bad").failures


# --- once, and anew ----------------------------------------------------------------------------


def test_plugins_load_once_until_forgotten(live_site):
    assert plugins.installed() is plugins.installed()
    live_site.offer("late", "late_m")
    assert "late/late_m" not in names()
    plugins.forget()
    assert "late/late_m" in names()


def test_plugins_load_in_another_thread(live_site):
    live_site.install("bad", "raise KeyboardInterrupt")
    thread = threading.Thread(target=plugins.installed)
    thread.start()
    thread.join()
    assert found("bad").failures[0].reason == "KeyboardInterrupt (bad.py:1)"


def test_the_interrupt_handler_is_put_back(live_site):
    before = signal.getsignal(signal.SIGINT)
    live_site.install("hijack", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    plugins.installed()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "code",
    [
        "wait()",
        "try: wait()\nexcept BaseException: raise ValueError from None",
        "from records import *\n@hookimpl\ndef zoo_catalogues():\n"
        "    try: wait()\n    except BaseException: return []",
    ],
    ids=["at-import", "turned-into-another-error", "swallowed-by-the-last-hook"],
)
def test_a_real_ctrl_c_stops(fake_site, code):
    wait = """
import sys, time

def wait():
    print("waiting", file=sys.stderr, flush=True)
    time.sleep(60)

"""
    fake_site.install("zz-the-last", wait + code)
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    process = subprocess.Popen(
        [sys.executable, "-c", start + LOADED],
        env=fake_site.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT, err
    assert "KeyboardInterrupt" in err
    assert "loaded" not in out


# --- requirements ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "acme==1.0"),
        ({"url": "file:///src/acme", "dir_info": {"editable": True}}, "-e file:///src/acme"),
        ({"url": "file:///a.whl", "archive_info": {}}, "acme @ file:///a.whl"),
        (
            {"url": "https://h/acme", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "acme @ git+https://h/acme@abc",
        ),
    ],
    ids=["index", "editable", "file", "git"],
)
def test_the_requirement_that_restores_a_distribution(live_site, origin, line):
    from zoo_core.distributions import requirement

    live_site.offer("acme", "acme_m")
    if origin:
        info = live_site.path / "acme-1.0.dist-info"
        (info / "direct_url.json").write_text(json.dumps(origin))
    assert requirement("acme") == line
