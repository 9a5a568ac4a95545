"""Freezing: what is frozen stays, what is cached has the bits it would be computed with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import fidelity_lab as lab
import pytest
import torch
from torch import nn

import zoo_core as zoo
from zoo_core.errors import DoesNotFit, OptionError, UnsupportedCall
from zoo_core.fidelity.activations import ActivationCache
from zoo_core.fidelity.freezing import FreezeByHand, FreezeConverged, Freezing, Parts

LAYERS = 4


def text_model() -> nn.Module:
    """Four layers with dropout, whose attention is linformer's."""
    return lab.bert(num_hidden_layers=LAYERS, task="sequence-classification")


def still(attention: str, seed: int = 0) -> nn.Module:
    """Four layers without dropout."""
    size = {**lab.tiny("bert"), "num_hidden_layers": LAYERS, "initializer_range": 0.2}
    size |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return zoo.build("bert", attention, seed=seed, **size)


def image_model() -> nn.Module:
    return lab.vit(depth=LAYERS, drop_path_rate=0.2, proj_drop_rate=0.1)


def text_batches(epoch: int) -> list[dict[str, Any]]:
    """The same samples in every epoch, in another order and so with other padding."""
    samples = lab.tokens(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(epoch)).tolist()
    batches = []
    for start in range(0, 12, 4):
        rows = [samples[i]["input_ids"] for i in order[start : start + 4]]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        labels = torch.tensor([i % 2 for i in order[start : start + 4]])
        batches.append({"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels})
    return batches


def image_batches(epoch: int) -> list[dict[str, Any]]:
    images = torch.stack(lab.images(12))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(epoch))
    return [{"x": images[part], "labels": part % 4} for part in order.split(4)]


HOSTS = {"bert": (text_model, text_batches), "vit": (image_model, image_batches)}


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    if "x" in batch:
        return nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
    return model(**batch).loss


def train(
    model: nn.Module, batches: Any, plan: tuple[int, ...], cache: ActivationCache | None, epochs=4
) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    with Freezing(model, FreezeByHand(plan), cache=cache) as freezing:
        for epoch in range(epochs):
            model.train()
            for batch in batches(epoch):
                loss = loss_of(model, batch)
                optimizer.zero_grad()
                loss.backward()
                freezing.observe()
                optimizer.step()
                losses.append(loss.item())
            freezing.end_epoch()
    return losses


@pytest.mark.parametrize(
    ("frozen", "changes", "expected"),
    [
        (0, None, 0),
        (0, [0.1, 0.1, 0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], 4),
        (0, [0.1, 0.1, 0.9, 0.1, 0.1, 0.9, 0.9, 0.9, 0.1, 0.9, 0.1, 0.9], 2),
        (0, [0.9, *[0.1] * 5, *[0.8] * 6], 0),
        (4, [0.9] * 4 + [0.1, 0.1, 0.1, 0.5, 0.6, 0.7, 0.8, 0.9], 6),
        (10, [0.0] * 10 + [0.1, 0.2], 10),
        (12, [0.0] * 12, 12),
    ],
    ids=["first epoch", "alpha", "run ends", "first moves", "of the rest", "too few", "all"],
)
def test_the_prefix_that_has_converged_is_frozen(frozen, changes, expected) -> None:
    assert FreezeConverged().frozen_after(3, frozen, 12, changes) == expected


def test_changes_are_those_of_the_mean_norm() -> None:
    model = text_model()
    seen = []

    class Watch:
        def frozen_after(self, epoch, frozen, layers, changes):
            seen.append(changes)
            return frozen

    freezing = Freezing(model, Watch())
    for size in (1.0, 3.0, 6.0, 6.0):  # means of two epochs of two steps: 2 and 6
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, size)
        freezing.observe()
        if size != 1.0 and len(seen) == 0:
            freezing.end_epoch()
    freezing.end_epoch()
    assert seen[0] is None
    assert seen[1] == pytest.approx([2.0] * LAYERS)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("cached", [False, True], ids=["computed", "cached"])
