"""The attention maps of one sample, layer by layer, made small enough to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from zoo_core.diagnose.flow import cls_map
from zoo_core.diagnose.maps import AttentionMaps, Labels, attention_map
from zoo_core.diagnose.pictures import grouped
from zoo_core.diagnose.watching import chosen_sites, mechanism_names
from zoo_core.errors import UnsupportedCall
from zoo_core.fidelity.observing import is_timm
from zoo_core.report.records import Cells, LayerMap

_NEAR = 2


def layer_maps(
    host: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    groups: int = 64,
    progress: Callable[[str], None] | None = None,
) -> tuple[LayerMap, ...]:
    """The map of every attention layer, for the first sample of a batch.

    One layer at a time, so that no more than one full map is in memory. Tokens are joined into at
    most `groups` groups. A layer whose mechanism has no map says so in its own words.
    """
    inputs = batch["pixel_values"] if is_timm(host) else batch
    names = mechanism_names(host)
    found: list[LayerMap] = []
    for site in chosen_sites(host, None):
        if progress:
            progress(f"attention map of {site.path}")
        try:
            maps = attention_map(host, inputs, layers=f"{site.kind}:{site.layer}")
        except UnsupportedCall as error:
            found.append(LayerMap(site.path, names[site.path], undefined=str(error)))
        else:
            found += [_layer_map(path, maps, groups) for path in maps]
    return tuple(found)


def _layer_map(path: str, maps: AttentionMaps, groups: int) -> LayerMap:
    labels = maps.labels[path]
    queries, keys = labels.queries[0], labels.keys[0]
    mean = maps[path][0].float().mean(0)
    shown = mean[queries][:, keys].cpu()
    return LayerMap(
        path=path,
        mechanism=labels.mechanism,
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
