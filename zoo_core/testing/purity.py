"""Rule 4: in eval mode the output is a function of the input and of what is saved."""

from __future__ import annotations

import copy

import torch

from zoo_core.mechanism import Mechanism
from zoo_core.testing.cases import Probe, main_settings, run, settings
from zoo_core.testing.compare import expect, expect_bits
from zoo_core.testing.conformance import rule
from zoo_core.testing.fresh import run_in_fresh_process


@rule(4)
def check_eval_repeats(mechanism: Mechanism) -> None:
    """In eval mode the same input gives the same bits, whatever ran or was drawn in between."""
    for setting in settings(mechanism):
        probe, call = setting.build(), setting.call(17)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            first = run(probe, call)
            for other in (setting.call(24, batch=2), setting.call(17, seed=1)):
                run(probe, other)
            torch.manual_seed(2)
            expect_bits(run(probe, call), first, call, "the first call's output")


@rule(4)
def check_seeded_build(mechanism: Mechanism) -> None:
    """Whatever the factory draws comes from torch's global generator: one seed, one module."""
    for setting in settings(mechanism):
        first, second = setting.build(seed=3).state_dict(), setting.build(seed=3).state_dict()
        _expect_same_state(second, first, setting.label, "the same under one seed")


@rule(4)
def check_reload(mechanism: Mechanism) -> None:
    """A state dict loaded into a module built under another seed gives the same bits."""
    for setting in settings(mechanism):
        probe, other, call = setting.build(seed=0), setting.build(seed=1), setting.call(17)
        other.load_state_dict(probe.state_dict(), strict=True)
        expect_bits(run(other, call), run(probe, call), call, "the saved module's output")


@rule(4, quick=False)
def check_fresh_process(mechanism: Mechanism) -> None:
    """Pickled and run in a process that never imported the plugin, it gives the same bits."""
    setting = main_settings(mechanism)[-1]
    probe, call = setting.build(), setting.call(17)
    wanted = run(probe, call)
    expect_bits(run_in_fresh_process(probe, call), wanted, call, "this process's output")


@rule(7)
def check_forward_changes_nothing(mechanism: Mechanism) -> None:
    """A forward changes no parameter and no setting, in eval mode no buffer either."""
    for setting in settings(mechanism):
        probe, call = setting.build(), setting.call(17)
        before, plain = copy.deepcopy(probe.state_dict()), _plain_attributes(probe)
        run(probe, call)
        _expect_same_state(probe.state_dict(), before, call, "unchanged by a forward in eval mode")
        run(probe.train(), call)
        names = [name for name, _ in probe.named_parameters()]
        now = probe.state_dict()
        kept = {name: before[name] for name in names}
        _expect_same_state(
            {name: now[name] for name in names}, kept, call, "unchanged by a forward in train mode"
        )
        for name, value in _plain_attributes(probe.eval()).items():
            expect(
                plain.get(name) == value,
                call,
                f"{name} unchanged ({plain.get(name)!r})",
                repr(value),
            )


def _expect_same_state(
    got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], where: object, expected: str
) -> None:
    expect(list(got) == list(wanted), where, f"state keys {list(wanted)}", str(list(got)))
    for name, tensor in wanted.items():
        expect_bits(got[name], tensor, where, f"{name} {expected}")


def _plain_attributes(probe: Probe) -> dict[str, object]:
    """Every attribute of the modules that is a plain value: what a forward might count or store."""
    return {
        f"{path}.{name}": value
        for path, module in probe.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None)
    }
