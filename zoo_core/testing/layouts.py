"""Where padding lies and what it holds: a call with padding made from one without, and batches."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo_core.testing.cases import Call, Setting

JUNK = ("zeros", "random", "50x larger", "NaN", "infinity")


def layouts(real: int, *, padding: int = 7) -> dict[str, Tensor]:
    """Masks (N,) with `real` True values, by where the padding is: left, right, inside, all over.

    Two amounts on the right, because nothing may depend on the amount.
    """
    yes, no = torch.ones(real, dtype=torch.bool), torch.zeros(padding, dtype=torch.bool)
    half = real // 2
    mixed = torch.cat([no[:2], yes, no[:1]]).roll(half)
    scattered = torch.cat([yes, no])[_shuffled(real + padding)]
    return {
        "one pad on the right": torch.cat([yes, no[:1]]),
        f"{padding} pads on the right": torch.cat([yes, no]),
        f"{padding} pads on the left": torch.cat([no, yes]),
        "3 pads inside": mixed if half else torch.cat([no[:2], yes, no[:1]]),
        f"{padding} pads scattered": scattered,
    }


def spread(call: Call, mask: Tensor, where: str, *, fill: str = "random") -> Call:
    """Put the tokens of `call` on the True places of mask (N,), junk on the others.

    where: the padding in words. fill: what q, k, v (hidden, times) hold at the pads, one of JUNK.
    A cross call gets its keys padded.
    """
    places = mask.nonzero().squeeze(1)
    key_padding = mask[None].expand(call.k.shape[0], -1)

    def place(x: Tensor, dim: int) -> Tensor:
        shape = list(x.shape)
        shape[dim] = len(mask)
        return _junk(shape, fill, x.dtype).index_copy(dim, places, x)

    ctx, note = call.ctx, f"{where} holding {fill}"
    bias = ctx.bias
    if bias is not None:
        bias = _blank_bias(bias, places, len(mask), queries=not call.cross)
    changes = {"k": place(call.k, -2), "v": place(call.v, -2), "bias": bias}
    if not call.cross:
        changes["q"] = place(call.q, -2)
        changes["hidden"] = None if ctx.hidden is None else place(ctx.hidden, 1)
        changes["times"] = None if ctx.times is None else place(ctx.times, 1)
    return call.but(note, key_padding=key_padding, **changes)


def padded_and_not(setting: Setting, length: int) -> list[Call]:
    """A call without padding and, where the mechanism masks, one of the same length with it."""
    calls = [setting.call(length)]
    if setting.mechanism.supports.key_padding:
        where = "7 pads on the left"
        calls.append(spread(setting.call(length - 7), layouts(length - 7)[where], where))
    return calls


def concatenate(calls: list[Call], note: str) -> Call:
    """One batch of calls with the same shapes."""
    first = calls[0]
    padded = any(call.ctx.key_padding is not None for call in calls)
    masks = [_mask(call) for call in calls]
    changes = {name: torch.cat([getattr(c, name) for c in calls]) for name in ("q", "k", "v")}
    for name in ("hidden", "times"):
        if getattr(first.ctx, name) is not None:
            changes[name] = torch.cat([getattr(call.ctx, name) for call in calls])
    return first.but(note, key_padding=torch.cat(masks) if padded else None, **changes)


def _mask(call: Call) -> Tensor:
    """The mask (B, S) of a call, True everywhere where it has none."""
    if call.ctx.key_padding is not None:
        return call.ctx.key_padding
    return torch.ones(call.k.shape[0], call.k.shape[-2], dtype=torch.bool)


def _junk(shape: list[int], fill: str, dtype: torch.dtype) -> Tensor:
    if fill in ("random", "50x larger"):
        source = torch.Generator().manual_seed(99)
        factor = 1.0 if fill == "random" else 50.0
        return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype) * factor
    value = {"zeros": 0.0, "NaN": torch.nan, "infinity": torch.inf}[fill]
    return torch.full(shape, value, dtype=dtype)


def _blank_bias(bias: Tensor, places: Tensor, length: int, *, queries: bool) -> Tensor:
    """Spread a (..., L, S) bias over the padded keys, and over the padded queries too."""
    for dim in (-1, -2) if queries else (-1,):
        shape = list(bias.shape)
        shape[dim] = length
        bias = _junk(shape, "random", bias.dtype).index_copy(dim, places, bias)
    return bias


def _shuffled(count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(3))
