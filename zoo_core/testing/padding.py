"""Rules 1 to 3: padding changes nothing, and no sample depends on its batch mates."""

from __future__ import annotations

import torch

from zoo_core.mechanism import Mechanism
from zoo_core.testing.cases import Call, Probe, run, settings
from zoo_core.testing.compare import changed, expect, expect_bits, expect_close, expect_finite
from zoo_core.testing.conformance import rule
from zoo_core.testing.layouts import JUNK, concatenate, layouts, spread


def _masks(mechanism: Mechanism) -> bool:
    return mechanism.supports.key_padding


@rule(1, applies=_masks)
def check_all_padding(mechanism: Mechanism) -> None:
    """A query whose keys are all padding gets zeros, and every gradient stays finite."""
    for setting in settings(mechanism):
        probe = setting.build()
        for length in (1, 17):
            call = setting.call(length, batch=3)
            mask = torch.ones(3, length, dtype=torch.bool)
            mask[1] = False
            call, inputs = call.but("sample 1 all padding", key_padding=mask).leaves()
            out = run(probe, call)
            expect_bits(out[1].abs(), torch.zeros_like(out[1]), call, "zeros for sample 1")
            expect_finite(out, call, "outputs")
            _expect_finite_gradients(probe, out.square().sum(), inputs, call)


@rule(1, applies=_masks)
def check_long_padding(mechanism: Mechanism) -> None:
    """Whole windows, blocks and segments of padding leave outputs and gradients finite."""
    for setting in settings(mechanism):
        probe = setting.build()
        for real in (2, 3):
            short = setting.call(real)
            for side, start in (("left", 45 - real), ("right", 0), ("left and right", 21)):
                mask = torch.zeros(45, dtype=torch.bool)
                mask[start : start + real] = True
                where = f"{45 - real} pads on the {side} of {real} tokens"
                call, inputs = spread(short, mask, where).leaves()
                out = run(probe, call)
                expect_finite(out[..., mask, :], call, "outputs of the real tokens")
                _expect_finite_gradients(probe, out[..., mask, :].square().sum(), inputs, call)


@rule(2, applies=_masks)
def check_padding_content(mechanism: Mechanism) -> None:
    """What padded positions hold (large, NaN, infinite) changes no real token's output."""
    for setting in settings(mechanism):
        probe = setting.build()
        short = setting.call(13)
        for where, mask in layouts(13).items():
            wanted = run(probe, spread(short, mask, where, fill="zeros"))[..., mask, :]
            for fill in JUNK[1:]:
                call = spread(short, mask, where, fill=fill)
                got = run(probe, call)[..., mask, :]
                expect_close(got, wanted, call, "the output with zeros at the pads")


@rule(2, applies=_masks)
def check_padding_gradients(mechanism: Mechanism) -> None:
    """NaN in padded keys and values reaches no gradient, and pads get none."""
    for setting in settings(mechanism):
        probe = setting.build()
        mask = layouts(13)["3 pads inside"]
        clean = spread(setting.call(13), mask, "3 pads inside")
        dirty = spread(setting.call(13), mask, "3 pads inside", fill="NaN")
        call, inputs = clean.but("holding NaN in k and v", k=dirty.k, v=dirty.v).leaves()
        out = run(probe, call)[..., mask, :]
        _expect_finite_gradients(probe, out.square().sum(), inputs, call)
        for name in ("k", "v"):
            gradient = inputs[name].grad
            if gradient is not None:
                at_pads = gradient[..., ~mask, :]
                expect_close(
                    at_pads, torch.zeros_like(at_pads), call, f"no gradient at the pads of {name}"
                )


@rule(2, applies=_masks)
def check_truncation(mechanism: Mechanism) -> None:
    """Real tokens' outputs equal those of the input without its padding, wherever the pads lie."""
    for setting in settings(mechanism):
        probe = setting.build()
        for real in (1, 2, 5, 17, 24):
            short = setting.call(real)
            alone = run(probe, short)
            for where, mask in layouts(real).items():
                call = spread(short, mask, where)
                expected = f"the output of the {real} tokens alone"
                expect_close(run(probe, call)[..., mask, :], alone, call, expected)


