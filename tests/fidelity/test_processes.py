"""Two processes give what one gives: accelerate launch, with and without FSDP2, gloo, CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fidelity_lab as lab
import pytest
import torch

import zoo_core as zoo
from zoo_core.errors import DoesNotFit
from zoo_core.fidelity import processes, sharding
from zoo_core.fidelity.selection import select

# Without FSDP the words are `--multi_gpu`; both mean torch's launcher, and gloo where
# ACCELERATE_USE_CPU is set. `--cpu` asks for MPI.
LAUNCH = ["-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2"]
LAUNCH += ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no"]
SCRIPT = """
import os, sys
import torch
import zoo_core as zoo
sys.path.insert(0, sys.argv[1])
import fidelity_lab as lab
import test_processes as test

rank, found, learnt = int(os.environ["RANK"]), {}, {}
for mode in ("split", "whole"):
    if mode == "whole":
        del os.environ["ACCELERATE_USE_FSDP"]
    state = {"checkpoint": f"{sys.argv[2]}/{mode}", "checkpoint_every": 2}
    model = lab.bert()
    if rank:
        torch.nn.init.normal_(model.encoder.layer[0].attention.self.zoo.project_keys)
    learnt["texts", mode] = lab.Seen.by(model).learnt
    try:
        test.calibrate_texts(model, on_step=test.stop_at(5), **state)
    except test.Stopped:
        report = test.calibrate_texts(model, **state)
    found["texts", mode] = model.state_dict(), report.history
    if mode == "whole":
        model = lab.bert("performer")
        if rank:
            torch.nn.init.normal_(test.directions(model))
        learnt["features", mode] = lab.Seen.by(model).learnt
        report = test.calibrate_texts(model)
        found["features", mode] = model.state_dict(), report.history
    if mode == "split":
        model = lab.vit()
        learnt["images", mode] = lab.Seen.by(model).learnt
        report = test.calibrate_images(model)
        found["images", mode] = model.state_dict(), report.history
        spoilt = lab.bert("local", options={"window": 16})
        before = lab.state(spoilt)
        notes = test.calibrate_texts(spoilt, host_learning_rate=0.3).notes
        worse = notes, lab.changed(spoilt, before)
torch.save((found, worse, learnt), f"{sys.argv[2]}/{rank}.pt")
"""
DIFFERENT = """
import os, sys
from pathlib import Path
import zoo_core as zoo
sys.path.insert(0, sys.argv[1])
import fidelity_lab as lab

rank = int(os.environ["RANK"])
how = {"steps": 2, "batch_size": 4, "progress": False}
for verb, run in {
    "calibrate": lambda: zoo.calibrate(lab.bert(), lab.tokens()[::1 - 2 * rank], **how),
    "distil": lambda: zoo.distil(
        lab.vit(), lab.vit(), [(one, n % 2 * rank) for n, one in enumerate(lab.images())], **how
    ),
}.items():
    try:
        run()
    except zoo.ZooError as error:
        Path(sys.argv[2], f"{verb}-{rank}").write_text(str(error))
"""
HOW: dict[str, Any] = {"steps": 6, "batch_size": 6, "accumulate": 2, "evaluate_every": 3}


class Stopped(Exception):
    pass


def stop_at(step: int):
    def watch(now: Any) -> None:
        if now.step == step:
            raise Stopped

    return watch


def calibrate_texts(model: torch.nn.Module, **how: Any):
    return zoo.calibrate(model, lab.tokens(), progress=False, **{**HOW, **how})


def calibrate_images(model: torch.nn.Module):
    return zoo.calibrate(model, lab.images(), progress=False, train="all", **HOW)


def directions(model: Any) -> torch.Tensor:
    """What performer draws at random and keeps: a persistent buffer."""
    return model.encoder.layer[0].attention.self.zoo.directions


def six_steps(learnt: list[Any]) -> list[Any]:
    """Two forwards a step; a run that was stopped does its fifth step twice."""
    return [*learnt[:8], *learnt[-4:]]


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    here = str(Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, *LAUNCH, script, here, tmp_path],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (first, worse, mine), (second, too, yours) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)
    )
    for notes, changed in (worse, too):  # shards of weights that got worse are not given back
        assert "made it worse" in notes[-1]
        assert not changed
    models = {"texts": lab.bert(), "images": lab.vit(), "features": lab.bert("performer")}
    start = {data: lab.state(model) for data, model in models.items()}
    all_of = {data: lab.Seen.by(model).learnt for data, model in models.items()}
    ways = {"images": calibrate_images}
    reports = {data: ways.get(data, calibrate_texts)(model) for data, model in models.items()}
    alone = {data: model.state_dict() for data, model in models.items()}
    split, whole = [("texts", "split"), ("images", "split")], [("texts", "whole")]
    assert set(first) == {*split, *whole, ("features", "whole")}
    drawn = first["features", "whole"][0]
    name = "encoder.layer.0.attention.self.zoo.directions"
    assert torch.equal(drawn[name], start["features"][name])
    for data, mode in first:  # each learns from its half of each of two batches in six steps
        halves = zip(six_steps(mine[data, mode]), six_steps(yours[data, mode]), strict=True)
        for (one, other), batch in zip(halves, all_of[data][:12], strict=True):
            assert len(one) == len(other) == 3, (data, mode)
            assert sorted([*one, *other]) == sorted(batch), (data, mode)
    for (data, mode), (state, history) in first.items():
        for name, tensor in second[data, mode][0].items():
            assert torch.equal(state[name], tensor), (mode, name)
        # Another order of summation moves AdamW visibly where gradients are nothing but rounding.
        trained = [name for name in state if not torch.equal(state[name], start[data][name])]
        apart, moved = (
            sum((state[name] - other[name]).square().sum() for name in trained).sqrt()
            for other in (alone[data], start[data])
        )
        assert apart < 0.02 * moved, (data, mode)
        for theirs, ours in zip(history, reports[data].history, strict=True):
            assert theirs[2:] == pytest.approx(ours[2:], rel=5e-3)


@pytest.mark.slow
def test_data_that_differ_are_refused_in_every_process(tmp_path: Path) -> None:
    """Another order counts, as that of a set, and so do other labels."""
    script = tmp_path / "train.py"
    script.write_text(DIFFERENT)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [sys.executable, *launch, script, Path(__file__).parent, tmp_path],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for name in ("calibrate-0", "calibrate-1", "distil-0", "distil-1"):
        assert "the 2 processes were given different data" in (tmp_path / name).read_text()


def test_a_tensor_that_two_units_share_is_refused() -> None:
    model = lab.bert("linformer", options={"rank": 4, "share": "layers"})
    with pytest.raises(DoesNotFit, match="share a tensor that is trained"):
        sharding.shard(model, select(model, "mechanism"), mesh=None)


def test_fsdp_of_the_first_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(zoo.ZooError, match="--fsdp_version 2"):
        processes._mesh("cpu", 2)
