"""Pretrained weights for timm models: from a directory or the Hub, strict, with a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import zoo_core as zoo
from zoo_core import registry
from zoo_core.errors import CheckpointError, UnknownName
from zoo_core.testing.hub import Hub

TINY = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": (32, 48), "num_classes": 5}
VIT = "vit_tiny_patch16_224"


def adapter(name: str = "vit"):
    return registry.architecture(name).adapter()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, nn.Module]:
    """A directory as timm writes it, and the model that it holds."""
    model = timm.create_model(VIT, **TINY).eval()
    directory = tmp_path / "saved"
    timm.models.save_for_hf(model, directory, model_args=TINY, safe_serialization=True)
    return directory, model


def same_weights(left: nn.Module, right: nn.Module, *, but: tuple[str, ...] = ()) -> bool:
    other = right.state_dict()
    return all(
        torch.equal(tensor, other[name])
        for name, tensor in left.state_dict().items()
        if not name.startswith(but or ("\0",))
    )


def edit(directory: Path, change) -> None:
    state = load_file(directory / "model.safetensors")
    save_file(change(state), directory / "model.safetensors")


def edit_config(directory: Path, change) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.mark.parametrize("variant", [None, VIT, f"{VIT}.augreg_in21k"])
def test_a_directory_says_what_it_holds(saved, variant: str | None) -> None:
    directory, model = saved
    name = "vit" if variant is None else f"vit:{variant}"
    built = zoo.build(name, "softmax", pretrained=str(directory)).eval()
    assert same_weights(built, model)
    x = torch.randn(1, 3, 32, 48)
    assert torch.equal(built(x), model(x))
    loaded = zoo.inspect(built).loaded
    assert loaded == {
        "source": str(directory),
        "loaded": len(model.state_dict()),
        "new": (),
        "unused": (),
        "resized": (),
    }


def test_a_skeleton_reads_no_weights(saved) -> None:
    directory, _ = saved
    (directory / "model.safetensors").unlink()
    skeleton = adapter().create(None, pretrained=str(directory), skeleton=True)
    assert skeleton.embed_dim == 32
    assert skeleton.cls_token.is_meta


def test_another_classifier_is_new(saved) -> None:
    directory, model = saved
    built = adapter().create(VIT, pretrained=str(directory), num_classes=3)
    assert same_weights(built, model, but=("head.",))
    assert built.zoo_loaded.new == built.zoo_loaded.unused == ("head.bias", "head.weight")
    assert built.zoo_loaded.loaded == len(model.state_dict()) - 2


def test_without_a_classifier(saved) -> None:
    directory, model = saved
    built = adapter().create(VIT, pretrained=str(directory), num_classes=0)
    assert same_weights(built, model)
    assert set(built.zoo_loaded.unused) == {"head.weight", "head.bias"}


def test_another_image_size_resamples_positions(saved) -> None:
    """From the grid that the config names: 2 x 3 positions are no square."""
    directory, model = saved
    built = adapter().create(VIT, pretrained=str(directory), img_size=(64, 96))
    assert built.zoo_loaded.resized == ("pos_embed",)
    assert same_weights(built, model, but=("pos_embed",))
    old, new = model.pos_embed.detach(), built.pos_embed.detach()
    assert torch.equal(new[:, :1], old[:, :1])
    grid = nn.functional.interpolate(
        old[:, 1:].reshape(1, 2, 3, 32).permute(0, 3, 1, 2),
        size=(4, 6),
        mode="bicubic",
        antialias=True,
    )
    expected = grid.permute(0, 2, 3, 1).reshape(1, 24, 32)
    torch.testing.assert_close(new[:, 1:], expected, atol=1e-6, rtol=1e-5)


def test_the_same_number_of_patches_in_another_grid(saved) -> None:
    directory, model = saved
    built = adapter().create(VIT, pretrained=str(directory), img_size=(48, 32))
    assert built.zoo_loaded.resized == ("pos_embed",)
    assert not torch.equal(built.pos_embed, model.pos_embed)


def test_how_images_are_prepared_comes_along(saved) -> None:
    directory, _ = saved

    def other_mean(config: dict) -> dict:
        config["pretrained_cfg"]["mean"] = [0.1, 0.2, 0.3]
        return config

    edit_config(directory, other_mean)
    built = adapter().create(None, pretrained=str(directory))
    assert timm.data.resolve_model_data_config(built)["mean"] == (0.1, 0.2, 0.3)


def test_locations_in_the_config_are_not_followed(saved) -> None:
    directory, model = saved

    def elsewhere(config: dict) -> dict:
        inner = {"url": "http://127.0.0.1:9/x.npz", "file": "/nowhere", "custom_load": True}
        return {**config, "pretrained_cfg": {**config["pretrained_cfg"], **inner}}

    edit_config(directory, elsewhere)
    assert same_weights(adapter().create(None, pretrained=str(directory)), model)


def drop(name: str):
    return lambda state: {key: value for key, value in state.items() if key != name}


def add(name: str):
    return lambda state: {**state, name: torch.zeros(1)}


def poison(state: dict) -> dict:
    state["norm.weight"][3] = float("nan")
    return state


def wrong_prefix(state: dict) -> dict:
    return {f"vit.{key}": value for key, value in state.items()}


def narrow(state: dict) -> dict:
    return {**state, "blocks.0.mlp.fc1.bias": torch.zeros(3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("blocks.1.attn.qkv.weight"), r"it has no blocks\.1\.attn\.qkv\.weight"),
        (add("surprise"), "the model has no surprise"),
        (poison, r"norm\.weight holds values that are not finite"),
        (narrow, r"blocks\.0\.mlp\.fc1\.bias is \(3,\), the model's is \(128,\)"),
        (wrong_prefix, r"fills no attention weight.*keys look like vit\."),
        (add("blocks.0.attn.zoo.rank"), r"holds a patched model; use zoo\.load"),
    ],
    ids=["missing", "unknown", "not_finite", "shape", "prefix", "patched"],
)
def test_weights_that_do_not_fit(saved, change, message: str) -> None:
    directory, _ = saved
    edit(directory, change)
    with pytest.raises(CheckpointError, match=message):
        adapter().create(VIT, pretrained=str(directory))


def test_directories_that_are_no_checkpoint(saved, tmp_path: Path) -> None:
    directory, _ = saved
    with pytest.raises(CheckpointError, match="neither a directory that exists"):
        adapter().create(None, pretrained=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"holds vit_tiny.*, not vit_small_patch16_224"):
        adapter().create("vit_small_patch16_224", pretrained=str(directory))
    with pytest.raises(UnknownName, match="write 'vit:vit_tiny"):
        adapter("deit").create(None, pretrained=str(directory))
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match="is damaged"):
        adapter().create(None, pretrained=str(directory))
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        adapter().create(None, pretrained=str(directory))
    (directory / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        adapter().create(None, pretrained=str(directory))
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        adapter().create(None, pretrained=str(directory))


def test_a_config_cannot_choose_files_or_code(saved) -> None:
    directory, _ = saved
    edit_config(directory, lambda config: {**config, "model_args": {"checkpoint_path": "x.pt"}})
    with pytest.raises(CheckpointError, match="checkpoint_path"):
        adapter().create(None, pretrained=str(directory))


def test_a_patched_directory_is_refused(tmp_path: Path) -> None:
    model = zoo.build(f"vit:{VIT}", "softmax", **TINY)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    with pytest.raises(CheckpointError, match=r"holds a patched model; use zoo\.load"):
        adapter().create(None, pretrained=str(tmp_path))


def test_a_transformers_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit", "hidden_size": 32}')
    with pytest.raises(CheckpointError, match=r"transformers checkpoint.*hf_vit"):
        adapter().create(None, pretrained=str(tmp_path))


def test_from_a_hub(saved) -> None:
    """A pinned revision of a repository, over the real client."""
    directory, model = saved
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    code = (
        "import sys, torch, zoo_core as zoo\n"
        "model = zoo.build('vit', 'softmax', pretrained=sys.argv[1]).eval()\n"
        "print(model(torch.ones(1, 3, 32, 48)).tolist())\n"
        "try:\n"
        "    zoo.build('vit', 'softmax', pretrained='owner/absent')\n"
        "except zoo.ZooError as error:\n"
        "    print(type(error).__name__)\n"
    )
    with Hub() as hub:
        head = hub.create("owner/vit", files)
        hub.commit("owner/vit", {"config.json": b"{}"})
        done = subprocess.run(
            [sys.executable, "-c", code, f"owner/vit@{head}"],
            env={**os.environ, **hub.env(None)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    logits, error = done.stdout.splitlines()
    assert json.loads(logits) == model(torch.ones(1, 3, 32, 48)).tolist()
    assert error == "CheckpointError"


def hf_vit(**arguments) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        image_size=32,
        patch_size=16,
        layer_norm_eps=1e-6,
        **arguments,
    )
    return transformers.ViTForImageClassification(config).eval()


def randomise(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def old_names(key: str) -> str:
    """As transformers named them before version 5, and as the Hub still has them."""
    for new, old in {
        "layers.": "encoder.layer.",
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }.items():
        key = key.replace(new, old)
    return key


@pytest.mark.parametrize("names", ["new", "old"])
def test_convert_from_transformers_vit(names: str) -> None:
    source = randomise(hf_vit(num_labels=5))
    state = source.state_dict()
    if names == "old":
        state = {old_names(key): value for key, value in state.items()}
        assert "vit.encoder.layer.0.attention.attention.query.weight" in state
    target = timm.create_model(VIT, **{**TINY, "img_size": 32}).eval()
    target.load_state_dict(adapter().convert(state, "transformers"))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(target(x), source(pixel_values=x).logits, atol=1e-5, rtol=1e-5)


def test_convert_from_transformers_distilled_deit() -> None:
    config = transformers.DeiTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        image_size=32,
        patch_size=16,
        layer_norm_eps=1e-6,
        num_labels=5,
    )
    source = randomise(transformers.DeiTForImageClassificationWithTeacher(config)).eval()
    sizes = {**TINY, "img_size": 32}
    target = timm.create_model("deit_tiny_distilled_patch16_224", **sizes).eval()
    target.load_state_dict(adapter("deit").convert(source.state_dict(), "transformers"))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(target(x), source(pixel_values=x).logits, atol=1e-5, rtol=1e-5)


def test_convert_refuses_what_it_does_not_know() -> None:
    state = dict(hf_vit().state_dict())
    with pytest.raises(CheckpointError, match="mask_token is not a weight"):
        adapter().convert({**state, "vit.embeddings.mask_token": torch.zeros(1)}, "transformers")
    del state["vit.layers.1.attention.k_proj.weight"]
    with pytest.raises(CheckpointError, match=r"only some of .*blocks\.1\.attn\.qkv\.weight"):
        adapter().convert(state, "transformers")
    with pytest.raises(CheckpointError, match="not 'flax'"):
        adapter().convert({}, "flax")


def test_convert_of_its_own_names_changes_nothing() -> None:
    state = timm.create_model(VIT, **TINY).state_dict()
    assert adapter().convert(state, "timm") == dict(state)
