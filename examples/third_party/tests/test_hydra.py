"""Hydra keeps the rules of zoo-core, and is the formula of its paper."""

from __future__ import annotations

import pytest
import torch

import zoo_core as zoo
from zoo_core.testing import parametrize_mechanisms


@parametrize_mechanisms("zoo-hydra/*")
def test_conformance(mechanism, check) -> None:
    """Every rule of zoo-core that applies, and hydra in every installed architecture."""
    check(mechanism)


def by_loops(q, k, v, seen):
    """The formula, token by token; seen: (B, L, S) bool."""
    out = torch.zeros_like(v[:, :, :1]).repeat(1, 1, q.shape[2], 1)
    for b, i, j in seen.nonzero().tolist():
        query, key = q[b, :, i], k[b, :, j]
        out[b, :, i] += query / query.norm() * key / key.norm() * v[b, :, j]
    return out


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_equals_the_formula(causal) -> None:
    """A padded batch equals the loop, with and without causality."""
    q, k, v = torch.randn(3, 2, 3, 7, 4, dtype=torch.float64).unbind(0)
    padding = torch.tensor([[True] * 7, [False, True, True, False, True, True, False]])
    seen = padding[:, None, :].expand(2, 7, 7)
    if causal:
        seen = seen & torch.ones(7, 7, dtype=torch.bool).tril()
    record = zoo.mechanisms("zoo-hydra/hydra")[0]
    module = record.factory(zoo.Site(heads=3, head_dim=4, dim=12), record.options())
    got = module(q, k, v, zoo.Context(key_padding=padding, causal=causal))
    torch.testing.assert_close(got, by_loops(q, k, v, seen), rtol=0, atol=1e-12)


def test_runs_in_a_bert() -> None:
    """By its qualified name, as manifests store it."""
    size = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 99}
    model = zoo.build("bert", "zoo-hydra/hydra", intermediate_size=64, **size)
    ids = torch.randint(5, 99, (2, 9))
    assert model(ids).last_hidden_state.isfinite().all()
