"""zoo.build and zoo.why as a user calls them; every error before anything is built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import zoo_core as zoo
from zoo_core import builder, patching, registry
from zoo_core.errors import DoesNotFit, OptionError, PatchError, UnknownName
from zoo_core.plan import Rule


def tiny(name: str = "bert") -> dict:
    return registry.architecture(name).adapter().tiny()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"architecture": "brt"}, UnknownName, "did you mean 'bert'"),
        ({"attention": "linfomer"}, UnknownName, "did you mean 'linformer'"),
        ({"attention": "linformer", "options": {"rnk": 3}}, OptionError, "did you mean 'rank'"),
        (
            {"attention": "linformer", "options": {"rank": 0}},
            OptionError,
            "below its lower bound 1",
        ),
        ({"attention": "linformer", "options": {"rank": 2.5}}, OptionError, "must be int"),
        ({"attention": "linformer", "options": {"rank": True}}, OptionError, "must be int"),
        ({"attention": "linear", "layers": "0-9"}, OptionError, "this model has layers 0-1"),
        ({"attention": "linear", "hiden_size": 3}, OptionError, "did you mean 'hidden_size'"),
        ({"attention": "linear", "task": "masked"}, OptionError, "masked-lm"),
        ({"attention": "linformer", "is_decoder": True}, DoesNotFit, "no causal form"),
        ({"architecture": "bert:large"}, OptionError, "no variants"),
        ({"architecture": 3}, OptionError, "must be a name"),
        ({"hidden_size": 37}, OptionError, r"hidden_size=37.*not a multiple"),
        ({"hidden_size": float("nan")}, OptionError, "hidden_size=nan"),
        ({"vocab_size": float("inf")}, OptionError, "vocab_size=inf"),
        ({"num_attention_heads": 0}, OptionError, "num_attention_heads=0"),
        ({"num_hidden_layers": "abc"}, OptionError, "num_hidden_layers='abc'"),
        ({"num_hidden_layers": 0}, DoesNotFit, "no attention layer"),
        ({"num_hidden_layers": -1}, DoesNotFit, "no attention layer"),
    ],
)
def test_mistakes_are_named_before_a_model_is_made(
    arguments: dict, kind: type[Exception], message: str, monkeypatch
) -> None:
    made = []
    monkeypatch.setattr(builder, "apply", lambda *a, **k: made.append(a))
    with pytest.raises(kind, match=message):
        zoo.build(**{"architecture": "bert", **tiny(), **arguments})
    assert not made


@pytest.mark.parametrize("raised", [ValueError("boom"), SystemExit(9)], ids=repr)
def test_a_factory_that_fails_is_named(raised: BaseException) -> None:
    def factory(site, options):
        raise raised

    broken = replace(registry.mechanism("uniform"), factory=factory, distribution="zoo-broken")
    message = rf"zoo-broken/uniform failed at .*self: {type(raised).__name__}.*author"
    with pytest.raises(PatchError, match=message) as caught:
        patching.apply(zoo.build("bert", **tiny()), [Rule("all", broken, broken.options())])
    assert caught.value.__cause__ is raised


def test_why_is_empty_exactly_where_build_works() -> None:
    assert zoo.why("bert", "linformer", **tiny()) == []
    reasons = zoo.why("bert", "linformer", is_decoder=True, **tiny())
    assert len(reasons) == 1
    assert "no causal form" in reasons[0]
    assert "'rnk'" in zoo.why("bert", ("linformer", {"rnk": 3}), **tiny())[0]


def test_a_seed_decides_the_whole_build_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = zoo.build("bert", "performer", seed=1, **tiny()).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    again = zoo.build("bert", "performer", seed=1, **tiny()).state_dict()
    other = zoo.build("bert", "performer", seed=2, **tiny()).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first if ".zoo." in key)


def test_rules_by_layer() -> None:
    model = zoo.build("bert", {"0": "local", "1-": ("linformer", {"rank": 8})}, **tiny())
    sites = zoo.inspect(model).sites
    assert [site.mechanism for site in sites] == ["zoo-core/local", "zoo-core/linformer"]
    assert sites[1].options["rank"] == 8


def test_build_returns_the_hosts_own_class() -> None:
    import transformers

    assert type(zoo.build("bert", **tiny())) is transformers.BertModel
    headed = zoo.build("bert", task="sequence-classification", num_labels=7, **tiny())
    assert type(headed) is transformers.BertForSequenceClassification
    assert headed.num_labels == 7


def test_a_default_device_of_meta_does_not_reach_the_mechanism() -> None:
    with torch.device("meta"):
        model = zoo.build("bert", "performer", **tiny())
    module = model.encoder.layer[0].attention.self.zoo
    assert {buffer.device.type for buffer in module.buffers()} == {"meta"}


def test_auxiliary_loss_is_zero_without_any() -> None:
    assert zoo.auxiliary_loss(zoo.build("bert", "linear", **tiny())) == 0
