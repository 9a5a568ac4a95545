"""A model small enough to heal in a second, whose attention matters, and data for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zoo_core as zoo
from zoo_core import registry


def tiny(family: str) -> dict[str, Any]:
    return dict(registry.architecture(family).adapter().tiny())


def sharpened(model: nn.Module) -> nn.Module:
    """Weights so large that attention is far from uniform, as in a trained model."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and ".zoo." not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    return model.eval()


def bert(attention: str = "linformer", *, options: Any = None, **kwargs: Any) -> nn.Module:
    options = {"rank": 4} if attention == "linformer" and options is None else options
    arguments = {**tiny("bert"), **kwargs}
    return sharpened(zoo.build("bert", attention, options=options, seed=0, **arguments))


def vit(attention: str = "linformer", family: str = "deit", **kwargs: Any) -> nn.Module:
    arguments = {**tiny(family), "num_classes": 4, **kwargs}
    return sharpened(zoo.build(family, attention, options={"rank": 4}, seed=0, **arguments))


def tokens(count: int = 40, longest: int = 24) -> list[dict[str, Tensor]]:
    """Tokenised texts of many lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(6, longest, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(5, 99, (n,), generator=generator)} for n in lengths]


def images(count: int = 32) -> list[Tensor]:
    return list(torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(2)))


class Letters:
    """A tokenizer of single letters, as little of one as texts need."""

    pad_token_id, mask_token_id, padding_side = 0, 3, "right"
    all_special_ids = (0, 1, 2, 3)

    def __len__(self) -> int:
        return 99

    def __call__(
        self, texts: list[str], *, truncation: bool = False, max_length: int | None = None
    ) -> dict[str, Any]:
        cut = max_length - 2 if truncation and max_length else None
        ids = [[1, *(5 + ord(c) % 90 for c in text[:cut]), 2] for text in texts]
        return {"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}


@dataclass(eq=False)
class Seen:
    """The samples that a model was run on: those to learn from, and those it was measured on.

    Of each forward the samples as tuples of numbers, without padding. What copies of the model
    learn from counts too (FSDP's); what they are only asked (the teacher) does not.
    """

    learnt: list[list[tuple[float, ...]]] = field(default_factory=list)
    measured: list[list[tuple[float, ...]]] = field(default_factory=list)

    @classmethod
    def by(cls, model: Any) -> Seen:
        """Watch a model from now on."""
        seen = cls()
        stem = model.embeddings if hasattr(model, "embeddings") else model.patch_embed

        def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            batch = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
            rows = [tuple(row[row != 0].tolist()) for row in batch]
            if torch.is_grad_enabled():
                seen.learnt.append(rows)
            elif module is stem:
                seen.measured.append(rows)

        stem.register_forward_pre_hook(watch, with_kwargs=True)
        return seen


def calibrate_in_sight(directory: str, told: Any, settings: dict[str, Any]) -> None:
    """A calibration in a process of its own, which tells each step and writes its result."""
    model = bert()
    report = zoo.calibrate(
        model,
        tokens(),
        checkpoint=directory,
        on_step=lambda now: told.send(now.step),
        **settings,
    )
    torch.save((state(model), report.history), f"{directory}/result.pt")
