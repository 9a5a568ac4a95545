"""The kit proves itself: a right mechanism passes, a wrong one fails what it should."""

from __future__ import annotations

import pytest
import toys

from zoo_core import Mechanism, Supports
from zoo_core.testing import CHECKS, mechanism_checks, run_checks

CAUSAL = Supports(key_padding=True, causal=True)
CROSS = Supports(cross=True)
FIXED = Supports(key_padding=True, lengths="fixed")
GRID = Supports(key_padding=True, grid="required")
CARRY = Supports(key_padding=True, weights=True, needs=frozenset({"carry"}))

MOVED = {"truncation", "prefix", "ragged_batch"}
REPEATED = {"eval_repeats", "reload", "deepcopy", "pickle", "dropout"}


def promising(build: type, supports: Supports) -> Mechanism:
    return toys.inexact(build, supports=supports)


#: what is wrong -> (the mechanism, the checks that must fail; no other may)
BROKEN = {
    "ignores padding": (
        toys.inexact(toys.IgnoresPadding),
        MOVED | {"all_padding", "padding_content", "padding_gradients", "polarity"},
    ),
    "mask upside down": (
        toys.inexact(toys.InvertedMask),
        MOVED | {"all_padding", "padding_content", "padding_gradients", "full_mask"},
    ),
    "zeroes pads by multiplying": (
        toys.inexact(toys.MultipliesByZero),
        {"padding_content", "padding_gradients"},
    ),
    "pads in the normaliser": (toys.inexact(toys.PadsInNormaliser), MOVED),
    "NaN without a real key": (toys.inexact(toys.EmptyRowsNaN), {"all_padding"}),
    "NaN in a window of pads": (
        toys.inexact(toys.WindowNaN),
        {"all_padding", "long_padding", "truncation", "prefix"},
    ),
    "position is the column": (toys.inexact(toys.PositionIsIndex), MOVED),
    "prefix is the first columns": (toys.inexact(toys.PrefixIsFirstColumns), MOVED),
    "scaled by the batch": (
        toys.inexact(toys.LeaksAcrossBatch),
        {"batch_mates", "padding_content", "truncation", "ragged_batch"},
    ),
    "random in eval": (toys.inexact(toys.NoisyEval), REPEATED),
    "random numbers not saved": (toys.inexact(toys.TransientBuffer), {"reload"}),
    "random numbers not seeded": (toys.inexact(toys.OwnRandomness), {"seeded_build"}),
    "unpickles only at home": (toys.inexact(toys.Registered), {"fresh_process"}),
    "some lengths fail": (toys.inexact(toys.NoBlocks), {"lengths"}),
    "longer than max_len computed": (promising(toys.FixedUnchecked, FIXED), {"beyond_max_len"}),
    "longer than max_len refused": (toys.inexact(toys.FixedRefused), {"beyond_max_len"}),
    "value width of the keys": (toys.inexact(toys.ValueWidthOfKeys), {"shapes"}),
    "fp32 out of half in": (toys.inexact(toys.ReturnsFp32), {"dtypes", "autocast"}),
    "exp in half precision": (toys.inexact(toys.HalfExponential), {"large_inputs"}),
    "softmax in half precision": (toys.inexact(toys.HalfSoftmax), {"dtypes", "autocast"}),
    "a tensor that is no buffer": (toys.inexact(toys.PlainTensor), {"dtypes", "dtype_move"}),
    "reads a value": (toys.inexact(toys.ReadsValues), {"reads_no_values", "batch_mates"}),
    "loops over heads": (toys.inexact(toys.LoopsOverHeads), {"no_loops"}),
    "breaks the graph": (toys.inexact(toys.GraphBreak), {"compile"}),
    "N x N in linear memory": (toys.inexact(memory="n*d"), {"memory"}),
    "counts its calls": (toys.inexact(toys.Counts), {"forward_changes_nothing"}),
    "moves a parameter": (
        toys.inexact(toys.MovesParameter),
        {"forward_changes_nothing", "gradient_checkpointing"},
    ),
    "gradient cut off": (toys.inexact(toys.WrongGradient), {"gradients"}),
    "idle parameter": (toys.inexact(toys.UnusedParameter), {"parameters_train"}),
    "keys unused in silence": (toys.inexact(toys.UnusedKeys), {"unused"}),
    "drops out in eval": (toys.inexact(toys.DropsInEval), {"dropout"}),
    "never drops out": (toys.inexact(toys.NeverDrops), {"dropout"}),
    "idle option": (toys.inexact(options=toys.IdleOptions), {"options_act"}),
    "option without a bound": (
        toys.inexact(toys.Divides, options=toys.UnboundedOptions),
        {"option_bounds"},
    ),
    "forward is a closure": (
        toys.inexact(toys.Closure),
        {"deepcopy", "pickle", "gradient_checkpointing"},
    ),
    "keeps the graph": (toys.inexact(toys.KeepsGraph), {"deepcopy"}),
    "noise that is not replayed": (toys.inexact(toys.OwnNoise), {"gradient_checkpointing"}),
    "keeps the last map": (
        toys.inexact(toys.KeepsLastMap),
        {"eval_repeats", "padding_content", "truncation", "autocast"},
    ),
    "exact_at is not exact": (toys.record(toys.SquaresScores), {"exact_limit"}),
    "sees the future": (promising(toys.CausalLeak, CAUSAL), {"causal", "causal_alone"}),
    "counts the future": (promising(toys.CountsAllTokens, CAUSAL), {"causal_alone"}),
    "blind to its own token": (promising(toys.CausalBlind, CAUSAL), {"causal"}),
    "ignores the cache": (promising(toys.IgnoresOffset, CAUSAL), {"causal_cache"}),
    "keys of another length fail": (promising(toys.SquareOnly, CROSS), {"cross"}),
    "ignores the bias": (promising(toys.IgnoresBias, Supports(bias=True)), {"bias"}),
    "another map": (promising(toys.WrongMap, Supports(weights=True)), {"weights"}),
    "not linear in v": (promising(toys.SquaresValues, Supports()), {"linear_in_v"}),
    "linear in v after all": (promising(toys.Toy, Supports(linear_in_v=False)), {"linear_in_v"}),
    "ignores the grid": (promising(toys.Toy, Supports(grid="optional")), {"grid"}),
    "guesses the grid": (promising(toys.GuessesGrid, GRID), {"grid"}),
}

