from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import zoo_core as zoo
from zoo_attention.dam import DAM, DamOptions
from zoo_core import Context, Site
from zoo_core.errors import UnsupportedCall

HEADS, WIDTH, MAX_LEN = 2, 8, 32
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=MAX_LEN)
CTX = Context()
STRUCTURES = pytest.mark.parametrize("structure", ["toeplitz", "free"])


def build(site: Site = SITE, *, learned: bool = True, **options: object) -> nn.Module:
    """A module in float64; learned: with decisions of both kinds."""
    torch.manual_seed(1)
    module = DAM.factory(site, DamOptions(**options)).double().eval()
    if learned:
        nn.init.normal_(module.logits)
    return module


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def decisions(module: nn.Module, length: int, causal: bool = False) -> Tensor:
    """The frozen mask, pair by pair: (H, N, N)."""
    mask = torch.zeros(HEADS, length, length, dtype=torch.bool)
    for h in range(HEADS):
        for i in range(length):
            for j in range(i + 1 if causal else length):
                at = (h, abs(i - j)) if module.toeplitz else (h, i, j)
                keep, drop = module.logits[at]
                mask[h, i, j] = bool(keep >= drop)
            if not mask[h, i].any():
                mask[h, i, i] = True
    return mask


def by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * SITE.scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v


class TestFrozen:
    @STRUCTURES
    @pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
    @pytest.mark.parametrize("length", [1, 2, 13, MAX_LEN])
    def test_it_computes_its_formula(self, length: int, structure: str, causal: bool) -> None:
        q, k, v = inputs(length, batch=2)
        module = build(structure=structure)
        wanted = by_formula(q, k, v, decisions(module, length, causal))
        got = module(q, k, v, Context(causal=causal))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)

    @STRUCTURES
    def test_pairs_are_ranks_of_real_tokens(self, structure: str) -> None:
        """Pads on the left, on the right and inside, holding NaN, in one batch."""
        q, k, v = inputs(20, batch=4)
        real = torch.ones(4, 20, dtype=torch.bool)
        real[0, :9] = False
        real[1, 5:] = False
        real[2, 4::5] = False
        real[3] = False
        k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (k, v))
        module = build(structure=structure)
        got = module(q, k, v, Context(key_padding=real))
        for b, mask in enumerate(real[:3]):
            alone = [x[b : b + 1, :, mask] for x in (q, k, v)]
            wanted = by_formula(*alone, decisions(module, int(mask.sum())))
            torch.testing.assert_close(got[b, :, mask], wanted[0], rtol=0, atol=1e-12)
        assert (got[3] == 0).all()

    def test_a_mask_that_drops_all_leaves_each_token_itself(self) -> None:
        q, k, v = inputs(9)
        module = build()
        with torch.no_grad():
            module.logits[..., 1] = module.logits[..., 0] + 1
        torch.testing.assert_close(module(q, k, v, Context()), v, rtol=0, atol=0)
        got = module.train()(q, k, v, Context())
        assert got.isfinite().all()

    def test_it_draws_nothing(self) -> None:
        q, k, v = inputs(9)
        module, before = build(), torch.get_rng_state()
        module(q, k, v, Context())
        assert torch.equal(torch.get_rng_state(), before)
        assert module.auxiliary_loss() == 0


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@STRUCTURES
def test_the_start_is_softmax_attention(structure: str, causal: bool) -> None:
    q, k, v = inputs(17)
    options = replace(DAM.exact_at(SITE), structure=structure)
    module = DAM.factory(SITE, options).double().eval()
    mask = torch.ones(17, 17, dtype=torch.bool)
    wanted = by_formula(q, k, v, mask.tril() if causal else mask)
    got = module(q, k, v, Context(causal=causal))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


