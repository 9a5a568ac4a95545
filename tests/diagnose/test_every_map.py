"""map @ v is the output, for every installed mechanism in a text and an image model."""

from __future__ import annotations

import pytest
import torch

import zoo_core as zoo
from zoo_core import registry
from zoo_core.diagnose.maps import has_map
from zoo_core.testing.models import inputs, is_text

RIGHT = torch.arange(23) < torch.tensor([[23], [9]])
FAMILIES = ("bert", "vit")
CASES = [(one, family) for one in registry.mechanisms() for family in FAMILIES]


@pytest.mark.parametrize(
    ("mechanism", "family"), CASES, ids=[f"{one.name}-{family}" for one, family in CASES]
)
def test_map_times_values_is_the_output(mechanism, family):
    tiny = registry.architecture(family).adapter().tiny()
    if zoo.why(family, mechanism.qualified, **tiny):
        pytest.skip("does not fit")
    model = zoo.build(family, mechanism.qualified, seed=0, **tiny).eval()
    padded = mechanism.supports.key_padding and is_text(model)
    arguments = inputs(model, RIGHT if padded else None)
    module = next(m for name, m in reversed(list(model.named_modules())) if name.endswith(".zoo"))
    if not has_map(module):
        with pytest.raises(zoo.ZooError, match=r"has no attention map.*layers="):
            zoo.attention_map(model, arguments)
        return
    seen = {}
    hook = module.register_forward_hook(lambda m, args, out: seen.update(v=args[2], out=out))
    with torch.no_grad():
        model(**arguments)
    hook.remove()
    maps = zoo.attention_map(model, arguments)
    path, weights = list(maps.items())[-1]
    labels = maps.labels[path]
    real = labels.queries[:, None, :, None]
    assert labels.mechanism == mechanism.name
    assert not (weights * ~labels.keys[:, None, None] * real).any()
    values = seen["v"].masked_fill(~labels.keys[:, None, :, None], 0)
    got, wanted = (weights @ values) * real, seen["out"].masked_fill(~real, 0)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_a_layer_that_runs_several_times_has_a_map_for_each():
    tiny = registry.architecture("albert").adapter().tiny()
    model = zoo.build("albert", "softmax", seed=0, **tiny).eval()
    arguments = inputs(model)
    given = model(**arguments, output_attentions=True).attentions
    maps = zoo.attention_map(model, arguments)
    assert [path.rpartition("#")[2] for path in maps] == ["0", "1"]
    for ours, theirs in zip(maps.values(), given, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", ["bert", "hf_vit"])
@pytest.mark.parametrize("mechanism", registry.mechanisms(), ids=lambda one: one.name)
def test_output_attentions_is_never_empty(mechanism, family):
    tiny = registry.architecture(family).adapter().tiny()
    if zoo.why(family, mechanism.qualified, **tiny):
        pytest.skip("does not fit")
    model = zoo.build(family, mechanism.qualified, seed=0, **tiny).eval()
    arguments = inputs(model)
    if not mechanism.supports.weights:
        with pytest.raises(zoo.ZooError, match=r"output_attentions.*zoo\.attention_map"):
            model(**arguments, output_attentions=True)
        return
    given = model(**arguments, output_attentions=True).attentions
    maps = zoo.attention_map(model, arguments)
    assert len(given) == len(maps) > 0
    for ours, theirs in zip(maps.values(), given, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("family", ["bert", "hf_vit"])
def test_output_attentions_through_the_config_is_refused(family):
    tiny = registry.architecture(family).adapter().tiny()
    own = zoo.build(family, "linear", seed=0, **tiny).eval()
    # Asked through the config, transformers itself refuses any attention but its eager one.
    with pytest.raises(ValueError, match="output_attentions"):
        own.config.output_attentions = True
