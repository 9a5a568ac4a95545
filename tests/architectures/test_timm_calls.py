"""What a mechanism is told in each call of a patched timm model, and which calls are refused."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo_core import Context, Site, Supports
from zoo_core.errors import DoesNotFit, UnsupportedCall
from zoo_core.hosts import adapter_of

ANY = Supports(key_padding=True, causal=True, bias=True)
GRID = Supports(grid="required")
CARRY = Supports(needs=frozenset({"carry"}))


class Spy(nn.Module):
    """Softmax attention that keeps the Context of its last call."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self.seen: Context | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        self.seen = ctx
        mask = ctx.bias if ctx.key_padding is None else ctx.key_padding[:, None, None]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=ctx.causal, scale=self.site.scale
        )


class GridSum(nn.Module):
    """Adds to each value what depends on the grid only."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        rows, cols = ctx.grid
        return v + rows + 100 * cols


class Chain(nn.Module):
    """Adds the previous site's values to its own: needs carry."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        before = ctx.carry.get(self.site.previous)
        y = v if before is None else v + before
        ctx.carry[self.site.path] = y
        return y


needs_causal = pytest.mark.skipif(
    "is_causal" not in inspect.signature(timm.models.VisionTransformer.forward).parameters,
    reason="this timm has no is_causal",
)
needs_mask_by_key = pytest.mark.skipif(
    not hasattr(timm.models.naflexvit.NaFlexVitCfg, "use_key_only_attn_mask"),
    reason="NaFlexVit of this timm has no use_key_only_attn_mask",
)


