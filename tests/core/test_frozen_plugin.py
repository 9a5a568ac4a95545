"""A plugin written against the first version of every hook works on, unchanged."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
import torch

import zoo_core as zoo
from zoo_core import hookspecs, plugins, registry

FROZEN = Path(__file__).with_name("frozen_plugin_api1.py")
SHA256 = "e0d69289bdf97b20505c7d4048552f480f2c5206a38e16b03de50a887261c16f"
CATALOGUE = """
schema = 1

[presets.frozen_preset]
summary = "A row of the first schema."
architecture = "bert"
attention = "frozen"
"""


@pytest.fixture
def plugin(live_site) -> plugins.Plugin:
    live_site.install("frozen-plugin", FROZEN.read_bytes(), module="frozen_plugin")
    (live_site.path / "frozen.toml").write_text(CATALOGUE)
    [found] = [one for one in plugins.installed() if one.distribution == "frozen-plugin"]
    return found


def test_the_file_is_as_it_was() -> None:
    digest = hashlib.sha256(FROZEN.read_bytes()).hexdigest()
    assert digest == SHA256, f"{FROZEN.name} stands for plugins out there; restore it"


def test_every_hook_is_heard(plugin) -> None:
    assert plugin.failures == ()
    assert plugin.notes == ()
    assert [record.name for record in plugin.mechanisms] == ["frozen", "frozen_function"]
    assert [record.name for record in plugin.architectures] == ["frozen_family"]
    assert registry.mechanism("frozen_alias").qualified == "frozen-plugin/frozen"
    assert registry.preset("frozen_preset").attention == "frozen"


@pytest.mark.parametrize("attention", ["frozen", "frozen_function"])
def test_it_builds_and_runs_and_hears_of_it(plugin, attention) -> None:
    tiny = registry.architecture("bert").adapter().tiny()
    model = zoo.build("bert", attention, **tiny)
    assert model(torch.randint(5, 99, (2, 9))).last_hidden_state.isfinite().all()
    heard, patch = sys.modules["frozen_plugin"].SEEN[-1]
    assert heard is model
    assert isinstance(patch, zoo.Patch)


def test_a_hook_may_gain_arguments(plugin, monkeypatch) -> None:
    @hookspecs.hookspec
    def zoo_patched(model, patch, reason) -> None:
        pass

    monkeypatch.setattr(hookspecs, "zoo_patched", zoo_patched)
    plugins.forget()
    [later] = [one for one in plugins.installed() if one.distribution == "frozen-plugin"]
    assert later.failures == ()
    later.hooks.zoo_patched(model="a model", patch="a patch", reason="a new argument")
    assert sys.modules["frozen_plugin"].SEEN[-1] == ("a model", "a patch")


@pytest.mark.parametrize(
    "mark",
    [
        {"warn_on_impl": DeprecationWarning("zoo_patched goes; use zoo_built")},
        {"warn_on_impl_args": {"patch": DeprecationWarning("zoo_patched goes; use zoo_built")}},
    ],
    ids=["hook", "argument"],
)
def test_a_deprecation_is_told_once_with_the_name_of_the_plugin(plugin, monkeypatch, mark) -> None:
    @hookspecs.hookspec(**mark)
    def zoo_patched(model, patch) -> None:
        pass

    monkeypatch.setattr(hookspecs, "zoo_patched", zoo_patched)
    plugins.forget()
    with pytest.warns(FutureWarning) as told:
        found = plugins.installed()
    assert [str(one.message) for one in told] == [
        "plugin frozen-plugin 1.0: zoo_patched goes; use zoo_built"
    ]
    [notes] = [one.notes for one in found if one.notes]
    assert notes == ("deprecated: zoo_patched goes; use zoo_built",)
    assert registry.mechanism("frozen").distribution == "frozen-plugin"
