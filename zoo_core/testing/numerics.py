"""Rules 5 and 6: every length and every dtype."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from zoo_core.mechanism import Mechanism
from zoo_core.testing.cases import MAX_LEN, Call, run, settings
from zoo_core.testing.compare import expect, expect_finite
from zoo_core.testing.conformance import refused, rule
from zoo_core.testing.layouts import padded_and_not

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, MAX_LEN)
LONG = 401

#: Largest error of three rows in four, relative to the root mean square of the fp32 output.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}


@rule(5)
def check_lengths(mechanism: Mechanism) -> None:
    """Any length works: 1, 2, primes, one below and above blocks, fewer tokens than landmarks."""
    for setting in settings(mechanism):
        probe = setting.build()
        for length in LENGTHS:
            call, inputs = setting.call(length).leaves()
            out = run(probe, call)
            expect_finite(out, call, "outputs")
            torch.autograd.backward(out.sum())
            for name, tensor in inputs.items():
                expect_finite(tensor.grad, call, f"the gradient of {name}")


@rule(5)
def check_beyond_max_len(mechanism: Mechanism) -> None:
    """Beyond site.max_len lengths="any" works; "fixed" raises a ZooError with both numbers."""
    longer = MAX_LEN + 13
    for setting in settings(mechanism):
        probe, call = setting.build(), setting.call(longer)
        if mechanism.supports.lengths == "any":
            expect_finite(run(probe, call), call, "outputs")
            continue
        error = refused(lambda: probe(call.q, call.k, call.v, call.ctx))  # noqa: B023
        both = error is not None and str(longer) in str(error) and str(MAX_LEN) in str(error)
        expected = f"a ZooError naming {longer} tokens and the maximum of {MAX_LEN}"
        expect(both, call, expected, repr(error) if error else "an output")


@rule(5)
def check_shapes(mechanism: Mechanism) -> None:
    """One head, an odd width, values of another width: computed, or refused when it is built."""
    for setting in settings(mechanism):
        for heads, head_dim, width in ((1, 8, 8), (2, 5, 5), (3, 8, 8), (2, 8, 6), (2, 8, 12)):
            changed = setting.but(heads=heads, head_dim=head_dim)
            if refused(changed.build):
                continue
            call = changed.call(9, batch=2, width=width)
            expect_finite(run(changed.build(), call), call, "outputs")


@rule(6)
def check_dtypes(mechanism: Mechanism) -> None:
    """Output dtype = input dtype, for fp64, fp32, bf16 and fp16, and near the fp32 result."""
    for setting in settings(mechanism):
        # Long enough for a sum in half precision to lose what it adds.
        setting = setting.but(max_len=LONG)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            probe = setting.build(dtype=dtype)
            # The reference starts from the rounded inputs and parameters: only what the
            # mechanism itself loses counts.
            wide = copy.deepcopy(probe).float()
            for call in padded_and_not(setting, LONG):
                call = call.to(dtype)
                out = run(probe, call)
                _expect_dtype(out, dtype, call)
                expect_finite(out[..., call.real, :], call, "outputs")
                if dtype in TOLERANCE:
                    wanted = run(wide, call.to(torch.float32))
                    _expect_near(out, wanted, TOLERANCE[dtype], call)


@rule(6)
def check_large_inputs(mechanism: Mechanism) -> None:
    """3 * randn at width 64 gives finite outputs and gradients in bf16 and fp16."""
    for setting in settings(mechanism):
        wide = setting.but(heads=1, head_dim=64)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            probe = wide.build(dtype=dtype)
            for call in padded_and_not(wide, 40):
                call = call.map(lambda x: 3 * x, "inputs 3 * randn").to(dtype)
                call, inputs = call.leaves()
                out = run(probe, call)[..., call.real, :]
                expect_finite(out, call, "outputs")
                torch.autograd.backward(out.float().square().mean())
                for name, tensor in inputs.items():
                    expect_finite(tensor.grad, call, f"the gradient of {name}")


@rule(6)
def check_autocast(mechanism: Mechanism) -> None:
    """Under bf16 autocast: v's dtype comes out where v is bf16, and the result is near fp32."""
    for setting in settings(mechanism):
        probe = setting.build(dtype=torch.float32)
        for call in padded_and_not(setting, 33):
            half = call.to(torch.bfloat16)
            wide = half.to(torch.float32)
            wanted = run(probe, wide)
            # Where a host normalises q and k, they leave autocast in fp32 and v does not.
            for note, mixed in (
                ("bf16 under autocast", half),
                ("fp32 q and k, bf16 v under autocast", wide.but(v=half.v)),
                ("fp32 under autocast", wide),
            ):
                call = mixed.but(note)
                with torch.autocast("cpu", torch.bfloat16):
                    out = run(probe, call)
                if call.v.dtype == torch.bfloat16:
                    _expect_dtype(out, torch.bfloat16, call)
                expect_finite(out[..., call.real, :], call, "outputs")
                _expect_near(out, wanted, TOLERANCE[torch.bfloat16], call)


def _expect_dtype(out: Tensor, dtype: torch.dtype, call: Call) -> None:
    expect(out.dtype == dtype, call, f"an output in {dtype}", str(out.dtype))


def _expect_near(got: Tensor, wanted: Tensor, tolerance: float, call: Call) -> None:
    """Three rows in four within tolerance; a mechanism that selects keys may flip a few ties."""
    got, wanted = got[..., call.real, :].float(), wanted[..., call.real, :].float()
    size = wanted.square().mean().sqrt().clamp_min(1e-3)
    error = (got - wanted).square().mean(-1).sqrt() / size
    typical = error.flatten().quantile(0.75).item()
    expect(
        typical <= tolerance,
        call,
        f"a relative error of at most {tolerance} against fp32 in three rows of four",
        f"{typical:.3g}",
    )
