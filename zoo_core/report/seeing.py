"""The attention maps of one sample, layer by layer, made small enough to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from zoo_core.diagnose.flow import cls_map, rolled
from zoo_core.diagnose.maps import Labels, attention_map, has_map, undefined
from zoo_core.diagnose.pictures import grouped
from zoo_core.diagnose.watching import chosen_sites, mechanism_names
from zoo_core.fidelity.observing import is_timm
from zoo_core.hosts import adapter_of
from zoo_core.report.records import Cells, LayerMap, Maps

_NEAR = 2


def see(
    host: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    groups: int = 64,
    progress: Callable[[str], None] | None = None,
) -> Maps:
    """The map of every attention layer, and their rollout, for the first sample of a batch.

    One layer at a time, so that no more than one full map is in memory. Tokens are joined into at
    most `groups` groups. A layer whose mechanism has no map says so in its own words.
    """
    inputs = batch["pixel_values"] if is_timm(host) else batch
    running = adapter_of(host)[1].installed(host)
    names = mechanism_names(host)
    flow = _Flow(groups)
    found: list[LayerMap] = []
    for site in chosen_sites(host, None):
        if progress:
            progress(f"attention map of {site.path} ({names[site.path]})")
        module = running[site.path]
        if module is not None and not has_map(module):
            why = undefined(names[site.path])
            found.append(LayerMap(site.path, names[site.path], undefined=why))
            flow.stop()
            continue
        maps = attention_map(host, inputs, layers=f"{site.kind}:{site.layer}")
        for path, weights in maps.items():
            labels = maps.labels[path]
            mean = weights[0].float().mean(0)
            found.append(_layer_map(path, labels.mechanism, mean, labels, groups))
            flow.add(weights, labels)
    return Maps(tuple(found), flow.rollout())


class _Flow:
    """The rollout of the layers seen so far, of the first sample."""

    def __init__(self, groups: int) -> None:
        self.groups, self.whole = groups, True
        self.total: Tensor | None = None
        self.labels: Labels | None = None

    def stop(self) -> None:
        """Give up: a layer has no map, and what flows through it is not known."""
        self.whole = False

    def add(self, weights: Tensor, labels: Labels) -> None:
        """Take the next layer's map (B, H, L, S), which ends it unless it is square and fits."""
        known = weights.shape[-1] if self.total is None else self.total.shape[-1]
        self.whole = self.whole and weights.shape[-2:] == (known, known)
        if self.whole:
            self.total, self.labels = rolled(self.total, weights[:1].float()), labels

    def rollout(self) -> LayerMap | None:
        """The rollout as a map, None where it could not be followed."""
        if not self.whole or self.total is None or self.labels is None:
            return None
        return _layer_map("rollout", "all layers", self.total[0], self.labels, self.groups)


def _layer_map(path: str, mechanism: str, mean: Tensor, labels: Labels, groups: int) -> LayerMap:
    queries, keys = labels.queries[0], labels.keys[0]
    shown = mean[queries][:, keys].cpu()
    return LayerMap(
        path=path,
        mechanism=mechanism,
        queries=shown.shape[0],
        keys=shown.shape[1],
        cells=_cells(grouped(shown, groups)),
        near=_near(shown),
        prefix=_share(shown, labels.prefix[0][keys].cpu()),
        over_image=_over_image(mean, labels),
    )


def _near(weights: Tensor) -> float:
    """Share of the weight within a few tokens; NaN where queries and keys are not the same."""
    if weights.shape[0] != weights.shape[1]:
        return math.nan
    places = torch.arange(len(weights))
    return _share(weights, (places[:, None] - places[None]).abs() <= _NEAR)


def _share(weights: Tensor, chosen: Tensor) -> float:
    sizes = weights.abs()
    return float((sizes * chosen).sum() / sizes.sum().clamp(min=1e-30))


def _over_image(weights: Tensor, labels: Labels) -> Cells | None:
    """What the first prefix token sees of an image; None for text, and for images without one."""
    if labels.grid is None or len(labels.grid) != 2 or not bool(labels.prefix[0].any()):
        return None
    return _cells(cls_map(weights[None], labels)[0].cpu())


def _cells(weights: Tensor) -> Cells:
    return tuple(tuple(row) for row in weights.tolist())
