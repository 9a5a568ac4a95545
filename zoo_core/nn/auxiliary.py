"""Auxiliary losses: what a mechanism adds to the training loss, of the last forward only."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.attention import Site


class AuxiliaryLoss:
    """Holds what one module adds to the loss in a forward, until it is asked for.

    It is state of a forward, not of the module: copies and pickles start empty, and the bridges
    empty it where a forward of the whole model begins. Training that never asks leaves the loss
    out, and is told so once.

    site: where the module is; a host may call it several times in one forward, whose losses add up,
    and all sites of a patch tell once. None: of a module by itself, whose every call is a forward.
    """

    def __init__(self, mechanism: str, site: Site | None = None) -> None:
        self._mechanism = mechanism
        self._calls = 1 if site is None else site.calls
        shared = {} if site is None else site.shared
        self._told: _Told = shared.setdefault("auxiliary loss", _Told())
        self._kept: list[Tensor | None] = []
        self._unread = False
        self._detached = False

    def begin(self) -> None:
        """A forward of the model begins: nothing is left of earlier ones."""
        self._kept = []

    def keep(self, loss: Tensor | None) -> None:
        """Add what one call of this forward has; loss is a scalar, None = it has none."""
        if len(self._kept) >= self._calls:
            self.begin()
        self._kept.append(loss)
        self._detached = not torch.is_grad_enabled()
        trains = loss is not None and loss.requires_grad
        if torch.compiler.is_compiling() or not trains or len(self._kept) > 1:
            return
        if self._unread and not self._told.once:
            self._told.once = True
            warnings.warn(
                f"{self._mechanism} trains without its auxiliary loss: add zoo.auxiliary_loss"
                "(model) to the loss of every step, or use zoo.AuxiliaryLossMixin in a Trainer",
                RuntimeWarning,
                stacklevel=2,
            )
        self._unread = True

    def last(self) -> Tensor:
        """The loss of the last forward, a scalar that carries gradients; 0 where it had none."""
        self._told.once = True
        losses = [loss for loss in self._kept if loss is not None]
        if self._detached and losses and torch.is_grad_enabled():
            warnings.warn(
                f"the auxiliary loss of {self._mechanism} carries no gradient: its forward ran "
                "without one, under no_grad or under reentrant checkpointing, which must be "
                "use_reentrant=False",
                RuntimeWarning,
                stacklevel=2,
            )
        return torch.stack(losses).sum() if losses else torch.zeros(())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": [], "_unread": False}


class _Told:
    """Whether training asked for the losses of a patch, or was told to."""

    once = False


class BeginForward:
    """Forward pre-hook where the forward of a model begins: its modules' losses start anew."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.losses = [loss for module in modules for loss in losses_in(module)]

    def __call__(self, *_: Any) -> None:
        """Empty them all: a module that does not run this time has none."""
        for loss in self.losses:
            loss.begin()


def losses_in(module: nn.Module) -> list[AuxiliaryLoss]:
    """The AuxiliaryLoss of a module and of its parts."""
    return [
        value
        for inner in module.modules()
        for value in vars(inner).values()
        if isinstance(value, AuxiliaryLoss)
    ]
