"""Every installed mechanism keeps every rule of the contract; test_architectures combines them."""

from __future__ import annotations

from zoo_core.testing import parametrize_mechanisms


@parametrize_mechanisms(combinations=False)
def test_mechanism(mechanism, check) -> None:
    check(mechanism)
