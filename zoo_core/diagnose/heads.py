"""What each attention head does: entropy, rank, reach, agreement, and what may break."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from zoo_core.attention import Context
from zoo_core.diagnose.maps import has_map, map_of, undefined
from zoo_core.diagnose.rank import effective_rank
from zoo_core.diagnose.reports import AttentionScore, HeadScore
from zoo_core.diagnose.watching import Call
from zoo_core.nn import masks, softmax
from zoo_core.nn.precision import sum_dtype

_ONE_KEY = 0.99
_EXACT = "donot_use_mm_for_euclid_dist"
_NAMES = tuple(spec.name for spec in fields(HeadScore))


@dataclass(eq=False)
class Tally:
    """Scores of one layer over the samples seen so far, (B, H) for each batch by name."""

    path: str
    mechanism: str
    without_map: str | None = None
    values: dict[str, list[Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, call: Call, separators: Tensor | None, *, half: bool) -> None:
        """Score one call. separators: bool (B, S). half: also run the mechanism in fp16."""
        if not has_map(call.module):
            self.without_map = undefined(call.mechanism)
        for name, value in scores(call, separators, half=half).items():
            self.values.setdefault(name, []).append(value.float().cpu())

    def score(self) -> AttentionScore:
        """The averages over the samples that have a number."""
        columns = {name: self._mean(name) for name in _NAMES}
        heads = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
        found = tuple(HeadScore(**head) for head in heads)
        return AttentionScore(self.path, self.mechanism, found, self.without_map)

    def _mean(self, name: str) -> list[float]:
        joined = torch.cat(self.values[name])
        # What matters of these is the worst sample.
        found = joined.amax(0) if name == "largest" else joined.nanmean(0)
        return [float(value) for value in found]


def scores(call: Call, separators: Tensor | None, *, half: bool = False) -> dict[str, Tensor]:
    """Every score of `HeadScore` for each sample and head, (B, H); NaN where undefined."""
    nothing = torch.full(call.q.shape[:2], torch.nan, device=call.q.device)
    found = dict.fromkeys(_NAMES, nothing)
    found |= _of_output(call)
    if half:
        found["fp16_broken"] = _broken_in_half(call)
    if has_map(call.module):
        found |= _of_map(call, separators)
    return found


def _of_output(call: Call) -> dict[str, Tensor]:
    """What needs no map: error, size, and numbers out of range."""
    real = call.real_queries[:, None, :, None]
    # Queries and keys of padding mean nothing, and may hold anything.
    q = _wide(call.q).masked_fill(~real, 0)
    k, v = (masks.hide(_wide(x), call.ctx.key_padding) for x in (call.k, call.v))
    out = _wide(call.out).masked_fill(~real, 0)
    exact = softmax.weights(q, k, call.ctx, scale=call.site.scale) @ v
    exact = exact.masked_fill(~real, 0)
    size = out.flatten(2).norm(dim=-1)
    products = (q @ k.mT).abs().flatten(2).amax(-1)
    largest = [products, *(x.abs().flatten(2).amax(-1) for x in (q, k, v, out))]
    broken = ~call.out.isfinite() & real
    return {
        "error": (out - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1),
        "share": size / size.mean(1, keepdim=True).clamp(min=1e-30),
        "largest": torch.stack(largest).amax(0),
        "broken": broken.flatten(2).sum(-1) / (real.sum((1, 2, 3)) * out.shape[-1])[:, None],
    }


def _broken_in_half(call: Call) -> Tensor:
    """Share of numbers that are not finite when a copy of the mechanism runs in fp16, (B, H).

    All of them where it does not run at all.
    """
    if call.ctx.carry is not None:
        # What earlier layers handed on is in the model's own precision.
        return torch.full(call.q.shape[:2], torch.nan, device=call.q.device)
    module = copy.deepcopy(call.module).half().eval()
    try:
        out = module(call.q.half(), call.k.half(), call.v.half(), _half(call.ctx))
    except Exception:  # Whatever a library makes of a dtype it has no kernel for.
        return torch.ones(call.q.shape[:2], device=call.q.device)
    real = call.real_queries[:, None, :, None]
    broken = ~out.isfinite() & real
    share: Tensor = broken.flatten(2).sum(-1) / (real.sum((1, 2, 3)) * out.shape[-1])[:, None]
    return share


def _half(ctx: Context) -> Context:
    projections = ctx.projections and {
        name: (weight.half(), None if bias is None else bias.half())
        for name, (weight, bias) in ctx.projections.items()
    }
    return replace(
        ctx,
        bias=None if ctx.bias is None else ctx.bias.half(),
        hidden=None if ctx.hidden is None else ctx.hidden.half(),
        projections=projections,
    )


def _of_map(call: Call, separators: Tensor | None) -> dict[str, Tensor]:
    weights = _wide(map_of(call))
    real = call.real_queries
    sizes = weights.abs().masked_fill(~real[:, None, :, None], 0)
    total = sizes.sum(-1, keepdim=True)
    shares = sizes / total.clamp(min=1e-30)
    # Rows that see nothing (padding, or all keys hidden) are left out of every average.
    rows = (total[..., 0] > 0) & real[:, None]
    entropy = torch.special.entr(shares).sum(-1)
    visible = _visible_keys(call)
    found = {
        "entropy": _mean(entropy, rows),
        "uniformity": _mean(entropy / visible.log().clamp(min=1e-12), rows & (visible > 1)),
        "effective_rank": _effective_rank(weights.masked_fill(~real[:, None, :, None], 0)),
        "prefix": _mean(_mass(shares, call.prefix_keys), rows),
        "saturated": _mean((shares.amax(-1) > _ONE_KEY).to(shares), rows),
        "agreement": _agreement(shares, rows),
    }
    if separators is not None and separators.shape == call.real_keys.shape:
        found["separators"] = _mean(_mass(shares, separators & call.real_keys), rows)
    if call.site.kind == "self" and shares.shape[-1] == shares.shape[-2]:
        found["distance"] = _distance(call, shares, rows)
    return found


def _visible_keys(call: Call) -> Tensor:
    """How many keys each query may see, (B, 1, L) or (B, 1, 1)."""
    mask = masks.scores_mask(call.ctx, call.q.shape[-2], call.k.shape[-2], call.k.device)
    if mask is None:
        mask = call.real_keys[:, None, None]
    return mask.expand(len(call.k), -1, -1, -1).sum(-1).to(_wide(call.q).dtype)


def _distance(call: Call, shares: Tensor, rows: Tensor) -> Tensor:
    """Mean distance between a query and what it looks at; the prefix lies nowhere."""
    placed = call.real_keys & ~call.prefix_keys
    distances = _distances(call)
    seen = shares * placed[:, None, None]
    total = seen.sum(-1)
    mean = (seen * distances[:, None]).sum(-1) / total.clamp(min=1e-30)
    return _mean(mean, rows & placed[:, None] & (total > 0))


def _distances(call: Call) -> Tensor:
    """Between tokens, (B, N, N): of ranks among the real tokens, or of places on the grid."""
    grid = call.grid
    if grid is None:
        place = masks.rank(call.real_keys)[..., None].to(_wide(call.q).dtype)
        return torch.cdist(place, place, compute_mode=_EXACT)
    axes = [torch.arange(size, device=call.q.device) for size in grid]
    cells = torch.cartesian_prod(*axes).to(_wide(call.q).dtype).view(-1, len(grid))
    place = torch.cat([cells.new_zeros(call.ctx.prefix, len(grid)), cells])
    return torch.cdist(place, place, compute_mode=_EXACT)[None]


def _effective_rank(weights: Tensor) -> Tensor:
    if not bool(weights.isfinite().all()):
        return torch.full(weights.shape[:2], torch.nan, device=weights.device)
    return effective_rank(torch.linalg.svdvals(weights))


def _agreement(shares: Tensor, rows: Tensor) -> Tensor:
    """Overlap sum_j min(p_j, p'_j) of each head's rows with the other heads', averaged."""
    heads = shares.shape[1]
    if heads == 1:
        return torch.full(shares.shape[:2], torch.nan, device=shares.device)
    found = []
    for head in range(heads):  # one head at a time: all pairs at once would be H times the maps
        own = shares[:, head : head + 1]
        overlap = torch.minimum(own, shares).sum(-1)
        mean = _mean(overlap, rows & rows[:, head : head + 1])
        found.append((mean.nansum(1) - mean[:, head].nan_to_num()) / (heads - 1))
    return torch.stack(found, 1)


def _mass(shares: Tensor, keys: Tensor) -> Tensor:
    return (shares * keys[:, None, None]).sum(-1)


def _mean(values: Tensor, rows: Tensor) -> Tensor:
    """The mean over the queries in `rows`, (B, H); NaN without any."""
    rows = rows.expand_as(values)
    return values.masked_fill(~rows, 0).sum(-1) / rows.sum(-1)


def _wide(x: Tensor) -> Tensor:
    return x.to(sum_dtype(x))


def separators_in(inputs: Mapping[str, Tensor], ids: Iterable[int]) -> Tensor | None:
    """Bool (B, S): which tokens are separators; None for inputs without token ids."""
    tokens, wanted = inputs.get("input_ids"), list(ids)
    if tokens is None or not wanted:
        return None
    return torch.isin(tokens, torch.tensor(wanted, device=tokens.device))
