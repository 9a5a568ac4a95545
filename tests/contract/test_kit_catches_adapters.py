"""The kit proves itself: a right bridge passes, a wrong one fails what it should."""

from __future__ import annotations

import pytest
import toy_adapters as toys

from zoo_architectures._transformers import TransformersAdapter
from zoo_core import registry
from zoo_core.testing import ARCHITECTURE_CHECKS, architecture_checks, run_checks

WITH = "with_linformer"

#: what is wrong -> (the adapter, the checks that must fail; no other may)
BROKEN = {
    "owns everything": (toys.OwnsEverything, {"create"}),
    "drops unknown arguments": (toys.DropsArguments, {"create"}),
    "tiny is not small": (toys.TooMany, {"create"}),
    "sketch unlike the model": (toys.LargeSketch, {"sites"}),
    "config leaves something out": (toys.ForgetsLayers, {"config", WITH}),
    "not the stock bits": (toys.Wraps, {"softmax_bits"}),
    "loses the padding": (toys.LosesPadding, {"softmax_bits", WITH}),
    "loses gradients": (toys.LosesGradients, {"softmax_bits", WITH}),
    "loses float masks": (toys.LosesFloatMasks, {"mask_forms"}),
    "empty attention maps": (toys.EmptyMaps, {"attentions"}),
    "restore leaves traces": (toys.LeavesTraces, {"restore"}),
    "forward patched by hand": (toys.PatchesForward, {"copies"}),
}


@pytest.fixture
def failing():
    def failing(adapter: type[TransformersAdapter]) -> dict[str, str]:
        record = registry.register(toys.record(adapter))
        checks = [c for c in architecture_checks(record) if c.quick or c.name == WITH]
        return {o.check.name: str(o.failure) for o in run_checks(record, checks) if o.failure}

    yield failing
    registry.forget()


def test_a_right_bridge_passes(failing) -> None:
    assert failing(TransformersAdapter) == {}


@pytest.mark.parametrize(("adapter", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_broken_bridge_fails_what_it_breaks_and_nothing_else(failing, adapter, expected) -> None:
    assert set(failing(adapter)) == expected


def test_every_check_is_seen_to_fail() -> None:
    caught = set().union(*(expected for _, expected in BROKEN.values()))
    assert {check.name for check in ARCHITECTURE_CHECKS} | {WITH} == caught
