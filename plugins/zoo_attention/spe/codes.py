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

from zoo_core import Site
from zoo_core.nn import kernels
from zoo_core.nn.parts import spans, streams

#: Positions for which convolutional codes draw noise; beyond them it is taken from elsewhere.
NOISE = 128

#: Entries of codes, or of one factor of them, that are worked on at once without gradients.
ENTRIES = 1 << 18
#: Tokens that are worth a product of their own.
SHORTEST = 16

Waves = tuple[Tensor, Tensor]  # for cosines and for sines


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
        self, shape: Sequence[int], amplitude: Tensor, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode q, k (B, H, N, D) by codes of the cells of `shape`, times amplitude (H, D)."""
        dtype, device = amplitude.dtype, amplitude.device
        extents = torch.tensor(self.extents, dtype=dtype, device=device)
        turns = (2 / extents * self.frequencies.to(dtype)).tanh() * math.pi
        axes = [torch.arange(size, dtype=dtype, device=device) for size in shape]
        cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
        noises = self._noises(amplitude)
        encoded = []
        for part in self._parts(q):
            angles = torch.einsum("na,hdka->hnkd", cells[part], turns)
            waves = angles.cos(), angles.sin()
            pairs = zip((q, k), noises, strict=True)
            encoded.append([_encode(x[..., part, :], waves, noise) for x, noise in pairs])
        q, k = (torch.cat(parts, -2) for parts in zip(*encoded, strict=True))
        return q, k

    def _noises(self, amplitude: Tensor) -> tuple[Waves, Waves]:
        """What cosines and sines are multiplied by in codes of queries and keys, (H, K, D, R).

        cos(x + offset) and sin(x + offset) are cos(x) and sin(x) turned by the offset, and so is
        the noise in their place: both kinds of codes share their waves.
        """
        dtype = amplitude.dtype
        gains = F.softplus(self.gains.to(dtype)) / math.sqrt(self.gains.shape[-1])
        gains = (gains * amplitude[..., None]).mT[..., None]
        offsets = self.offsets.to(dtype).mT[..., None]
        noises = self.noise.to(dtype).transpose(0, 1).chunk(2)
        # Contiguous, or every product of them would copy them again.
        cosines, sines = ((gains * noise).contiguous() for noise in noises)
        turned = (
            offsets.cos() * cosines + offsets.sin() * sines,
            offsets.cos() * sines - offsets.sin() * cosines,
        )
        return (turned[0].contiguous(), turned[1].contiguous()), (cosines, sines)

    def _parts(self, x: Tensor) -> list[slice]:
        length = max(1, x.shape[-2])  # one part even of nothing: all tokens may be in the prefix
        if not streams(x):
            return [slice(0, length)]
        row = self.gains.shape[0] * min(
            x.shape[0] * self.gains[0].numel(), self.noise[:, 0].numel()
        )
        return spans(length, x, most=max(SHORTEST, ENTRIES // row))


def _encode(x: Tensor, waves: Waves, noise: Waves) -> Tensor:
    """sum_kd x_nd waves_nkd noise_kdr over cosines and sines: x (B, H, N, D) to (B, H, N, R).

    waves (H, N, K, D) and noise (H, K, D, R) each. By the order of products that takes less room:
    codes for the whole batch, or none at all.
    """
    if x.shape[0] * 2 * noise[0].shape[1] > noise[0].shape[-1]:
        codes = torch.cat(waves, 2).permute(0, 3, 1, 2) @ torch.cat(noise, 1).transpose(1, 2)
        return (x.permute(1, 2, 0, 3) @ codes.transpose(1, 2)).permute(2, 0, 1, 3)
    x = x[..., None, :]
    pairs = zip(waves, noise, strict=True)
    cosines, sines = ((x * wave).flatten(-2) @ z.flatten(1, 2) for wave, z in pairs)
    return cosines + sines


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
        self, shape: Sequence[int], amplitude: Tensor, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Encode q, k (B, H, N, D) by codes of the cells of `shape`, times amplitude (H, D)."""
        if len(shape) == 1 and shape[0] > NOISE:
            codes = self._codes([NOISE], amplitude)
            return _encode_in_turns(q, codes[0]), _encode_in_turns(k, codes[1])
        codes = self._codes(shape, amplitude)[:, :, : q.shape[-2]]
        q, k = (
            torch.einsum("bhnd,hndr->bhnr", x, code) for x, code in zip((q, k), codes, strict=True)
        )
        return q, k

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
