"""Kernels in place of plain torch: when they are chosen, and that nothing else changes.

Here, stand-ins have the signatures of flash-linear-attention and compute token by token; its own
kernels run where there is a GPU, at the end.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo_core import Context, Site, registry
from zoo_core.errors import UnsupportedCall
from zoo_core.nn import choice, gpu
from zoo_core.nn.windows import Window

BATCH, HEADS, WIDTH, SCALE = 3, 2, 16, 0.3


class Kernels:
    """Stand-ins; `calls` are the names of those that ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def chunk_linear_attn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        normalize: bool = True,
    ) -> tuple[Tensor, None]:
        """q, k (B, N, H, M), v (B, N, H, E)."""
        self.calls.append("linear")
        self._expect_layout(q, k, v)
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        state, total, out = 0, 0, []
        for i in range(q.shape[1]):
            state = state + k[:, i, :, :, None] * v[:, i, :, None]
            total = total + k[:, i]
            read = torch.einsum("bhm,bhme->bhe", q[:, i] * scale, state)
            weight = (q[:, i] * scale * total).sum(-1, keepdim=True)
            out.append(read / weight if normalize else read)
        return torch.stack(out, 1), None

    def chunk_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
    ) -> tuple[Tensor, None]:
        """q, k (B, N, H, M), v (B, N, H, E), beta (B, N, H)."""
        self.calls.append("delta")
        self._expect_layout(q, k, v)
        assert beta.shape == q.shape[:3]
        assert not use_qk_l2norm_in_kernel
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        state, out = q.new_zeros(len(q), q.shape[2], v.shape[-1], q.shape[-1]), []
        for i in range(q.shape[1]):
            held = torch.einsum("bhem,bhm->bhe", state, k[:, i])
            added = beta[:, i, :, None] * (v[:, i] - held)
            state = state + added[..., None] * k[:, i, :, None]
            out.append(torch.einsum("bhem,bhm->bhe", state, q[:, i] * scale))
        return torch.stack(out, 1), None

    def _expect_layout(self, *tensors: Tensor) -> None:
        for x in tensors:
            assert x.shape[2] == HEADS
            assert x.is_contiguous()
            assert x.shape[-1] % gpu.STEP == 0  # the real backward refuses odd widths


@pytest.fixture
def kernels(monkeypatch) -> Iterator[Kernels]:
    """Stand-ins in place of flash-linear-attention, and every tensor suits them."""
    made = Kernels()
    for package in ("fla", "fla.ops", "fla.ops.linear_attn", "fla.ops.delta_rule"):
        monkeypatch.setitem(sys.modules, package, made)
    monkeypatch.setattr(gpu, "suits", lambda *_: choice.kernels_allowed())
    gpu.kernel.cache_clear()
    yield made
    gpu.kernel.cache_clear()


def build(name: str, *, causal: bool) -> nn.Module:
    torch.manual_seed(0)
    record = registry.mechanism(name)
    dim = HEADS * WIDTH
    site = Site(heads=HEADS, head_dim=WIDTH, dim=dim, scale=SCALE, max_len=512, causal=causal)
    return record.factory(site, record.options()).double()


def inputs(length: int) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(length)
    shapes = [(BATCH, HEADS, length, WIDTH)] * 3 + [(BATCH, length, HEADS * WIDTH)]
    return tuple(
        torch.randn(shape, dtype=torch.float64, generator=source).requires_grad_()
        for shape in shapes
    )


def holes(length: int) -> Tensor:
    """Padding left, right and inside."""
    real = torch.ones(BATCH, length, dtype=torch.bool)
    real[0, :5] = False
    real[1, -3:] = False
    real[2, 4:7] = False
    return real


def gradients(out: Tensor, real: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """Of the outputs of real tokens; None where a leaf is not used."""
    read = out.masked_fill(~real[:, None, :, None], 0)
    found = torch.autograd.grad(read.square().sum(), leaves, allow_unused=True)
    return [x for x in found if x is not None]


def tensor(*, cuda: bool = True, dtype: torch.dtype = torch.bfloat16) -> Any:
    return types.SimpleNamespace(is_cuda=cuda, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "widths", "chosen"),
    [
        pytest.param(tensor(), (64, 256), True, id="bfloat16-on-cuda"),
        pytest.param(tensor(cuda=False), (64,), False, id="another-device"),
        pytest.param(tensor(dtype=torch.float16), (64,), False, id="float16"),
        pytest.param(tensor(dtype=torch.float32), (64,), False, id="float32"),
        pytest.param(tensor(), (64, 40), False, id="no-multiple-of-16"),
        pytest.param(tensor(), (272,), False, id="too-wide"),
    ],
)
def test_kernels_are_chosen_by_device_dtype_and_width(x, widths, chosen: bool) -> None:
    assert gpu.suits(x, *widths) is chosen