class TestTraining:
    def test_a_draw_masks_the_weights_and_renormalises(self) -> None:
        """Values that tell keys apart show which are kept, and that their ratios stay."""
        q, k, _ = inputs(8)
        weights = build().train()(q, k, torch.eye(8, dtype=torch.float64).expand(1, 2, 8, 8), CTX)
        kept = weights > 0
        wanted = (q @ k.mT * SITE.scale).masked_fill(~kept, -torch.inf).softmax(-1)
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-12)
        # One decision for each distance of each head.
        for h in range(HEADS):
            for d in range(1, 8):
                band = torch.cat([kept[0, h].diagonal(d), kept[0, h].diagonal(-d)])
                assert band.all() or not band.any()

    def test_a_key_is_kept_as_often_as_its_logits_say(self) -> None:
        """Token 0 gives token 1 a half where both are kept, all or nothing where one is."""
        heads = 2000
        module = build(replace(SITE, heads=heads, max_len=2), learned=False, start=1.0).train()
        q = torch.zeros(1, heads, 2, 2, dtype=torch.float64)
        v = torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(1, heads, 2, 1)
        given = module(q, q, v, CTX)[0, :, 0, 0]
        p = torch.tensor(1.0).sigmoid().item()
        assert (given == 0.5).double().mean().item() == pytest.approx(p * p, abs=0.04)
        assert (given == 1.0).double().mean().item() == pytest.approx((1 - p) * p, abs=0.04)

    @STRUCTURES
    def test_gradients_reach_the_logits_and_stay_small(self, structure: str) -> None:
        """Through masks added as -10000 they are thousands of times larger than the output's."""
        q, k, v = (3 * x for x in inputs(MAX_LEN))
        module = build(structure=structure, penalty=0.0).train()
        torch.manual_seed(0)
        module(q, k, v, CTX).mean().backward()
        gradient = module.logits.grad
        assert (gradient != 0).any(-1).double().mean() > 0.9
        assert gradient.abs().max() < 1

    def test_the_gradient_is_straight_through(self) -> None:
        """Two tokens, one head, noise replayed: the derivative by hand."""
        site = replace(SITE, heads=1, max_len=2)
        module = build(site, learned=False, start=0.5, temperature=0.7, penalty=0.0).train()
        q = torch.zeros(1, 1, 2, 2, dtype=torch.float64)
        v = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.float64)
        torch.manual_seed(3)
        module(q, q, v, CTX)[0, 0, 0, 0].backward()
        torch.manual_seed(3)
        noise = -torch.empty(1, 2, 2, dtype=torch.float64).exponential_().log()
        logits = module.logits.detach().requires_grad_()
        soft = ((logits + noise) / 0.7).softmax(-1)[0, :, 0]
        hard = (soft > 0.5).double()
        if not hard.any():
            hard[0] = 1
        keep = soft - soft.detach() + hard
        (keep[1] / keep.sum()).backward()
        torch.testing.assert_close(module.logits.grad, logits.grad, rtol=0, atol=1e-10)

    def test_dropped_keys_of_huge_scores_leave_outputs_and_gradients_finite(self) -> None:
        q, k, v = (40 * x for x in inputs(MAX_LEN))
        q, k, v = (x.float().requires_grad_() for x in (q, k, v))
        module = build(penalty=0.0).float().train()
        out = module(q, k, v, CTX)
        out.sum().backward()
        assert out.isfinite().all()
        tensors = (q, k, v, module.logits)
        assert all(x.grad.isfinite().all() for x in tensors)


class TestLoss:
    @STRUCTURES
    def test_it_is_the_expected_part_that_is_kept(self, structure: str) -> None:
        module = build(structure=structure, penalty=0.5).train()
        module(*inputs(5), CTX)
        share = (module.logits[..., 0] - module.logits[..., 1]).sigmoid()
        if structure == "toeplitz":
            rank = torch.arange(MAX_LEN)
            share = share[:, (rank[:, None] - rank).abs()]
        torch.testing.assert_close(module.auxiliary_loss(), 0.5 * share.mean())

    def test_a_long_mask_does_not_overflow_fp16(self) -> None:
        module = build(replace(SITE, max_len=600), learned=False, penalty=1.0).half().train()
        module(*(x.half() for x in inputs(5)), CTX)
        wanted = torch.tensor(4.0).sigmoid()
        torch.testing.assert_close(module.auxiliary_loss(), wanted, rtol=0, atol=1e-3)

    def test_descending_it_makes_the_mask_sparse(self) -> None:
        module = build(learned=False, penalty=1.0).train()
        for _ in range(6):
            module(*inputs(5), CTX)
            (slope,) = torch.autograd.grad(module.auxiliary_loss(), module.logits)
            with torch.no_grad():
                module.logits -= 0.5 * slope.sign()
        weights = module.eval().attention_map(*inputs(MAX_LEN)[:2], CTX)
        assert (weights == 0).double().mean() > 0.9


@STRUCTURES
def test_structure_decides_the_parameters(structure: str) -> None:
    shape = (HEADS, MAX_LEN, 2) if structure == "toeplitz" else (HEADS, MAX_LEN, MAX_LEN, 2)
    state = build(structure=structure).state_dict()
    assert {name: tuple(x.shape) for name, x in state.items()} == {"logits": shape}


def test_a_longer_input_is_refused_with_both_numbers() -> None:
    with pytest.raises(UnsupportedCall, match=rf"at most {MAX_LEN} tokens and got {MAX_LEN + 1}"):
        build()(*inputs(MAX_LEN + 1), Context())


class TestSharedByLayers:
    def layers(self) -> nn.ModuleList:
        """Three layers of one patch."""
        site = replace(SITE, shared={})
        return nn.ModuleList(build(site, share="layers") for _ in range(3))

    @pytest.mark.parametrize(
        "again",
        [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
        ids=["as-built", "copy", "pickle"],
    )
    def test_all_layers_hold_one_mask(self, again) -> None:
        layers = again(self.layers())
        assert len(list(layers.parameters())) == 1
        assert len(layers.state_dict()) == 3

    def test_a_model_saves_it_once_and_loads_it_as_one(self, tmp_path) -> None:
        tiny = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2}
        model = zoo.build("bert", "dam", options={"share": "layers"}, vocab_size=9, **tiny)
        zoo.save(model, tmp_path / "saved")
        for one in (model, zoo.load(tmp_path / "saved")):
            logits = [layer.attention.self.zoo.logits for layer in one.encoder.layer]
            assert len({id(mask) for mask in logits}) == 1
            assert sum(name.endswith("zoo.logits") for name, _ in one.named_parameters()) == 1
        with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
            assert sum(name.endswith("zoo.logits") for name in file.keys()) == 1  # noqa: SIM118

    @pytest.mark.parametrize("other", [{"max_len": 16}, {"heads": 4}], ids=["length", "heads"])
    def test_layers_of_another_shape_have_their_own(self, other: dict[str, int]) -> None:
        site = replace(SITE, shared={})
        one = build(site, share="layers")
        two = build(replace(site, **other), share="layers")
        assert one.logits is not two.logits
