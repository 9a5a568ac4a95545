"""Plans are made from records and sites alone, and refuse in words before anything is built."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from zoo_core import Mechanism, Options, Site, Supports, option, plan
from zoo_core.errors import DoesNotFit, OptionError
from zoo_core.plan import Rule, ranges


@dataclass(frozen=True, kw_only=True)
class RankOptions(Options):
    rank: int = option(64, low=1, at_most="max_len")


def mechanism(name: str = "toy", **supports) -> Mechanism:
    return Mechanism(
        name=name,
        summary="A toy.",
        family="test",
        paper=None,
        time="n",
        memory="n",
        supports=Supports(**supports),
        options=RankOptions,
        swap="approximate",
        factory=lambda site, options: None,
    )


def sites(layers: int = 4, **fields) -> list[Site]:
    return [Site(path=f"layer.{i}", layer=i, layers=layers, **fields) for i in range(layers)]


DECODER = [
    Site(path=f"layer.{i}.{kind}", layer=i, layers=2, kind=kind, causal=True)
    for i in range(2)
    for kind in ("self", "cross")
]


@pytest.mark.parametrize(
    ("selector", "layers"),
    [
        (2, [2]),
        ("2", [2]),
        ("0-2", [0, 1, 2]),
        ("2-", [2, 3]),
        ("0,2-3", [0, 2, 3]),
        (" 1 , 3 ", [1, 3]),
        ([3, 1], [1, 3]),
        (range(2), [0, 1]),
        ("all", [0, 1, 2, 3]),
        ("self", [0, 1, 2, 3]),
        ("self:1-", [1, 2, 3]),
        ("cross", []),
    ],
    ids=str,
)
def test_selectors(selector, layers: list[int]) -> None:
    assert [site.layer for site in plan.select(selector, sites())] == layers


@pytest.mark.parametrize(
    "selector", ["4", "2-4", "3-2", "a", "-1", "", "1-2-3", "query:1", [7]], ids=str
)
def test_bad_selectors_are_refused_in_words(selector) -> None:
    with pytest.raises(OptionError, match="layers"):
        plan.select(selector, sites())


def test_cross_sites_are_selected_by_kind() -> None:
    assert [s.path for s in plan.select("cross:1", DECODER)] == ["layer.1.cross"]
    assert [s.kind for s in plan.select("self", DECODER)] == ["self", "self"]
    assert len(plan.select("all", DECODER)) == 4


def test_options_are_clamped_to_the_site_and_the_plan_shows_it() -> None:
    made = plan.plan([Rule("all", mechanism(), RankOptions(rank=256))], sites(1, max_len=197))
    assert made.steps[0].options.rank == 197
    assert made.steps[0].clamped == {"rank": (256, 197)}


def test_sites_of_one_mechanism_are_linked_in_order_of_execution() -> None:
    toy, other = mechanism("toy"), mechanism("other")
    chosen = [
        Rule("3", toy, RankOptions()),
        Rule("0-1", toy, RankOptions()),
        Rule("2", other, RankOptions()),
    ]
    made = plan.plan(chosen, sites())
    previous = {step.site.layer: step.site.previous for step in made.steps}
    assert previous == {0: None, 1: "layer.0", 2: None, 3: "layer.1"}
    shared = {step.site.layer: id(step.site.shared) for step in made.steps}
    assert shared[0] == shared[1] == shared[3] != shared[2]


def test_unnamed_layers_stay_stock() -> None:
    made = plan.plan([Rule("1", mechanism(), RankOptions())], sites(3))
    assert [site.layer for site in made.stock] == [0, 2]


def test_one_layer_in_two_rules_is_refused() -> None:
    chosen = [Rule("0-2", mechanism(), RankOptions()), Rule("2-", mechanism(), RankOptions())]
    with pytest.raises(OptionError, match=r"layer 2 .* two rules"):
        plan.plan(chosen, sites())


@pytest.mark.parametrize(
    ("supports", "where", "reason"),
    [
        ({}, sites(causal=True), "toy has no causal form"),
        ({"causal": True}, DECODER, "toy cannot attend to another sequence"),
        ({"grid": "required"}, sites(), "needs tokens on a .* grid"),
        ({}, sites(obstacle="a sliding window"), "a sliding window; leave this layer out"),
    ],
    ids=["causal", "cross", "grid", "obstacle"],
)
def test_misfits_are_refused_in_words(supports: dict, where: list[Site], reason: str) -> None:
    with pytest.raises(DoesNotFit, match=reason) as caught:
        plan.plan([Rule("all", mechanism(**supports), RankOptions())], where)
    assert len(caught.value.reasons) == 1, "layers with the same obstacle share one line"


def test_a_model_without_layers_is_refused_in_words() -> None:
    with pytest.raises(DoesNotFit, match="no attention layer") as caught:
        plan.plan([Rule("all", mechanism(), RankOptions())], [])
    assert len(caught.value.reasons) == 1


def test_every_misfit_is_told_at_once() -> None:
    with pytest.raises(DoesNotFit) as caught:
        plan.plan([Rule("all", mechanism(grid="required"), RankOptions())], DECODER)
    assert len(caught.value.reasons) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention": {"0": "softmax"}, "layers": "1"},
        {"attention": {"0": "softmax"}, "options": {}},
        {"attention": ("softmax", {}), "options": {}},
    ],
    ids=["layers_twice", "options_beside_rules", "options_twice"],
)
def test_contradictory_arguments_are_refused(arguments: dict) -> None:
    with pytest.raises(OptionError):
        plan.rules(**arguments)


@pytest.mark.parametrize(
    ("layers", "text"),
    [([0], "0"), ([0, 1, 2], "0-2"), ([5, 0, 1, 3], "0-1,3,5"), ([], "")],
)
def test_layers_are_written_as_a_selector(layers: list[int], text: str) -> None:
    assert ranges(layers) == text
