from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from zoo_attention.linformer import LINFORMER, LinformerOptions
from zoo_core import Context, Site
from zoo_core.errors import UnsupportedCall

HEADS, WIDTH, MAX_LEN = 2, 8, 32
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=MAX_LEN)
SHARES = ("none", "heads", "kv", "layers")


def build(site: Site = SITE, start: str = "segments", **options: object) -> nn.Module:
    """A module in float64 whose projections are no longer what they start from."""
    torch.manual_seed(1)
    module = LINFORMER.factory(site, LinformerOptions(start=start, **options)).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def inputs(queries: int, keys: int | None = None, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    keys = queries if keys is None else keys
    shapes = [(batch, HEADS, n, WIDTH) for n in (queries, keys, keys)]
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return q, k, v


def by_formula(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
    """softmax(q (E k)^T) (F v), head by head, over the first `rows` rows, for unpadded input."""
    E = module.project_keys
    F = E if module.project_values is None else module.project_values
    E, F = (x.expand(HEADS, -1, -1)[:, :rows, : k.shape[-2]] for x in (E, F))
    heads = []
    for h in range(HEADS):
        short_k, short_v = E[h] @ k[:, h], F[h] @ v[:, h]
        heads.append((q[:, h] @ short_k.mT * SITE.scale).softmax(-1) @ short_v)
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("queries", "keys"), [(32, 32), (3, 32), (40, 1)])
def test_it_computes_its_formula(share: str, queries: int, keys: int) -> None:
    module = build(rank=8, share=share, empty_rows="null")
    q, k, v = inputs(queries, keys, batch=2)
    wanted = by_formula(module, q, k, v, rows=8)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("length", "rows"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (32, 8)])
def test_masked_rows_are_those_whose_segment_begins_beyond_the_sample(
    length: int, rows: int
) -> None:
    module = build(rank=8)
    q, k, v = inputs(length)
    wanted = by_formula(module, q, k, v, rows)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("left", [0, 5, 23], ids=lambda n: f"{n}-on-the-left")
@pytest.mark.parametrize("length", [1, 4, 5, 9], ids=lambda n: f"{n}-tokens")
def test_padding_masks_the_same_rows(length: int, left: int) -> None:
    module = build(rank=8)
    q, k, v = inputs(length)
    padding = (left, MAX_LEN - length - left)
    k, v = (nn.functional.pad(x, (0, 0, *padding), value=torch.nan) for x in (k, v))
    real = nn.functional.pad(torch.ones(1, length, dtype=torch.bool), padding)
    got = module(q, k, v, Context(key_padding=real))
    k, v = (x[:, :, left : left + length] for x in (k, v))
    wanted = by_formula(module, q, k, v, rows=-(-length // 4))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_null_rows_stay_in_the_softmax() -> None:
    start = LinformerOptions(rank=8, start="segments", empty_rows="null")
    module = LINFORMER.factory(SITE, start).double()
    q, k, v = inputs(8)
    # Two of eight segments hold tokens; the others are keys of score 0 with value 0.
    short_k, short_v = (x.unflatten(2, (2, 4)).mean(3) for x in (k, v))
    scores = (q @ short_k.mT * SITE.scale).exp()
    wanted = scores @ short_v / (scores.sum(-1, keepdim=True) + 6)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-6)


def test_rows_can_start_as_the_means_of_their_segments() -> None:
    options = LinformerOptions(rank=3, start="segments")
    module = LINFORMER.factory(replace(SITE, max_len=5), options)
    wanted = torch.tensor([[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0], [0, 0, 0, 0, 1]])
    assert torch.equal(module.project_keys, wanted)
    assert torch.equal(module.project_values, wanted)


def test_three_quarters_of_the_rows_start_as_the_first_tokens() -> None:
    module = LINFORMER.factory(replace(SITE, max_len=8), LinformerOptions(rank=5))
    wanted = torch.zeros(5, 8)
    wanted[[0, 1, 2], [0, 1, 2]] = 1
    wanted[3, 3:6] = 1 / 3
    wanted[4, 6:] = 1 / 2
    assert torch.equal(module.project_keys, wanted)
    assert torch.equal(module.project_values, wanted)


@pytest.mark.parametrize("left", [0, 3], ids=lambda n: f"{n}-on-the-left")
@pytest.mark.parametrize(
    ("length", "rows"), [(1, 1), (5, 5), (6, 6), (7, 7), (19, 7), (20, 8), (29, 8)]
)
def test_rows_at_the_front_are_seen_one_by_one(length: int, rows: int, left: int) -> None:
    """Six rows of single tokens, then two that share the 26 others."""
    module = build(rank=8, start="front")
    q, k, v = inputs(length)
    wanted = by_formula(module, q, k, v, rows)
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-10)
    padding = (left, MAX_LEN - length - left)
    k, v = (nn.functional.pad(x, (0, 0, *padding), value=torch.nan) for x in (k, v))
    real = nn.functional.pad(torch.ones(1, length, dtype=torch.bool), padding)
    got = module(q, k, v, Context(key_padding=real))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_short_texts_start_as_softmax_attention() -> None:
    module = LINFORMER.factory(SITE, LinformerOptions(rank=16)).double()
    q, k, v = inputs(12)
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


