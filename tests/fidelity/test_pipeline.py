"""A patched BERT cut in two by torch.distributed.pipelining trains as it does in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, LAYERS, RATE = 3, 2, 1e-3


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--layers", str(LAYERS), "--steps", str(STEPS), "--weights", tmp_path / "weights"]
    run = subprocess.run(
        [sys.executable, *launch, EXAMPLES / "pipeline.py", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    halves = [torch.load(tmp_path / f"weights.{rank}") for rank in (0, 1)]

    monkeypatch.syspath_prepend(EXAMPLES)
    import pipeline as example

    model = example.build("linformer", LAYERS)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        data = example.Data.draw(8, seed=step)
        loss = F.cross_entropy(model(data.input_ids, data.attention_mask), data.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(f"step {step}: loss {loss.item():.4f}")
    assert [line for line in run.stdout.splitlines() if line.startswith("step")] == losses
    assert any(".zoo." in name for name in halves[0])
    assert any(".zoo." in name for name in halves[1])
    assert set(halves[0]).isdisjoint(halves[1])
    alone = dict(model.named_parameters())
    for name, weight in {**halves[0], **halves[1]}.items():
        torch.testing.assert_close(weight, alone[name].detach(), atol=1e-6, rtol=1e-5)
    idle = {name for name in alone if name not in halves[0] and name not in halves[1]}
    assert not idle
    assert not torch.equal(alone["host.classifier.weight"], start["host.classifier.weight"])