def test_what_is_frozen_stays_and_the_rest_trains(host: str, cached: bool) -> None:
    make, batches = HOSTS[host]
    model = make()
    parts = Parts.of(model)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    train(model, batches, (0,), None, epochs=1)
    ids = {id(p) for one in parts.prefix(2) for p in one.parameters()} | set(map(id, parts.loose))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Freezing(model, FreezeByHand((2,)), cache=ActivationCache() if cached else None) as it:
        it.end_epoch()
        assert it.frozen == 2
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for batch in batches(0):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
        assert not parts.layers[1].training
        assert parts.layers[2].training
    for name, parameter in model.named_parameters():
        same = torch.equal(parameter, before[name])
        assert same == (id(parameter) in ids or not flags[name]), name
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("host", HOSTS)
def test_cached_equals_recomputed_to_the_bit(host: str, tmp_path: Path) -> None:
    make, batches = HOSTS[host]
    kept, on_disk, nothing = (
        ActivationCache(),
        ActivationCache(folder=tmp_path),
        ActivationCache(0),
    )
    models = [make() for _ in range(4)]
    plan = (1, 1, 3)
    losses = [
        train(model, batches, plan, cache)
        for model, cache in zip(models, (kept, on_disk, nothing, None), strict=True)
    ]
    # Epoch 0 has nothing frozen; epochs 1 and 3 meet a new prefix.
    assert (kept.hits, kept.misses) == (on_disk.hits, on_disk.misses) == (12, 24)
    assert (nothing.hits, nothing.misses) == (0, 36)
    assert losses[0] == losses[1] == losses[2]
    for name, tensor in models[2].state_dict().items():
        assert torch.equal(models[0].state_dict()[name], tensor), name
    assert losses[0] == pytest.approx(losses[3], rel=1e-5)
    assert len(kept) == 0
    assert not list(tmp_path.iterdir())


