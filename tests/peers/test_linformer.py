"""linformer: equal where nothing is padded; rows that see no token stay in its softmax.

That is empty_rows="null" of ours, which by default leaves them out.
"""

from __future__ import annotations

import pytest
from same_weights import DIM, HEADS, WIDTH, assert_same, distance, first, join, normal, ours, split
from torch import Tensor, nn

from zoo_attention.linformer import LINFORMER
from zoo_core import Context

peer = pytest.importorskip("linformer")

LENGTH, RANK = 24, 6


def pair(*, share_kv: bool = False, one_kv_head: bool = False) -> tuple[nn.Module, nn.Module]:
    """Ours and theirs, with one E and F."""
    theirs = peer.LinformerSelfAttention(
        DIM, seq_len=LENGTH, k=RANK, heads=HEADS, share_kv=share_kv, one_kv_head=one_kv_head
    )
    theirs = theirs.double().eval()
    theirs.to_out = nn.Identity()
    options = {"rank": RANK, "share": "kv" if share_kv else "heads", "empty_rows": "null"}
    module = ours(LINFORMER, max_len=LENGTH, **options)
    module.project_keys.copy_(theirs.proj_k.T)
    if not share_kv:
        module.project_values.copy_(theirs.proj_v.T)
    return module, theirs


def projected(theirs: nn.Module, x: Tensor, context: Tensor) -> tuple[Tensor, ...]:
    """q, k and v of the peer; shared keys and values share their projection too."""
    to_v = theirs.to_k if theirs.share_kv else theirs.to_v
    shown = (theirs.to_k(context), to_v(context))
    return split(theirs.to_q(x)), *(split(y, y.shape[-1] // WIDTH) for y in shown)


@pytest.mark.parametrize("share_kv", [False, True], ids=["own-F", "E-for-both"])
@pytest.mark.parametrize("length", [LENGTH, 10], ids=lambda n: f"{n}-tokens")
def test_attention_is_equal(length: int, share_kv: bool) -> None:
    module, theirs = pair(share_kv=share_kv)
    x = normal(2, length, DIM)
    q, k, v = projected(theirs, x, x)
    assert_same(join(module(q, k, v, Context())), theirs(x))


def test_cross_attention_is_equal() -> None:
    module, theirs = pair()
    x, context = normal(2, 5, DIM), normal(2, 17, DIM)
    q, k, v = projected(theirs, x, context)
    assert_same(join(module(q, k, v, Context())), theirs(x, context))


def test_one_key_head_for_all_is_equal() -> None:
    module, theirs = pair(one_kv_head=True)
    x = normal(2, LENGTH, DIM)
    q, k, v = projected(theirs, x, x)
    k, v = (y.expand(-1, HEADS, -1, -1) for y in (k, v))
    assert_same(join(module(q, k, v, Context())), theirs(x))


def test_it_swallows_a_mask() -> None:
    """It takes any keyword and uses none of them: padding counts as tokens, without a word."""
    module, theirs = pair()
    x, real = normal(1, LENGTH, DIM), first(10, LENGTH)
    alone = theirs(x[:, :10])
    assert_same(theirs(x, mask=real, input_mask=real), theirs(x), atol=0)
    assert distance(theirs(x, mask=real)[:, :10], alone) > 0.01
    q, k, v = projected(theirs, x, x)
    assert_same(join(module(q, k, v, Context(key_padding=real)))[:, :10], alone)
