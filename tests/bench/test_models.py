"""Races of whole models, tiny ones."""

from __future__ import annotations

import pytest
import torch

from zoo_core import registry
from zoo_core.bench import models, sweep
from zoo_core.bench.contest import Effort
from zoo_core.errors import BenchError, OptionError

BERT = registry.architecture("bert").adapter().tiny()
SIZES = {name: value for name, value in BERT.items() if name != "max_position_embeddings"}
SIZES["intermediate_size"] = 64


def host(length: int = 24, **changes) -> models.Host:
    return models.Host.of("bert", length, None, {**SIZES, **changes})


def test_rows_hold_the_tax_and_the_ratio_to_stock(quick: Effort) -> None:
    cases = sweep(length=[16, 24], mode=["forward", "backward"])
    rows = list(models.measure_models("bert", ["linear", "gpsa"], cases, effort=quick, **SIZES))
    assert [row.name for row in rows[:4]] == ["stock", "floor", "linear", "gpsa"]
    assert len(rows) == 16
    for row in rows:
        assert row.model == "bert"
        assert (row.case.heads, row.case.width) == (2, 16)
        if row.name == "linear":
            assert set(row.ratios) == {"stock", "floor"}
            assert row.tax == row.ratios["floor"].value - 1
            assert row.peak > 0
    gpsa = rows[3]
    assert gpsa.seconds is None
    assert gpsa.refused.startswith("gpsa does not fit BertModel")


def test_the_floor_is_attention_that_returns_the_values() -> None:
    (case,) = sweep(length=24)
    floor = host().patched(models.FLOOR, models.FLOOR.options(), case)
    (model,) = floor.modules
    attention = model.encoder.layer[0].attention.self
    seen = {}
    attention.value.register_forward_hook(lambda m, args, out: seen.update(value=out))
    attention.register_forward_hook(lambda m, args, out: seen.update(out=out[0]))
    floor.call("forward")
    torch.testing.assert_close(seen["out"], seen["value"], rtol=0, atol=0)


def test_competitors_share_weights_and_leave_the_stock_model_alone() -> None:
    (case,) = sweep(length=24)
    one = host()
    before = one.model(torch.arange(5, 29)[None])[0]
    work = one.patched(registry.mechanism("linear"), registry.mechanism("linear").options(), case)
    (model,) = work.modules
    ours, stock = dict(model.named_parameters()), dict(one.model.named_parameters())
    assert stock.keys() <= ours.keys()
    assert all(ours[name] is stock[name] for name in stock)
    assert model is not one.model
    assert model.encoder.layer[0] is not one.model.encoder.layer[0]
    one.model.eval()
    assert not hasattr(one.model, "zoo_patches")
    assert one.model.config._attn_implementation == "sdpa"
    assert before.shape == one.model(torch.arange(5, 29)[None])[0].shape


def test_parameters_that_a_mechanism_ignores_are_not_frozen_for_the_others() -> None:
    (case,) = sweep(length=24)
    one, uniform = host(), registry.mechanism("uniform")
    one.patched(uniform, uniform.options(), case)
    assert all(parameter.requires_grad for parameter in one.model.parameters())


def test_padding_reaches_the_model() -> None:
    one = host()
    (case,) = sweep(length=24, batch=2, padded=True)
    arguments = models._inputs(one.model, case)
    assert arguments["attention_mask"].sum(-1).tolist() == case.real_tokens
    assert "attention_mask" not in models._inputs(one.model, sweep(length=24)[0])


def test_an_image_model_has_one_length(quick: Effort) -> None:
    cases = sweep(length=[16, 24])
    rows = list(
        models.measure_models(
            "vit:vit_tiny_patch16_224", ["linear"], cases, effort=quick, depth=1, img_size=32
        )
    )
    assert [(row.name, row.case.length) for row in rows] == [
        ("stock", 5),
        ("floor", 5),
        ("linear", 5),
    ]
    padded = sweep(length=16, padded=True)
    with pytest.raises(BenchError, match="images have no padding"):
        next(models.measure_models("vit:vit_tiny_patch16_224", ["linear"], padded, depth=1))


def test_stock_models_of_transformers_take_part(quick: Effort) -> None:
    rows = list(models.measure_models("bert", ["local"], sweep(length=64), effort=quick, **SIZES))
    assert [(row.name, row.of) for row in rows[2:]] == [
        ("local", ""),
        ("transformers longformer", "local"),
    ]
    assert rows[3].seconds > 0
    assert "transformers longformer" in rows[2].ratios


def test_a_stock_model_that_does_other_work_is_left_out(quick: Effort) -> None:
    options = {"landmarks": 16, "iterations": 3}
    rows = list(
        models.measure_models(
            "bert", ["nystromformer"], sweep(length=64), options=options, effort=quick, **SIZES
        )
    )
    assert rows[-1].refused == (
        "transformers nystromformer: always iterates 6 times, the mechanism 3 times"
    )


def test_a_wrong_setting_is_refused_before_anything_runs(quick: Effort) -> None:
    with pytest.raises(OptionError, match="hiden_size"):
        next(models.measure_models("bert", ["linear"], sweep(length=16), hiden_size=3))
