"""Building timm models by name, and saying of a model how it was built."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import timm
import torch
from torch import nn

import zoo_core as zoo
from zoo_core import registry
from zoo_core.errors import CheckpointError, OptionError, PatchError, UnknownName, ZooError
from zoo_core.hosts import adapter_of

TINY = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 32}
VIT = "vit_tiny_patch16_224"


def adapter(name: str = "vit"):
    return registry.architecture(name).adapter()


def describe(model: nn.Module) -> dict:
    return adapter_of(model)[1].config(model)


def structure(model: nn.Module) -> tuple:
    """What must come back: modules as printed, and tensors with their shapes."""
    return repr(model), {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["vit", "deit"])
def test_tiny_builds_and_runs(name: str) -> None:
    model = adapter(name).create(None, **adapter(name).tiny())
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 1000)
    assert sum(p.numel() for p in model.parameters()) < 100_000


def test_default_variants() -> None:
    for name, width in (("vit", 768), ("deit", 768)):
        skeleton = adapter(name).create(None, skeleton=True)
        assert skeleton.embed_dim == width
        assert {p.device.type for p in skeleton.parameters()} == {"meta"}


def test_a_variant_with_a_tag() -> None:
    model = zoo.build("vit:vit_tiny_patch16_224.augreg_in21k", **TINY)
    assert model.num_classes == 21843


def test_build_returns_the_class_of_timm() -> None:
    model = zoo.build("deit:deit_tiny_distilled_patch16_224", "softmax", num_classes=10, **TINY)
    assert type(model) is timm.models.deit.VisionTransformerDistilled
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)


def test_the_skeleton_leaves_the_random_stream_alone() -> None:
    """So that a seed builds what timm builds with it."""
    torch.manual_seed(0)
    expected = timm.create_model(VIT, **TINY)
    built = zoo.build(f"vit:{VIT}", "softmax", seed=0, **TINY)
    assert all(map(torch.equal, built.state_dict().values(), expected.state_dict().values()))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        ({"ref": "vit_tinny_patch16_224"}, UnknownName, "did you mean .*'vit_tiny_patch16_224'"),
        ({"ref": "resnet18"}, OptionError, "resnet18.* is a ResNet, not one of VisionTransformer"),
        ({"ref": "deit_tiny_patch16_224"}, UnknownName, "write 'deit:deit_tiny_patch16_224'"),
        ({"ref": f"hf-hub:owner/{VIT}"}, UnknownName, "no model 'hf-hub:owner"),
        ({"ref": "../weights"}, UnknownName, "no model"),
        ({"ref": f"{VIT}.nope"}, OptionError, "Invalid pretrained tag"),
        ({"ref": VIT, "variant": "vit_small_patch16_224"}, OptionError, "two variants"),
        ({"num_class": 3}, OptionError, "no argument 'num_class'; did you mean 'num_classes'"),
        ({"checkpoint_path": "x.bin"}, OptionError, "no argument 'checkpoint_path'"),
        ({"pretrained_cfg": {"file": "x"}}, OptionError, "no argument 'pretrained_cfg'"),
        ({"pretrained_cfg_overlay": {"file": "x"}}, OptionError, "may set only .*mean.*std"),
        ({"features_only": True}, OptionError, "no argument 'features_only'"),
        ({"num_heads": 7}, OptionError, "timm cannot build .*divisible"),
        ({"img_size": "big"}, OptionError, "timm cannot build"),
        ({"task": "masked-lm"}, OptionError, "num_classes="),
        ({"max_length": 512}, OptionError, "img_size="),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("skeleton", [True, False], ids=["skeleton", "model"])
def test_what_create_refuses(
    call: dict, kind: type[ZooError], message: str, skeleton: bool
) -> None:
    call = {"ref": None, **call}
    with pytest.raises(kind, match=message):
        adapter().create(call.pop("ref"), skeleton=skeleton, **call)


def test_weights_that_nobody_published() -> None:
    with pytest.raises(CheckpointError, match=r"could not load .*No pretrained weights exist"):
        adapter().create("vit_small_patch16_36x1_224", pretrained=True, **TINY)


CREATED = {
    "plain": (VIT, TINY),
    "tag": (f"{VIT}.augreg_in21k", TINY),
    "classes": (VIT, {**TINY, "num_classes": 3, "in_chans": 1}),
    "no_head": (VIT, {**TINY, "num_classes": 0, "global_pool": "avg"}),
    "not_square": (VIT, {**TINY, "img_size": (32, 48), "patch_size": 8}),
    "flags": (
        VIT,
        {**TINY, "dynamic_img_size": True, "reg_tokens": 2, "qk_norm": True, "init_values": 1e-3},
    ),
    "rates": (VIT, {**TINY, "attn_drop_rate": 0.1, "drop_path_rate": 0.2, "drop_rate": 0.3}),
    "layers_by_name": (VIT, {**TINY, "norm_layer": "rmsnorm", "act_layer": "silu"}),
    "distilled": ("deit_tiny_distilled_patch16_224", TINY),
    "naflex": ("naflexvit_base_patch16_map", {"depth": 1, "embed_dim": 32, "num_heads": 2}),
    "as_naflex": (VIT, {**TINY, "use_naflex": True}),
}


@pytest.mark.parametrize("by", ["zoo", "timm"])
@pytest.mark.parametrize("name", CREATED)
def test_config_builds_the_same_model(name: str, by: str) -> None:
    variant, arguments = CREATED[name]
    if by == "timm":
        model = timm.create_model(variant, **arguments)
        if not hasattr(model, "_model_args"):
            pytest.skip(f"timm {timm.__version__} keeps no record of what it was given")
    else:
        family = "deit" if variant.startswith("deit") else "vit"
        model = zoo.build(f"{family}:{variant}", ("linformer", {"rank": 2}), **arguments)
        assert json.loads(json.dumps(describe(model))) == describe(model)
        model.zoo_patches.patches[0].restore()
    config = json.loads(json.dumps(describe(model)))
    again = adapter_of(model)[1].create(None, **config)
    assert structure(again) == structure(model)
    assert again.pretrained_cfg == model.pretrained_cfg
    assert config["variant"].startswith(variant)
    assert describe(again) == config


@pytest.mark.parametrize("recorded", [True, False])
def test_config_after_changes_that_timm_offers(recorded: bool) -> None:
    """Also with timm before it kept a record: what zoo.build was given is known by the zoo."""
    model = zoo.build(f"vit:{VIT}", "softmax", **TINY)
    model.reset_classifier(4, "avg")
    model.set_input_size((48, 32))
    if not recorded and hasattr(model, "_model_args"):
        del model._model_args
    config = describe(model)
    assert (config["num_classes"], config["global_pool"], config["img_size"]) == (
        4,
        "avg",
        [48, 32],
    )
    again = adapter().create(None, **config)
    zoo.patch(again, "softmax")
    assert structure(again) == structure(model)


@pytest.mark.parametrize("create", [timm.create_model, adapter().create], ids=["timm", "zoo"])
def test_config_keeps_how_images_are_prepared(create) -> None:
    mean = [0.1, 0.2, 0.3]
    model = create(VIT, pretrained_cfg_overlay={"mean": mean}, **TINY)
    if not hasattr(model, "zoo_created") and not hasattr(model, "_model_args"):
        pytest.skip(f"timm {timm.__version__} keeps no record of what it was given")
    config = json.loads(json.dumps(describe(model)))
    assert config["pretrained_cfg_overlay"] == {"mean": mean}
    again = adapter().create(None, **config)
    assert timm.data.resolve_model_data_config(again)["mean"] == tuple(mean)


def replaced_head(model: nn.Module) -> None:
    model.head = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 5))


def other_epsilon(model: nn.Module) -> None:
    model.blocks[1].norm1.eps = 1e-3


def fewer_blocks(model: nn.Module) -> None:
    model.blocks = model.blocks[:1]


def longer_positions(model: nn.Module) -> None:
    model.pos_embed = nn.Parameter(torch.zeros(1, 99, 32))


def more_modules(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2)


def no_record(model: nn.Module) -> None:
    model._model_args = {}
    del model.zoo_created


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (replaced_head, "head"),
        (other_epsilon, r"blocks\.1\.norm1 differs in eps"),
        (fewer_blocks, r"blocks\.1\S* is missing"),
        (longer_positions, "the model differs in pos_embed"),
        (more_modules, "extra is additional"),
        (no_record, "differs in"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_config_refuses_what_timm_would_not_build(change, named: str) -> None:
    model = adapter().create(VIT, **TINY)
    change(model)
    with pytest.raises(PatchError, match=named):
        describe(model)


def test_config_refuses_arguments_that_are_not_json() -> None:
    model = adapter().create(VIT, norm_layer=nn.LayerNorm, **TINY)
    with pytest.raises(PatchError, match="not JSON"):
        describe(model)


def test_config_refuses_a_model_without_a_name() -> None:
    bare = timm.models.VisionTransformer(img_size=32, embed_dim=32, depth=1, num_heads=2)
    with pytest.raises(PatchError, match="does not say which timm model"):
        describe(bare)


def test_config_ignores_the_state_of_training() -> None:
    model = adapter().create(VIT, **TINY)
    config = describe(model)
    model.train().set_grad_checkpointing()
    assert describe(copy.deepcopy(model)) == config


def test_listing_families_imports_no_library() -> None:
    code = (
        "import sys\n"
        "import zoo_architectures\n"
        "names = [row.name for row in zoo_architectures.zoo_architectures()]\n"
        "assert {'vit', 'deit'} <= set(names), names\n"
        "loaded = {'torch', 'timm', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
