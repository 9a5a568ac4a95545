"""The MLP after an attention layer, found by what a forward runs and not by what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Run:
    """One call of a linear layer: its name in the model, and what entered it."""

    name: str
    module: nn.Linear
    entered: Tensor


@dataclass(frozen=True, eq=False)
class FeedForward:
    """An MLP without normalisation and skip connection, (B, N, dim) -> (B, N, dim).

    state: (B, N, dim), what entered it in the model.
    """

    parts: tuple[nn.Module, ...]
    state: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Run it on another input."""
        for part in self.parts:
            x = part(x)
        return x


def feed_forward(root: nn.Module, runs: Sequence[Run]) -> FeedForward | None:
    """The MLP among the linear layers that ran, in order, after one attention layer.

    It rises above the width of the model and falls back to it. None where there is none, or where
    what stands between the two (the activation) belongs to no module of theirs.
    """
    inner = _from_rise_to_fall(runs)
    if not inner:
        return None
    names, first, last = {run.name for run in inner}, inner[0], inner[-1]
    whole = _largest(root, first.name, names)
    if _linears(root, whole) == names:
        return FeedForward((root.get_submodule(whole),), first.entered)
    if whole == first.name or len(inner) > 2:
        return None
    return FeedForward((root.get_submodule(whole), last.module), first.entered)


def _from_rise_to_fall(runs: Sequence[Run]) -> Sequence[Run]:
    for start, first in enumerate(runs):
        width = first.module.in_features
        if first.module.out_features > width:
            for end in range(start + 1, len(runs)):
                if runs[end].module.out_features == width:
                    return runs[start : end + 1]
    return ()


def _largest(root: nn.Module, name: str, within: set[str]) -> str:
    """The outermost module around `name` whose linear layers are all `within`."""
    parent = name.rpartition(".")[0]
    while parent and _linears(root, parent) <= within:
        name, parent = parent, parent.rpartition(".")[0]
    return name


def _linears(root: nn.Module, name: str) -> set[str]:
    modules = root.get_submodule(name).named_modules(prefix=name)
    return {inner for inner, module in modules if isinstance(module, nn.Linear)}
