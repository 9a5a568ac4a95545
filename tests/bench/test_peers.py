"""Adapters to public implementations, on stand-ins with the same signatures."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo_core import registry
from zoo_core.bench import layers, sweep
from zoo_core.bench.competitors import Inputs, attend, fitted
from zoo_core.bench.peers import PEERS, Given, peers_of
from zoo_core.errors import BenchError, ZooError

CASE = sweep(length=64, batch=2, heads=2, width=64)[0]


def options(mechanism: str, **changes) -> dict:
    record = registry.mechanism(mechanism)
    return fitted(record, record.options(**changes), CASE).as_dict()


def peer(name: str):
    (found,) = [one for one in PEERS if one.name == name]
    return found


class Recorder(nn.Module):
    """A library's class: remembers how it was made; its forward is for the test to give."""

    made: ClassVar[dict] = {}

    def __init__(self, *arguments, **how) -> None:
        super().__init__()
        type(self).made = {"arguments": arguments, **how}


@pytest.fixture
def library(monkeypatch):
    """Put a module with one class in place of a library."""

    def library(module: str, name: str, forward, *children: str):
        kind = type(name, (Recorder,), {"forward": forward})
        fake = types.ModuleType(module)

        def make(*arguments, **how):
            made = kind(*arguments, **how)
            for child in children:
                made.add_module(child, nn.Linear(1, 1))
            return made

        setattr(fake, name, make)
        for part in range(module.count(".") + 1):
            parent = ".".join(module.split(".")[: part + 1])
            monkeypatch.setitem(sys.modules, parent, fake)
        return kind

    return library


def softmax_of(q, k, v, heads: int):
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def expected(inputs: Inputs) -> torch.Tensor:
    return F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v)


def test_linformer_gets_what_was_projected_and_the_same_rank(library) -> None:
    kind = library(
        "linformer",
        "LinformerSelfAttention",
        lambda self, x: self.to_out(softmax_of(self.to_q(x), self.to_k(x), self.to_v(x), 2)),
    )
    inputs = Inputs.of(CASE)
    work = peer("linformer").work(inputs, options("linformer", rank=16))
    assert kind.made == {
        "arguments": (128,),
        "seq_len": 64,
        "k": 16,
        "heads": 2,
        "dim_head": 64,
        "share_kv": False,
    }
    out = work.function().unflatten(-1, (2, -1)).transpose(1, 2)
    torch.testing.assert_close(out, expected(inputs))
    assert len(work.leaves) == 3
    with pytest.raises(BenchError, match="linformer: shares E and F between heads"):
        peer("linformer").work(inputs, options("linformer", share="none"))


@pytest.mark.parametrize(
    ("name", "module", "kind", "mechanism", "sizes"),
    [
        (
            "nystrom-attention",
            "nystrom_attention",
            "NystromAttention",
            "nystromformer",
            {"num_landmarks": 64, "pinv_iterations": 6, "residual": False},
        ),
        (
            "memory-compressed-attention",
            "memory_compressed_attention",
            "MemoryCompressedAttention",
            "memory_compressed",
            {"compression_factor": 3, "heads": 2},
        ),
    ],
)
def test_fused_projections_are_given(library, name, module, kind, mechanism, sizes) -> None:
    made = library(
        module,
        kind,
        lambda self, x: self.to_out(softmax_of(*self.to_qkv(x).chunk(3, -1), 2)),
    )
    inputs = Inputs.of(CASE)
    work = peer(name).work(inputs, options(mechanism))
    assert sizes.items() <= made.made.items()
    out = work.function().unflatten(-1, (2, -1)).transpose(1, 2)
    torch.testing.assert_close(out, expected(inputs))
    assert work.call("backward")()[0].shape == (2, 64, 3 * 128)


def test_heads_are_folded_into_the_batch_for_local_attention(library) -> None:
    kind = library(
        "local_attention",
        "LocalAttention",
        lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v),
    )
    inputs = Inputs.of(CASE)
    work = peer("local-attention").work(inputs, options("local", window=8))
    assert kind.made["window_size"] == 8
    assert kind.made["exact_windowsize"]
    assert not kind.made["use_rotary_pos_emb"]
    torch.testing.assert_close(work.function().unflatten(0, (2, 2)), expected(inputs))


def test_reformer_shares_queries_and_keys(library) -> None:
    kind = library("reformer_pytorch", "LSHAttention", lambda self, qk, v: (qk + v, None, None))
    inputs = Inputs.of(CASE)
    work = peer("reformer-pytorch").work(inputs, options("reformer", rounds=2, chunk=16))
    assert (kind.made["bucket_size"], kind.made["n_hashes"]) == (16, 2)
    torch.testing.assert_close(work.function()[0], (inputs.q + inputs.v).flatten(0, 1))
    odd = Inputs.of(replace(CASE, length=48))
    with pytest.raises(BenchError, match="48 tokens are no multiple of two chunks, 32"):
        peer("reformer-pytorch").work(odd, options("reformer", chunk=16))


def test_performer_has_the_same_features(library) -> None:
    kind = library("performer_pytorch", "FastAttention", lambda self, q, k, v: q + k + v)
    inputs = Inputs.of(CASE)
    peer("performer-pytorch").work(inputs, options("performer", features=32, kind="relu"))
    assert kind.made == {
        "arguments": (),
        "dim_heads": 64,
        "nb_features": 32,
        "ortho_scaling": 1,
        "generalized_attention": True,
    }
    with pytest.raises(BenchError, match="performer-pytorch: has no hyperbolic features"):
        peer("performer-pytorch").work(inputs, options("performer", kind="hyperbolic"))