def test_batches_at_once_equal_one_by_one_within_rounding() -> None:
    made = [text_model() for _ in range(2)]
    losses = [
        train(model, text_batches, (2,), ActivationCache(one_by_one=alone))
        for model, alone in zip(made, (True, False), strict=True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("folder", [False, True], ids=["memory", "disk"])
def test_a_full_cache_keeps_what_it_has(folder: bool, tmp_path: Path) -> None:
    cache = ActivationCache(250, folder=tmp_path if folder else None)
    rows = {key: torch.randn(5, 5) for key in "abc"}  # 100 bytes each
    for key, row in rows.items():
        cache.put(key, row)
    assert cache.bytes == 200
    for key in "ab":
        found = cache.get(key)
        assert found is not None
        assert torch.equal(found, rows[key])
    assert cache.get("c") is None
    assert len(list(tmp_path.rglob("*.safetensors"))) == (2 if folder else 0)
    cache.clear()
    assert cache.get("a") is None
    assert not list(tmp_path.iterdir())


def test_a_prefix_that_grows_voids_the_cache() -> None:
    model, cache = text_model(), ActivationCache()
    freezing = Freezing(model, FreezeByHand((1, 1, 2)), cache=cache)
    freezing.end_epoch()
    model.train()
    loss_of(model, text_batches(0)[0])
    freezing.end_epoch()
    assert len(cache) == 4
    freezing.end_epoch()
    assert len(cache) == 0


CHANGES = {
    "redraw": zoo.redraw,
    "load": lambda model: load_doubled(model, assign=False),
    "assign": lambda model: load_doubled(model, assign=True),
    "rounded": lambda model: model.bfloat16().float(),
    "patch": lambda model: zoo.patch(model, "uniform"),
    "options": lambda model: zoo.patch(model, "local", options={"window": 2}),
    "autocast": lambda model: None,
}


def load_doubled(model: nn.Module, *, assign: bool) -> None:
    layer = model.encoder.layer[0].output.dense
    layer.load_state_dict({k: 2 * t for k, t in layer.state_dict().items()}, assign=assign)
    layer.requires_grad_(False)


def states(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(5, 99, (4, 20), generator=torch.Generator().manual_seed(3))
    return model(ids).last_hidden_state


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_cached_of_another_prefix_is_void(change: str) -> None:
    model = still("local" if change == "options" else "performer").train()
    with Freezing(model, FreezeByHand((2,)), cache=ActivationCache()) as freezing:
        freezing.end_epoch()
        with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
            before = states(model)
        CHANGES[change](model)
        seen = states(model)
    expected = states(model)
    assert (before - expected).abs().max() > 1e-3
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


def test_two_models_do_not_take_each_others_activations() -> None:
    cache, models = ActivationCache(), [still("performer", seed).train() for seed in (0, 1)]
    expected = [states(model) for model in models]
    for model in models:
        Freezing(model, FreezeByHand((2,)), cache=cache).end_epoch()
    seen = [states(model) for model in models]
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


def test_what_was_thawed_by_hand_learns() -> None:
    model = text_model().train()
    with Freezing(model, FreezeByHand((2,)), cache=ActivationCache()) as freezing:
        freezing.end_epoch()
        loss_of(model, text_batches(0)[0])
        bias = freezing.parts.layers[0].output.dense.bias.requires_grad_(True)
        loss_of(model, text_batches(0)[0]).backward()
    assert bias.grad.abs().sum() > 0


def test_a_mechanism_that_comes_later_must_be_cacheable_too() -> None:
    model = text_model().train()
    with Freezing(model, FreezeByHand((1, 2)), cache=ActivationCache()) as freezing:
        freezing.end_epoch()
        loss_of(model, text_batches(0)[0])
        zoo.patch(model, "luna")
        freezing.end_epoch()
        for _ in range(2):
            with pytest.raises(DoesNotFit, match="carries state"):
                loss_of(model, text_batches(0)[0])


def test_evaluation_and_inner_states_are_computed_in_full() -> None:
    model, cache = text_model(), ActivationCache()
    freezing = Freezing(model, FreezeByHand((2,)), cache=cache)
    freezing.end_epoch()
    batch = text_batches(0)[0]
    model.eval()
    expected = model(**batch, output_hidden_states=True)
    model.train()
    seen = model(**batch, output_hidden_states=True)
    assert cache.misses == 0
    torch.testing.assert_close(seen.hidden_states[2], expected.hidden_states[2], rtol=0, atol=0)
    freezing.thaw()


def test_what_is_shared_with_a_frozen_layer_is_frozen() -> None:
    model = lab.bert(
        "linformer",
        options={"rank": 4, "share": "layers"},
        num_hidden_layers=LAYERS,
        task="masked-lm",
    )
    freezing = Freezing(model, FreezeByHand((1,)))
    freezing.end_epoch()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(".zoo." in name for name in trained)
    assert "bert.embeddings.word_embeddings.weight" not in trained  # tied to the output
    freezing.thaw()


def test_a_frozen_layer_adds_no_auxiliary_loss() -> None:
    sums = []
    for cache in (None, ActivationCache()):
        model = lab.bert("dam", num_hidden_layers=LAYERS, task="sequence-classification")
        freezing = Freezing(model, FreezeByHand((LAYERS,)), cache=cache)
        model.train()
        loss_of(model, text_batches(0)[0])
        assert zoo.auxiliary_loss(model) != 0
        freezing.end_epoch()
        loss_of(model, text_batches(0)[0])
        sums.append(float(zoo.auxiliary_loss(model)))
    assert sums == [0.0, 0.0]


def test_the_trainer_freezes_and_thaws(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from zoo_core.fidelity.freezing_callback import FreezingCallback

    samples = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(i % 2)}
        for i, ids in enumerate(torch.randint(5, 99, (12, 16)))
    ]
    logged = []
    for cache in (ActivationCache(), ActivationCache(0)):
        callback = FreezingCallback(FreezeByHand((2, 3)), cache=cache)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=5,
            num_train_epochs=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        )
        model = text_model()
        trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[callback])
        trainer.train()
        assert callback.history == [2, 3, 3, 3]
        assert all(p.requires_grad for p in model.parameters())
        logged.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        assert (cache.hits, cache.misses) == ((12, 24) if cache.limit else (0, 36))
    assert logged[0] == logged[1]
    assert len(logged[0]) == 12


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Freezing(lab_albert()), DoesNotFit, "one layer many times"),
        (lambda: Freezing(lab.bert("luna"), cache=ActivationCache()), DoesNotFit, "carries state"),
        (lambda: Freezing(lab_decoder(), cache=ActivationCache()), DoesNotFit, "decoder"),
        (lambda: Freezing(compiled(), cache=ActivationCache()), DoesNotFit, "compiled"),
        (lambda: FreezeByHand((2, 1)), OptionError, "never fall"),
        (lambda: FreezeConverged(alpha=0.0), OptionError, "above 0"),
        (lambda: Freezing(text_model(), FreezeByHand((5,))).end_epoch(), OptionError, "has 4"),
        (lambda: ActivationCache(folder="missing"), zoo.ZooError, "'missing' is no directory"),
    ],
    ids=["albert", "carry", "decoder", "compiled", "plan", "alpha", "too many", "folder"],
)
def test_refusals(make, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_distributed_data_parallel_must_allow_for_missing_gradients() -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(text_model())
        with pytest.raises(DoesNotFit, match="find_unused_parameters"):
            Freezing(wrapped)
        wrapped = nn.parallel.DistributedDataParallel(text_model(), find_unused_parameters=True)
        with Freezing(wrapped, FreezeByHand((2,)), cache=ActivationCache()) as freezing:
            freezing.end_epoch()
            for batch in text_batches(0):
                wrapped(**batch).loss.backward()
        assert freezing.parts.layers[3].output.dense.weight.grad is not None
        assert freezing.parts.layers[1].output.dense.weight.grad is None
    finally:
        torch.distributed.destroy_process_group()


def compiled() -> nn.Module:
    model = text_model()
    model._compiled_call_impl = model._call_impl  # what model.compile() sets, without its import
    return model


def lab_albert() -> nn.Module:
    return zoo.build("albert", "linear", **lab.tiny("albert"))


def lab_decoder() -> nn.Module:
    return lab.bert("linear", is_decoder=True)


def test_a_gradient_for_the_inputs_is_refused() -> None:
    model = text_model()
    freezing = Freezing(model, FreezeByHand((1,)), cache=ActivationCache())
    freezing.end_epoch()
    model.train()
    with pytest.raises(UnsupportedCall, match="wants a gradient"):
        model(inputs_embeds=torch.randn(2, 5, 32, requires_grad=True))
    freezing.thaw()


@pytest.mark.bench
@pytest.mark.slow
def test_time_saved() -> None:
    """Six layers, 256 wide, eight epochs of 32 texts; four of them frozen after the first epoch.

    CPU seconds of one thread, which an idle machine's wall time equals.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 99, (32, 128), generator=generator)
    labels = (ids[:, 1:40] < 50).sum(-1) > 20

    def batches(epoch: int) -> list[dict[str, Any]]:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(epoch))
        return [{"input_ids": ids[part], "labels": labels[part].long()} for part in order.split(8)]

    size = {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 1024}
    size |= {"num_attention_heads": 4, "max_position_embeddings": 128}
    found = {}
    for name, plan, cache in (
        ("all layers train", (0,), None),
        ("frozen", (4,), None),
        ("frozen and cached", (4,), ActivationCache()),
    ):
        model = lab.bert(**size, task="sequence-classification")
        wall, start = time.perf_counter(), time.process_time()
        losses = train(model, batches, plan, cache, epochs=8)
        seconds, loss = time.process_time() - start, sum(losses[-4:]) / 4
        wall = time.perf_counter() - wall
        found[name] = (seconds, loss)
        print(f"{name}: {seconds:.1f} s of CPU, {wall:.1f} s, last loss {loss:.4f}")  # noqa: T201
    whole, frozen, cached = found.values()
    assert cached[0] < 0.9 * frozen[0] < 0.9 * whole[0]
    assert cached[1] == pytest.approx(frozen[1], rel=1e-4)
