"""Mechanisms compute the same with native kernels and without, and keep their rules with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import zoo_core as zoo
from zoo_core.attention import Context
from zoo_core.nn import choice, softmax
from zoo_core.nn.sparse import SparseAttention
from zoo_core.nn.windows import Window
from zoo_core.testing import compare, mechanism_checks
from zoo_core.testing.cases import Setting

WIDTH = 16
LENGTHS = (1, 63, 64, 65, 300, 600)
#: Options with which 600 tokens are many.
OPTIONS: dict[str, dict[str, Any]] = {
    "bigbird": {"random": 1},
    "clustered": {"clusters": 20},
    "delta": {"strength_from": "keys"},
    "dpfp": {},
    "improved_clustered": {"clusters": 10, "topk": 20},
    "linear": {},
    "local": {"window": 20},
    "log_sparse": {"window": 10},
    "low_rank_band": {"band": 20, "rank": 4},
    "lsh": {"chunk": 16},
    "pooling": {"window": 20, "outer": 80},
    "reformer": {"chunk": 16},
    "sparse_transformer": {"stride": 10},
    "spe": {"realizations": 16, "sines": 4},
}
#: Their hashing and their sorting have kernels, too.
HASHED = ("lsh", "reformer")
#: As has what finds their clusters.
CLUSTERED = ("clustered", "improved_clustered")
#: Without a kernel of their causal form; spe then only encodes by one.
SEE_ALL = ("dpfp", "linear", "spe")
RECORDS = {record.name: record for record in zoo.mechanisms() if record.name in OPTIONS}
#: Of the kit: what calls a mechanism and compares it with itself.
RULES = (
    "all_padding",
    "long_padding",
    "padding_content",
    "padding_gradients",
    "truncation",
    "prefix",
    "full_mask",
    "polarity",
    "batch_mates",
    "ragged_batch",
    "eval_repeats",
    "forward_changes_nothing",
    "lengths",
    "autocast",
    "deepcopy",
    "gradient_checkpointing",
    "causal",
    "causal_alone",
    "causal_cache",
    "cross",
)


pytestmark = pytest.mark.usefixtures("native_kernels")


class Taken(TorchDispatchMode):
    """The native kernels that are called within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "zoo_core":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))

    @property
    def names(self) -> set[str]:
        return {str(function) for function, _ in self.calls}


