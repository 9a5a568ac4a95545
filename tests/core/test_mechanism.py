"""Records and options: what they accept, what they refuse, and in which words."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from zoo_core import Architecture, Mechanism, Options, Paper, Site, Supports, option
from zoo_core.errors import OptionError, RecordError


@dataclass(frozen=True, kw_only=True)
class ToyOptions(Options):
    rank: int = option(64, low=1, high=4096, at_most="max_len", help="rows")
    share: str = option("heads", choices=("none", "heads"))
    ratio: float = option(0.5, low=0.0, high=1.0)
    learned: bool = option(False)
    seed: int | None = option(None)


def toy(**changes) -> Mechanism:
    fields = {
        "name": "toy",
        "summary": "A toy.",
        "family": "test",
        "paper": None,
        "time": "n",
        "memory": "n",
        "supports": Supports(),
        "options": ToyOptions,
        "swap": "approximate",
        "factory": lambda site, options: None,
    }
    return Mechanism(**{**fields, **changes})


def tower(**changes) -> Architecture:
    fields = {
        "name": "tower",
        "library": "timm",
        "summary": "A tower.",
        "default": "x",
        "adapter": lambda: None,
    }
    return Architecture(**{**fields, **changes})


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rank": 1},
        {"rank": 4096},
        {"share": "none"},
        {"ratio": 1.0},
        {"learned": True},
        {"seed": 7},
        {"seed": None},
    ],
    ids=str,
)
def test_good_options_are_json_and_come_back(values):
    options = ToyOptions.parse(values, owner="toy")
    assert options.as_dict() == {**ToyOptions().as_dict(), **values}
    assert ToyOptions.parse(json.loads(json.dumps(options.as_dict())), owner="toy") == options


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"rnk": 3}, "toy has no option 'rnk' .has: rank, share, ratio, learned, seed.*'rank'?"),
        ({"rank": 0}, "toy: option rank=0 is below its lower bound 1"),
        ({"rank": 4097}, "option rank=4097 is above its upper bound 4096"),
        ({"rank": 2.0}, "option rank=2.0 must be int"),
        ({"rank": True}, "option rank=True must be int"),
        ({"rank": "8"}, "option rank='8' must be int"),
        ({"rank": None}, "option rank=None must be int"),
        ({"ratio": math.nan}, "option ratio=nan must be finite"),
        ({"ratio": math.inf}, "option ratio=inf must be finite"),
        ({"ratio": 1.5}, "above its upper bound 1.0"),
        ({"share": "all"}, "option share='all' must be one of 'none', 'heads'"),
        ({"learned": 1}, "option learned=1 must be bool"),
        ({"seed": 1.0}, "option seed=1.0 must be int or None"),
        ({"seed": [1]}, "option seed=.1. must be int or None"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_words(values, reason):
    with pytest.raises(OptionError, match=reason):
        ToyOptions.parse(values, owner="toy")


def test_a_whole_number_is_a_float():
    value = ToyOptions(ratio=1).ratio
    assert type(value) is float


def test_options_of_another_mechanism_are_refused():
    @dataclass(frozen=True, kw_only=True)
    class Other(Options):
        rank: int = option(1)

    with pytest.raises(OptionError, match="toy takes options of type ToyOptions, not Other"):
        ToyOptions.parse(Other(), owner="toy")


def test_a_mechanism_without_options_says_so():
    with pytest.raises(OptionError, match=r"plain has no option 'x' \(it has no options\)"):
        Options.parse({"x": 1}, owner="plain")


def test_options_are_frozen_equal_and_picklable():
    options = ToyOptions(rank=3)
    with pytest.raises(FrozenInstanceError):
        options.rank = 4
    assert options == ToyOptions(rank=3)
    assert hash(options) == hash(ToyOptions(rank=3))
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize(("asked", "built"), [(64, 17), (17, 17), (3, 3)])
def test_an_option_larger_than_the_site_is_clamped(asked, built):
    options = ToyOptions(rank=asked)
    assert options.clamped(Site(max_len=17)).rank == built
    assert options.rank == asked


def test_options_that_json_cannot_hold_are_refused_with_the_record():
    @dataclass(frozen=True, kw_only=True)
    class Sizes(Options):
        sizes: tuple[int, ...] = option(())

    with pytest.raises(RecordError, match=r"Sizes\.sizes is annotated.*options are JSON scalars"):
        toy(options=Sizes)


def test_defaults_out_of_bounds_are_refused_with_the_record():
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Options):
        rank: int = option(0, low=1)

    with pytest.raises(OptionError, match="rank=0 is below"):
        toy(options=Wrong)


# --- records -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "l2", "improved_clustered", "x" * 64])
def test_good_names(name):
    assert toy(name=name, aliases=(name,)).name == name


@pytest.mark.parametrize(
    "name", ["", "A", "2d", "_x", "a-b", "a b", "a/b", "ñ", "x" * 65, "a\n", None, 3, b"a"]
)
@pytest.mark.parametrize("make", [toy, tower], ids=["mechanism", "architecture"])
def test_bad_names(make, name):
    with pytest.raises(RecordError, match="must be lower_snake ASCII"):
        make(name=name)
    with pytest.raises(RecordError, match="must be lower_snake ASCII"):
        make(aliases=(name,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("summary", None),
        ("family", 3),
        ("time", b"n"),
        ("memory", ["n"]),
        ("formula", None),
        ("deviations", None),
        ("supports", {}),
        ("supports", Supports),
        ("options", ToyOptions()),
        ("options", dict),
        ("paper", "Linformer"),
        ("swap", "maybe"),
        ("factory", None),
    ],
)
def test_a_mechanism_of_wrong_types_is_refused_by_field(field, value):
    with pytest.raises(RecordError, match=f"toy: {field}"):
        toy(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("summary", None), ("default", 3), ("library", "jax"), ("adapter", None)],
)
def test_an_architecture_of_wrong_types_is_refused_by_field(field, value):
    with pytest.raises(RecordError, match=f"tower: {field}"):
        tower(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("lengths", "some"), ("grid", True), ("needs", frozenset({"time"}))],
)
def test_supports_knows_its_words(field, value):
    with pytest.raises(RecordError, match=rf"Supports\.{field} is .* must be one of"):
        Supports(**{field: value})


def test_nothing_is_promised_by_default():
    promises = Supports()
    assert not any(
        (promises.key_padding, promises.causal, promises.cross, promises.bias, promises.weights)
    )
    assert (promises.lengths, promises.grid, promises.needs) == ("any", "ignored", frozenset())


def test_records_are_frozen_and_copied_by_replace():
    record = toy()
    with pytest.raises(FrozenInstanceError):
        record.name = "other"
    assert replace(record, distribution="acme").qualified == "acme/toy"
    assert record.qualified == "toy"


@pytest.mark.parametrize(
    ("paper", "link"),
    [
        (Paper(title="T", year=2020, arxiv="2006.04768"), "https://arxiv.org/abs/2006.04768"),
        (Paper(title="T", year=2020, arxiv="1", url="https://x"), "https://x"),
        (Paper(title="T", year=2020), None),
    ],
    ids=["arxiv", "url-first", "neither"],
)
def test_where_a_paper_is(paper, link):
    assert paper.link == link


@pytest.mark.parametrize(
    "aliases", ["abc", ["abc"], ("no good",)], ids=["text", "list", "bad_name"]
)
@pytest.mark.parametrize("make", [toy, tower], ids=["mechanism", "architecture"])
def test_bad_aliases(make, aliases):
    with pytest.raises(RecordError, match=r"aliases must be a tuple|must be lower_snake"):
        make(aliases=aliases)


@pytest.mark.parametrize("promise", ["causal", "weights", "linear_in_v"])
def test_promises_are_booleans(promise):
    with pytest.raises(RecordError, match=rf"Supports\.{promise} is 'yes', must be one of"):
        Supports(**{promise: "yes"})


@pytest.mark.parametrize(
    "paper",
    [
        {"title": None, "year": 2020},
        {"title": "T", "year": "2020"},
        {"title": "T", "year": 2020, "arxiv": 1},
    ],
)
def test_papers_of_wrong_types_are_refused(paper):
    with pytest.raises(RecordError, match="Paper"):
        Paper(**paper)


def test_options_without_the_dataclass_decorator_are_refused():
    class Forgotten(Options):
        rank: int = option(3)

    with pytest.raises(RecordError, match="decorate Forgotten with @dataclass"):
        toy(options=Forgotten)
