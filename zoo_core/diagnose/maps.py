"""The attention map of every layer, own or effective, whatever the mechanism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core.attention import Context
from zoo_core.diagnose.watching import Call, Scratch, chosen_sites, supports_of, watched
from zoo_core.errors import OptionError, UnsupportedCall
from zoo_core.hosts import unwrap
from zoo_core.plan import Layers


@dataclass(frozen=True, eq=False)
class Labels:
    """What the rows and columns of a map are.

    keys, queries: bool (B, S) and (B, L), True = real token, False = padding.
    prefix: bool (B, S), the leading real tokens that stand for no word and no patch (CLS).
    grid: (rows, cols) of the keys after the prefix of an image, or None.
    mechanism: what made the map.
    """

    keys: Tensor
    queries: Tensor
    prefix: Tensor
    grid: tuple[int, ...] | None
    mechanism: str

    def words(self, sample: int = 0) -> list[str]:
        """What each key of a sample is: "prefix", "token" or "padding"."""
        pairs = zip(self.keys[sample].tolist(), self.prefix[sample].tolist(), strict=True)
        return ["prefix" if first else "token" if real else "padding" for real, first in pairs]


class AttentionMaps(dict[str, Tensor]):
    """Site path -> map (B, heads, L, S); `labels` says by the same paths what the tokens are.

    A layer that its host runs several times has a number after its path: `path#0`, `path#1`.
    """

    def __init__(self, maps: Mapping[str, Tensor], labels: Mapping[str, Labels]) -> None:
        super().__init__(maps)
        self.labels = dict(labels)


@torch.no_grad()
def attention_map(
    model: Any, inputs: Any, layers: Layers | None = None, heads: Iterable[int] | None = None
) -> AttentionMaps:
    """Maps of the chosen layers for one batch: site path -> (B, heads, L, S).

    inputs: keyword arguments as a mapping (a tokenizer's output), or one tensor (images).
    layers: 3, "0-3", "self", ... as in `zoo.build`; all by default. heads: all by default.

    A mechanism with an own map gives that. One that is linear in v gives its effective map, found
    by pushing unit values through it. Both fulfil map @ v == output in eval mode. A mechanism that
    is neither raises UnsupportedCall before anything runs.
    """
    host = unwrap(model)
    sites = chosen_sites(host, layers)
    with watched(host, sites) as watch:
        for site in sites:
            if not has_map(watch.modules[site.path]):
                why = undefined(watch.names[site.path])
                raise UnsupportedCall(f"{site.path}: {why}; leave this layer out with layers=")
        model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        watch.stop()
        names = numbered(watch.calls)
        wanted = None if heads is None else _checked(list(heads), watch.calls)
        maps = {name: map_of(call) for name, call in names.items()}
    chosen = {name: one if wanted is None else one[:, wanted] for name, one in maps.items()}
    return AttentionMaps(chosen, {name: labels_of(call) for name, call in names.items()})


def has_map(module: nn.Module) -> bool:
    """Whether a mechanism has an attention map, own or effective."""
    supports = supports_of(module)
    return supports.weights or supports.linear_in_v


def undefined(mechanism: str) -> str:
    """Why there is no map, in words."""
    return f"{mechanism} has no attention map, its output is not linear in the values"


def map_of(call: Call) -> Tensor:
    """The map (B, H, L, S) of one call, see `find_map`; what is carried stays as it was."""
    ctx = call.ctx if call.ctx.carry is None else replace(call.ctx, carry=Scratch(call.ctx.carry))
    return find_map(call.module, call.q, call.k, call.v, ctx)


def find_map(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
    """The map (B, H, L, S) of a mechanism: its own, else the effective one. See `has_map`."""
    if supports_of(module).weights:
        own: Tensor = module.attention_map(q, k, ctx)  # type: ignore[operator]
        return own
    return effective_map(module, q, k, v, ctx)


def labels_of(call: Call) -> Labels:
    """What the tokens of one call are."""
    return Labels(call.real_keys, call.real_queries, call.prefix_keys, call.grid, call.mechanism)


def effective_map(
    module: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, ctx: Context
) -> Tensor:
    """Columns of the map (B, H, L, S), v.shape[-1] at a time: the outputs for unit values.

    Besides the map itself it takes no more memory than one forward.
    """
    keys, width = v.shape[-2], v.shape[-1]
    found = q.new_empty(*q.shape[:-1], keys)
    for start in range(0, keys, width):
        unit = torch.eye(keys, width, dtype=v.dtype, device=v.device).roll(start, 0)
        # Rolled past the last key, the unit rows of absent keys would wrap to the first ones.
        unit[:, keys - start :] = 0
        columns = module(q, k, unit.expand_as(v).contiguous(), ctx)
        found[..., start : start + width] = columns[..., : keys - start]
    return found


def numbered(calls: Iterable[Call]) -> dict[str, Call]:
    """The calls by site path; of a layer that ran several times, by path and number."""
    by_path: dict[str, list[Call]] = {}
    for call in calls:
        by_path.setdefault(call.site.path, []).append(call)
    names: dict[str, Call] = {}
    for path, found in by_path.items():
        several = len(found) > 1
        names |= {f"{path}#{n}" if several else path: one for n, one in enumerate(found)}
    return names


def _checked(heads: list[int], calls: Iterable[Call]) -> list[int]:
    count = min(call.q.shape[1] for call in calls)
    for head in heads:
        if not 0 <= head < count:
            raise OptionError(f"head {head} is out of range; this model has heads 0-{count - 1}")
    return heads
