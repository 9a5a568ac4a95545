"""Rule 9: copies, pickles, dtype moves and gradient checkpointing keep what a module computes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor

from zoo_core.mechanism import Mechanism
from zoo_core.testing.cases import Call, Probe, run, settings
from zoo_core.testing.compare import changed, expect, expect_bits, expect_close
from zoo_core.testing.conformance import rule


@rule(9)
def check_deepcopy(mechanism: Mechanism) -> None:
    """A deep copy made after a training step computes with its own weights, not the original's."""
    for setting in settings(mechanism):
        probe, call = setting.build(), setting.call(17)
        _train_step(probe, call)
        probe.eval()
        before = run(probe, call)
        twin = copy.deepcopy(probe)
        expect_bits(run(twin, call), before, call, "the same from a deep copy")
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(torch.linspace(0.5, 1, parameter.numel()).view_as(parameter))
        expect_bits(run(probe, call), before, call, "the original unmoved by changes to its copy")
        if any(p.requires_grad for p in twin.parameters()):
            moved = changed(run(twin, call), before) or _auxiliary(twin, call) != _auxiliary(
                probe, call
            )
            expect(moved, call, "the copy to follow its own weights", "the original's output")


@rule(9)
def check_pickle(mechanism: Mechanism) -> None:
    """Pickled after a training step and read back, it gives the same bits."""
    for setting in settings(mechanism):
        probe, call = setting.build(), setting.call(17)
        _train_step(probe, call)
        probe.eval()
        twin = pickle.loads(pickle.dumps(probe))
        expect_bits(run(twin, call), run(probe, call), call, "the same from a pickled copy")


@rule(9)
def check_dtype_move(mechanism: Mechanism) -> None:
    """`module.to(dtype)` moves all of it: it runs in fp32, and back in fp64 as before."""
    for setting in settings(mechanism):
        probe, call = setting.build(), setting.call(17)
        before = run(probe, call)
        narrow = call.to(torch.float32)
        out = run(probe.to(torch.float32), narrow)
        expect(out.dtype == torch.float32, narrow, "fp32 after a move to it", str(out.dtype))
        again = run(probe.to(torch.float64), call)
        size = (again - before).square().mean().sqrt() / before.square().mean().sqrt()
        expect(
            size.item() < 1e-2,
            call,
            "near the first output after fp64 -> fp32 -> fp64",
            f"{size:.3g}",
        )


@rule(9)
def check_gradient_checkpointing(mechanism: Mechanism) -> None:
    """Non-reentrant gradient checkpointing gives the same gradients, dropout included."""
    for setting in settings(mechanism):
        probe, call = setting.but(dropout=0.2).build().train(), setting.call(17)
        twin = copy.deepcopy(probe)
        plain = _gradients(probe, call, recompute=False)
        again = _gradients(twin, call, recompute=True)
        for name, gradient in plain.items():
            expect(
                (gradient is None) == (again[name] is None),
                call,
                f"the same gradients: {name}",
                "None",
            )
            if gradient is not None and (other := again[name]) is not None:
                expect_close(other, gradient, call, f"the same gradient of {name}", tolerance=1e-12)


def _gradients(probe: Probe, call: Call, *, recompute: bool) -> dict[str, Tensor | None]:
    """Output and gradients by name of one training step under a fixed seed."""
    call, inputs = call.leaves()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = run(probe, call, recompute=recompute)
        torch.autograd.backward(out.square().sum())
    found = {"output": out.detach(), **{name: x.grad for name, x in inputs.items()}}
    return {**found, **{name: p.grad for name, p in probe.named_parameters()}}


def _auxiliary(probe: Probe, call: Call) -> float:
    """The auxiliary loss of one seeded forward in train mode: all that some parameters act on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run(probe.train(), call)
    probe.eval()
    losses: list[Any] = [getattr(site, "auxiliary_loss", None) for site in probe.sites]
    return sum(float(loss().item()) for loss in losses if loss is not None)


def _train_step(probe: Probe, call: Call) -> None:
    call, _ = call.leaves()
    torch.autograd.backward(run(probe.train(), call).square().sum())
    probe.zero_grad()