@rule(2, applies=_masks)
def check_prefix(mechanism: Mechanism) -> None:
    """The prefix is the first real tokens of a sample, however many: none, two, five."""
    for setting in settings(mechanism):
        for prefix in (0, 2, 5):
            prefixed = setting.but(prefix=prefix)
            probe, short = prefixed.build(), prefixed.call(17)
            for where in ("7 pads on the left", "3 pads inside"):
                mask = layouts(17)[where]
                call = spread(short, mask, f"prefix {prefix}, {where}")
                got, alone = run(probe, call)[..., mask, :], run(probe, short)
                expect_close(got, alone, call, "the output of the 17 tokens alone")


@rule(2, applies=_masks)
def check_full_mask(mechanism: Mechanism) -> None:
    """A mask that is True everywhere equals no mask."""
    for setting in settings(mechanism):
        probe, call = setting.build(), setting.call(17, batch=2)
        masked = call.but("an all-True mask", key_padding=torch.ones(2, 17, dtype=torch.bool))
        expect_close(run(probe, masked), run(probe, call), masked, "the output without a mask")


@rule(2, applies=_masks)
def check_polarity(mechanism: Mechanism) -> None:
    """False in the mask hides a key: with half of them hidden the others get another output."""
    for setting in settings(mechanism):
        probe, whole = setting.build(), setting.call(16)
        mask = torch.arange(16) % 2 == 0
        masked = spread(setting.call(8), mask, "every other token padded")
        open_ = masked.but("no mask", key_padding=None, grid=whole.ctx.grid)
        different = changed(run(probe, masked)[..., mask, :], run(probe, open_)[..., mask, :])
        expect(different, masked, "another output than without a mask", "the same output")


@rule(3)
def check_batch_mates(mechanism: Mechanism) -> None:
    """A sample gets the same output alone and beside mates with 4x keys, 50x inputs or NaN."""
    for setting in settings(mechanism):
        probe, sample = setting.build(), setting.call(17)
        loud = setting.call(17, seed=1)
        mates = {
            "a mate with 4x keys": loud.but(k=4 * loud.k),
            "a mate with 50x inputs": loud.map(lambda x: 50 * x),
            "a mate of zeros": loud.map(torch.zeros_like),
            "a mate of NaN": loud.map(lambda x: x * torch.nan),
        }
        alone = run(probe, sample)
        for note, mate in mates.items():
            _expect_same_beside(probe, sample, alone, [mate, sample, mate], note)


@rule(3, applies=lambda mechanism: _masks(mechanism) and mechanism.supports.grid != "required")
def check_ragged_batch(mechanism: Mechanism) -> None:
    """A sample gets the same output alone and beside mates with more or fewer real tokens."""
    for setting in settings(mechanism):
        if setting.grid:
            continue
        probe, sample = setting.build(), setting.call(13)
        alone = run(probe, sample)
        where, mask = "11 pads on the left", layouts(13, padding=11)["11 pads on the left"]
        padded = spread(sample, mask, where)
        shorter = setting.call(3, seed=1)
        shorter = spread(shorter, layouts(3, padding=21)["21 pads on the right"], "21 pads")
        longer = setting.call(24, seed=2)
        batch = concatenate([shorter, padded, longer], "beside mates of 3 and 24 real tokens")
        got = run(probe, batch)[1:2][..., mask, :]
        expect_close(got, alone, batch, "what sample 1 gets alone")


def _expect_same_beside(
    probe: Probe, sample: Call, alone: torch.Tensor, calls: list[Call], note: str
) -> None:
    batch = concatenate(calls, f"beside {note}")
    expect_close(run(probe, batch)[1:2], alone, batch, "what sample 1 gets alone")


def _expect_finite_gradients(
    probe: Probe, loss: torch.Tensor, inputs: dict[str, torch.Tensor], call: Call
) -> None:
    torch.autograd.backward(loss)
    for name, tensor in inputs.items():
        expect_finite(tensor.grad, call, f"the gradient of {name}")
    for name, parameter in probe.named_parameters():
        expect_finite(parameter.grad, call, f"the gradient of parameter {name}")
    probe.zero_grad()
