from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

import zoo_core.testing
from zoo_attention.nystromformer import NYSTROMFORMER, NystromformerOptions
from zoo_attention.nystromformer.attention import pseudo_inverse
from zoo_core import Context, Site, option
from zoo_core.errors import OptionError

HEADS, WIDTH = 2, 8
SITE = Site(heads=HEADS, head_dim=WIDTH, dim=16, scale=WIDTH**-0.5, max_len=32)


def build(site: Site = SITE, **options: object) -> nn.Module:
    return NYSTROMFORMER.factory(site, NystromformerOptions(**options)).double().eval()


def inputs(length: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3))
    return q, k, v


def kernels(batch: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(batch, HEADS, size, size, dtype=dtype).softmax(-1)


def inverse_by_formula(a: Tensor, iterations: int) -> Tensor:
    """Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 for one matrix."""
    identity = torch.eye(len(a), dtype=a.dtype)
    z = a.T / a.sum(0).max()
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return z


def by_formula(q: Tensor, k: Tensor, v: Tensor, landmarks: int, iterations: int) -> Tensor:
    """The three softmaxes, head by head, over segments of one unpadded sample."""
    length = q.shape[-2]
    groups = [[i for i in range(length) if i * landmarks // length == m] for m in range(landmarks)]
    groups = [group for group in groups if group]
    heads = []
    for h in range(HEADS):
        few_q, few_k = (torch.stack([x[0, h, g].mean(0) for g in groups]) for x in (q, k))
        outer = (q[0, h] @ few_k.T * SITE.scale).softmax(-1)
        kernel = (few_q @ few_k.T * SITE.scale).softmax(-1)
        inner = (few_q @ k[0, h].T * SITE.scale).softmax(-1)
        heads.append(outer @ inverse_by_formula(kernel, iterations) @ inner @ v[0, h])
    return torch.stack(heads)[None]


@pytest.mark.parametrize("length", [1, 5, 8, 21, 32], ids=lambda n: f"{n}-tokens")
def test_it_computes_its_formula(length: int) -> None:
    q, k, v = inputs(length)
    wanted = by_formula(q, k, v, landmarks=8, iterations=6)
    got = build(landmarks=8)(q, k, v, Context())
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


def test_segments_are_those_of_each_samples_own_tokens() -> None:
    """Lengths 5 and 32 in one batch: whole segments of the short one would be padding."""
    q, k, v = inputs(32, batch=2)
    real = torch.ones(2, 32, dtype=torch.bool)
    real[0, :27] = False
    q, k, v = (x.masked_fill(~real[:, None, :, None], torch.nan) for x in (q, k, v))
    got = build(landmarks=16)(q, k, v, Context(key_padding=real))
    for sample, start in ((0, 27), (1, 0)):
        alone = [x[sample : sample + 1, :, start:] for x in (q, k, v)]
        wanted = by_formula(*alone, landmarks=16, iterations=6)
        torch.testing.assert_close(got[sample, :, start:], wanted[0], rtol=0, atol=1e-9)


class TestInverse:
    def test_six_iterations_follow_the_formula(self) -> None:
        a = kernels(2, 8)
        wanted = [[inverse_by_formula(matrix, 6) for matrix in heads] for heads in a]
        wanted = torch.stack([torch.stack(heads) for heads in wanted])
        torch.testing.assert_close(pseudo_inverse(a, 6), wanted, rtol=1e-9, atol=1e-9)

    def test_it_converges_to_the_inverse(self) -> None:
        a = kernels(1, 8) / 2 + torch.eye(8, dtype=torch.float64) / 2
        torch.testing.assert_close(pseudo_inverse(a, 12), torch.linalg.inv(a), rtol=0, atol=1e-10)

    def test_no_matrix_depends_on_another(self) -> None:
        """A start scaled by the largest norm of the batch would let a mate change the result."""
        ordinary = kernels(1, 8)
        lopsided = torch.full_like(ordinary, 1e-6)
        lopsided[..., 0] = 1
        together = pseudo_inverse(torch.cat([ordinary, lopsided]), 6)
        assert torch.equal(together[:1], pseudo_inverse(ordinary, 6))

    def test_rows_and_columns_of_empty_landmarks_stay_zero(self) -> None:
        a = torch.zeros(1, HEADS, 8, 8, dtype=torch.float64)
        a[..., :5, :5] = kernels(1, 5)
        z = pseudo_inverse(a, 6)
        torch.testing.assert_close(z[..., :5, :5], pseudo_inverse(a[..., :5, :5], 6))
        assert (z[..., 5:, :] == 0).all()
        assert (z[..., :, 5:] == 0).all()

    def test_a_sample_without_tokens_has_an_inverse_of_zeros(self) -> None:
        nothing = torch.zeros(1, HEADS, 8, 8, dtype=torch.float64)
        assert torch.equal(pseudo_inverse(nothing, 6), nothing)

    def test_autocast_leaves_it_in_single_precision(self) -> None:
        q, k, v = (x.bfloat16() for x in inputs(32))
        module = build(landmarks=8).float()
        wanted = module(q, k, v, Context())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(module(q, k, v, Context()), wanted)


class TestTransformersOwn:
    """Its attention, without its projections, for inputs of the one length it is built for."""

    def attend(self, x: Tensor, length: int) -> Tensor:
        config = NystromformerConfig(
            hidden_size=x.shape[-1],
            num_attention_heads=HEADS,
            num_landmarks=8,
            segment_means_seq_len=length,
        )
        theirs = NystromformerSelfAttention(config).double().eval()
        theirs.query = theirs.key = theirs.value = nn.Identity()
        nn.init.zeros_(theirs.conv.weight)
        return theirs(x)[0]

    def ours(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        out = build(landmarks=8, iterations=6)(heads, heads, heads, Context())
        return out.transpose(1, 2).flatten(2)

    def test_gives_the_same_where_all_matrices_have_one_norm(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(1, 32, WIDTH, dtype=torch.float64).repeat(3, 1, HEADS)
        torch.testing.assert_close(self.ours(x), self.attend(x, 32), rtol=0, atol=1e-9)

    def test_depends_on_batch_mates_where_this_one_does_not(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(2, 32, HEADS * WIDTH, dtype=torch.float64)
        x[1] *= 3
        torch.testing.assert_close(self.ours(x)[:1], self.ours(x[:1]))
        assert (self.attend(x, 32)[:1] - self.attend(x[:1], 32)).abs().max() > 1e-3


class TestExactLimit:
    @pytest.mark.parametrize("length", [1, 7, 31, 32], ids=lambda n: f"{n}-tokens")
    def test_a_landmark_per_token_is_softmax_attention(self, length: int) -> None:
        module = NYSTROMFORMER.factory(SITE, NYSTROMFORMER.exact_at(SITE)).double()
        q, k, v = inputs(length)
        wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
        torch.testing.assert_close(module(q, k, v, Context()), wanted, rtol=0, atol=1e-6)

    def test_so_it_is_for_a_padded_sample_with_fewer_tokens_than_landmarks(self) -> None:
        module = NYSTROMFORMER.factory(SITE, NYSTROMFORMER.exact_at(SITE)).double()
        q, k, v = inputs(20)
        real = torch.tensor([[True, False] * 10])
        scores = (q @ k.mT * SITE.scale).masked_fill(~real, -torch.inf)
        got = module(q, k, v, Context(key_padding=real))
        torch.testing.assert_close(
            got[:, :, ::2], (scores.softmax(-1) @ v)[:, :, ::2], rtol=0, atol=1e-6
        )

    def test_more_iterations_come_closer(self) -> None:
        q, k, v = inputs(32)
        wanted = (q @ k.mT * SITE.scale).softmax(-1) @ v
        errors = [
            (build(landmarks=32, iterations=n)(q, k, v, Context()) - wanted).abs().max().item()
            for n in (2, 6, 12, 20)
        ]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 1e-6


class TestConvolution:
    def module(self, width: int = 5) -> nn.Module:
        module = build(landmarks=8, conv=width)
        torch.manual_seed(2)
        nn.init.normal_(module.conv)
        return module

    def by_loop(self, v: Tensor, weight: Tensor, prefix: int) -> Tensor:
        out, reach = torch.zeros_like(v), weight.shape[1] // 2
        for i in range(prefix, v.shape[-2]):
            for step in range(-reach, reach + 1):
                if prefix <= i + step < v.shape[-2]:
                    out[:, :, i] += weight[:, step + reach, None] * v[:, :, i + step]
        return out

    @pytest.mark.parametrize("prefix", [0, 1, 2])
    @pytest.mark.parametrize("length", [1, 2, 3, 21], ids=lambda n: f"{n}-tokens")
    def test_it_runs_over_the_tokens_behind_the_prefix(self, length: int, prefix: int) -> None:
        q, k, v = inputs(length)
        module = self.module()
        without = build(landmarks=8)(q, k, v, Context())
        wanted = without + self.by_loop(v, module.conv, prefix)
        got = module(q, k, v, Context(prefix=prefix))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)

    def test_padding_is_skipped_wherever_it_lies(self) -> None:
        module = self.module()
        q, k, v = inputs(12)
        wanted = module(q, k, v, Context(prefix=1))
        places = torch.tensor([1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 17, 18])
        real = torch.zeros(1, 20, dtype=torch.bool)
        real[:, places] = True
        q, k, v = (
            torch.full((1, HEADS, 20, WIDTH), torch.nan, dtype=x.dtype).index_copy(2, places, x)
            for x in (q, k, v)
        )
        got = module(q, k, v, Context(key_padding=real, prefix=1))
        torch.testing.assert_close(got[:, :, places], wanted, rtol=0, atol=1e-10)

    def test_it_starts_without_effect_but_with_a_gradient(self) -> None:
        q, k, v = inputs(12)
        module = build(landmarks=8, conv=3)
        out = module(q, k, v, Context())
        assert torch.equal(out, build(landmarks=8)(q, k, v, Context()))
        out.square().sum().backward()
        assert (module.conv.grad != 0).all()

    def test_an_even_width_is_refused(self) -> None:
        with pytest.raises(OptionError, match=r"conv=4 must be odd, or 0"):
            NystromformerOptions(conv=4)


class TestIterations:
    def test_many_of_them_warn_because_few_are_the_regularisation(self) -> None:
        with pytest.warns(UserWarning, match=r"iterations=20.*64 landmarks.*6 is usual"):
            build(replace(SITE, max_len=512), landmarks=64, iterations=20)

    @pytest.mark.parametrize("options", [{"iterations": 8}, {"landmarks": 32, "iterations": 30}])
    def test_few_of_them_or_a_landmark_per_token_do_not(self, options: dict[str, int]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build(**{"landmarks": 8, **options})


@dataclass(frozen=True, kw_only=True)
class ConvolvingOptions(NystromformerOptions):
    conv: int = option(5, low=0)


def build_convolving(site: Site, options: ConvolvingOptions) -> nn.Module:
    """A module whose convolution acts, as after training."""
    module = NYSTROMFORMER.factory(site, options)
    if module.conv is not None:
        nn.init.normal_(module.conv)
    return module


CONVOLVING = replace(
    NYSTROMFORMER, name="convolving", options=ConvolvingOptions, factory=build_convolving
)


@zoo_core.testing.parametrize_mechanisms(CONVOLVING, quick=True)
def test_the_rules_hold_with_a_convolution(mechanism, check) -> None:
    """The kit builds default options, which have none."""
    check(mechanism)
