"""Work cut into parts that fit a cache, where no gradient keeps the whole anyway.

What is made for a part is used while it is still near the core, and its memory serves the next
part: beyond the cache, time would grow faster than the work.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Rows of features, of all heads together, that a thread works on at once where nothing has to be
#: kept for a backward: about as many as a core's own cache holds.
ROWS = 2048

#: Tokens in a part of `spans`, if there are so many.
FEWEST = 128

#: Scores of queries and keys that are made at once: about as many as a cache holds.
SCORES = 1 << 19


def streams(x: Tensor) -> bool:
    """Whether to work on x in parts: not under gradients, which keep every part anyway.

    Nor where parts do not fit.
    """
    return fits_parts(x) and not torch.is_grad_enabled()


def fits_parts(x: Tensor) -> bool:
    """Whether parts of x may be worked on one after the other.

    Not on accelerators, whose kernels want much work at once, nor in compiled code, which fuses.
    """
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def samples(x: Tensor) -> list[slice]:
    """Cut the batch of x (B, H, N, D) so that `spans` of few tokens each find enough rows."""
    return cut(x.shape[0], _rows() // max(1, x.shape[1] * min(x.shape[2], FEWEST)))


def spans(length: int, x: Tensor, *, most: int | None = None) -> list[slice]:
    """Cut `length` tokens of x (B, H, N, D) into parts of about 2 ROWS rows for each thread.

    Twice what fits a core's own cache is no slower, and threads wait for each other half as often.
    most: tokens in a part instead.
    """
    return cut(length, most or max(FEWEST, 2 * _rows() // max(1, x.shape[0] * x.shape[1])))


def rows_of_scores(keys: int) -> int:
    """How many queries, of all heads together, have SCORES scores with so many keys."""
    return max(1, SCORES // keys)


def parts(
    x: Tensor, *, multiple: int = 1, rows: int = ROWS, dropout: float = 0.0
) -> list[tuple[slice, slice]]:
    """Cut x (B, H, N, D) into (heads, tokens), each of about `rows` rows of all samples together.

    multiple: of so many tokens is every part but the last. All in one where `streams` says
    so, and under dropout: a recompute for gradients must draw it in the same order.
    """
    batch, heads, length = x.shape[:3]
    if dropout or not streams(x):
        return [(slice(0, heads), slice(0, length))]
    size = max(1, rows // batch // multiple) * multiple
    return [
        (some_heads, span)
        for some_heads in cut(heads, rows // (batch * min(size, length)))
        for span in cut(length, size)
    ]


def attend_in_parts(
    attend: Callable[[slice, slice], Tensor],
    q: Tensor,
    v: Tensor,
    *,
    multiple: int = 1,
    rows: int = ROWS,
    dropout: float = 0.0,
) -> Tensor:
    """The results (B, H, n, E) of attend(heads, tokens) for all parts of q: (B, H, L, E).

    The other arguments are those of `parts`; v (B, H, S, E) says of what dtype the results are.
    """
    pieces = parts(q, multiple=multiple, rows=rows, dropout=dropout)
    if len(pieces) == 1:
        return attend(*pieces[0])
    # In the layout of hosts, to whom merging the heads then costs nothing.
    out = v.new_empty(v.shape[0], q.shape[-2], v.shape[1], v.shape[-1]).transpose(1, 2)
    for heads, span in pieces:
        out[:, heads, span] = attend(heads, span)
    return out


def _rows() -> int:
    return ROWS * torch.get_num_threads()


def cut(length: int, size: int) -> list[slice]:
    """Cut `length` places into runs of `size`, at least one place each."""
    size = max(1, size)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