def build(name: str, *, causal: bool = False, prefix: int = 0) -> nn.Module:
    record = RECORDS[name]
    site = zoo.Site(
        dim=2 * WIDTH, heads=2, head_dim=WIDTH, scale=0.3, max_len=640, causal=causal, prefix=prefix
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return record.factory(site, record.options(**OPTIONS[name])).eval()


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v as a host has them, three samples, and which tokens are real: of the last none."""
    torch.manual_seed(length)
    q, k, v = (torch.randn(3, length, 2, WIDTH).transpose(1, 2) for _ in range(3))
    real = torch.rand(3, length) > 0.3
    real[0], real[2] = True, False
    return q, k, v, real


def attend(module: nn.Module, length: int, *, padded: bool, **how: Any) -> list[Tensor]:
    """The outputs of real tokens with and without gradients, and all gradients.

    padded: whether only `real` tokens are; then the keys and values of the others are NaN.
    """
    *tensors, real = inputs(length)
    real = real if padded else torch.ones_like(real)
    hidden = ~real[:, None, :, None]
    q, *others = tensors
    k, v = (x.masked_fill(hidden, torch.nan).requires_grad_() for x in others)
    q.requires_grad_()
    ctx = Context(key_padding=real if padded else None, **how)
    out = module(q, k, v, ctx).masked_fill(hidden, 0)
    with torch.no_grad():
        alone = module(q, k, v, ctx).masked_fill(hidden, 0)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    grads = torch.autograd.grad(
        out, [q, k, v, *module.parameters()], weights, materialize_grads=True
    )
    return [out, alone, *grads]


def kernels_of(name: str, *, causal: bool = False) -> int:
    """Forward and backward, and what hashes, clusters or encodes."""
    own = 4 if name in (*HASHED, "spe") else 3 if name in CLUSTERED else 2
    return own - 2 if causal and name in SEE_ALL else own


def kinds(name: str) -> list[dict[str, Any]]:
    """The calls that a mechanism takes."""
    causal = [{"causal": True}] if RECORDS[name].supports.causal else []
    return [{}, {"prefix": 2}, *causal]


def check_agrees(got: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        most = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5 * most)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", OPTIONS)
def test_kernels_compute_the_same(name: str, length: int, padded: bool) -> None:
    for how in kinds(name):
        module = build(name, **how)
        with Taken() as taken:
            got = attend(module, length, padded=padded, **how)
        if length == LENGTHS[-1]:
            expected = kernels_of(name, causal=how.get("causal", False))
            assert len(taken.names) == expected, f"forward and backward of {how}"
        with Taken() as taken, choice.plain_only():
            wanted = attend(module, length, padded=padded, **how)
        assert not taken.names
        check_agrees(got, wanted)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_nystromformer_takes_them_for_many_tokens(padded: bool) -> None:
    """Where none is padding; fused softmax is faster otherwise."""
    [record] = zoo.mechanisms("nystromformer")
    site = zoo.Site(dim=2 * WIDTH, heads=2, head_dim=WIDTH, scale=0.3, max_len=2 * softmax.MANY)
    module = record.factory(site, record.options()).eval()
    for length in (softmax.MANY - 1, softmax.MANY + 70):
        with Taken() as taken:
            got = attend(module, length, padded=padded)
        assert len(taken.names) == (0 if padded or length < softmax.MANY else 2)
        with choice.plain_only():
            check_agrees(got, attend(module, length, padded=padded))


@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_code_takes_them(name: str) -> None:
    torch._dynamo.reset()
    module = build(name, prefix=2)
    targets: list[str] = []
    backend = recording(targets)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for length in (600, 590):
        got = attend(compiled, length, padded=True, prefix=2)
        check_agrees(got, attend(module, length, padded=True, prefix=2))
    taken = {target for target in targets if target.startswith("zoo_core.")}
    assert len(taken) == kernels_of(name), "forward and backward"
    # Forward, backward, and forward without gradients.
    assert targets.count("new graph") == 3, "another length needs no graphs of its own"


def recording(targets: list[str]) -> Callable[..., Any]:
    """A backend that notes what every graph calls, and runs it as it is."""

    def note(graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        targets.append("new graph")
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=note)


@pytest.mark.parametrize("name", OPTIONS)
def test_exported_code_takes_none(name: str) -> None:
    *tensors, real = inputs(600)
    exported = torch.export.export(Masked(build(name)), (*tensors, real))
    assert not any("zoo_core" in str(node.target) for node in exported.graph.nodes)


class Masked(nn.Module):
    """Export takes no dataclasses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        out: Tensor = self.module(q, k, v, Context(key_padding=real))
        return out


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", OPTIONS)
def test_compilers_are_told_what_kernels_give(name: str, padded: bool) -> None:
    for how in kinds(name):
        with Taken() as taken:
            attend(build(name, **how), 600, padded=padded, **how)
        for kernel, args in taken.calls:
            torch.library.opcheck(kernel, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", OPTIONS)
def test_autocast_gives_the_same_dtype(name: str) -> None:
    """Other parts of a mechanism give half precision there."""
    module = build(name)
    *tensors, _ = inputs(600)
    with torch.autocast("cpu", torch.bfloat16):
        got = module(*tensors, Context())
        with choice.plain_only():
            wanted = module(*tensors, Context())
    assert got.dtype == wanted.dtype
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-2)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of the kit that kernels take, fp32 as wide as a vector, and kernels however short."""
    build, call = Setting.build, Setting.call

    def wide(setting: Setting) -> Setting:
        return setting.but(head_dim=WIDTH, max_len=128)

    fp32 = {"dtype": torch.float32}
    monkeypatch.setattr(Setting, "build", lambda one, **how: build(wide(one), **(fp32 | how)))
    monkeypatch.setattr(Setting, "call", lambda one, n, **how: call(wide(one), n, **(fp32 | how)))
    monkeypatch.setitem(compare.expect_close.__kwdefaults__, "tolerance", 2e-5)
    monkeypatch.setattr(Window, "_is_short", lambda window, keys, *, in_tiles: not in_tiles)
    monkeypatch.setattr(Window, "_size", 0)
    construct = SparseAttention.__init__

    def construct_for_any_length(module: SparseAttention, site: zoo.Site, **how: Any) -> None:
        construct(module, site, **(how | {"few": 0, "short": 0}))

    monkeypatch.setattr(SparseAttention, "__init__", construct_for_any_length)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_rules_hold_with_kernels(name: str, narrow: None) -> None:
    record = RECORDS[name]
    with Taken() as taken:
        for check in mechanism_checks(record, quick=True, combinations=False):
            if check.name in RULES:
                check(record)
    assert len(taken.names) == kernels_of(name)


@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("name", OPTIONS)
def test_nan_does_not_vanish(name: str, which: int) -> None:
    """A broken model has to show, as without kernels; hashed keys may lie where nobody looks."""
    *tensors, _ = inputs(600)
    tensors[which][0, 0, 300] = torch.nan
    with torch.no_grad():
        got = build(name)(*tensors, Context()).isnan()
        with choice.plain_only():
            wanted = build(name)(*tensors, Context()).isnan()
    assert got.any() == wanted.any() == (name not in HASHED or which != 1)
    assert got[0, 0, 300].all() or which
    assert not got[1:].any()