RIGHT = {
    "everything promised": toys.record(),
    "padding promised": toys.inexact(),
    "nothing promised": promising(toys.Toy, Supports()),
    "fixed length": promising(toys.FixedRefused, FIXED),
    "on a grid": promising(toys.NeedsGrid, GRID),
    "a carry": promising(toys.CarriesMap, CARRY),
}


def failing(mechanism: Mechanism, slow: set[str]) -> dict[str, str]:
    """The quick checks and those named in `slow` that fail, with their messages."""
    checks = [c for c in mechanism_checks(mechanism) if c.quick or c.name in slow]
    return {o.check.name: str(o.failure) for o in run_checks(mechanism, checks) if o.failure}


@pytest.mark.parametrize("right", RIGHT.values(), ids=RIGHT)
def test_a_right_mechanism_passes(right) -> None:
    assert failing(right, slow={"fresh_process", "gradients"}) == {}


def test_a_right_mechanism_passes_the_slow_checks() -> None:
    assert failing(toys.record(), slow={check.name for check in CHECKS}) == {}


@pytest.mark.parametrize(("broken", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_broken_mechanism_fails_what_it_breaks_and_nothing_else(broken, expected) -> None:
    assert set(failing(broken, slow=expected)) == expected


def test_every_check_is_seen_to_fail() -> None:
    caught = set().union(*(expected for _, expected in BROKEN.values()))
    assert {check.name for check in CHECKS} - caught == {"refusals"}


def test_a_failure_says_rule_mechanism_shape_expected_and_got() -> None:
    text = failing(toys.inexact(toys.ValueWidthOfKeys), slow=set())["shapes"]
    assert text.startswith("toy breaks rule5 (shapes)")
    assert "v (2, 2, 9, 12)" in text
    assert "expected: a tensor of shape (2, 2, 9, 12)" in text
    assert "got:      (2, 2, 9, 8)" in text
