"""Softmax attention to the union of several rounds of windows, such as `hashing.windows` gives.

A pair of query and key counts in the first round in which they meet, and in no later one. Each
round computes its own softmax, and the rounds are weighed by their denominators: exactly softmax
over the union.

On a CPU, without dropout, fused softmax runs on a few chunks at a time, so that what is copied
for them stays in the cache. Its derivative reads the union's output and denominator instead of a
chunk's own: a weight is exp(score - log denominator), whatever the other scores are. Where native
kernels are there, see `zoo_core.nn.native`, one of them does all of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zoo_core.nn import derivatives, fused, native
from zoo_core.nn.hashing import LAST_RESORT, Windows
from zoo_core.nn.parts import fits_parts
from zoo_core.nn.precision import sum_dtype

#: Added to a score, it hides the key: far below any score, and finite, so that a row without any
#: key stays finite too.
HIDDEN = -1e25

#: Numbers in the keys and values that are copied at a time, and in the outputs kept of all rounds.
COPIED, KEPT = 1 << 19, 1 << 21


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Windows,
    *,
    scale: float,
    spare_self: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of each query over the union of its windows, (B, H, N, E), at least fp32.

    q, k (B, H, N, D), v (B, H, N, E); they must be finite at padding, and what is handed back
    there, gradients included, is finite and meaningless.
    spare_self: a token sees itself only where there is nothing else to see.
    """
    wide = sum_dtype(q)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    out: Tensor
    if native.suits(q, k, v) and not dropout:
        out = _Native.apply(q, k, v, seen, scale, spare_self)[0]
        return out
    if fused.has(q, v) and not dropout:
        if fits_parts(q):
            out = _Fused.apply(q, k, v, seen, scale, spare_self)[0]
            return out
        if not torch.is_grad_enabled():
            out = _compiled(q, k, v, *vars(seen).values(), scale, spare_self)
            return out
    return plain(q, k, v, seen, scale=scale, spare_self=spare_self, dropout=dropout)


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Windows,
    *,
    scale: float,
    spare_self: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """`attend` by single operations, on any device; q, k and v in one dtype."""
    layout = _Layout.of(q, k, v, seen)
    outs, masses = [], []
    for part in layout.rounds(spare_self):
        keys, values = _rows(layout.keys, part.key).tensor_split([q.shape[-1]], -1)
        scores = (_rows(layout.queries, part.query) * scale) @ keys.mT
        if part.bias is not None:
            scores = scores + part.bias
        peak = scores.detach().amax(-1, keepdim=True)
        powers = (scores - peak).exp()
        total = powers.sum(-1, keepdim=True)
        outs.append((F.dropout(powers, dropout) @ values) / total)
        masses.append(peak + total.log())
    out, mass = (_rows(torch.cat(x).flatten(0, 1), layout.slot) for x in (outs, masses))
    return (out * mass.softmax(1)).sum(1).view(v.shape)


