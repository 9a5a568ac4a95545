"""What attention of a given width can express: planted sparse patterns, and who finds them.

For any pattern A with few nonzeros in each row and column, fixed projections and an input X with
softmax(X W_Q (X W_K)^T) close to A, at a width that grows with the logarithm of the length:

    X = [B G, G],  W_Q = [I; 0],  W_K = [0; I],  G_ij ~ N(0, 1/d),  so that E[q k^T] = B

where B holds the logarithms of A, shifted so that its zeros keep a chosen share of the weight.

Likhosherstov, Choromanski, Weller, "On the Expressive Power of Self-Attention Matrices", 2021,
arXiv:2106.03764 (AAAI 2023: "On the Expressive Flexibility of Self-Attention Matrices").
Deviations: the details are rebuilt from the abstract; the projections come transposed, as the
weights of a Linear. Of the paper's own points, its smallest widths by length, only the abstract's
O(log L) was at hand; the widths that tests compare with (19 to 101 for one key among 32 to 512, 35
to 180 for two) come from another program after the same construction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo_core import registry
from zoo_core.attention import Context, Site
from zoo_core.diagnose.maps import effective_map, find_map, has_map
from zoo_core.errors import OptionError, ZooError
from zoo_core.patching import build_modules
from zoo_core.plan import Step

#: Leading widths of the search, and its step.
_NARROWEST, _GROWTH = 4, 1.15
_WIDEST = 4096
#: How far values are moved to see what follows.
_MOVE = 1e-3
#: Families whose mechanisms look at some keys only.
_CHOOSING = frozenset({"sparse", "clustering", "hashing"})


@dataclass(frozen=True, eq=False)
class SparsePattern:
    """Inputs under which softmax attention without scaling shows a given pattern.

    target: (L, L), rows that sum to 1. scores: (L, L), the wanted products B.
    x: (L, 2 d), the input. query, key: (d, 2 d), fixed weights that know nothing of the pattern.
    """

    target: Tensor
    scores: Tensor
    x: Tensor
    query: Tensor
    key: Tensor

    @property
    def q(self) -> Tensor:
        """The queries (L, d)."""
        return self.x @ self.query.mT

    @property
    def k(self) -> Tensor:
        """The keys (L, d)."""
        return self.x @ self.key.mT

    @property
    def weights(self) -> Tensor:
        """What softmax attention makes of them, (L, L)."""
        return (self.q @ self.k.mT).softmax(-1)

    @property
    def error(self) -> float:
        """The largest error of a score, in nats: every ratio of weights is off by e^(2 error)."""
        return float((self.q @ self.k.mT - self.scores).abs().max())

    def recall(self, weights: Tensor) -> float:
        """How many of the keys that matter are a map's (L, L) largest of its row, on average."""
        wanted = self.target > 0
        counts = wanted.sum(-1)
        sizes = weights.abs()
        order = sizes.argsort(stable=True, dim=-1, descending=True)
        place = torch.arange(order.shape[-1], device=order.device)
        chosen = torch.zeros_like(wanted).scatter(-1, order, place < counts[:, None])
        # A key of weight 0 is not found, whatever its place among the others.
        found = (chosen & wanted & (sizes > 0)).sum(-1)
        return float((found / counts.clamp(min=1))[counts > 0].double().mean())


@dataclass(frozen=True)
class KeyRecall:
    """How well a mechanism finds the keys that matter; `refused` says why it has no number."""

    mechanism: str
    recall: float | None
    refused: str | None = None


@dataclass(frozen=True)
class CapacityCurve:
    """Smallest widths by length for one number of keys, and the line width = a + b ln(length)."""

    keys: int
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    intercept: float
    slope: float


def random_pattern(length: int, keys: int, *, seed: int = 0) -> Tensor:
    """A bool pattern (L, L) with `keys` nonzeros in each row and each column."""
    if not 1 <= keys <= length:
        raise OptionError(f"keys={keys} must be between 1 and the length {length}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(length, generator=generator)
    columns = torch.randperm(length, generator=generator)
    shifts = torch.randperm(length, generator=generator)[:keys]
    pattern = torch.zeros(length, length, dtype=torch.bool)
    # Different cyclic shifts of one arrangement never meet in a row or a column.
    for shift in shifts.tolist():
        pattern[order, columns.roll(shift)] = True
    return pattern


def sparse_pattern(
    pattern: Tensor, *, width: int, leak: float = 0.01, seed: int = 0
) -> SparsePattern:
    """Build inputs under which softmax attention of `width` shows `pattern`.

    pattern: (L, L), bool, or the wanted weights; few nonzeros in each row and each column.
    leak: the precision, the share of weight that all the zeros of a row together keep.
    The larger the width, the closer: see `SparsePattern.error`.
    Raises OptionError for a pattern that is not square, negative, or has an empty row.
    """
    target = _target(pattern)
    if width < 1:
        raise OptionError(f"width={width} must be at least 1")
    if not 0 < leak < 1:
        raise OptionError(f"leak={leak} must be between 0 and 1")
    scores = _scores(target, leak)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(target), width, generator=generator, dtype=torch.float64) / width**0.5
    one, zero = torch.eye(width, dtype=torch.float64), torch.zeros(width, width).double()
    return SparsePattern(
        target=target,
        scores=scores,
        x=torch.cat([scores @ noise, noise], -1),
        query=torch.cat([one, zero], -1),
        key=torch.cat([zero, one], -1),
    )


