"""How training runs: typed, bounded, the same for Python and the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from zoo_core.errors import OptionError, did_you_mean
from zoo_core.mechanism import Options, option

LARGEST_SEED = 2**63 - 1  # that torch takes


@dataclass(frozen=True, kw_only=True)
class Schedule(Options):
    """What every training run can be told, whatever it trains."""

    steps: int = option(300, low=1, help="optimiser steps over all stages")
    batch_size: int = option(8, low=1, help="samples of one forward, all processes together")
    accumulate: int = option(1, low=1, help="forwards whose gradients make one optimiser step")
    warmup: float = option(0.1, low=0, high=1, help="share of a stage in which rates rise")
    final_rate: float = option(0.02, low=0, high=1, help="share of the rates left at the end")
    weight_decay: float = option(0.0, low=0, help="decoupled weight decay of AdamW")
    clip: float = option(1.0, low=1e-6, help="largest norm of the gradient of one step")
    bf16: bool = option(False, help="compute under bfloat16 autocast; weights stay as they are")
    held_out: int = option(32, low=4, help="samples kept back to measure on, at most a quarter")
    evaluate_every: int = option(50, low=1, help="steps between two looks at the held-out samples")
    patience: int | None = option(
        None, low=1, help="looks without gain after which a stage ends; None: run all steps"
    )
    checkpoint_every: int = option(25, low=1, help="steps between two saves, where there are any")
    seed: int = option(0, low=0, high=LARGEST_SEED, help="of the order of samples and of all noise")

    @classmethod
    def of(cls, values: Mapping[str, Any], *, owner: str) -> Self:
        """Check keyword arguments of the verb `owner`. Raises OptionError, with a suggestion."""
        known = [spec.name for spec in fields(cls)]
        for name in values:
            if name not in known:
                raise OptionError(
                    f"{owner} has no setting {name!r} (has: {', '.join(known)})"
                    f"{did_you_mean(name, known)}"
                )
        return cls(**values)

    @property
    def samples_per_step(self) -> int:
        """Samples that one optimiser step sees, over all processes."""
        return self.batch_size * self.accumulate

    def rate(self, step: int, steps: int) -> float:
        """The share of the peak rate at a step of a stage: a linear rise, then half a cosine."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        fallen = (step - rising) / max(steps - rising, 1)
        return self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * fallen)) / 2


@dataclass(frozen=True, kw_only=True)
class Settings(Schedule):
    """What `zoo.calibrate` can be told besides."""

    train: str = option(
        "attention",
        choices=("mechanism", "attention", "all"),
        help="the mechanism's own tensors; with the projections around it; the whole model",
    )
    layer_share: float = option(
        0.5, low=0, high=1, help="share of the steps in the per-layer stage, which comes first"
    )
    match: str = option(
        "auto",
        choices=("auto", "embedding", "logits", "masked-lm", "none"),
        help="what the end-to-end stage matches besides hidden states; auto: logits if there are",
    )
    hidden_weight: float = option(1.0, low=0, help="weight of the hidden states, end to end")
    output_weight: float = option(1.0, low=0, help="weight of the output, end to end")
    auxiliary_weight: float = option(1.0, low=0, help="weight of mechanisms' auxiliary losses")
    # Tried on MiniLM: the best rates grow with how far the layers are off, from 1e-4 for
    # improved_clustered (0.07; 1e-3 makes it worse) over 3e-4 for local (0.16) to 1e-3 for
    # performer (0.75); end to end a tenth does better than three.
    learning_rate: float | None = option(
        None,
        low=0,
        help="of the mechanism's own tensors; None: 1e-3 times the error of a layer's output",
    )
    host_learning_rate: float | None = option(
        None, low=0, help="of the host's tensors; None: likewise"
    )
    end_rate: float = option(
        0.1, low=0, help="share of both learning rates that the end-to-end stage peaks at"
    )
    noise: bool = option(
        False, help="run the mechanisms in training mode: their dropout and sampling act"
    )
    mask_share: float = option(0.15, low=0.01, high=0.9, help="tokens hidden for masked-lm")
    pooling: str = option(
        "mean", choices=("mean", "cls"), help="what of a text is its embedding; timm has its own"
    )
