"""One attention layer at a time: the student's, fed what the teacher's sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.fidelity.losses import relative_error
from zoo_core.fidelity.observing import Batch, hidden_of, observe


def layer_errors(
    student: nn.Module,
    teacher: nn.Module,
    paths: Sequence[str],
    batch: Batch,
    *,
    states: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Relative squared error (B,) of the attention output of each layer in `paths`.

    One forward of the student in which every attention layer hands on the teacher's output instead
    of its own, so that each one sees what it would see in an unpatched model.

    teacher: a `stock_twin`, whose attention layers take the same arguments.
    states: the teacher's inputs of these layers, for a teacher that is not the student's own twin.
    """
    mask = batch.get("attention_mask")
    feed = iter(states) if states is not None else None
    errors: list[Tensor] = []
    with ExitStack() as hooks:
        for path in paths:
            module = student.get_submodule(path)
            if feed is not None:
                fed = module.register_forward_pre_hook(_Feed(feed), with_kwargs=True, prepend=True)
                hooks.callback(fed.remove)
            compare = _Compare(teacher.get_submodule(path), mask, errors)
            handle = module.register_forward_hook(compare, with_kwargs=True)
            hooks.callback(handle.remove)
        observe(student, batch)
    return errors


class _Feed:
    """Forward pre-hook that replaces a layer's hidden states by the next recorded ones."""

    def __init__(self, states: Iterator[Tensor]) -> None:
        self.states = states

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        state = next(self.states)
        if args:
            return (state, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": state}


class _Compare:
    """Forward hook that runs the teacher's layer beside the student's and hands on its output."""

    def __init__(self, teacher: nn.Module, mask: Tensor | None, errors: list[Tensor]) -> None:
        self.teacher, self.mask, self.errors = teacher, mask, errors

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        with torch.no_grad():
            wanted = self.teacher(*args, **kwargs)
        ours, theirs = _first(output), _first(wanted)
        real = torch.ones(ours.shape[:2], dtype=torch.bool, device=ours.device)
        has_padding = self.mask is not None and self.mask.shape == hidden_of(args, kwargs).shape[:2]
        mask = self.mask.bool() if self.mask is not None and has_padding else real
        self.errors.append(relative_error(ours, theirs, mask))
        return wanted


def _first(output: Any) -> Tensor:
    """The hidden states of a layer's output, which transformers puts into a tuple."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found
