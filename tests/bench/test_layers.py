"""Races of bare mechanisms at a handful of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import zoo_core as zoo
from zoo_core import registry
from zoo_core.bench import counting, layers, sweep
from zoo_core.bench.competitors import Inputs, attend
from zoo_core.errors import BenchError, OptionError, UnknownName

TINY = {"heads": 2, "width": 8}


def measure(mechanisms, cases, effort):
    rows = list(layers.measure(mechanisms, cases, effort=effort, peers=False))
    return {(row.name, row.case.mode): row for row in rows}


def test_rows_hold_times_ratios_products_and_memory(quick) -> None:
    cases = sweep(length=32, mode=["forward", "backward"], **TINY)
    rows = measure(["softmax", "linformer"], cases, quick)
    assert list(rows) == [
        (name, mode)
        for mode in ("forward", "backward")
        for name in ("sdpa", "softmax", "linformer")
    ]
    for row in rows.values():
        expected = {"flops", "bytes"} | ({"sdpa"} if row.name != "sdpa" else set())
        assert set(row.ratios) == expected, row.name
        assert row.seconds > 0
        assert row.rounds == 2
        assert row.peak > 0
    products = 2 * 2 * 2 * 32 * 32 * 8  # two products of (2, 32, 8) with (2, 8, 32)
    assert rows["sdpa", "forward"].flops == rows["softmax", "forward"].flops == products
    assert rows["sdpa", "backward"].flops == 3.5 * products
    assert rows["linformer", "forward"].options["rank"] == 32  # clamped to the tokens


@pytest.mark.parametrize("padded", [False, True], ids=["all real", "padded"])
def test_a_floor_is_the_work_at_the_measured_rate(quick, padded: bool) -> None:
    (case,) = sweep(length=16, batch=2, padded=padded, **TINY)
    row = measure(["softmax"], [case], quick)["softmax", "forward"]
    assert Inputs.of(case).bytes == 4 * (2 * 2 * 16 * 8) * 4
    assert Inputs.of(replace(case, mode="backward")).bytes == 11 * (2 * 2 * 16 * 8) * 4
    assert row.ratios["bytes"].value > 0


def test_what_does_not_fit_is_refused_in_words_that_name_it(quick) -> None:
    (case,) = sweep(length=16, padded=True, **TINY)
    plain = replace(registry.mechanism("softmax"), name="plain", supports=zoo.Supports())
    row = measure([plain, "softmax"], [case], quick)["plain", "forward"]
    assert row.refused.startswith("plain: this mechanism cannot mask padding")
    assert row.seconds is None


def test_a_crash_is_a_row_and_the_others_go_on(quick) -> None:
    class Broken(nn.Module):
        def forward(self, q, k, v, ctx):
            raise RuntimeError("out of ideas")

    broken = replace(
        registry.mechanism("softmax"), name="broken", factory=lambda site, options: Broken()
    )
    rows = measure([broken, "softmax"], sweep(length=16, **TINY), quick)
    assert rows["broken", "forward"].refused.startswith("broken: failed: RuntimeError: out of")
    assert rows["softmax", "forward"].seconds > 0


def test_an_output_without_a_gradient_has_no_backward(quick) -> None:
    class Constant(nn.Module):
        def forward(self, q, k, v, ctx):
            return torch.zeros_like(v)

    constant = replace(
        registry.mechanism("softmax"), name="constant", factory=lambda site, options: Constant()
    )
    rows = measure([constant], sweep(length=16, mode="backward", **TINY), quick)
    assert "constant: its output has no gradient" in rows["constant", "backward"].refused


def test_names_and_options_are_checked_before_anything_runs(quick) -> None:
    cases = sweep(length=16, **TINY)
    with pytest.raises(UnknownName, match="linfomer"):
        next(layers.measure(["linfomer"], cases))
    with pytest.raises(OptionError, match="rnk"):
        next(layers.measure(["linformer"], cases, options={"rnk": 3}))
    with pytest.raises(BenchError, match="options belong to one mechanism"):
        next(layers.measure(["linformer", "local"], cases, options={"rank": 3}))
    with pytest.raises(BenchError, match="device 'nowhere' cannot be used"):
        next(layers.measure(["linformer"], sweep(length=16, device="nowhere", **TINY)))


def test_modes_put_modules_in_training_and_in_eval(quick) -> None:
    seen = []

    class Watch(nn.Module):
        def forward(self, q, k, v, ctx):
            seen.append((self.training, torch.is_grad_enabled()))
            return v * 1

    watch = replace(
        registry.mechanism("softmax"), name="watch", factory=lambda site, options: Watch()
    )
    for mode, expected in (("forward", (False, False)), ("backward", (True, True))):
        seen.clear()
        measure([watch], sweep(length=16, mode=mode, **TINY), quick)
        assert set(seen) == {expected}


def test_compiled_is_compared_with_eager(quick, monkeypatch) -> None:
    how = {}
    monkeypatch.setattr(torch, "compile", lambda module, **given: how.update(given) or module)
    rows = measure(["linear"], sweep(length=16, mode="compiled", **TINY), quick)
    assert how["fullgraph"]
    assert "eager" in rows["linear", "compiled"].ratios
    assert "eager" not in rows["sdpa", "compiled"].ratios


def test_a_mechanism_that_carries_state_is_measured_at_its_second_site() -> None:
    class Carrying(nn.Module):
        def __init__(self, site):
            super().__init__()
            self.site = site

        def forward(self, q, k, v, ctx):
            before = ctx.carry.get(self.site.previous)
            ctx.carry[self.site.path] = v if before is None else before + v
            return ctx.carry[self.site.path]

    record = registry.mechanism("softmax")
    carrying = replace(
        record,
        supports=zoo.Supports(needs=frozenset({"carry"})),
        factory=lambda site, options: Carrying(site),
    )
    inputs = Inputs.of(sweep(length=4, **TINY)[0])
    work = attend(carrying, record.options(), inputs)
    torch.testing.assert_close(work.function(), 2 * inputs.v)


def test_extras_are_given_as_asked() -> None:
    needs = frozenset({"hidden", "times", "projections"})
    record = registry.mechanism("softmax")
    inputs = Inputs.of(sweep(length=6, batch=2, padded=True, **TINY)[0])
    ctx = inputs.context(replace(record, supports=zoo.Supports(needs=needs, key_padding=True)))
    assert ctx.hidden.shape == (2, 6, 16)
    assert ctx.times.shape == (2, 6)
    assert ctx.projections["out"][0].shape == (16, 16)
    assert ctx.key_padding.tolist() == [[True] * 4 + [False] * 2, [True] * 5 + [False]]
    bare = inputs.context(record)
    assert (bare.hidden, bare.times, bare.projections, bare.grid, bare.prefix) == (
        *(None,) * 4,
        1,
    )
    on_grid = inputs.context(replace(record, supports=zoo.Supports(grid="required")))
    assert (on_grid.grid, on_grid.prefix) == ((2, 3), 0)


def test_a_case_that_would_exhaust_the_memory_is_refused(quick, monkeypatch) -> None:
    monkeypatch.setattr(counting, "peak_bytes", lambda call, device: 1_000_000)
    monkeypatch.setattr(counting, "available_bytes", lambda device: 3_000_000)
    rows = [
        row
        for row in layers.measure(["dam", "uniform"], sweep(length=[16, 32], **TINY), effort=quick)
        if row.role == "mechanism"
    ]
    refused = {(row.name, row.case.length): row.refused for row in rows if row.refused}
    assert list(refused) == [("dam", 32)]  # n**2: 4 MB; uniform, n*d: 2 MB
    assert "would take about 0.0 GB at 32 tokens" in refused["dam", 32]


def test_an_interrupted_run_keeps_what_is_complete(quick) -> None:
    told = []

    def progress(done: int, total: int, what: str) -> None:
        told.append((done, total, what))
        if done == 5:  # of the second case: prepared, one round
            raise KeyboardInterrupt

    cases = sweep(length=[16, 32], **TINY)
    run = layers.measure(["uniform"], cases, effort=quick, progress=progress)
    rows = [next(run), next(run)]
    with pytest.raises(KeyboardInterrupt):
        next(run)
    assert [(row.name, row.case.length) for row in rows] == [("sdpa", 16), ("uniform", 16)]
    assert told[0] == (0, 6, "16 tokens, forward: preparing uniform")
