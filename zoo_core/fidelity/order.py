"""Which samples each step sees: a fixed function of the seed, so that a resumed run agrees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

_LARGEST = 16


class Order:
    """An endless stream of shuffled epochs, cut into steps of samples of similar length.

    lengths: of the samples, in tokens. per_step: samples of one step. Nothing is drawn from torch's
    global generator.
    """

    def __init__(self, lengths: Sequence[int], per_step: int, seed: int) -> None:
        self.lengths, self.per_step, self.seed = lengths, per_step, seed
        # Not more than an epoch: copies of a sample are of one length, and would share a step.
        self.window = max(1, min(_LARGEST, len(lengths) // per_step))
        self._epoch = lru_cache(4)(self._draw_epoch)
        self._window = lru_cache(2)(self._draw_window)

    def step(self, number: int) -> list[int]:
        """The samples of a step, shortest first."""
        window, place = divmod(number, self.window)
        return self._window(window)[place]

    def _draw_epoch(self, epoch: int) -> list[int]:
        return _permutation(len(self.lengths), self.seed, 0, epoch)

    def _draw_window(self, window: int) -> list[list[int]]:
        """Some steps at once, so that each of them can take samples of one length."""
        size = self.window * self.per_step
        start = window * size
        places = [divmod(place, len(self.lengths)) for place in range(start, start + size)]
        drawn = [self._epoch(epoch)[index] for epoch, index in places]
        drawn.sort(key=lambda sample: self.lengths[sample])
        steps = [drawn[i : i + self.per_step] for i in range(0, size, self.per_step)]
        return [steps[i] for i in _permutation(self.window, self.seed, 1, window)]


def seed_of(*parts: int) -> int:
    """One seed from several numbers, far from those of their neighbours."""
    mixed = 0x9E3779B97F4A7C15
    for part in parts:
        mixed = ((mixed ^ part) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
        mixed ^= mixed >> 31
    return mixed % 2**63


def _permutation(count: int, *seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed_of(*seed))
    drawn: list[int] = torch.randperm(count, generator=generator).tolist()
    return drawn
