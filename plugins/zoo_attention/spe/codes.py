"""Random codes Q, K of positions with E[Q_m K_n] = P(m - n), for each head and feature.

Positions lie on one axis (text) or several (a grid). Both modules return the codes of all cells of
a shape, (2, H, n, D, R): those of queries, then those of keys, in R realizations, which multiplied
and averaged over R tend to P. Their noise is drawn once and kept in persistent buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_core import Site

#: Positions for which convolutional codes draw noise; beyond them it is taken from elsewhere.
NOISE = 128


class SineCodes(nn.Module):
    """P(x) = 1/K sum_k gain_k^2 cos(2 pi f_k . x + offset_k), for distances x on A axes.

    frequencies: (H, D, K, A), in turns per `extent` of the axis where small; f stays below half a
    turn per token. gains: (H, D, K) before softplus, offsets: (H, D, K). noise: (D, 2 K, R).
    """

    noise: Tensor

    def __init__(self, site: Site, extents: Sequence[int], sines: int, realizations: int) -> None:
        super().__init__()
        shape = (site.heads, site.head_dim, sines)
        self.extents = tuple(extents)
        self.frequencies = nn.Parameter(torch.randn(*shape, len(extents)))
        self.gains = nn.Parameter(torch.full(shape, math.log(math.e - 1)))  # softplus gives 1
        self.offsets = nn.Parameter(torch.zeros(shape))
        self.register_buffer("noise", torch.randn(site.head_dim, 2 * sines, realizations))

    def forward(self, shape: Sequence[int], amplitude: Tensor) -> Tensor:
        """Codes of the n cells of `shape`, (2, H, n, D, R), times amplitude (H, D), its dtype."""
        dtype, device = amplitude.dtype, amplitude.device
        extents = torch.tensor(self.extents, dtype=dtype, device=device)
        turns = (2 / extents * self.frequencies.to(dtype)).tanh() / 2
        axes = [torch.arange(size, dtype=dtype, device=device) for size in shape]
        cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
        angles = 2 * math.pi * torch.einsum("na,hdka->hndk", cells, turns)
        angles = torch.stack([angles + self.offsets.to(dtype)[:, None], angles])
        gains = F.softplus(self.gains.to(dtype)) / math.sqrt(self.gains.shape[-1])
        gains = (gains * amplitude[..., None])[:, None]
        waves = torch.cat([angles.cos() * gains, angles.sin() * gains], -1)
        return torch.einsum("shndk,dkr->shndr", waves, self.noise.to(dtype))


class ConvolutionalCodes(nn.Module):
    """P(x) = sum_t a(t) b(t - x): white noise filtered by a for queries and by b for keys.

    filters: (2, H, D, *taps), a and b. noise: (D, R, NOISE), for fields of any size.
    """

    noise: Tensor

    def __init__(self, site: Site, extents: Sequence[int], kernel: int, realizations: int) -> None:
        super().__init__()
        taps = [min(kernel, extent) for extent in extents]
        start = math.prod(taps) ** -0.5  # P falls from 1 at distance 0 to 0 at `taps`
        self.filters = nn.Parameter(torch.full((2, site.heads, site.head_dim, *taps), start))
        self.register_buffer("noise", torch.randn(site.head_dim, realizations, NOISE))

    def forward(self, shape: Sequence[int], amplitude: Tensor) -> Tensor:
        """Codes of the n cells of `shape`, (2, H, n, D, R), times amplitude (H, D), its dtype."""
        taps = self.filters.shape[3:]
        size = [cells + width - 1 for cells, width in zip(shape, taps, strict=True)]
        axes = list(range(-len(size), 0))
        filters = self.filters.to(amplitude.dtype)
        filters = filters * amplitude[(..., *[None] * len(size))]
        # A convolution by its spectrum, for any number of axes; what wraps around is cut off. Sizes
        # with a large prime factor, such as 639, would take several times longer.
        padded = [-(-places // 16) * 16 for places in size]
        field = self._field(size).to(amplitude.dtype)
        spectrum = torch.fft.rfftn(field, s=padded, dim=axes)
        spectrum = torch.fft.rfftn(filters, s=padded, dim=axes)[:, :, :, None] * spectrum
        codes = torch.fft.irfftn(spectrum, s=padded, dim=axes)
        valid = [slice(width - 1, places) for width, places in zip(taps, size, strict=True)]
        codes = codes[(..., *valid)]
        return codes.flatten(4).permute(0, 1, 4, 2, 3)

    def _field(self, size: Sequence[int]) -> Tensor:
        """Independent noise for every place of a field, (D, R, *size).

        Each next NOISE places take their noise from the next realization. Within a realization
        that is noise as good as new, up to R * NOISE places, where it begins to repeat itself.
        """
        realizations = self.noise.shape[1]
        place = torch.arange(math.prod(size), device=self.noise.device)
        realization = torch.arange(realizations, device=self.noise.device)[:, None]
        field = self.noise[:, (realization + place // NOISE) % realizations, place % NOISE]
        return field.unflatten(-1, list(size))
