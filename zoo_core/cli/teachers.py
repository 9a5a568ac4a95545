"""The original that a checkpoint is taught by, or measured beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo_core.errors import ZooError

if TYPE_CHECKING:
    from torch import nn

NEEDED = (
    "calibration trained the host's own weights too (train={train!r}), so that without its "
    "patches it is not the original: pass --teacher DIR, the checkpoint as it was before, or the "
    "stock weights"
)


def teacher_of(model: nn.Module, reference: str | None) -> nn.Module | None:
    """The model at `reference`; None, where there is none, for `model` without its patches.

    Raises ZooError where that would not be the original.
    """
    from zoo_core.checkpoint.calibration import trained_host
    from zoo_core.fidelity.originals import original_in
    from zoo_core.hosts import unwrap

    if reference is not None:
        return original_in(reference, model)
    train = trained_host(unwrap(model))
    if train is not None:
        raise ZooError(NEEDED.format(train=train))
    return None
