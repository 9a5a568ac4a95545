from __future__ import annotations

import re
from dataclasses import replace

import pytest

import zoo_core as zoo
from zoo_core import registry
from zoo_core.errors import ContestedName, PluginError, RecordError, UnknownName

PLUGIN = """
from records import *
from zoo_core import Supports


@hookimpl
def zoo_mechanisms():
    return [
        mechanism("alpha", aliases=("first",), family="kernel", supports=Supports(causal=True)),
        mechanism("beta", swap="approximate", supports=Supports(needs=frozenset({"carry"}))),
        mechanism("softmix", aliases=("softmax", "twin")),
    ]


@hookimpl
def zoo_architectures():
    return [architecture("tower", aliases=("babel",))]
"""

OTHER = """
from records import *


@hookimpl
def zoo_mechanisms():
    return [mechanism("gamma", aliases=("twin",)), mechanism("alpha")]
"""


@pytest.fixture
def acme(live_site):
    live_site.install("acme", PLUGIN)
    return live_site


def found(*arguments, **filters) -> list[str]:
    return [record.name for record in zoo.mechanisms(*arguments, distribution="acme", **filters)]


# --- lookup ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alpha", "first", "acme/alpha", "acme/first", "Acme/alpha"])
def test_a_mechanism_is_found_by(acme, name):
    assert registry.mechanism(name).name == "alpha"


@pytest.mark.parametrize("name", ["tower", "babel", "acme/tower"])
def test_an_architecture_is_found_by(acme, name):
    assert registry.architecture(name).name == "tower"


def test_an_alias_never_shadows_a_name(acme):
    assert registry.mechanism("softmax").distribution == "zoo-core"
    assert registry.mechanism("acme/softmax").name == "softmix"


def test_an_alias_claimed_twice_is_contested_by_its_names(acme):
    acme.install("other", OTHER)
    with pytest.raises(ContestedName, match="write 'other/gamma' or 'acme/softmix'"):
        registry.mechanism("twin")


def test_records_are_sorted_by_name_then_distribution(acme):
    acme.install("aaa", OTHER)
    alphas = [one.qualified for one in zoo.mechanisms("alpha")]
    assert alphas == ["aaa/alpha", "acme/alpha"]
    every = [(one.name, one.distribution) for one in zoo.mechanisms()]
    assert every == sorted(every)


@pytest.mark.parametrize("name", [3, None, "", "/", "acme/", ["alpha"]])
def test_what_is_no_name_is_unknown(acme, name):
    with pytest.raises(UnknownName):
        registry.mechanism(name)


# --- wildcards and filters ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", ["alpha", "beta", "softmix"]),
        ("al*", ["alpha"]),
        ("fir?t", ["alpha"]),
        ("acme/*t*", ["beta", "softmix"]),
        ("softmax", ["softmix"]),
        ("ALPHA", []),
    ],
)
def test_patterns_match_names_aliases_and_qualified_names(acme, pattern, names):
    assert found(pattern) == names


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({"family": "kernel"}, ["alpha"]),
        ({"causal": True}, ["alpha"]),
        ({"causal": False, "swap": "exact"}, ["softmix"]),
        ({"needs": "carry"}, ["beta"]),
        ({"aliases": "twin"}, ["softmix"]),
        ({"lengths": "any", "grid": "ignored", "api": 1}, ["alpha", "beta", "softmix"]),
        ({"family": "unheard of"}, []),
    ],
    ids=str,
)
def test_filters_are_fields_of_mechanism_and_supports(acme, filters, names):
    assert found(**filters) == names


def test_the_distribution_filter_is_normalised(acme):
    assert len(zoo.mechanisms(distribution="ACME")) == 3


@pytest.mark.parametrize("key", ["famly", "factory", "supports"])
def test_an_unknown_filter_is_refused(key):
    with pytest.raises(UnknownName, match=f"no filter '{key}'"):
        zoo.mechanisms(**{key: "kernel"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("swap", "exakt"), ("causal", "yes"), ("grid", True), ("needs", "time"), ("lengths", None)],
)
def test_an_impossible_value_is_refused(key, value):
    with pytest.raises(RecordError, match=f"filter {key} is {value!r}, must be one of"):
        zoo.mechanisms(**{key: value})


# --- names that are not there ------------------------------------------------------------------


def test_unknown_names_what_is_near_and_loaded(acme):
    with pytest.raises(UnknownName) as error:
        registry.mechanism("alpa")
    text = str(error.value)
    assert text.startswith("no mechanism 'alpa'; did you mean 'alpha'? Loaded: alpha, ")