def smallest_width(
    length: int, keys: int, *, error: float = 6.0, leak: float = 0.01, trials: int = 3
) -> int:
    """The smallest width, in steps of 15 %, at which no score is off by more than `error` nats.

    In `trials` random patterns with `keys` nonzeros in each row and column.
    """
    patterns = [random_pattern(length, keys, seed=trial) for trial in range(trials)]
    width = float(_NARROWEST)
    while width < _WIDEST:
        size = round(width)
        built = (
            sparse_pattern(pattern, width=size, leak=leak, seed=trial)
            for trial, pattern in enumerate(patterns)
        )
        if all(one.error <= error for one in built):
            return size
        width *= _GROWTH
    raise OptionError(f"no width below {_WIDEST} keeps {keys} keys among {length} within {error}")


def capacity_curve(
    lengths: Sequence[int] = (32, 64, 128, 256, 512), keys: int = 1, **how: Any
) -> CapacityCurve:
    """The smallest width by length, which grows with its logarithm; `how`: see `smallest_width`."""
    if len(set(lengths)) < 2:
        raise OptionError("a curve needs at least two lengths")
    widths = [smallest_width(length, keys, **how) for length in lengths]
    x, y = [math.log(length) for length in lengths], widths
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    slope = rise / sum((a - middle_x) ** 2 for a in x)
    return CapacityCurve(keys, tuple(lengths), tuple(widths), middle_y - slope * middle_x, slope)


def fixture_mechanisms() -> list[str]:
    """The installed mechanisms that choose their keys: sparse, hashing and clustering ones."""
    return [one.name for one in registry.mechanisms() if one.family in _CHOOSING]


@torch.no_grad()
def key_recall(
    fixture: SparsePattern, mechanism: str, *, options: Any = None, seed: int = 0
) -> KeyRecall:
    """Score one mechanism: whether its map, own or effective, holds the keys that softmax sees.

    Where there is no map, by how far each output moves when a value does. Take a fixture longer
    than the mechanism's windows and buckets, else there is nothing to find.
    options: as in `zoo.build`, the defaults without. A mechanism that needs more than queries and
    keys (a grid, the host's projections) is answered with the reason.
    """
    record = registry.mechanism(mechanism)
    length, width = fixture.q.shape
    site = Site(
        path="pattern", dim=width, heads=1, head_dim=width, scale=width**-0.5, max_len=length
    )
    lacking = record.supports.needs - {"carry"}
    if lacking or record.supports.grid == "required":
        missing = ", ".join(sorted(lacking)) or "grid"
        return KeyRecall(record.name, None, f"it needs {missing}, which the fixture has not")
    asked = record.options.parse(options, owner=record.name)
    try:
        step = Step(site, record, asked, asked.clamped(site))
        module = build_modules([step], seed=seed)[site.path].double().eval()
        q, k = fixture.q[None, None] * width**0.5, fixture.k[None, None]
        ctx = Context(carry={} if "carry" in record.supports.needs else None)
        if has_map(module):
            found = find_map(module, q, k, torch.zeros_like(k), ctx)
        else:
            found = _influence(module, q, k, ctx)
    except ZooError as error:
        return KeyRecall(record.name, None, str(error))
    return KeyRecall(record.name, fixture.recall(found[0, 0]))


def _influence(module: nn.Module, q: Tensor, k: Tensor, ctx: Context) -> Tensor:
    """How far output i moves when value j does, (1, 1, L, L): a map of what is not linear.

    The effective map of the derivative at random values. Each key moves its own channel, so that
    v.shape[-1] of them move in one forward; where channels mix, by a common normalisation say,
    each sees a little of the others.
    """
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(k.shape, generator=generator, dtype=k.dtype)
    before = module(q, k, v, ctx)

    def derivative(q: Tensor, k: Tensor, move: Tensor, ctx: Context) -> Tensor:
        moved = module(q, k, v + _MOVE * move, ctx)
        slope: Tensor = (moved - before) / _MOVE
        return slope

    return effective_map(derivative, q, k, v, ctx)


def _target(pattern: Tensor) -> Tensor:
    if pattern.dim() != 2 or pattern.shape[0] != pattern.shape[1] or not len(pattern):
        raise OptionError(f"a pattern is (L, L), not {tuple(pattern.shape)}")
    wide = pattern.double()
    sums = wide.sum(-1, keepdim=True)
    if bool((wide < 0).any()) or not bool((sums > 0).all()) or not bool(sums.isfinite().all()):
        raise OptionError("a pattern has no negative number and a positive one in each row")
    return wide / sums


def _scores(target: Tensor, leak: float) -> Tensor:
    """B (L, L): 0 at the zeros of the target, and what gives the others all but `leak`."""
    zeros = (target == 0).sum(-1, keepdim=True)
    full = torch.where(zeros > 0, (1 - leak) * zeros / leak, 1.0)
    return torch.where(target > 0, (target * full).clamp(min=1e-300).log(), 0.0)
