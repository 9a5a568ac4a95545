"""Auxiliary losses in a transformers Trainer; a plain loop adds `zoo.auxiliary_loss(model)`."""

from __future__ import annotations

from typing import Any

from zoo_core.patching import auxiliary_loss


class AuxiliaryLossMixin:
    """Adds the auxiliary losses of a patched model to what a transformers Trainer minimises.

        class MyTrainer(zoo.AuxiliaryLossMixin, Trainer): ...

    Evaluation is left alone: its loss stays comparable with that of other models.
    """

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """The Trainer's loss of one batch plus, in training, the model's auxiliary losses."""
        trainer: Any = super()
        loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, **kwargs)
        if model.training:
            loss = loss + auxiliary_loss(model) / self._divisor(kwargs.get("num_items_in_batch"))
        return (loss, outputs) if return_outputs else loss

    def _divisor(self, items: Any) -> int:
        """What makes the mean over accumulated batches, where the Trainer will not divide."""
        trainer: Any = self
        scaled: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            by_model = trainer.model_accepts_loss_kwargs and items is not None
            scaled = by_model or trainer.compute_loss_func is not None
        return int(trainer.current_gradient_accumulation_steps) if scaled else 1