def test_unknown_names_what_failed_and_why_the_likeliest_first(acme):
    for index in range(5):
        acme.install(f"broken-{index}", f"raise OSError('no {index}')")
    with pytest.raises(UnknownName) as error:
        registry.mechanism("broken_4")
    failed = str(error.value).partition("Failed: ")[2]
    assert failed.startswith("broken-4 1.0 (broken_4) at import: OSError: no 4 (broken_4.py:1);")
    assert re.search(r"; and \d more, see `zoo plugins`\.", failed)


def test_unknown_names_what_to_install(acme, tmp_path, monkeypatch):
    catalogue = tmp_path / "more.toml"
    catalogue.write_text(
        'schema = 1\n[plugins.zoo-omega]\nsummary = "Omega."\nmechanisms = ["omega"]\n'
        'architectures = ["arch"]\nversion = ">=1.2"\n'
    )
    monkeypatch.setenv("ZOO_REGISTRY", str(catalogue))
    with pytest.raises(UnknownName, match=r"zoo-omega offers it: pip install 'zoo-omega>=1.2'"):
        registry.mechanism("omega")
    with pytest.raises(UnknownName, match="did you mean 'omega'"):
        registry.mechanism("omga")
    with pytest.raises(UnknownName, match="pip install"):
        registry.architecture("arch")
    with pytest.raises(UnknownName) as error:
        registry.mechanism("arch")
    assert "pip install" not in str(error.value)


# --- records of this process -------------------------------------------------------------------


def cell(source: str = "lambda site, options: None", **changes):
    """What running a notebook cell again does: new objects from the same source."""
    space: dict = {"__name__": "notebook"}
    exec(f"factory = {source}", space)
    fields = {
        "summary": "Mine.",
        "family": "test",
        "paper": None,
        "time": "n",
        "memory": "n",
        "supports": zoo.Supports(),
        "options": zoo.Options,
        "swap": "exact",
    }
    return zoo.Mechanism(name="mine", factory=space["factory"], **{**fields, **changes})


def test_a_registered_record_has_no_distribution(live_site):
    record = zoo.register(cell(distribution="forged", version="1"))
    assert (record.distribution, record.version, record.qualified) == ("", "", "mine")
    assert registry.mechanism("mine") is record
    assert record in zoo.mechanisms()
    assert registry.owners("mine") == [""]


def test_registering_again_is_quiet_and_the_last_cell_counts(live_site):
    first = cell()
    zoo.register(first)
    zoo.register(first)
    again = zoo.register(cell(summary="Better."))
    assert [one.summary for one in zoo.mechanisms("mine")] == ["Better."]
    assert registry.mechanism("mine") is again


def test_another_definition_is_refused_unless_it_replaces(live_site):
    zoo.register(cell())
    other = cell("__import__('functools').partial(print)")
    with pytest.raises(ContestedName, match=r"by notebook\.<lambda>.*replaces=True"):
        zoo.register(other)
    assert registry.mechanism("mine").factory.__name__ == "<lambda>"
    zoo.register(other, replaces=True)
    assert registry.mechanism("mine").factory is other.factory


def test_the_name_of_an_installed_plugin_is_refused(acme):
    with pytest.raises(ContestedName, match="'alpha' belongs to acme"):
        zoo.register(replace(cell(), name="alpha"), replaces=True)
    assert registry.mechanism("alpha").distribution == "acme"


def test_registering_what_a_plugin_offers_changes_nothing(acme):
    installed = registry.mechanism("alpha")
    assert zoo.register(replace(installed, distribution="", version="")) is installed
    assert registry.owners("alpha") == ["acme"]


def test_an_alias_of_this_process_does_not_take_a_name(acme):
    zoo.register(cell(aliases=("alpha",)))
    assert registry.mechanism("alpha").distribution == "acme"


def test_an_architecture_is_registered_too(live_site):
    mine = zoo.Architecture(
        name="mine", library="timm", summary="", default="", adapter=lambda: None
    )
    assert zoo.register(mine) is registry.architecture("mine")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("softmax", "takes a Mechanism or an Architecture, not a str"),
        (cell(api=2), "api 2"),
    ],
    ids=["a-name", "api"],
)
def test_what_cannot_be_registered(live_site, record, reason):
    with pytest.raises(RecordError, match=reason):
        zoo.register(record)


def test_a_plugin_that_asks_while_loading_gets_a_clear_error(live_site):
    live_site.install("eager", "import zoo_core\nzoo_core.mechanisms()")
    from zoo_core import plugins

    [plugin] = [one for one in plugins.installed() if one.distribution == "eager"]
    assert plugin.failures[0].reason.startswith(f"{PluginError.__name__}: the registry was asked")
