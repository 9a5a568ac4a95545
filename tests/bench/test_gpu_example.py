"""examples/gpu.py, which this project could run on a CPU only."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from zoo_core import registry
from zoo_core.bench import yardsticks
from zoo_core.bench.cases import Case
from zoo_core.nn import choice, gpu


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    module = import_module("gpu")
    monkeypatch.setattr(module, "ROUNDS", 2)
    monkeypatch.setattr(module, "SECONDS", 1e-9)
    monkeypatch.setattr(yardsticks, "SIZE_ON_CPU", 8)
    monkeypatch.setattr(yardsticks, "COPIED_BYTES", 64)
    return module


def run(example, monkeypatch, path: Path, *arguments: str) -> tuple[list[dict], str]:
    output = ["--device", "cpu", "--output", str(path / "out")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *output, *arguments])
    example.main()
    lines = (path / "out.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], (path / "out.md").read_text()


def test_it_writes_a_line_for_each_measurement_and_the_tables(
    example, monkeypatch, tmp_path
) -> None:
    lines, tables = run(
        example, monkeypatch, tmp_path, "--lengths", "128,64", "--mechanisms", "dpfp,uniform"
    )
    assert lines[0]["kind"] == "machine"
    rows = [line for line in lines if line["kind"] == "row"]
    assert [(row["name"], row["length"]) for row in rows if row["role"] != "peer"] == [
        (name, length) for length in (64, 128) for name in ("sdpa", "dpfp", "uniform")
    ]
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    assert "| mechanism | pays from | / sdpa at 64 | / sdpa at 128 |" in tables
    assert "| `dpfp` |" in tables
    reasons = {line["what"]: line["reason"] for line in lines if line["kind"] == "left out"}
    assert "plain path" in reasons["kernel of local, both ways, 128 tokens"]
    assert "- kernel of local, both ways, 128 tokens: RuntimeError: both took" in tables


def test_a_kernel_is_compared_with_the_plain_path(example, monkeypatch, tmp_path) -> None:
    """A kernel that is off by a hundredth."""
    from zoo_core.nn import kernels

    def off(queries, keys, values, *, like):
        if not choice.kernels_allowed():
            return None
        sums = kernels.causal_product(queries, keys, values, offset=0)
        return sums * sums.new_tensor([1.01] * like.shape[-1] + [1.0])

    monkeypatch.setattr(gpu, "causal_product", off)
    monkeypatch.setattr(example, "KERNELS", (("linear", True),))
    how = ("--lengths", "64", "--mechanisms", "uniform", "--dtype", "float32")
    lines, tables = run(example, monkeypatch, tmp_path, *how)
    (found,) = (line for line in lines if line["kind"] == "kernel")
    assert found["name"] == "linear, causal"
    assert found["error"] == pytest.approx(0.01, rel=1e-3)
    assert found["plain_error"] == 0
    assert found["gradient_error"] > 0.01
    assert found["ratio"] > 0
    assert "| linear, causal | 64 |" in tables


def test_what_does_not_fit_is_left_out_with_the_reason(example, monkeypatch, row) -> None:
    long = Case(length=65536)
    linear, dam = registry.mechanism("linear"), registry.mechanism("dam")
    assert "n**2" in example.too_much(dam, long, [])
    assert example.too_much(dam, Case(length=4096), []) == ""
    assert example.too_much(linear, long, []) == ""
    assert example.too_much(linear, long, [row("linear", 16384)]) == ""
    slow = example.too_much(linear, long, [row("linear", 16384, seconds=0.5)])
    assert slow == "a call would take about 2.0 s"
    monkeypatch.setattr(example, "available_bytes", lambda _: 10**10)
    big = example.too_much(linear, long, [row("linear", 16384, peak=4 * 10**9)])
    assert big == "would take about 16 GB of 10 that are free"


def test_without_a_gpu_it_says_so(example, monkeypatch, tmp_path) -> None:
    with pytest.raises(SystemExit, match="'nowhere' cannot be used"):
        run(example, monkeypatch, tmp_path, "--device", "nowhere")


def test_a_part_that_fails_or_comes_too_late_is_named(example, monkeypatch, tmp_path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("out of memory\nwith details")

    monkeypatch.setattr(example, "compare", fail)
    monkeypatch.setattr(example.bench, "measure", fail, raising=False)
    lines, _ = run(example, monkeypatch, tmp_path, "--lengths", "64", "--mechanisms", "linear")
    reasons = {line["what"]: line["reason"] for line in lines if line["kind"] == "left out"}
    assert reasons["mechanisms at 64 tokens, part 1"] == "MemoryError: out of memory"
    assert reasons["kernel of delta, causal, 64 tokens"] == "MemoryError: out of memory"
    late = ("--lengths", "64", "--mechanisms", "linear", "--minutes", "-1")
    lines, _ = run(example, monkeypatch, tmp_path, *late)
    assert all(line["reason"] == "the -1 minutes were over" for line in lines[1:])
    assert len(lines) == 1 + len(example.KERNELS) + 1