@dataclass(frozen=True, eq=False)
class _Part:
    """Some chunks of one round: which rows are their queries (n, P), and their keys (n, W).

    at: the round, and which of its chunks.
    bias: what to add to their scores, broadcastable to (n, P, W), or None.
    """

    at: tuple[int, slice]
    query: Tensor
    key: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class _Layout:
    """The tokens of all heads as rows, B * H * N of them, and the chunks of each round.

    queries: q by row, (rows, D). keys: k and v by row, (rows, D + E).
    query, key: (R, chunks, P) and (R, chunks, W), rows. real: (R, chunks, W), 0 at padding, or
    None. slot: (rows, R), where among the R * chunks * P queries each token stands.
    place: (rows, R), of each key in the sorted order. middle: (rows, R), of each query's window.
    """

    queries: Tensor
    keys: Tensor
    query: Tensor
    key: Tensor
    real: Tensor | None
    slot: Tensor
    place: Tensor
    middle: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, seen: Windows) -> _Layout:
        """Lay out all heads of q, k, v (B, H, N, ...), of one dtype."""
        batch, heads, length, _ = q.shape
        rounds, chunks, size = seen.query.shape[2:]
        head = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1, 1)
        span = torch.arange(rounds, device=q.device)[:, None] * (batch * heads) + head[..., 0]

        def by_round(x: Tensor) -> Tensor:
            return x.movedim(2, 0).flatten(1, 3)

        def by_row(x: Tensor) -> Tensor:
            return x.mT.flatten(0, 2)

        return cls(
            queries=q.flatten(0, 2),
            keys=torch.cat([k, v], -1).flatten(0, 2),
            query=by_round(seen.query + head * length),
            key=by_round(seen.key + head * length),
            real=None if seen.real is None else by_round(seen.real.to(q.dtype)),
            slot=by_row(seen.row + span * (chunks * size)),
            place=by_row(seen.place.to(q.dtype)),
            middle=by_row(seen.first.to(q.dtype) + (seen.key.shape[-1] - 1) / 2),
        )

    def rounds(self, spare_self: bool) -> list[_Part]:
        """All chunks of each round."""
        return [self._part(turn, slice(None), spare_self) for turn in range(len(self.query))]

    def parts(self, spare_self: bool) -> Iterator[_Part]:
        """As many chunks at a time as let their keys and values fit a cache."""
        step = max(1, COPIED // (self.key.shape[-1] * self.keys.shape[-1]))
        rounds, chunks = self.query.shape[:2]
        for turn in range(rounds):
            for start in range(0, chunks, step):
                yield self._part(turn, slice(start, start + step), spare_self)

    def _part(self, turn: int, some: slice, spare_self: bool) -> _Part:
        at = turn, some
        return _Part(at, self.query[at], self.key[at], self._bias(at, spare_self))

    def _bias(self, at: tuple[int, slice], spare_self: bool) -> Tensor | None:
        """Hide padding, and what was seen in an earlier round.

        By arithmetic: on a CPU, comparisons take several times longer.
        """
        query, key, bias = self.query[at], self.key[at], None
        if earlier := at[0]:
            middle = _rows(self.middle, query)[..., :earlier, None].unbind(2)
            place = _rows(self.place, key).mT[..., :earlier, :].contiguous().unbind(1)
            nearest = (place[0][:, None] - middle[0]).abs_()
            for places, middles in zip(place[1:], middle[1:], strict=True):
                nearest = torch.minimum(nearest, (places[:, None] - middles).abs_())
            # Inside an earlier window it is half a place or more below half its width.
            bias = nearest.sub_(key.shape[-1] / 2).clamp_(max=0).mul_(-2 * HIDDEN)
        if spare_self:
            apart = (key[:, None] - query[..., None]).abs_().clamp_(max=1)
            own = apart.to(self.keys.dtype).sub_(1).mul_(-LAST_RESORT)
            bias = own if bias is None else bias.add_(own)
        if self.real is not None:
            padding = ((self.real[at] - 1) * -HIDDEN)[:, None]
            bias = padding if bias is None else bias.add_(padding)
        return bias


class _Fused(torch.autograd.Function):
    """`attend`, and the log of each query's denominator (B, H, N), by groups of heads."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, seen: Windows, scale: float, spare_self: bool
    ) -> tuple[Tensor, Tensor]:
        found = [
            _forward(q[:, some], k[:, some], v[:, some], seen.heads(some), scale, spare_self)
            for some in _groups(q, seen)
        ]
        out, mass = _joined(found)
        return out, mass

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *ctx.how = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        seen, scale, spare_self = ctx.how
        if torch.is_grad_enabled():
            single = partial(plain, seen=seen, scale=scale, spare_self=spare_self)
            found = derivatives.through(single, ctx.saved_tensors[:3], (grad,))
            return *found, None, None, None
        tensors = (grad, *ctx.saved_tensors)
        parts = [
            _backward([x[:, some] for x in tensors], seen.heads(some), scale, spare_self)
            for some in _groups(grad, seen)
        ]
        return *_joined(parts), None, None, None


class _Native(torch.autograd.Function):
    """`attend` by a native kernel, and the log to base 2 of each query's denominator (B, H, N)."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, seen: Windows, scale: float, spare_self: bool
    ) -> tuple[Tensor, Tensor]:
        layout = _for_kernel(seen, scale, spare_self)
        out, mass = native.call("rounds_native", q, k, v, *layout)
        return out, mass

    setup_context = _Fused.setup_context

    @staticmethod
    def backward(ctx: Any, grad: Tensor, mass: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _Fused.backward(ctx, grad, mass)
        tensors = (grad, *ctx.saved_tensors)
        grads = native.call("rounds_native_backward", *tensors, *_for_kernel(*ctx.how))
        return *grads, None, None, None


def _for_kernel(seen: Windows, scale: float, spare_self: bool) -> tuple[Any, ...]:
    """What the native kernels are told besides the tensors."""
    windows = (seen.query, seen.key, seen.real, seen.place, seen.first)
    return *windows, scale, LAST_RESORT if spare_self else 0.0


@torch.library.custom_op("zoo_core::rounds", mutates_args=())
def _compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query: Tensor,
    key: Tensor,
    real: Tensor | None,
    row: Tensor,
    place: Tensor,
    first: Tensor,
    scale: float,
    spare_self: bool,
) -> Tensor:
    """`_Fused`'s output, as one operation to a compiler: it would unroll all the parts.

    q, k and v in one dtype; the others are a `Windows` in the order of its fields.
    """
    seen = Windows(query, key, real, row, place, first)
    return _Fused.forward(q, k, v, seen, scale, spare_self)[0]


