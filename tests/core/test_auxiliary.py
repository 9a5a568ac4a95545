"""Auxiliary losses reach training: in a Trainer, in a plain loop, and never unnoticed."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

import zoo_core as zoo
from zoo_core import registry
from zoo_core.nn.auxiliary import AuxiliaryLoss


@dataclass(frozen=True, kw_only=True)
class NoOptions(zoo.Options):
    pass


class Penalised(nn.Module):
    """Softmax attention times a gain whose square is the auxiliary loss."""

    def __init__(self, site: zoo.Site | None = None) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.auxiliary = AuxiliaryLoss("penalised", site)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: zoo.Context) -> Tensor:
        self.auxiliary.keep(self.gain.square())
        return F.scaled_dot_product_attention(q, k, v) * self.gain

    def auxiliary_loss(self) -> Tensor:
        return self.auxiliary.last()


PENALISED = zoo.Mechanism(
    name="penalised",
    summary="A test.",
    family="test",
    paper=None,
    time="n**2",
    memory="n**2",
    supports=zoo.Supports(),
    options=NoOptions,
    swap="approximate",
    factory=lambda site, options: Penalised(site),
)


@pytest.fixture(autouse=True)
def registered():
    zoo.register(PENALISED)
    yield
    registry.forget()


def classifier() -> nn.Module:
    tiny = registry.architecture("bert").adapter().tiny()
    return zoo.build("bert", "penalised", task="sequence-classification", seed=0, **tiny)


class AuxiliaryTrainer(zoo.AuxiliaryLossMixin, Trainer):
    pass


def gains(model: nn.Module) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if name.endswith("gain")]


def trained_gains(kind: type[Trainer], folder: Path, **arguments: object) -> Tensor:
    """The gains after one SGD step of rate 0.5 on four equal examples."""
    model = classifier()
    example = {"input_ids": torch.arange(5, 13), "labels": torch.tensor(1)}
    settings = TrainingArguments(
        str(folder), optim="sgd", learning_rate=0.5, max_steps=1, report_to="none", use_cpu=True,
        lr_scheduler_type="constant", max_grad_norm=1e9, save_strategy="no", **arguments,
    )  # fmt: skip
    kind(model=model, args=settings, train_dataset=[example] * 4).train()
    return torch.stack([gain.detach() for gain in gains(model)])


def test_the_sum_over_sites_has_the_gradient_of_each() -> None:
    model = classifier()
    model(torch.arange(5, 13)[None])
    loss = zoo.auxiliary_loss(model)
    loss.backward()
    assert loss.item() == 2 * 2.0**2
    assert [p.grad.item() for p in gains(model)] == [4.0, 4.0]


@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_a_trainer_adds_them_once_however_many_batches_make_a_step(
    tmp_path: Path, accumulated: int
) -> None:
    arguments = {
        "per_device_train_batch_size": 4 // accumulated,
        "gradient_accumulation_steps": accumulated,
    }
    without = trained_gains(Trainer, tmp_path, **arguments)
    found = trained_gains(AuxiliaryTrainer, tmp_path, **arguments)
    # The derivative of gain**2 at 2, times the rate; dropout is the same in both by the seed.
    torch.testing.assert_close(found, without - 0.5 * 4.0)


def test_evaluation_leaves_them_out(tmp_path: Path) -> None:
    model = classifier()
    settings = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    example = {"input_ids": torch.arange(5, 13), "labels": torch.tensor(1)}
    report = AuxiliaryTrainer(model=model, args=settings, eval_dataset=[example]).evaluate()
    stock = model.eval()(torch.arange(5, 13)[None], labels=torch.tensor([1])).loss
    assert report["eval_loss"] == pytest.approx(stock.item(), abs=1e-5)


def test_a_timm_loop_adds_one_line() -> None:
    tiny = registry.architecture("vit").adapter().tiny()
    model = zoo.build("vit", "penalised", seed=0, **tiny)
    size = model.patch_embed.img_size
    loss = model(torch.randn(2, 3, *size)).square().mean()
    loss = loss + zoo.auxiliary_loss(model)
    loss.backward()
    assert all(p.grad is not None and p.grad.item() != 0 for p in gains(model))


def test_training_without_them_warns_once() -> None:
    module, x = Penalised(), torch.randn(1, 1, 4, 8)
    module(x, x, x, zoo.Context()).sum().backward()
    with pytest.warns(RuntimeWarning, match=r"penalised trains without .*zoo\.auxiliary_loss"):
        module(x, x, x, zoo.Context())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x, x, x, zoo.Context())


def test_a_model_warns_once_for_all_its_sites() -> None:
    model = zoo.build("vit", "penalised", seed=0, **registry.architecture("vit").adapter().tiny())
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            model(images).sum().backward()
    assert [str(one.message)[:22] for one in told] == ["penalised trains witho"]


def test_a_site_that_does_not_run_again_has_no_loss() -> None:
    """And none of an earlier graph, which a second backward would refuse."""
    model = zoo.build("vit", "penalised", seed=0, **registry.architecture("vit").adapter().tiny())
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    (model(images).sum() + zoo.auxiliary_loss(model)).backward()
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one.forward_intermediates(images, indices=[0], stop_early=True)
        assert zoo.auxiliary_loss(one).item() == 2.0**2
        zoo.auxiliary_loss(one).backward()
    text = classifier()
    text(torch.arange(5, 13)[None])
    del text.bert.encoder.layer[1:]
    text(torch.arange(5, 13)[None])
    assert zoo.auxiliary_loss(text).item() == 2.0**2


def test_a_module_that_all_layers_share_adds_one_for_each() -> None:
    tiny = registry.architecture("albert").adapter().tiny()
    model = zoo.build("albert", "penalised", seed=0, **{**tiny, "num_hidden_layers": 3})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(torch.arange(5, 13)[None])
            loss = zoo.auxiliary_loss(model)
            assert loss.item() == 3 * 2.0**2
            loss.backward()


def test_training_with_them_does_not_warn() -> None:
    module, x = Penalised(), torch.randn(1, 1, 4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            out = module(x, x, x, zoo.Context())
            (out.sum() + module.auxiliary_loss()).backward()


def test_evaluation_alone_does_not_warn() -> None:
    module, x = Penalised(), torch.randn(1, 1, 4, 8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for _ in range(3):
            module(x, x, x, zoo.Context())


@pytest.mark.parametrize(
    "twin",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["copy", "pickle"],
)
def test_a_twin_starts_without_a_last_forward(twin) -> None:
    module, x = Penalised(), torch.randn(1, 1, 4, 8)
    module(x, x, x, zoo.Context())
    assert twin(module).auxiliary_loss().item() == 0
    assert module.auxiliary_loss().item() == 4


def test_a_loss_that_reentrant_checkpointing_cut_off_is_told() -> None:
    module, x = Penalised(), torch.randn(1, 1, 4, 8, requires_grad=True)
    checkpoint(module, x, x, x, zoo.Context(), use_reentrant=True)
    with pytest.warns(RuntimeWarning, match=r"penalised carries no gradient.*use_reentrant=False"):
        module.auxiliary_loss()
    checkpoint(module, x, x, x, zoo.Context(), use_reentrant=False)
    module.auxiliary_loss().backward()
    assert module.gain.grad == 4
