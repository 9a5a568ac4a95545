"""Auxiliary losses: what a mechanism adds to the training loss, of the last forward only."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor


class AuxiliaryLoss:
    """Holds one module's auxiliary loss from its last forward until it is asked for.

    It is state of a forward, not of the module: copies and pickles start empty. Training that
    never asks leaves the loss out, and is told so once.
    """

    def __init__(self, mechanism: str) -> None:
        self._mechanism = mechanism
        self._last: Tensor | None = None
        self._unread = 0
        self._detached = False

    def keep(self, loss: Tensor | None) -> None:
        """Replace what the last forward left; loss is a scalar, None = this forward has none."""
        self._last = loss
        self._detached = not torch.is_grad_enabled()
        if torch.compiler.is_compiling() or loss is None or not loss.requires_grad:
            return
        if self._unread == 1:
            warnings.warn(
                f"{self._mechanism} trains without its auxiliary loss: add zoo.auxiliary_loss"
                "(model) to the loss of every step, or use zoo.AuxiliaryLossMixin in a Trainer",
                RuntimeWarning,
                stacklevel=2,
            )
        if self._unread >= 0:
            self._unread += 1

    def last(self) -> Tensor:
        """The loss of the last forward, a scalar that carries gradients; 0 where it had none."""
        self._unread = -1
        if self._detached and self._last is not None and torch.is_grad_enabled():
            warnings.warn(
                f"the auxiliary loss of {self._mechanism} carries no gradient: its forward ran "
                "without one, under no_grad or under reentrant checkpointing, which must be "
                "use_reentrant=False",
                RuntimeWarning,
                stacklevel=2,
            )
        return torch.zeros(()) if self._last is None else self._last

    def __deepcopy__(self, memo: dict[int, Any]) -> AuxiliaryLoss:
        return AuxiliaryLoss(self._mechanism)

    def __reduce__(self) -> tuple[Any, ...]:
        return AuxiliaryLoss, (self._mechanism,)
