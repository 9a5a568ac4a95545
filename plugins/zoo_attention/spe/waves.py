"""Sinusoids of cells, and the noise that they are multiplied by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Noise:
    """What has no gradient: C and then S (D, 2 K, R); F (D, R), or None for zeros.

    shape: of the cells.
    """

    waves: Tensor
    free: Tensor | None
    shape: tuple[int, ...]

    def cells(self) -> Tensor:
        """Their places, (N, A)."""
        axes = [torch.arange(size, device=self.waves.device) for size in self.shape]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)


def make_waves(cells: Tensor, turns: Tensor, still: Tensor | None) -> list[Tensor]:
    """Cosines and sines of cells (n, A), by turns (H, D, K, A), and s: (H, n, K or 1, D) each."""
    angles = _angles(cells, turns)
    found = [angles.cos(), angles.sin()]
    if still is not None:
        found.append(still[:, None, None].expand(-1, cells.shape[0], -1, -1))
    return found


def _angles(cells: Tensor, turns: Tensor) -> Tensor:
    """(H, n, K, D); not by a product of matrices, which is slow where there is one axis."""
    on_axes = turns.permute(3, 0, 2, 1).contiguous()[:, :, None]
    places = cells.to(turns.dtype).mT[..., None, None]
    first, *others = (place * turn for place, turn in zip(places, on_axes, strict=True))
    return sum(others, first)


def make_waves_in_place(cells: Tensor, turns: Tensor, still: Tensor | None) -> Tensor:
    """`make_waves` without gradients, side by side, (H, n, J = 2 K [+ 1], D)."""
    angles, rows = _angles(cells, turns), turns.shape[2]
    waves = angles.new_empty(*angles.shape[:2], 2 * rows + (still is not None), angles.shape[3])
    torch.cos(angles, out=waves[:, :, :rows])
    torch.sin(angles, out=waves[:, :, rows : 2 * rows])
    if still is not None:
        waves[:, :, -1] = still[:, None]
    return waves


def make_factors(offsets: Tensor, amplitudes: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
    """What waves are multiplied by for queries and for keys, (H, J, D, R) each.

    cos(x + o) and sin(x + o) are cos(x) and sin(x) turned by o, and so is the noise in their place:
    both share their waves. offsets, amplitudes (H, D, K); None means 1.
    """
    cosines, sines = noise.waves.transpose(0, 1).chunk(2)
    if amplitudes is not None:
        size = amplitudes.mT[..., None]
        cosines, sines = size * cosines, size * sines
    along, across = offsets.cos().mT[..., None], offsets.sin().mT[..., None]
    turned = [along * cosines + across * sines, along * sines - across * cosines]
    straight = [x.expand_as(turned[0]) for x in (cosines, sines)]
    if noise.free is not None:
        free = noise.free.expand(offsets.shape[0], 1, -1, -1)
        turned.append(free)
        straight.append(free)
    return torch.cat(turned, 1), torch.cat(straight, 1)
