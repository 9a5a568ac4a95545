"""The timm bridge: a patched softmax model is the stock model, to the bit, wherever it travels."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import timm
import torch
from timm.layers import Attention
from torch import nn

import zoo_core as zoo
from zoo_core.errors import DoesNotFit, PatchError
from zoo_core.hosts import adapter_of

# variant, arguments, image size
MODELS = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 48}, (48, 48)),
    "not_square": ("vit_tiny_patch16_224", {"img_size": (48, 64)}, (48, 64)),
    "dynamic": ("vit_tiny_patch16_224", {"img_size": 48, "dynamic_img_size": True}, (32, 64)),
    "distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 48}, (48, 48)),
    "registers": ("vit_small_patch14_reg4_dinov2", {"img_size": (28, 42)}, (28, 42)),
    "no_class_token": ("vit_base_patch16_siglip_224", {"img_size": 48}, (48, 48)),
    "norms": (
        "vit_tiny_patch16_224",
        {"img_size": 48, "qk_norm": True, "scale_attn_norm": True, "init_values": 0.1},
        (48, 48),
    ),
    "dropouts": (
        "vit_tiny_patch16_224",
        {"img_size": 48, "attn_drop_rate": 0.3, "proj_drop_rate": 0.2, "drop_path_rate": 0.2},
        (48, 48),
    ),
    "deit3": ("deit3_small_patch16_224", {"img_size": 48}, (48, 48)),
    "two_a_block": ("vit_small_patch16_18x2_224", {"img_size": 48}, (48, 48)),
    "naflex": ("naflexvit_base_patch16_gap", {}, (48, 64)),
}
WITH_PARAMETERS = ("linformer", {"rank": 4})


# A head width of 24, where D ** -0.5 and 1 / sqrt(D) differ in the last bit.
def stock(name: str = "vit", **arguments) -> nn.Module:
    variant, own, _ = MODELS[name]
    sizes = {"depth": 2, "embed_dim": 48, "num_heads": 2, "num_classes": 7}
    return timm.create_model(variant, **{**sizes, **own, **arguments}).eval()


def images(name: str = "vit", size: tuple[int, int] | None = None) -> torch.Tensor:
    return torch.randn(2, 3, *(size or MODELS[name][2]), generator=torch.Generator().manual_seed(0))


def forward_backward(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    output = model(x)
    output.square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **grads}


def assert_same_bits(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    assert not [name for name in left if not torch.equal(left[name], right[name])]


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_softmax_is_bit_identical_and_restored(name: str, train: bool) -> None:
    model = stock(name).train(train)
    before, keys = forward_backward(model, images(name)), list(model.state_dict())
    with zoo.patch(model, "softmax"):
        attention = [m for m in model.blocks.modules() if isinstance(m, Attention)]
        assert attention
        assert all(type(m).__name__ == "ZooAttention" for m in attention)
        assert_same_bits(forward_backward(model, images(name)), before)
        assert list(model.state_dict()) == keys
    assert all(type(m) is Attention for m in attention)
    assert not [n for m in attention for n in vars(m) if "zoo" in n]
    assert not [m for m in model.modules() if m._forward_pre_hooks]
    assert_same_bits(forward_backward(model, images(name)), before)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_within_tolerance_of_the_unfused_kernel(fused: bool) -> None:
    model = stock()
    for block in model.blocks:
        block.attn.fused_attn = fused
    expected = model(images())
    with zoo.patch(model, "softmax"):
        torch.testing.assert_close(model(images()), expected, atol=1e-5, rtol=0)


def test_sites_describe_the_model() -> None:
    with zoo.patch(stock("registers"), "softmax") as patch:
        report = zoo.inspect(patch.model)
    assert [site.path for site in report.sites] == ["blocks.0.attn", "blocks.1.attn"]
    _, adapter = adapter_of(patch.model)
    site = adapter.sites(patch.model)[1]
    assert (site.layer, site.layers, site.kind, site.causal) == (1, 2, "self", False)
    assert (site.dim, site.heads, site.head_dim) == (48, 2, 24)
    assert site.scale == 1 / 24**0.5
    assert (site.grid, site.prefix, site.max_len) == ((2, 3), 5, 11)


@pytest.mark.parametrize(
    ("name", "prefix", "grid"),
    [
        ("vit", 1, (3, 3)),
        ("not_square", 1, (3, 4)),
        ("dynamic", 1, (3, 3)),
        ("distilled", 2, (3, 3)),
        ("registers", 5, (2, 3)),
        ("no_class_token", 0, (3, 3)),
        ("naflex", 4, None),
    ],
)
def test_prefix_and_grid_are_asked_of_the_model(name: str, prefix: int, grid) -> None:
    model = stock(name)
    _, adapter = adapter_of(model)
    assert {(site.prefix, site.grid) for site in adapter.sites(model)} == {(prefix, grid)}


def test_attention_dropout_rate_reaches_the_site() -> None:
    model = stock("dropouts")
    _, adapter = adapter_of(model)
    assert [site.dropout for site in adapter.sites(model)] == [0.3, 0.3]


def test_families_share_no_model() -> None:
    assert adapter_of(stock("vit"))[0].name == "vit"
    assert adapter_of(stock("distilled"))[0].name == "deit"
    assert adapter_of(stock("deit3"))[0].name == "deit"
    bare = timm.models.VisionTransformer(img_size=32, embed_dim=32, depth=1, num_heads=2)
    assert adapter_of(bare)[0].name == "vit"


def test_own_tensors_live_under_zoo_and_stock_keys_stay() -> None:
    model = stock()
    keys = set(model.state_dict())
    zoo.patch(model, WITH_PARAMETERS)
    added = set(model.state_dict()) - keys
    assert keys <= set(model.state_dict())
    assert added
    assert all(key.startswith(("blocks.0.attn.zoo.", "blocks.1.attn.zoo.")) for key in added)


def test_a_partial_patch_leaves_other_layers_stock() -> None:
    model = stock()
    patch = zoo.patch(model, WITH_PARAMETERS, layers=1)
    assert type(model.blocks[0].attn) is Attention
    assert type(model.blocks[1].attn) is not Attention
    patch.restore()
    assert type(model.blocks[1].attn) is Attention


@pytest.mark.parametrize(
    "variant", ["vit_dlittle_patch16_reg1_gap_256", "vit_dpwee_patch16_reg1_gap_256"]
)
def test_other_attention_classes_are_refused_by_name(variant: str) -> None:
    if not timm.is_model(variant):
        pytest.skip(f"timm {timm.__version__} has no {variant}")
    model = timm.create_model(variant, depth=1, img_size=32)
    with pytest.raises(DoesNotFit, match=r"blocks\.0.* is a Diff\w+; only timm's plain Attention"):
        zoo.patch(model, "softmax")


def test_methods_of_the_host_still_work() -> None:
    model, x = stock(), images()
    before = [
        model.forward_features(x),
        *model.forward_intermediates(x)[1],
        *model.get_intermediate_layers(x, n=2),
        model.forward_head(model.forward_features(x)),
    ]
    data = timm.data.resolve_model_data_config(model)
    zoo.patch(model, "softmax")
    after = [
        model.forward_features(x),
        *model.forward_intermediates(x)[1],
        *model.get_intermediate_layers(x, n=2),
        model.forward_head(model.forward_features(x)),
    ]
    assert all(map(torch.equal, before, after))
    assert timm.data.resolve_model_data_config(model) == data
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    timm.data.create_transform(**data)


def test_set_input_size_after_the_patch() -> None:
    model, reference = stock(), stock()
    reference.load_state_dict(model.state_dict())
    zoo.patch(model, "softmax")
    for one in (model, reference):
        one.set_input_size((32, 64))
    x = images(size=(32, 64))
    assert torch.equal(model(x), reference(x))


def test_timm_itself_is_left_alone() -> None:
    models = timm.list_models()
    zoo.patch(stock(), "softmax")
    assert timm.list_models() == models
    assert type(stock().blocks[0].attn) is Attention


def test_deepcopy_computes_with_its_own_weights() -> None:
    model = stock()
    zoo.patch(model, "softmax")
    before = model(images())
    twin = copy.deepcopy(model)
    assert torch.equal(twin(images()), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(images()), before)
    assert not twin(images()).any()


def test_a_copy_restores_itself_and_not_the_original() -> None:
    model = stock()
    zoo.patch(model, "softmax")
    twin = copy.deepcopy(model)
    twin.zoo_patches.patches[0].restore()
    assert type(twin.blocks[0].attn) is Attention
    assert type(model.blocks[0].attn) is not Attention


def test_moving_average_of_weights() -> None:
    model = stock()
    zoo.patch(model, "softmax")
    average = timm.utils.ModelEmaV3(model)
    average.update(model)
    assert torch.equal(average.module(images()), model(images()))


def test_pickle_into_a_fresh_process() -> None:
    model = stock("distilled")
    zoo.patch(model, WITH_PARAMETERS)
    x = images("distilled")
    code = (
        "import sys, pickle\n"
        "model, x = pickle.load(sys.stdin.buffer)\n"
        "pickle.dump(model(x), sys.stdout.buffer)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((model, x)),
        capture_output=True,
        check=True,
    )
    assert torch.equal(pickle.loads(done.stdout), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_whole_model_in_another_dtype(dtype: torch.dtype) -> None:
    model, x = stock("norms").to(dtype), images("norms").to(dtype)
    before = forward_backward(model, x)
    zoo.patch(model, "softmax")
    assert_same_bits(forward_backward(model, x), before)


def test_autocast() -> None:
    model = stock("norms")
    with torch.autocast("cpu", torch.bfloat16):
        before = forward_backward(model, images("norms"))
        zoo.patch(model, "softmax")
        assert_same_bits(forward_backward(model, images("norms")), before)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = stock("dropouts").train()
    zoo.patch(model, "softmax")
    before = forward_backward(model, images())
    model.set_grad_checkpointing()
    assert_same_bits(forward_backward(model, images()), before)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["softmax", WITH_PARAMETERS], ids=["softmax", "linformer"])
def test_compile_in_one_graph(attention, backend: str) -> None:
    model = stock()
    patch = zoo.patch(model, attention)
    expected = model(images())
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(images()), expected, atol=1e-5, rtol=1e-5)
    patch.restore()
    torch.testing.assert_close(compiled(images()), model(images()), atol=1e-5, rtol=1e-5)


def test_export() -> None:
    model, x = stock(), images()
    zoo.patch(model, WITH_PARAMETERS)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x), atol=1e-6, rtol=1e-6)


def test_patched_weights_of_timm_are_no_model_to_stock_timm(tmp_path) -> None:
    """Also where the mechanism has no tensors whose keys could be unexpected."""
    sizes = {"depth": 2, "embed_dim": 48, "num_heads": 2, "img_size": 48}
    model = stock()
    patch = zoo.patch(model, "softmax")
    timm.models.save_for_hf(model, tmp_path, model_args=sizes, safe_serialization=True)
    with pytest.raises(RuntimeError, match="Unknown model"):
        timm.create_model(f"local-dir:{tmp_path}")
    patch.restore()
    timm.models.save_for_hf(model, tmp_path, model_args=sizes, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(images()), model(images()))


@pytest.mark.parametrize("name", MODELS)
def test_save_and_load(name: str, tmp_path) -> None:
    model = stock(name)
    if not hasattr(model, "_model_args"):
        pytest.skip(f"timm {timm.__version__} keeps no record of what it was given")
    zoo.patch(model, WITH_PARAMETERS)
    zoo.save(model, tmp_path)
    again = zoo.load(tmp_path)
    assert type(again) is type(model)
    assert torch.equal(again(images(name)), model(images(name)))


def test_inside_a_wrapper_that_gives_features() -> None:
    sizes = {"depth": 2, "img_size": 48, "out_indices": 2}
    wrapper = timm.create_model("vit_tiny_patch16_224", features_only=True, **sizes)
    before = wrapper.eval()(images())
    patch = zoo.patch(wrapper, "softmax")
    assert type(patch.model) is timm.models.VisionTransformer
    assert all(map(torch.equal, wrapper(images()), before))


@pytest.mark.parametrize("first", ["patch", "lora"])
def test_lora_finds_the_stock_layers(first: str) -> None:
    peft = pytest.importorskip("peft")
    model = stock()
    lora = peft.LoraConfig(target_modules=["qkv", "proj"], init_lora_weights=False)
    if first == "patch":
        zoo.patch(model, "softmax")
        wrapped = peft.get_peft_model(model, lora).eval()
    else:
        wrapped = peft.get_peft_model(model, lora).eval()
        zoo.patch(wrapped, "softmax")
    assert type(model.blocks[0].attn).__name__ == "ZooAttention"
    patched = wrapped(images())
    model.zoo_patches.patches[0].restore()
    assert torch.equal(wrapped(images()), patched)
    with wrapped.disable_adapter():
        assert not torch.equal(wrapped(images()), patched)


def test_restore_refuses_where_the_class_changed_since() -> None:
    model = stock()
    patch = zoo.patch(model, "softmax")
    model.blocks[0].attn.__class__ = type("Sharded", (type(model.blocks[0].attn),), {})
    with pytest.raises(PatchError, match="Sharded"):
        patch.restore()


def test_torch_save_keeps_the_way_back() -> None:
    model = stock()
    zoo.patch(model, "softmax")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    again.zoo_patches.patches[0].restore()
    assert type(again.blocks[0].attn) is Attention
    assert torch.equal(again(images()), model(images()))
