"""What runs: where a mechanism sits (Site), what one call brings (Context), what it must offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from zoo_core.errors import UnsupportedCall

if TYPE_CHECKING:
    from torch import Tensor

    from zoo_core.mechanism import Supports


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """One attention layer of a host model, known before the mechanism is built.

    path: dotted module path of the host's attention module.
    layer, layers: index of the layer and number of layers.
    kind: "self", or "cross" where keys come from another sequence.
    dim, heads, head_dim: model width, number of heads, width of q and k per head.
    scale: factor on q @ k.T; the mechanism applies it.
    dropout: probability on attention weights, applied in training only.
    max_len: the most tokens the host can see. grid: its (rows, cols) or None.
    causal: whether the host is a decoder. prefix: number of leading tokens outside the grid.
    previous: path of the previous site of this mechanism in this patch, None for the first.
    shared: one dict per mechanism and patch; what the first site puts there, later sites reuse.
    calls: how often the host calls this module in one forward (ALBERT: once per layer).
    obstacle: why the host's attention here cannot be replaced (a sliding window), None = it can.
    """

    path: str = ""
    layer: int = 0
    layers: int = 1
    kind: Literal["self", "cross"] = "self"
    dim: int = 64
    heads: int = 1
    head_dim: int = 64
    scale: float = 0.125
    dropout: float = 0.0
    max_len: int = 512
    causal: bool = False
    grid: tuple[int, ...] | None = None
    prefix: int = 0
    previous: str | None = None
    shared: dict[str, Any] = field(default_factory=dict, repr=False)
    calls: int = 1
    obstacle: str | None = None


class Carry(Protocol):
    """Per-forward state handed from layer to layer; a fresh one for each forward.

    A site writes only `carry[site.path]` and reads only `carry.get(site.previous)`.
    """

    def get(self, key: str | None) -> Any:
        """What the site `key` wrote in this forward, or None."""
        ...

    def __setitem__(self, key: str, value: Any) -> None: ...


@dataclass(kw_only=True, eq=False)
class Context:
    """What one forward call brings besides q, k and v. `Context()` alone is valid.

    key_padding: bool (B, S), True = real token; None = all real. Never a dense N x N mask.
    bias: float, broadcastable to (B, H, L, S), added to the scores; None = no bias.
    causal: output i sees keys up to i + query_offset.
    query_offset: number of keys before the first query (a decoder with a cache).
    grid: (rows, cols) or (frames, rows, cols) of this call, or None.
    prefix: the first `prefix` real tokens of each sample lie outside the grid (CLS and the like).
    hidden: (B, L, dim), the input of the layer. times: (B, L). projections: query, key, value
    and out as weight and bias views. carry: state from the previous site.
    The last four are None unless the mechanism's Supports.needs asks for them.
    """

    key_padding: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    query_offset: int = 0
    grid: tuple[int, ...] | None = None
    prefix: int = 0
    hidden: Tensor | None = None
    times: Tensor | None = None
    projections: Mapping[str, tuple[Tensor, Tensor | None]] | None = None
    carry: Carry | None = None


class AttentionModule(Protocol):
    """What a factory returns, besides being an nn.Module.

    Optional members: `unused`, a frozenset of "query", "key", "value" naming projections whose
    results it ignores; `attention_map(q, k, ctx) -> (B, H, L, S)`, for looking, not for running;
    `auxiliary_loss() -> scalar` of the last forward; `redraw()`, which draws its random buffers
    anew where training asks for it.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """q (B, H, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, H, L, E) in v's dtype."""
        ...


def refuse_unsupported(
    supports: Supports, ctx: Context, *, where: str, queries: int, keys: int
) -> None:
    """Raise UnsupportedCall if a call brings what the mechanism does not promise to handle.

    Bridges call this before computing. where: the site, for the message.
    queries, keys: L and S; without `cross` they differ only by the cache of a causal decoder.
    """
    if reason := refusal(supports, ctx, queries=queries, keys=keys):
        raise UnsupportedCall(f"{where}: {reason}")


def refusal(supports: Supports, ctx: Context, *, queries: int, keys: int) -> str | None:
    """Why the mechanism cannot take this call, see `refuse_unsupported`; None if it can."""
    brought = {
        "key_padding": ctx.key_padding is not None,
        "causal": ctx.causal,
        "bias": ctx.bias is not None,
        "cross": queries + (ctx.query_offset if ctx.causal else 0) != keys,
    }
    for promise, present in brought.items():
        if present and not getattr(supports, promise):
            return _REFUSALS[promise]
    return None


_REFUSALS = {
    "key_padding": "this mechanism cannot mask padding; pass batches of equal length without an "
    "attention mask, or patch one with supports.key_padding",
    "causal": "this mechanism has no causal form; patch one with supports.causal",
    "bias": "this call brings a dense mask or bias (a 4-D mask, packed sequences, a sliding window "
    "or a static cache), which this mechanism cannot apply; pass a 2-D padding mask, a dynamic "
    "cache and one sequence per row, or patch one with supports.bias",
    "cross": "queries and keys differ in number, which this mechanism cannot handle; patch one "
    "with supports.cross",
}