@_compiled.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, seen: Windows, scale: float, spare_self: bool
) -> tuple[Tensor, Tensor]:
    layout = _Layout.of(q, k, v, seen)
    outs = q.new_empty(*layout.query.shape, v.shape[-1])
    masses = q.new_empty(layout.query.shape)
    for part in layout.parts(spare_self):
        queries = _rows(layout.queries, part.query)[:, None]
        keys, values = _rows(layout.keys, part.key)[:, None].tensor_split([q.shape[-1]], -1)
        mask = None if part.bias is None else part.bias[:, None]
        out, mass = fused.attend(queries, keys, values, mask, scale=scale)
        outs[part.at], masses[part.at] = out[:, 0], mass[:, 0]
    mass = masses.flatten()[layout.slot]
    out = _summed(outs, layout.slot, mass.softmax(1))
    return out.view(v.shape), mass.logsumexp(1).view(v.shape[:-1])


def _backward(
    tensors: Sequence[Tensor], seen: Windows, scale: float, spare_self: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """tensors: the output's gradient, q, k, v, the output and the log of the denominators."""
    grad, q, k, v, out, mass = tensors
    layout, width = _Layout.of(q, k, v, seen), q.shape[-1]
    ends, masses = torch.cat([grad, out], -1).flatten(0, 2), mass.flatten()
    # The last chunk of each round is filled up with tokens that have their place elsewhere.
    stands = q.new_zeros(layout.query.shape)
    stands.view(-1)[layout.slot.flatten()] = 1
    grads_q = q.new_empty(*layout.query.shape, width)
    grads_k, grads_v = (q.new_zeros(len(layout.keys), x.shape[-1]) for x in (k, v))
    for part in layout.parts(spare_self):
        queries = _rows(layout.queries, part.query)[:, None]
        keys, values = _rows(layout.keys, part.key)[:, None].tensor_split([width], -1)
        grads, outs = _rows(ends, part.query)[:, None].tensor_split([v.shape[-1]], -1)
        grads_q[part.at], *others = (
            x[:, 0]
            for x in fused.attend_backward(
                grads * stands[part.at][:, None, :, None],
                queries,
                keys,
                values,
                outs,
                masses[part.query][:, None],
                None if part.bias is None else part.bias[:, None],
                scale=scale,
            )
        )
        for total, some in zip((grads_k, grads_v), others, strict=True):
            total.index_add_(0, part.key.flatten(), some.flatten(0, 1))
    grad_q = _summed(grads_q, layout.slot)
    return grad_q.view(q.shape), grads_k.view(k.shape), grads_v.view(v.shape)


def _groups(x: Tensor, seen: Windows) -> list[slice]:
    """Heads to work on at a time: as many as let x (B, H, N, E), in all rounds, fit a cache."""
    batch, heads, _, width = x.shape
    step = max(1, KEPT // (batch * seen.query[0, 0].numel() * width))
    return [slice(start, start + step) for start in range(0, heads, step)]


def _joined(groups: Sequence[tuple[Tensor, ...]]) -> Iterator[Tensor]:
    """Each of the tensors that groups of heads have, for all heads."""
    return (torch.cat(x, 1) if len(x) > 1 else x[0] for x in zip(*groups, strict=True))


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (rows, D) by index of any shape; `embedding` has by far the faster derivative."""
    return F.embedding(index, x)


def _summed(x: Tensor, slot: Tensor, shares: Tensor | None = None) -> Tensor:
    """Sum of the rows of x (R, chunks, P, E) that are a token's, `slot` (rows, R): (rows, E)."""
    return F.embedding_bag(slot, x.flatten(0, 2), mode="sum", per_sample_weights=shares)
