"""Maps as pictures: token to token, and over the image. PNG and SVG, colours all can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.diagnose.maps import AttentionMaps, Labels
from zoo_core.errors import OptionError
from zoo_core.targets import check_picture, figure_class, save_figure

#: More tokens than this are joined into groups: nobody reads 4096 ticks.
GROUPS = 64
#: As many tokens have their words beside the map.
WORDS = 40
#: The most panels of one picture.
PANELS = 48
_COLUMNS = 4
_SIGNED, _UNSIGNED = "PuOr", "cividis"


def draw_maps(
    maps: AttentionMaps,
    path: str | Path,
    *,
    sample: int = 0,
    tokens: Sequence[str] | None = None,
    heads: Literal["mean", "all"] = "mean",
    title: str = "",
) -> list[Path]:
    """Draw the maps of one sample, a panel for each layer or each head; gives the files written.

    path: with a suffix (.png, .svg, .pdf) one file; without one both .png and .svg.
    tokens: the words of the sample, its padding included. Padding is cut off; a white line ends
    the prefix; more than 64 tokens are joined into groups.
    Raises ZooError where the files cannot be written, before anything is drawn.
    """
    files = check_picture(path)
    panels = _panels(maps, sample, heads)
    if not 0 < len(panels) <= PANELS:
        raise OptionError(
            f"{len(panels)} maps do not fit into one picture of 1 to {PANELS}; take maps with "
            "layers= or heads="
        )
    figure = _figure(len(panels))
    places = list(figure.subplots(*_layout(len(panels)), squeeze=False).flat)
    for axes, (name, weights, labels) in zip(places, panels, strict=False):
        _draw_map(axes, weights, labels, sample, tokens)
        axes.set_title(name, fontsize=8)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(title or "who looks (rows) at whom (columns)", fontsize=10)
    return [save_figure(figure, file) for file in files]


def draw_on_image(
    heat: Tensor, path: str | Path, *, image: Tensor | None = None, title: str = ""
) -> list[Path]:
    """Draw a map over the image, (rows, cols), beside the image (C, H, W) where that is given.

    Gives the files written; see `draw_maps`.
    """
    files = check_picture(path)
    if heat.dim() != 2:
        raise OptionError(f"a map over an image is (rows, cols), not {tuple(heat.shape)}")
    figure = _figure(1 if image is None else 2)
    places = figure.subplots(1, 1 if image is None else 2, squeeze=False)[0]
    last = places[-1]
    shown = heat.detach().float().cpu()
    if image is not None:
        picture = _viewable(image)
        places[0].imshow(picture)
        last.imshow(picture.mean(-1), cmap="gray")  # colours below would mix with the map's
        size = picture.shape[:2]
        shown = F.interpolate(shown[None, None], size=size, mode="nearest")[0, 0]
    drawn = last.imshow(shown.numpy(), cmap=_UNSIGNED, alpha=None if image is None else 0.7)
    figure.colorbar(drawn, ax=last, shrink=0.8, label="weight")
    for axes in places:
        axes.set_axis_off()
    figure.suptitle(title or "what the class token sees", fontsize=10)
    return [save_figure(figure, file) for file in files]


def grouped(weights: Tensor, groups: int = GROUPS) -> Tensor:
    """A map (L, S) with at most `groups` rows and columns, each the mean of a run of tokens."""
    rows, columns = (_membership(tokens, groups).to(weights) for tokens in weights.shape)
    return rows @ weights @ columns.mT


def _figure(panels: int) -> Any:
    rows, columns = _layout(panels)
    size = 6.0 if panels == 1 else 3.4
    return figure_class()(figsize=(size * columns, size * rows + 0.4), layout="constrained")


def _layout(panels: int) -> tuple[int, int]:
    columns = min(panels, _COLUMNS)
    return -(-panels // columns), columns


def _panels(maps: AttentionMaps, sample: int, heads: str) -> list[tuple[str, Tensor, Labels]]:
    if heads not in ("mean", "all"):
        raise OptionError(f"heads={heads!r} must be 'mean' or 'all'")
    panels = []
    for path, weights in maps.items():
        if not 0 <= sample < len(weights):
            raise OptionError(f"sample {sample} is out of range; the batch has {len(weights)}")
        labels = maps.labels[path]
        if heads == "mean":
            panels.append((path, weights[sample].mean(0), labels))
        else:
            panels += [(f"{path}, head {n}", one, labels) for n, one in enumerate(weights[sample])]
    return panels


def _draw_map(
    axes: Any, weights: Tensor, labels: Labels, sample: int, tokens: Sequence[str] | None
) -> None:
    queries, keys = labels.queries[sample].cpu(), labels.keys[sample].cpu()
    shown = weights.detach().float().cpu()[queries][:, keys]
    small = grouped(shown)
    lowest = float(small.min()) if small.numel() else 0.0
    peak = float(small.abs().max()) if small.numel() else 1.0
    signed = lowest < -1e-3 * peak
    drawn = axes.imshow(
        small.numpy(),
        cmap=_SIGNED if signed else _UNSIGNED,
        vmin=-peak if signed else 0,
        vmax=peak or 1,
        aspect="auto",
        interpolation="nearest",
        # Ticks count tokens, whether they are joined into groups or not.
        extent=(-0.5, shown.shape[-1] - 0.5, shown.shape[-2] - 0.5, -0.5),
    )
    axes.get_figure().colorbar(drawn, ax=axes, shrink=0.8).ax.tick_params(labelsize=6)
    prefix = int(labels.prefix[sample].sum())
    if prefix and shown.shape == small.shape:
        axes.axvline(prefix - 0.5, color="white", linewidth=0.8)
    if tokens is not None and shown.shape[-1] <= WORDS:
        _name_tokens(axes, tokens, queries, keys)
    elif shown.shape != small.shape:
        axes.set_xlabel(f"keys, means of {small.shape[-1]} groups", fontsize=7)
        axes.set_ylabel(f"queries, means of {small.shape[-2]} groups", fontsize=7)
    axes.tick_params(labelsize=6)


def _name_tokens(axes: Any, tokens: Sequence[str], queries: Tensor, keys: Tensor) -> None:
    if len(tokens) != len(keys):
        raise OptionError(f"{len(tokens)} words for {len(keys)} tokens; padding has words too")
    columns = [word for word, real in zip(tokens, keys.tolist(), strict=True) if real]
    axes.set_xticks(range(len(columns)), columns, rotation=90)
    if len(queries) == len(keys):
        axes.set_yticks(range(len(columns)), columns)


def _membership(tokens: int, groups: int) -> Tensor:
    """The part of each token in each group, (groups, tokens): equal runs, the last one shorter."""
    size = max(1, -(-tokens // groups))
    member = F.one_hot(torch.arange(tokens) // size, -(-tokens // size)).mT.float()
    return member / member.sum(-1, keepdim=True)


def _viewable(image: Tensor) -> Any:
    """An image of any scale as (H, W, 3) between 0 and 1."""
    picture = image.detach().float().cpu()
    if picture.dim() != 3 or picture.shape[0] not in (1, 3):
        raise OptionError(f"an image is (1 or 3, H, W), not {tuple(image.shape)}")
    low, high = picture.min(), picture.max()
    scaled = (picture - low) / (high - low).clamp(min=1e-12)
    return scaled.expand(3, -1, -1).permute(1, 2, 0).numpy()
