"""The transformers bridge: a patched softmax model is the stock model, to the bit."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn

import zoo_core as zoo
from zoo_core import registry
from zoo_core.errors import OptionError, PatchError, UnsupportedCall

TEXT = [
    "bert",
    "roberta",
    "xlm_roberta",
    "camembert",
    "electra",
    "distilbert",
    "modernbert",
    "albert",
]
IMAGE = ["hf_vit", "hf_deit", "dinov2"]

IDS = torch.randint(5, 99, (3, 17), generator=torch.Generator().manual_seed(0))
MASKS = {
    "none": None,
    "all_real": torch.ones(3, 17, dtype=torch.long),
    "right": torch.tensor([[1] * 17, [1] * 9 + [0] * 8, [1] * 3 + [0] * 14]),
    "left": torch.tensor([[1] * 17, [0] * 8 + [1] * 9, [0] * 14 + [1] * 3]),
}


def tiny(name: str) -> dict:
    return registry.architecture(name).adapter().tiny()


def stock(name: str, **kwargs) -> nn.Module:
    return registry.architecture(name).adapter().create(None, **tiny(name), **kwargs).eval()


def inputs(name: str, mask: torch.Tensor | None = None) -> dict:
    if name in IMAGE:
        return {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        }
    return {"input_ids": IDS, "attention_mask": mask}


def forward_backward(model: nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    model.zero_grad()
    output = model(**batch)[0]
    output.square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **grads}


def assert_same_bits(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", TEXT)
def test_softmax_text_is_bit_identical(name: str, mask: str, train: bool) -> None:
    model = stock(name).train(train)
    batch = inputs(name, MASKS[mask])
    torch.manual_seed(1)
    before = forward_backward(model, batch)
    patch = zoo.patch(model, "softmax")
    torch.manual_seed(1)
    assert_same_bits(forward_backward(model, batch), before)
    patch.restore()
    torch.manual_seed(1)
    assert_same_bits(forward_backward(model, batch), before)


@pytest.mark.parametrize("name", IMAGE)
def test_softmax_image_is_bit_identical(name: str) -> None:
    model = stock(name)
    before = forward_backward(model, inputs(name))
    with zoo.patch(model, "softmax"):
        assert_same_bits(forward_backward(model, inputs(name)), before)
    assert_same_bits(forward_backward(model, inputs(name)), before)


@pytest.mark.parametrize("name", TEXT)
def test_softmax_matches_eager_within_1e_5(name: str) -> None:
    model = stock(name)
    real = MASKS["right"].bool()
    model.set_attn_implementation("eager")
    eager = model(**inputs(name, MASKS["right"]))[0][real]
    with zoo.patch(model, "softmax"):
        ours = model(**inputs(name, MASKS["right"]))[0][real]
    torch.testing.assert_close(ours, eager, atol=1e-5, rtol=0)
    again = model(**inputs(name, MASKS["right"]))[0][real]
    assert torch.equal(again, eager), "restore brings eager back, not sdpa"


@pytest.mark.parametrize("mask", MASKS)
def test_decoder_with_cross_attention_is_bit_identical(mask: str) -> None:
    model = stock("bert", task="causal-lm", is_decoder=True, add_cross_attention=True)
    seen = torch.tensor([[1] * 11, [1] * 4 + [0] * 7, [0] * 2 + [1] * 9])
    batch = inputs("bert", MASKS[mask]) | {
        "encoder_hidden_states": torch.randn(3, 11, 32),
        "encoder_attention_mask": seen,
    }
    before = forward_backward(model, batch)
    with zoo.patch(model, "softmax"):
        kinds = [site.kind for site in zoo.inspect(model).sites]
        assert kinds == ["self", "cross", "self", "cross"]
        assert_same_bits(forward_backward(model, batch), before)


@pytest.mark.parametrize("mask", ["none", "left"])
def test_generate_with_a_cache_equals_stock_and_no_cache(mask: str) -> None:
    model = stock("bert", task="causal-lm", is_decoder=True)
    ask = {
        "attention_mask": MASKS[mask],
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
    }
    expected = model.generate(IDS, **ask)
    zoo.patch(model, "softmax")
    assert torch.equal(model.generate(IDS, **ask), expected)
    assert torch.equal(model.generate(IDS, use_cache=False, **ask), expected)


def test_encoder_decoder_is_patched_part_by_part() -> None:
    encoder, decoder = (
        stock("bert"),
        stock("bert", task="causal-lm", is_decoder=True, add_cross_attention=True),
    )
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    with pytest.raises(PatchError, match=r"encoder.*decoder"):
        zoo.patch(model, "softmax")
    batch = {"input_ids": IDS, "attention_mask": MASKS["right"], "decoder_input_ids": IDS[:, :5]}
    expected = model(**batch).logits
    zoo.patch(model.encoder, "softmax")
    zoo.patch(model.decoder, "softmax")
    assert torch.equal(model(**batch).logits, expected)


@pytest.mark.parametrize(
    "task",
    [
        "masked-lm",
        "multiple-choice",
        "next-sentence-prediction",
        "pretraining",
        "question-answering",
        "sequence-classification",
        "token-classification",
    ],
)
def test_every_bert_head_builds_and_runs(task: str) -> None:
    model = zoo.build("bert", "softmax", task=task, **tiny("bert")).eval()
    ids = IDS[:, None].repeat(1, 2, 1) if task == "multiple-choice" else IDS
    ours = model(ids)[0]
    model.zoo_patches.patches[0].restore()
    assert torch.equal(model(ids)[0], ours)


def test_no_stock_key_is_renamed() -> None:
    model = stock("bert")
    keys = set(model.state_dict())
    zoo.patch(model, "linformer")
    added = set(model.state_dict()) - keys
    assert keys <= set(model.state_dict())
    assert added
    assert all(".zoo." in key for key in added)


def test_partial_patch_leaves_other_layers_stock() -> None:
    model = stock("bert")
    batch = inputs("bert", MASKS["right"])
    expected = model(**batch, output_hidden_states=True).hidden_states
    zoo.patch(model, {"1-": "uniform"})
    ours = model(**batch, output_hidden_states=True).hidden_states
    assert torch.equal(ours[1], expected[1])
    assert not torch.allclose(ours[2], expected[2])
    assert [site.mechanism for site in zoo.inspect(model).sites] == ["stock", "zoo-core/uniform"]


@pytest.mark.parametrize("first", [0, 1], ids=["older_first", "newer_first"])
def test_patches_stack_and_restore_in_any_order(first: int) -> None:
    model = stock("bert")
    batch = inputs("bert", MASKS["right"])
    expected = model(**batch)[0]
    patches = [zoo.patch(model, "linear"), zoo.patch(model, "uniform", layers=[0])]
    names = [site.mechanism.split("/")[1] for site in zoo.inspect(model).sites]
    assert names == ["uniform", "linear"]
    patches[first].restore()
    names = [site.mechanism.split("/")[-1] for site in zoo.inspect(model).sites]
    assert names == (["uniform", "stock"] if first == 0 else ["linear", "linear"])
    patches[1 - first].restore()
    assert torch.equal(model(**batch)[0], expected)
    assert not [name for module in model.modules() for name in vars(module) if "zoo" in name]
    with pytest.raises(PatchError, match="already restored"):
        patches[0].restore()


def test_a_failed_patch_changes_nothing() -> None:
    model = stock("bert")
    batch = inputs("bert", MASKS["right"])
    before, keys, config = model(**batch)[0], set(model.state_dict()), model.config
    for bad in ({"attention": "linfomer"}, {"attention": "linformer", "options": {"rnk": 3}}):
        with pytest.raises(zoo.ZooError):
            zoo.patch(model, **bad)
    with pytest.raises(OptionError, match="out of range; this model has layers 0-1"):
        zoo.patch(model, "linear", layers="0-7")
    assert torch.equal(model(**batch)[0], before)
    assert set(model.state_dict()) == keys
    assert model.config is config


def test_two_models_from_one_config_do_not_share_a_patch() -> None:
    config = transformers.BertConfig(**tiny("bert"))
    first, second = transformers.BertModel(config).eval(), transformers.BertModel(config).eval()
    expected = second(IDS)[0]
    zoo.patch(first, "uniform")
    assert torch.equal(second(IDS)[0], expected)
    assert config._attn_implementation == "sdpa"
    assert not hasattr(config, "zoo")


def test_deepcopy_is_independent_and_restorable() -> None:
    model = zoo.build("bert", "linformer", **tiny("bert")).eval()
    twin = copy.deepcopy(model)
    expected = model(IDS)[0]
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(IDS)[0], expected)
    assert not torch.equal(twin(IDS)[0], expected)
    twin.zoo_patches.patches[0].restore()
    assert zoo.inspect(twin).sites[0].mechanism == "stock"
    assert zoo.inspect(model).sites[0].mechanism == "zoo-core/linformer"


def test_pickle_into_a_fresh_process(tmp_path) -> None:
    model = zoo.build("bert", "linformer", **tiny("bert")).eval()
    (tmp_path / "model").write_bytes(pickle.dumps((model, IDS, model(IDS)[0])))
    code = (
        "import pickle, sys, torch\n"
        "model, ids, expected = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert torch.equal(model(ids)[0], expected)\n"
        "model.zoo_patches.patches[0].restore()\n"
        "model(ids)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "model"], check=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_half_and_double_models(dtype: torch.dtype) -> None:
    model = zoo.build("bert", "linformer", **tiny("bert")).eval().to(dtype)
    output = model(**inputs("bert", MASKS["right"]))[0]
    assert output.dtype == dtype
    assert output.isfinite().all()
    late = stock("bert").to(dtype)
    zoo.patch(late, "linformer")
    assert {p.dtype for p in late.parameters()} == {dtype}


@pytest.mark.parametrize("mask", ["none", "right"])
@pytest.mark.parametrize("attention", ["softmax", "linear", "linformer"])
def test_compile_fullgraph(attention: str, mask: str) -> None:
    model = zoo.build("bert", attention, **tiny("bert")).eval()
    batch = inputs("bert", MASKS[mask])
    expected = model(**batch)[0]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**batch)[0], expected, atol=1e-6, rtol=1e-5)


def test_patching_inside_a_compiled_model_takes_effect() -> None:
    model = stock("bert")
    compiled = torch.compile(model, backend="eager")
    stock_output = compiled(IDS)[0]
    zoo.patch(compiled, "uniform")
    assert not torch.allclose(compiled(IDS)[0], stock_output)
    assert torch.equal(compiled(IDS)[0], model(IDS)[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    model = zoo.build("bert", "linformer", **tiny("bert")).train()
    batch = inputs("bert", MASKS["right"])
    torch.manual_seed(3)
    expected = forward_backward(model, batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(3)
    for name, value in forward_backward(model, batch).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    "attention",
    "softmax linear local nystromformer linformer bigbird synthesizer low_rank_band".split(),
)
def test_export_with_a_dynamic_batch_and_length(attention: str) -> None:
    model = zoo.build("bert", attention, **tiny("bert")).eval()
    # torch cuts a table of 64 positions to any length below 64, or to 64, not to both.
    sizes = {0: torch.export.Dim("batch", max=9), 1: torch.export.Dim("length", min=2, max=63)}
    program = torch.export.export(
        model,
        (IDS, MASKS["right"]),
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
        strict=False,
    )
    for batch, length in ((3, 5), (2, 17), (5, 33)):
        ids = torch.randint(5, 99, (batch, length))
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[1, length // 2 :] = 0
        expected = model(ids, mask)[0][mask.bool()]
        ours = program.module()(ids, mask)[0][mask.bool()]
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)


def test_output_attentions_gives_maps_or_refuses_with_a_hint() -> None:
    model = zoo.build("bert", "softmax", **tiny("bert")).eval()
    maps = model(IDS, output_attentions=True).attentions
    assert [tuple(m.shape) for m in maps] == [(3, 2, 17, 17)] * 2
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(3, 2, 17))
    zoo.patch(model, "local")
    if not registry.mechanism("local").supports.weights:
        with pytest.raises(UnsupportedCall, match=r"zoo\.attention_map"):
            model(IDS, output_attentions=True)


def test_a_4d_mask_is_applied_or_refused() -> None:
    model = stock("bert")
    block = torch.zeros(3, 1, 17, 17, dtype=torch.bool)
    block[:, :, :9, :9] = block[:, :, 9:, 9:] = True
    expected = model(IDS, attention_mask=block)[0]
    with zoo.patch(model, "softmax"):
        torch.testing.assert_close(model(IDS, attention_mask=block)[0], expected)
        with pytest.raises(UnsupportedCall, match="ambiguous"):
            model(IDS, attention_mask=block.long())
    with zoo.patch(model, "linear"), pytest.raises(UnsupportedCall, match="dense mask"):
        model(IDS, attention_mask=block)


def test_packed_sequences_are_applied_or_refused() -> None:
    model = stock("bert", task="causal-lm", is_decoder=True)
    positions = torch.cat([torch.arange(9), torch.arange(8)]).expand(3, -1)
    ask = {"input_ids": IDS, "position_ids": positions, "use_cache": False}
    expected = model(**ask).logits
    with zoo.patch(model, "softmax"):
        torch.testing.assert_close(model(**ask).logits, expected, atol=1e-6, rtol=1e-5)


def test_a_static_cache_is_applied_or_refused() -> None:
    model = stock("bert", task="causal-lm", is_decoder=True)
    ask = {
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": "static",
        "pad_token_id": 0,
    }
    expected = model.generate(IDS, **ask)
    with zoo.patch(model, "softmax"):
        assert torch.equal(model.generate(IDS, **ask), expected)
    with zoo.patch(model, "linear"), pytest.raises(UnsupportedCall, match="static cache"):
        model.generate(IDS, **ask)


def test_modernbert_sliding_layers_are_refused_and_global_ones_patched() -> None:
    kwargs = tiny("modernbert") | {"layer_types": ["full_attention", "sliding_attention"]}
    model = transformers.ModernBertModel(transformers.ModernBertConfig(**kwargs)).eval()
    batch = inputs("modernbert", MASKS["right"])
    expected = model(**batch)[0]
    with pytest.raises(zoo.ZooError, match=r"layers 1: .*sliding window"):
        zoo.patch(model, "softmax")
    with zoo.patch(model, "softmax", layers=[0]):
        real = MASKS["right"].bool()
        torch.testing.assert_close(model(**batch)[0][real], expected[real], atol=1e-6, rtol=1e-5)


def test_unused_projections_are_frozen_and_thawed() -> None:
    model = stock("bert")
    zoo_patch = zoo.patch(model, "uniform")
    attention = model.encoder.layer[0].attention.self
    assert not attention.query.weight.requires_grad
    assert attention.value.weight.requires_grad
    assert any("ignores its" in note for note in zoo.inspect(model).notes)
    model.train()(IDS)[0].square().mean().backward()
    trained = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert trained == ["pooler.dense.weight", "pooler.dense.bias"]
    zoo_patch.restore()
    assert attention.query.weight.requires_grad


def test_inspect_refuses_a_model_whose_patch_was_switched_off() -> None:
    model = zoo.build("bert", "linear", **tiny("bert"))
    model.set_attn_implementation("eager")
    with pytest.raises(PatchError, match="runs stock attention, but its patch says"):
        zoo.inspect(model)


def test_an_unknown_keyword_of_a_later_host_is_handed_on() -> None:
    model = zoo.build("bert", "softmax", **tiny("bert")).eval()
    assert torch.equal(model(IDS, some_new_keyword=1)[0], model(IDS)[0])


def test_torch_save_of_a_patched_model_round_trips() -> None:
    model = zoo.build("bert", "linformer", **tiny("bert")).eval()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(IDS)[0], model(IDS)[0])
