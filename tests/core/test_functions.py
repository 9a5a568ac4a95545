"""A plain function becomes a mechanism: told what it asks for, options from its defaults."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import zoo_core as zoo
from zoo_core import registry
from zoo_core.attention import Context, Site
from zoo_core.errors import OptionError, RecordError


@zoo.from_function(summary="Mean of the keys it sees, sharpened.", aliases=("sharp",))
def sharpened_mean(q, k, v, key_padding, scale, *, power: float = 1.0):
    scores = power * scale * q @ k.mT
    if key_padding is not None:
        scores = scores.masked_fill(~key_padding[:, None, None], float("-inf"))
    return scores.softmax(-1).nan_to_num() @ v


def test_the_record_says_what_the_signature_says() -> None:
    assert sharpened_mean.name == "sharpened_mean"
    assert sharpened_mean.aliases == ("sharp",)
    assert sharpened_mean.supports == zoo.Supports(key_padding=True)
    assert sharpened_mean.options().as_dict() == {"power": 1.0}
    with pytest.raises(OptionError, match="must be float"):
        sharpened_mean.options(power="high")


def test_the_module_calls_the_function_with_options_and_context() -> None:
    site = Site(heads=2, head_dim=8, dim=16, scale=0.5)
    module = sharpened_mean.factory(site, sharpened_mean.options(power=3.0))
    q, k, v = torch.randn(3, 2, 2, 5, 8).unbind(0)
    padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    scores = (1.5 * q @ k.mT).masked_fill(~padding[:, None, None], float("-inf"))
    torch.testing.assert_close(
        module(q, k, v, Context(key_padding=padding)), scores.softmax(-1) @ v
    )


def test_copies_and_pickles_by_name_under_the_decorator() -> None:
    module = sharpened_mean.factory(Site(), sharpened_mean.options())
    q = torch.randn(1, 1, 4, 64)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(q, q, q, Context()), module(q, q, q, Context()))


def test_it_is_registered_built_saved_and_refused_elsewhere_by_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(registry._MECHANISMS, "local", {})
    zoo.register(sharpened_mean)
    tiny = registry.architecture("bert").adapter().tiny()
    model = zoo.build("bert", ("sharp", {"power": 2.0}), **tiny).eval()
    zoo.save(model, tmp_path / "model")
    ids = torch.randint(5, 99, (2, 9))
    assert torch.equal(zoo.load(tmp_path / "model")(ids)[0], model(ids)[0])
    monkeypatch.setattr(registry._MECHANISMS, "local", {})
    with pytest.raises(zoo.ZooError, match="sharpened_mean"):
        zoo.load(tmp_path / "model")


def test_a_plain_call_works_as_well() -> None:
    def nothing(q, k, v):
        """Return the values."""
        return v

    record = zoo.from_function(nothing, name="just_values", family="toy")
    assert (record.name, record.summary, record.family) == (
        "just_values",
        "Return the values.",
        "toy",
    )


def test_a_parameter_that_nothing_fills_is_refused() -> None:
    def wrong(q, k, v, mask):
        return v

    with pytest.raises(RecordError, match=r"takes 'mask', which nothing fills; take one of scale"):
        zoo.from_function(wrong)