def test_a_gaussian_start_has_the_papers_variance() -> None:
    torch.manual_seed(0)
    site = replace(SITE, max_len=512)
    module = LINFORMER.factory(site, LinformerOptions(rank=64, start="gaussian"))
    for rows in (module.project_keys, module.project_values):
        assert rows.std().item() == pytest.approx(64**-0.5, rel=0.02)


def test_one_row_per_token_is_softmax_attention() -> None:
    options = LINFORMER.exact_at(SITE)
    module = LINFORMER.factory(SITE, options).double()
    assert torch.equal(module.project_keys, torch.eye(MAX_LEN, dtype=torch.float64))
    q, k, v = inputs(20)
    wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
    torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("keys", [1, 17, MAX_LEN])
def test_any_length_up_to_the_longest_works(keys: int) -> None:
    q, k, v = inputs(5, keys)
    assert build(rank=16)(q, k, v, Context()).isfinite().all()


def test_a_longer_input_is_refused_with_both_numbers() -> None:
    with pytest.raises(UnsupportedCall, match=rf"at most {MAX_LEN} tokens and got {MAX_LEN + 1}"):
        build(rank=16)(*inputs(MAX_LEN + 1), Context())


@pytest.mark.parametrize("content", [1e6, torch.nan])
def test_padding_changes_no_bit(content: float) -> None:
    """Reported against two public versions, which had no mask because scores are N x rank."""
    module = build(rank=16)
    q, k, v = inputs(30)
    real = (torch.arange(30) < 17)[None]
    hidden = [x.masked_fill(~real[:, None, :, None], content) for x in (k, v)]
    context = Context(key_padding=real)
    got, wanted = module(q, *hidden, context), module(q, k, v, context)
    assert torch.equal(got[:, :, :17], wanted[:, :, :17])


@pytest.mark.parametrize(
    ("share", "shapes"),
    [
        ("none", {"project_keys": (2, 8, 32), "project_values": (2, 8, 32)}),
        ("heads", {"project_keys": (8, 32), "project_values": (8, 32)}),
        ("kv", {"project_keys": (8, 32)}),
        ("layers", {"project_keys": (8, 32)}),
    ],
)
def test_sharing_decides_the_parameters(share: str, shapes: dict[str, tuple[int, ...]]) -> None:
    state = build(rank=8, share=share).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == shapes


class TestSharedByLayers:
    def layers(self) -> nn.ModuleList:
        """Three layers of one patch."""
        site = replace(SITE, shared={})
        return nn.ModuleList(build(site, rank=8, share="layers") for _ in range(3))

    def test_all_layers_hold_one_parameter(self) -> None:
        layers = self.layers()
        assert len(list(layers.parameters())) == 1
        assert len(layers.state_dict()) == 3

    @pytest.mark.parametrize(
        "again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
    )
    def test_a_copy_shares_its_own(self, again) -> None:
        layers = self.layers()
        copied = again(layers)
        (parameter,) = copied.parameters()
        with torch.no_grad():
            parameter.zero_()
        q, k, v = inputs(9)
        assert all((layer(q, k, v, Context()) == 0).all() for layer in copied)
        assert all((layer(q, k, v, Context()) != 0).all() for layer in layers)

    def test_a_state_dict_goes_into_another_patch(self) -> None:
        layers, others = self.layers(), self.layers()
        nn.init.normal_(others[0].project_keys)
        others.load_state_dict(layers.state_dict(), strict=True)
        assert len(list(others.parameters())) == 1
        assert torch.equal(others[2].project_keys, layers[0].project_keys)

    def test_every_layer_adds_to_the_gradient(self) -> None:
        layers = self.layers()
        q, k, v = inputs(9)
        parts = [
            torch.autograd.grad(layer(q, k, v, Context()).sum(), layer.project_keys)[0]
            for layer in layers
        ]
        sum(layer(q, k, v, Context()).sum() for layer in layers).backward()
        torch.testing.assert_close(layers[0].project_keys.grad, sum(parts))

    @pytest.mark.parametrize(
        "other", [{"max_len": 16}, {"kind": "cross"}], ids=["length", "cross-attention"]
    )
    def test_layers_of_another_length_or_kind_have_their_own(self, other) -> None:
        first = replace(SITE, shared={})
        one = build(first, rank=8, share="layers")
        two = build(replace(first, **other), rank=8, share="layers")
        assert one.project_keys is not two.project_keys

    def test_layers_of_another_rank_have_their_own(self) -> None:
        site = replace(SITE, shared={})
        one, two = (build(site, rank=rank, share="layers") for rank in (8, 4))
        assert one.project_keys.shape != two.project_keys.shape


def test_frozen_rows_give_the_same_bits() -> None:
    """Met with an adapter: loaded for use it differed in the last bits from the trained one."""
    module = build(replace(SITE, heads=4, head_dim=16, max_len=64), rank=4, start="front").float()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 4, 16).transpose(1, 2) for _ in range(3))
    trained = module(q, k, v, Context())
    module.requires_grad_(False)
    assert torch.equal(module(q, k, v, Context()), trained)
