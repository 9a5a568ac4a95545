"""A patched BERT cut in two by torch.distributed.pipelining trains as it does in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, LAYERS, RATE = 3, 3, 0.1
# Of all kinds that torch.export takes to pieces: with and without autocast, buffers, loops.
MECHANISMS = ("linformer", "nystromformer", "performer", "linear", "local")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    import pipeline

    return pipeline


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path, example: ModuleType) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    numbers = {"--layers": LAYERS, "--steps": STEPS, "--rate": RATE}
    options = [str(word) for option in numbers.items() for word in option]
    options += ["--weights", str(tmp_path / "weights"), "--mechanism", *MECHANISMS]
    run = subprocess.run(
        [sys.executable, *launch, EXAMPLES / "pipeline.py", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    printed = [line for line in run.stdout.splitlines() if line.startswith("step")]
    first, second = (torch.load(tmp_path / f"weights.{rank}") for rank in (0, 1))
    for number, mechanism in enumerate(MECHANISMS):
        halves = first[mechanism], second[mechanism]
        assert set(halves[0]).isdisjoint(halves[1])
        alone, losses = train_alone(example, mechanism)
        assert printed[number * STEPS :][:STEPS] == losses
        weights = halves[0] | halves[1]
        assert set(weights) == set(alone), mechanism
        for name, weight in weights.items():
            torch.testing.assert_close(weight, alone[name], atol=1e-6, rtol=1e-5)


def train_alone(example: ModuleType, mechanism: str) -> tuple[dict[str, Tensor], list[str]]:
    """The weights that one process comes to, and what it would print."""
    model = example.build(mechanism, LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        data = example.Data.draw(8, seed=step)
        logits = model(input_ids=data.input_ids, attention_mask=data.attention_mask).logits
        loss = F.cross_entropy(logits, data.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(f"step {step}: loss {loss.item():.4f}")
    return {name: weight.detach() for name, weight in model.named_parameters()}, losses


@pytest.mark.parametrize(
    ("mechanism", "why"),
    [("luna", "state from layer to layer"), ("self_modulating", "a loss of its own")],
)
def test_more_than_hidden_states_is_refused(mechanism: str, why: str, example: ModuleType) -> None:
    with pytest.raises(SystemExit, match=f"^{mechanism} .*{why}"):
        example.check(mechanism, example.build(mechanism, 2))


def test_the_parts_together_are_the_model(example: ModuleType) -> None:
    data, whole = example.Data.draw(4, seed=0), example.build("nystromformer", 3).eval()
    hidden: Tensor = data.input_ids
    for mine in (range(1), range(1, 2), range(2, 3)):
        part: nn.Module = example.Part(example.build("nystromformer", 3).eval(), mine)
        hidden = part(hidden, attention_mask=data.attention_mask)
    wanted = whole(input_ids=data.input_ids, attention_mask=data.attention_mask).logits
    assert torch.equal(hidden, wanted)
