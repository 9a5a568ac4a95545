"""Two processes give what one gives: torchrun's and accelerate's environment, gloo, CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fidelity_lab as lab
import pytest
import torch

import zoo_core as zoo

SCRIPT = """
import sys
import torch
import zoo_core as zoo
sys.path.insert(0, sys.argv[1])
import fidelity_lab as lab

model = lab.bert()
rank = int(__import__("os").environ["RANK"])
if rank:
    torch.nn.init.normal_(model.encoder.layer[0].attention.self.zoo.project_keys)
report = zoo.calibrate(model, lab.tokens(), progress=False, checkpoint=sys.argv[3], **{how})
torch.save((model.state_dict(), report.history), f"{{sys.argv[2]}}/{{rank}}.pt")
"""
HOW = {"steps": 10, "batch_size": 6, "accumulate": 2, "evaluate_every": 5}


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(how=HOW))
    here = str(Path(__file__).parent)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [sys.executable, *launch, script, here, tmp_path, tmp_path / "state"],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    alone = lab.bert()
    start = lab.state(alone)
    report = zoo.calibrate(alone, lab.tokens(), progress=False, **HOW)
    (first, history), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name in start:
        assert torch.equal(first[name], second[name]), name
    # Another order of summation moves AdamW visibly where gradients are nothing but rounding.
    trained = [name for name, tensor in start.items() if not torch.equal(first[name], tensor)]
    apart, moved = (
        sum((first[name] - other[name]).square().sum() for name in trained).sqrt()
        for other in (alone.state_dict(), start)
    )
    assert apart < 0.02 * moved
    for theirs, ours in zip(history, report.history, strict=True):
        assert theirs[2:] == pytest.approx(ours[2:], rel=5e-3)
    assert (tmp_path / "state" / "state.json").exists()