def test_compiled_code_takes_the_plain_path(monkeypatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not gpu.suits(tensor(), 64)


def test_plain_only_holds_within_its_block() -> None:
    with choice.plain_only():
        with choice.plain_only():
            pass
        assert not gpu.suits(tensor(), 64)
    assert gpu.suits(tensor(), 64)
    with pytest.raises(KeyError), choice.plain_only():
        raise KeyError
    assert gpu.suits(tensor(), 64)


def test_without_the_package_the_plain_path_is_taken_in_silence(kernels, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", None)
    q, k, v, _ = inputs(9)
    module = build("linear", causal=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = module(q, k, v, Context(causal=True))
    with choice.plain_only():
        assert torch.equal(got, module(q, k, v, Context(causal=True)))


def test_a_package_that_cannot_be_imported_is_told_of_once(monkeypatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "fla":
                raise RuntimeError("needs another driver")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    gpu.kernel.cache_clear()
    with pytest.warns(UserWarning, match="fla is installed and cannot be used.*another driver"):
        assert gpu.kernel("fla.ops", "anything") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gpu.kernel("fla.ops", "anything") is None
    gpu.kernel.cache_clear()


@pytest.mark.parametrize(
    ("name", "causal", "ran"),
    [
        pytest.param("linear", True, ["linear"], id="linear-causal"),
        pytest.param("linear", False, [], id="linear-both-ways-has-no-kernel"),
        pytest.param("dpfp", True, ["linear"], id="dpfp-causal"),
        pytest.param("delta", True, ["delta"], id="delta-causal"),
        pytest.param("delta", False, ["delta", "delta"], id="delta-both-ways"),
    ],
)
def test_a_kernel_computes_the_same(kernels: Kernels, name: str, causal: bool, ran) -> None:
    """float64, padding that holds NaN, a sample without a real token; gradients as well."""
    module, (q, k, v, x) = build(name, causal=causal), inputs(21)
    real = holes(21)
    real = torch.cat([real[:2], torch.zeros_like(real[:1])])
    gaps = ~real[:, None, :, None]
    with torch.no_grad():
        for y in (k, v):
            y.masked_fill_(gaps, torch.nan)
        x.masked_fill_(~real[..., None], torch.nan)
    ctx = Context(key_padding=real, causal=causal, hidden=x)
    leaves = (q, k, v, x, *module.parameters())
    got = module(q, k, v, ctx)
    assert kernels.calls == ran
    with choice.plain_only():
        wanted = module(q, k, v, ctx)
    assert not got[2].any()
    real_rows = real[:, None, :, None].expand_as(got)
    assert_close(got[real_rows], wanted[real_rows], rtol=0, atol=1e-10)
    pairs = zip(gradients(got, real, leaves), gradients(wanted, real, leaves), strict=True)
    for ours, plain in pairs:
        assert_close(ours, plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["linear", "delta"])
def test_tokens_after_a_cache_are_computed_the_same(kernels: Kernels, name: str) -> None:
    """By the plain path, but for delta, which goes through all keys either way."""
    module, (q, k, v, _) = build(name, causal=True), inputs(17)
    ctx = Context(causal=True, query_offset=14)
    got = module(q[:, :, -3:], k, v, ctx)
    assert kernels.calls == (["delta"] if name == "delta" else [])
    with choice.plain_only():
        assert_close(got, module(q[:, :, -3:], k, v, ctx), rtol=0, atol=1e-12)


def test_a_second_derivative_is_refused_in_words(kernels: Kernels) -> None:
    module, (q, k, v, _) = build("linear", causal=True), inputs(9)

    def penalty() -> Tensor:
        out = module(q, k, v, Context(causal=True))
        (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        return gradient.square().sum()

    with pytest.raises(UnsupportedCall, match="plain_only"):
        penalty()
    with choice.plain_only():
        penalty().backward()
    assert k.grad is not None


@pytest.fixture
def flex(monkeypatch) -> None:
    """flex_attention for every tensor, uncompiled as a CPU needs it."""
    from torch.nn.attention import flex_attention as library

    monkeypatch.setattr(gpu, "suits", lambda *_: choice.kernels_allowed())
    monkeypatch.setattr(gpu, "kernel", lambda *_: print)
    monkeypatch.setattr(gpu, "_flex_attention", lambda: library.flex_attention)


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same_window(flex, causal: bool) -> None:
    """float64, 300 tokens, which are no multiple of a block, and a sample without any."""
    window, real = Window(20, prefix=2, causal=causal), torch.tensor([300, 123, 0])
    with torch.no_grad():
        q, k, v, _ = inputs(300)
        got = window.attend_front(q, k, v, real, scale=SCALE)
        with choice.plain_only():
            wanted = window.attend_front(q, k, v, real, scale=SCALE)
    assert_close(got, wanted, rtol=0, atol=1e-12)
    assert not torch.equal(got, wanted)  # else it was not flex_attention
    assert not got[2].any()


@pytest.mark.parametrize("causal", [False, True], ids=["both-ways", "causal"])
@pytest.mark.parametrize("prefix", [0, 3, 130])
@pytest.mark.parametrize("reach", [0, 1, 127, 200])
def test_the_mask_has_the_blocks_of_the_window_and_no_others(
    monkeypatch, reach: int, prefix: int, causal: bool
) -> None:
    """Token by token, and every block that holds a visible pair, for blocks of 128."""
    length, real = 5 * gpu.BLOCK, torch.tensor([600, 0])
    keys = torch.zeros(2, 1, length, 1)
    mask = gpu._window_mask(keys, real, reach=reach, prefix=prefix, causal=causal)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    near = (i - j).abs() <= reach
    wanted = (near | (j < prefix)) & (j <= i) if causal else near | (j < prefix) | (i < prefix)
    sample = torch.tensor(0)
    assert torch.equal(mask.mask_mod(sample, sample, i, j), wanted & (j < 600))
    assert not mask.mask_mod(sample + 1, sample, i, j).any()
    blocks = wanted.unflatten(0, (5, -1)).unflatten(2, (5, -1)).any(3).any(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks)


def test_dropout_and_strides_take_the_plain_path(flex, monkeypatch) -> None:
    def refuse() -> Callable[..., Any]:
        raise AssertionError("flex_attention was asked for")

    monkeypatch.setattr(gpu, "_flex_attention", refuse)
    q, k, v, _ = inputs(300)
    Window(20).attend_front(q, k, v, None, scale=SCALE, dropout=0.1)
    Window(5, stride=2).attend_front(q, k[:, :, :150], v[:, :, :150], None, scale=SCALE)
    with pytest.raises(AssertionError, match="asked for"):
        Window(20).attend_front(q, k, v, None, scale=SCALE)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize(
    ("name", "causal"), [("linear", True), ("delta", True), ("delta", False), ("local", False)]
)
def test_kernels_of_a_gpu_compute_the_same(monkeypatch, name: str, causal: bool) -> None:
    """bfloat16 against the plain path in fp32: 2e-2 of the root mean square, as in rule 6.

    Gradients 1e-1: in that of a query what the normaliser cancels is ten times what remains.
    """
    if name != "local":
        pytest.importorskip("fla.ops")
    chosen = []
    suits = gpu.suits
    monkeypatch.setattr(gpu, "suits", lambda *x: chosen.append(suits(*x)) or chosen[-1])
    module, tensors = build(name, causal=causal).cuda(), inputs(600)
    real = torch.ones(BATCH, 600, dtype=torch.bool, device="cuda")
    real[1, -50:] = False

    def run(dtype: torch.dtype) -> list[Tensor]:
        # Rounded inputs in both, so that only what the computation loses counts.
        q, k, v, x = (t.detach().cuda().bfloat16().to(dtype).requires_grad_() for t in tensors)
        ctx = Context(key_padding=real, causal=causal, hidden=x)
        out = module.to(dtype)(q, k, v, ctx)
        return [out.masked_fill(~real[:, None, :, None], 0), *gradients(out, real, (q, k, v))]

    got = run(torch.bfloat16)
    assert any(chosen)
    with choice.plain_only():
        wanted = run(torch.float32)
    for ours, plain, most in zip(got, wanted, (2e-2, 1e-1, 1e-1, 1e-1), strict=True):
        error = (ours.float() - plain).square().mean().sqrt() / plain.square().mean().sqrt()
        assert error < most