def build(**arguments) -> nn.Module:
    sizes = {"depth": 3, "embed_dim": 32, "num_heads": 2, "img_size": (32, 48), "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **{**sizes, **arguments}).eval()


def put(model: nn.Module, make: Callable[[Site], nn.Module], supports: Supports) -> list[nn.Module]:
    _, adapter = adapter_of(model)
    modules: dict[str, nn.Module] = {}
    previous = None
    for site in adapter.sites(model):
        modules[site.path] = module = make(site)
        object.__setattr__(site, "previous", previous)
        module.zoo_supports = supports
        module.train(model.training)
        previous = site.path
    model.undo = adapter.install(model, modules, [])
    return list(modules.values())


def images(rows: int = 32, cols: int = 48, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, rows, cols, generator=generator)


def test_a_plain_call_brings_prefix_and_nothing_else() -> None:
    model = build(reg_tokens=2)
    *_, last = put(model, Spy, ANY)
    model(images())
    seen = last.seen
    assert (seen.prefix, seen.causal, seen.query_offset) == (3, False, 0)
    extras = (seen.key_padding, seen.bias, seen.grid, seen.hidden, seen.projections, seen.carry)
    assert extras == (None,) * 6


TOKENS = 7
ALL, SOME = torch.ones(2, TOKENS, dtype=torch.bool), torch.ones(2, TOKENS, dtype=torch.bool)
SOME[0, 5:] = False
PAIRS = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.7
PAIRS |= torch.eye(TOKENS, dtype=torch.bool)
PAIRS[1, 0, 3] = False  # a query that may attend to nothing
MASKS = {
    "keys": SOME[:, None, None],
    "keys_all_real": ALL[:, None, None],
    "keys_of_all_samples": SOME[:1, None, None],
    "keys_float": torch.zeros(2, 1, 1, TOKENS).masked_fill(~SOME[:, None, None], float("-inf")),
    "pairs": PAIRS,
    "pairs_float": torch.randn(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)),
    "pairs_by_head": PAIRS.expand(2, 2, TOKENS, TOKENS),
    "two_dimensions": PAIRS[0, 0],
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_what_they_mean_to_timm(name: str) -> None:
    from zoo_attention.softmax.attention import SoftmaxAttention

    model = build()
    expected = model.forward_features(images(), attn_mask=MASKS[name])
    unmasked = model.forward_features(images())
    put(model, SoftmaxAttention, ANY)
    got = model.forward_features(images(), attn_mask=MASKS[name])
    assert torch.equal(got, expected)
    assert torch.equal(got, unmasked) == (name == "keys_all_real")


@pytest.mark.parametrize("name", ["keys", "keys_of_all_samples", "keys_float"])
def test_a_mask_by_key_is_padding(name: str) -> None:
    model = build()
    *_, last = put(model, Spy, Supports(key_padding=True))
    model.forward_features(images(), attn_mask=MASKS[name])
    assert last.seen.bias is None
    expected = SOME if name != "keys_of_all_samples" else SOME[:1].expand(2, -1)
    assert torch.equal(last.seen.key_padding, expected)


def test_a_float_mask_by_key_with_finite_values_is_not_padding() -> None:
    model = build()
    put(model, Spy, Supports(key_padding=True))
    soft = torch.zeros(2, 1, 1, TOKENS)
    soft[0, 0, 0, 3] = -1.0
    with pytest.raises(UnsupportedCall, match="0 and -inf only"):
        model.forward_features(images(), attn_mask=soft)


def test_a_float_mask_by_key_is_checked_in_a_compiled_graph_too() -> None:
    model = build(depth=1)
    put(model, Spy, Supports(key_padding=True))
    compiled = torch.compile(model.forward_features, fullgraph=True, backend="eager")
    good = MASKS["keys_float"]
    torch.testing.assert_close(
        compiled(images(), attn_mask=good), model.forward_features(images(), attn_mask=good)
    )
    with pytest.raises(RuntimeError, match="0 and -inf only"):
        compiled(images(), attn_mask=good.clamp(min=-1.0))


@pytest.mark.parametrize(
    ("mask", "supports", "message"),
    [
        (MASKS["keys"], Supports(), "cannot mask padding"),
        (MASKS["pairs"], Supports(key_padding=True), r"\(2, 1, 7, 7\); pass a padding mask"),
        (MASKS["pairs_float"], Supports(key_padding=True), "supports.bias"),
        (torch.ones(2, 1, 1, TOKENS, dtype=torch.long), ANY, "torch.int64"),
        (torch.ones(2, 1, 1, 5, dtype=torch.bool), ANY, r"broadcastable to \(2, 2, 7, 7\)"),
        (torch.ones(1, 2, 1, 1, TOKENS, dtype=torch.bool), ANY, "broadcastable"),
    ],
    ids=["padding", "pairs", "pairs_float", "integers", "shape", "five_dimensions"],
)
def test_masks_that_are_refused(mask: Tensor, supports: Supports, message: str) -> None:
    model = build()
    put(model, Spy, supports)
    with pytest.raises(UnsupportedCall, match=message) as raised:
        model.forward_features(images(), attn_mask=mask)
    assert "blocks.0.attn" in str(raised.value)


@needs_causal
def test_causal() -> None:
    model = build()
    expected = model.forward_features(images(), is_causal=True)
    *_, last = put(model, Spy, ANY)
    assert torch.equal(model.forward_features(images(), is_causal=True), expected)
    assert last.seen.causal
    with pytest.raises(UnsupportedCall, match="attn_mask and is_causal"):
        model.forward_features(images(), attn_mask=MASKS["keys"], is_causal=True)


@needs_causal
def test_causal_is_refused_without_the_promise() -> None:
    model = build()
    put(model, Spy, Supports())
    with pytest.raises(UnsupportedCall, match=r"blocks\.0\.attn.*causal"):
        model.forward_features(images(), is_causal=True)


def test_an_argument_of_a_later_timm_is_refused() -> None:
    model = build()
    put(model, Spy, ANY)
    with pytest.raises(UnsupportedCall, match=r"blocks\.0\.attn was called with rope"):
        model.blocks[0].attn(torch.randn(1, 7, 32), rope=None)


def test_a_child_of_a_later_timm_is_an_obstacle() -> None:
    model = build()
    model.blocks[1].attn.sink = nn.Linear(1, 1)
    _, adapter = adapter_of(model)
    obstacles = [site.obstacle for site in adapter.sites(model)]
    assert obstacles[0] is obstacles[2] is None
    assert "blocks.1.attn has sink" in obstacles[1]


@pytest.mark.parametrize("grid", ["optional", "required"])
@pytest.mark.parametrize("flexible", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_the_grid_is_that_of_the_call(grid: str, flexible: bool, prefix: int) -> None:
    tokens = {"reg_tokens": prefix - 1} if prefix else {"class_token": False, "global_pool": "avg"}
    model = build(dynamic_img_size=flexible, **tokens)
    spies = put(model, Spy, Supports(grid=grid))
    for rows, cols in [(32, 48), (48, 32), (16, 96), (64, 16)] if flexible else [(32, 48)]:
        model(images(rows, cols))
        assert [spy.seen.grid for spy in spies] == [(rows // 16, cols // 16)] * 3
        assert {spy.seen.prefix for spy in spies} == {prefix}
        model.forward_intermediates(images(cols, rows) if flexible else images(rows, cols))
        assert spies[0].seen.grid == ((cols // 16, rows // 16) if flexible else (2, 3))


def test_the_grid_of_padded_images() -> None:
    model = build(dynamic_img_size=True, dynamic_img_pad=True)
    *_, last = put(model, Spy, GRID)
    model(images(33, 49))
    assert last.seen.grid == (3, 4)


def test_the_grid_of_a_hybrid() -> None:
    model = timm.create_model(
        "vit_tiny_r_s16_p8_224", depth=1, embed_dim=32, num_heads=2, img_size=(64, 128)
    ).eval()
    *_, last = put(model, Spy, GRID)
    model(images(64, 128))
    assert last.seen.grid == model.patch_embed.grid_size
    assert last.seen.grid[0] != last.seen.grid[1]


def test_dropped_patches_leave_no_grid() -> None:
    model = build(patch_drop_rate=0.5, img_size=64).train()
    *_, last = put(model, Spy, Supports(grid="optional"))
    model(images(64, 64))
    assert last.seen.grid is None
    model.eval()(images(64, 64))
    assert last.seen.grid == (4, 4)
    required = build(patch_drop_rate=0.5, img_size=64).train()
    put(required, Spy, GRID)
    with pytest.raises(UnsupportedCall, match="needs the grid of its 9 tokens"):
        required(images(64, 64))


def test_blocks_called_alone_have_no_grid_and_no_carry() -> None:
    for make, supports in ((Spy, GRID), (Chain, CARRY)):
        model = build()
        put(model, make, supports)
        with pytest.raises(UnsupportedCall, match="call the model with images"):
            model.blocks(torch.randn(1, 7, 32))


def test_hooks_only_where_something_reads_the_frame() -> None:
    for supports, count in ((ANY, 0), (GRID, 1), (CARRY, 1)):
        model = build()
        put(model, Spy, supports)
        assert sum(len(m._forward_pre_hooks) for m in model.modules()) == count
        twin = copy.deepcopy(model)
        twin.undo()
        assert sum(len(m._forward_pre_hooks) for m in model.modules()) == count
        assert not [m for m in twin.modules() if m._forward_pre_hooks]
        assert {type(block.attn) for block in twin.blocks} == {Attention}


@pytest.mark.skipif(
    "gated" not in inspect.signature(Attention).parameters, reason="this timm has no gate"
)
def test_gate_and_heads_of_another_width() -> None:
    from zoo_attention.softmax.attention import SoftmaxAttention

    model = build(depth=1)
    model.blocks[0].attn = Attention(
        32, 2, attn_head_dim=8, gated=True, scale_norm=True, norm_layer=nn.LayerNorm
    ).eval()
    expected = model(images())
    put(model, SoftmaxAttention, ANY)
    assert torch.equal(model(images()), expected)


def test_hidden_is_the_input_of_the_layer() -> None:
    model = build()
    spies = put(model, Spy, Supports(needs=frozenset({"hidden"})))
    inputs: list[Tensor] = []
    model.blocks[1].norm1.register_forward_hook(lambda module, args, out: inputs.append(out))
    model(images())
    assert torch.equal(spies[1].seen.hidden, inputs[0])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_projections_are_views_of_the_fused_weights(bias: bool) -> None:
    model = build(qkv_bias=bias)
    spies = put(model, Spy, Supports(needs=frozenset({"projections", "hidden"})))
    q_of: list[Tensor] = []
    spies[0].register_forward_pre_hook(lambda module, args: q_of.extend(args[:3]))
    model(images())
    seen, attn = spies[0].seen, model.blocks[0].attn
    assert set(seen.projections) == {"query", "key", "value", "out"}
    for name, expected in zip(("query", "key", "value"), q_of, strict=True):
        weight, offset = seen.projections[name]
        assert weight.untyped_storage().data_ptr() == attn.qkv.weight.untyped_storage().data_ptr()
        assert (offset is None) == (not bias)
        projected = F.linear(seen.hidden, weight, offset).unflatten(-1, (2, 16)).transpose(1, 2)
        torch.testing.assert_close(projected, expected, atol=1e-6, rtol=1e-5)
    assert seen.projections["out"][0] is attn.proj.weight


def test_times_are_refused() -> None:
    with pytest.raises(DoesNotFit, match="images have none"):
        put(build(), Spy, Supports(needs=frozenset({"times"})))


def grads(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_carry_reaches_the_next_layer_and_only_within_one_forward() -> None:
    model = build()
    put(model, Chain, CARRY)
    x, y = images(), images().flip(0)
    alone = model(x)
    model(y)
    assert torch.equal(model(x), alone)
    assert torch.equal(model.forward_head(model.forward_intermediates(x)[0]), alone)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.add_(1)
        model.blocks[0].attn.proj.weight.zero_()
    assert not torch.equal(model(x), alone)


def test_carry_of_two_forwards_before_one_backward() -> None:
    model = build()
    put(model, Chain, CARRY)
    x, y = images(), images().flip(0) * 2
    one, two = (grads(model, model(i).square().sum()) for i in (x, y))
    both = grads(model, model(x).square().sum() + model(y).square().sum())
    for name, grad in both.items():
        torch.testing.assert_close(grad, one[name] + two[name], atol=1e-5, rtol=1e-4)


def test_carry_refuses_checkpointing_before_computing() -> None:
    model = build().train()
    put(model, Chain, CARRY)
    model.set_grad_checkpointing()
    ran: list[nn.Module] = []
    model.patch_embed.proj.register_forward_hook(lambda module, args, out: ran.append(module))
    with pytest.raises(UnsupportedCall, match=r"set_grad_checkpointing\(False\)"):
        model(images())
    assert not ran
    with torch.no_grad():
        model(images())
    assert ran


def test_carry_refuses_blocks_that_someone_else_checkpoints() -> None:
    """Instead of wrong gradients: the recompute would read what the whole forward left behind."""
    model = build().train()
    put(model, Chain, CARRY)
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    loss = model(images()).square().sum()
    with pytest.raises(UnsupportedCall, match="ran twice in one forward"):
        loss.backward()


def test_grid_and_checkpointing() -> None:
    """A fixed size recomputes right; a size that changes before the backward would not."""
    fixed = build().train()
    put(fixed, GridSum, GRID)
    expected = grads(fixed, fixed(images()).square().sum())
    fixed.set_grad_checkpointing()
    for name, grad in grads(fixed, fixed(images()).square().sum()).items():
        assert torch.equal(grad, expected[name]), name
    flexible = build(dynamic_img_size=True).train()
    put(flexible, GridSum, GRID)
    flexible.set_grad_checkpointing()
    with pytest.raises(UnsupportedCall, match="dynamic_img_size"):
        flexible(images())


@pytest.mark.parametrize(
    ("make", "supports"), [(GridSum, GRID), (Chain, CARRY)], ids=["grid", "carry"]
)
def test_copies_have_a_frame_of_their_own(make, supports: Supports) -> None:
    model = build(dynamic_img_size=True)
    put(model, make, supports)
    expected = model(images())
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        frames = {id(block.attn.zoo_frame) for block in twin.blocks}
        frame = twin.blocks[0].attn.zoo_frame
        assert len(frames) == 1
        assert (frame.grid, frame.carry) == (None, None)
        assert torch.equal(twin(images()), expected)
        twin(images(64, 16))
        assert model.blocks[0].attn.zoo_frame.grid in (None, (2, 3))
    assert not [key for key in model.state_dict() if "frame" in key]


@pytest.mark.parametrize("dynamic", [None, False, True])
@pytest.mark.parametrize(
    ("make", "supports"), [(GridSum, GRID), (Chain, CARRY)], ids=["grid", "carry"]
)
def test_frame_in_one_compiled_graph(make, supports: Supports, dynamic: bool | None) -> None:
    model = build(dynamic_img_size=True)
    put(model, make, supports)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=dynamic)
    for rows, cols in [(32, 48), (48, 32), (16, 96), (32, 48)]:
        x = images(rows, cols)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "supports"), [(GridSum, GRID), (Chain, CARRY)], ids=["grid", "carry"]
)
def test_frame_in_an_exported_graph(make, supports: Supports) -> None:
    model = build()
    put(model, make, supports)
    expected = model(images())
    exported = torch.export.export(model, (images(),)).module()
    torch.testing.assert_close(exported(images()), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(model(images()), expected)


def naflex(**arguments) -> nn.Module:
    sizes = {"depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    return timm.create_model("naflexvit_base_patch16_gap", **sizes, **arguments).eval()


def naflex_batch() -> dict[str, Tensor]:
    """Two images of 2 x 3 and 2 x 2 patches, padded to 6."""
    coord = torch.tensor([[[r, c] for r in range(2) for c in range(3)]] * 2)
    coord[1, :4] = torch.tensor([[r, c] for r in range(2) for c in range(2)])
    valid = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    patches = torch.randn(2, 6, 16 * 16 * 3, generator=torch.Generator().manual_seed(0))
    return {"patches": patches, "patch_coord": coord, "patch_valid": valid}


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param({"use_key_only_attn_mask": True}, id="by_key", marks=needs_mask_by_key),
        pytest.param({}, id="by_pair"),
    ],
)
def test_naflex_is_exact_with_softmax(mask: dict) -> None:
    from zoo_attention.softmax.attention import SoftmaxAttention

    model = naflex(**mask)
    expected = model(naflex_batch())
    put(model, SoftmaxAttention, ANY)
    assert torch.equal(model(naflex_batch()), expected)


@needs_mask_by_key
def test_naflex_padding_is_told_without_a_mask_of_pairs() -> None:
    model = naflex(use_key_only_attn_mask=True)
    *_, last = put(model, Spy, Supports(key_padding=True))
    model(naflex_batch())
    registers = torch.ones(2, 4, dtype=torch.bool)
    expected = torch.cat([registers, naflex_batch()["patch_valid"]], dim=1)
    assert torch.equal(last.seen.key_padding, expected)


def test_naflex_mask_of_pairs_is_refused_with_the_way_out() -> None:
    model = naflex()
    put(model, Spy, Supports(key_padding=True))
    with pytest.raises(UnsupportedCall, match="use_key_only_attn_mask=True"):
        model(naflex_batch())


def test_naflex_has_no_grid() -> None:
    model = naflex()
    *_, last = put(model, Spy, Supports(grid="optional"))
    model(images(32, 48))
    assert last.seen.grid is None
    assert last.seen.prefix == 4


def test_naflex_carry_starts_at_its_embedding() -> None:
    model = naflex()
    put(model, Chain, CARRY)
    assert torch.equal(model(images()), model(images()))
