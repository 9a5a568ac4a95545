"""Every installed architecture patches exactly, and carries or refuses every mechanism."""

from __future__ import annotations

from zoo_core.testing import parametrize_architectures


@parametrize_architectures()
def test_architecture(architecture, check) -> None:
    check(architecture)
