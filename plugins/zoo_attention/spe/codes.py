"""Queries and keys times random codes Q, K of positions with E[Q_m K_n] = P(m - n).

    q^_mr = sum_d q_md Q_mdr,   k^_nr = sum_d k_nd K_ndr

for each head, with other codes for each feature d. Positions lie on one axis (text) or several (a
grid). Both modules take the queries and the keys of the first cells of a shape, (B, H, N, D) each,
and give q^ and k^, (B, H, N, R): R realizations, in the mean of which products tend to P. Their
noise is drawn once and kept in persistent buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo_attention.spe.sines import encode
from zoo_attention.spe.waves import Noise
from zoo_core import Site
from zoo_core.nn import kernels

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

    def forward(
        self,
        shape: Sequence[int],
        amplitude: Tensor,
        q: Tensor,
        k: Tensor,
        share: Tensor | None = None,
        free: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Encode q, k (B, H, N, D) by codes of the cells of `shape`, times amplitude (H, D).

        To the codes is added `free` (D, R) times share (H, D).
        """
        dtype, device = amplitude.dtype, amplitude.device
        extents = torch.tensor(self.extents, dtype=dtype, device=device)
        turns = (2 / extents * self.frequencies.to(dtype)).tanh() * math.pi
        gains = F.softplus(self.gains.to(dtype)) / math.sqrt(self.gains.shape[-1])
        noise = Noise(self.noise.to(dtype), free, tuple(shape))
        sizes = gains * amplitude[..., None]
        return encode(q, k, turns, self.offsets.to(dtype), sizes, share, noise)


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

    def forward(
        self,
        shape: Sequence[int],
        amplitude: Tensor,
        q: Tensor,
        k: Tensor,
        share: Tensor | None = None,
        free: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `SineCodes.forward`."""
        if len(shape) == 1 and shape[0] > NOISE:
            codes = self._codes([NOISE], amplitude)
            encoded = _encode_in_turns(q, codes[0]), _encode_in_turns(k, codes[1])
        else:
            codes = self._codes(shape, amplitude)[:, :, : q.shape[-2]]
            encoded = (
                torch.einsum("bhnd,hndr->bhnr", q, codes[0]),
                torch.einsum("bhnd,hndr->bhnr", k, codes[1]),
            )
        if share is None or free is None:
            return encoded
        still = share[:, None]
        return encoded[0] + (q * still) @ free, encoded[1] + (k * still) @ free

    def _codes(self, shape: Sequence[int], amplitude: Tensor) -> Tensor:
        """Codes of queries and keys for the n cells of `shape`, (2, H, n, D, R)."""
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


def _encode_in_turns(x: Tensor, codes: Tensor) -> Tensor:
    """Encode x (B, H, N, D) by the codes (H, W, D, R) of its first W positions: (B, H, N, R).

    The noise of each next W = NOISE places is that of the next realization, and so are the codes.
    """
    length, width, realizations = x.shape[-2], codes.shape[1], codes.shape[-1]
    x = kernels.chunks(x, length, size=width)
    encoded = torch.einsum("bhcwd,hwdr->bhcwr", x, codes[:, : x.shape[3]])
    turn = torch.arange(x.shape[2], device=x.device)[:, None, None]
    source = (torch.arange(realizations, device=x.device) + turn) % realizations
    return kernels.joined(encoded.gather(-1, source.expand_as(encoded)), length)