def test_isab_gathers_from_the_given_keys(library, monkeypatch) -> None:
    def forward(self, x, latents=None):
        return self.attn2.to_out(self.attn2.to_q(x)), self.attn1.to_kv(x)

    library("isab_pytorch", "ISAB", forward, "attn1", "attn2")
    inputs = Inputs.of(CASE)
    work = peer("isab-pytorch").work(inputs, options("induced"))
    out, gathered = work.function()
    assert out.shape == (2, 64, 128)
    assert gathered.shape == (2, 64, 256)
    with pytest.raises(BenchError, match="use --width 64"):
        peer("isab-pytorch").work(Inputs.of(replace(CASE, width=32)), options("induced"))


def test_transformers_nystromformer_does_the_same_as_ours() -> None:
    inputs = Inputs.of(sweep(length=64, heads=1, width=16)[0])
    record = registry.mechanism("nystromformer")
    chosen = record.options(landmarks=8)
    ours = attend(record, chosen, inputs).function()
    work = peer("transformers nystromformer").work(inputs, chosen.as_dict())
    theirs = work.function()[0]
    torch.testing.assert_close(theirs[:, None], ours, rtol=1e-3, atol=1e-3)


def test_what_is_missing_is_said_and_the_rest_is_measured(quick, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "performer_pytorch", None)
    cases = sweep(length=16, heads=2, width=8)
    rows = list(layers.measure(["performer"], cases, effort=quick))
    assert [row.role for row in rows] == ["reference", "mechanism", "peer"]
    assert rows[2].refused.startswith("performer-pytorch: is not installed")
    assert "zoo-core[peers]" in rows[2].refused
    assert set(rows[1].ratios) == {"sdpa", "flops", "bytes"}


def test_a_measured_peer_has_a_row_and_a_ratio(quick, library) -> None:
    library("performer_pytorch", "FastAttention", lambda self, q, k, v: q + k + v)
    cases = sweep(length=16, heads=2, width=8)
    _, ours, theirs = layers.measure(["performer"], cases, effort=quick)
    assert theirs.of == "performer"
    assert theirs.seconds > 0
    assert ours.best_peer == ("performer-pytorch", ours.ratios["performer-pytorch"])


def test_a_library_that_fails_to_import_is_described(monkeypatch) -> None:
    class Refusing:
        def find_spec(self, name, path=None, target=None):
            if name == "isab_pytorch":
                raise RuntimeError("needs another torch")

    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "isab_pytorch", raising=False)
    with pytest.raises(BenchError, match="isab-pytorch: cannot be imported: RuntimeError"):
        peer("isab-pytorch").work(Inputs.of(CASE), options("induced"))


def test_padding_and_other_devices_have_no_peers() -> None:
    padded = Inputs.of(replace(CASE, padded=True))
    with pytest.raises(BenchError, match="without padding only"):
        peer("linformer").work(padded, options("linformer"))
    for mechanism, name in (("local", "flex_attention"), ("linear", "flash-linear-attention")):
        assert name not in [one.name for one in peers_of(mechanism)]
        assert name in [one.name for one in peers_of(mechanism, "cuda:0")]


def test_peers_are_of_mechanisms_that_exist() -> None:
    for one in PEERS:
        try:
            registry.mechanism(one.mechanism)
        except ZooError as error:
            pytest.fail(f"{one.name}: {error}")


def test_flash_linear_attention_gets_tokens_first(monkeypatch) -> None:
    asked = {}

    def chunk_linear_attn(q, k, v, **how):
        asked["linear"] = how
        return (q * k).sum(-1, keepdim=True) * v, None

    def chunk_delta_rule(q, k, v, beta, **how):
        asked["delta"] = how
        return v * beta[..., None].cumsum(1), None

    fake = types.SimpleNamespace(
        chunk_linear_attn=chunk_linear_attn, chunk_delta_rule=chunk_delta_rule
    )
    for module in ("fla", "fla.ops", "fla.ops.linear_attn", "fla.ops.delta_rule"):
        monkeypatch.setitem(sys.modules, module, fake)
    half = Inputs.of(replace(CASE, dtype="bfloat16"))
    linear = peer("flash-linear-attention").work(half, options("linear"))
    q, k = F.elu(half.q) + 1, F.elu(half.k) + 1
    wanted = (q * k).sum(-1, keepdim=True) * half.v
    torch.testing.assert_close(linear.function()[0].transpose(1, 2), wanted)
    assert asked["linear"] == {}
    delta = peer("flash-linear-attention delta").work(half, options("delta"))
    assert len(delta.call("backward")()) == 4
    assert asked["delta"] == {"use_qk_l2norm_in_kernel": True}
    with pytest.raises(BenchError, match="the mechanism has"):
        peer("flash-linear-attention").work(half, options("linear", feature_map="hedgehog"))
    with pytest.raises(BenchError, match="has no float32"):
        peer("flash-linear-attention delta").work(Inputs.of(CASE), options("delta"))


def test_given_hands_out_its_value() -> None:
    value = torch.ones(2)
    assert Given(value)(torch.zeros(3)) is value
