"""Every check there is, and which of them apply to a record."""

from __future__ import annotations

from zoo_core.architecture import Architecture
from zoo_core.mechanism import Mechanism
from zoo_core.testing import (
    architectures,
    limits,
    numerics,
    padding,
    promises,
    purity,
    state,
    tracing,
    training,
)
from zoo_core.testing.combinations import (
    combinations_of_architecture,
    combinations_of_mechanism,
)
from zoo_core.testing.conformance import Check, checks_in, select_checks

#: Every check of a mechanism by itself, by rule.
CHECKS: tuple[Check[Mechanism], ...] = checks_in(
    padding, purity, numerics, tracing, training, state, limits, promises
)

#: Every check of an architecture by itself.
ARCHITECTURE_CHECKS: tuple[Check[Architecture], ...] = checks_in(architectures)


def mechanism_checks(
    mechanism: Mechanism, *, quick: bool = False, combinations: bool = True
) -> list[Check[Mechanism]]:
    """The checks that apply to what a mechanism promises.

    quick: only those that take seconds in all.
    combinations: also one check for each installed architecture, if the mechanism has a name there.
    """
    checks = [*CHECKS]
    if combinations:
        checks += combinations_of_mechanism(mechanism)
    return select_checks(mechanism, checks, quick=quick)


def architecture_checks(
    architecture: Architecture, *, quick: bool = False, combinations: bool = True
) -> list[Check[Architecture]]:
    """The checks of an architecture; `combinations`: also one for each installed mechanism."""
    checks = [*ARCHITECTURE_CHECKS]
    if combinations:
        checks += combinations_of_architecture(architecture)
    return select_checks(architecture, checks, quick=quick)
