"""Every installed architecture patches exactly, and carries or refuses every mechanism.

Families that share all of their code with another one, but for names, are combined with a few
mechanisms only. The plain DeiT is timm's ViT; what its distilled one has of its own is in
tests/architectures/test_every_mechanism.py, with every mechanism.
"""

from __future__ import annotations

import pytest

from zoo_core import registry
from zoo_core.testing import parametrize_architectures
from zoo_core.testing.combinations import combination

RELATIVES = ("camembert", "deit", "electra", "hf_deit", "roberta", "xlm_roberta")
OTHERS = [one.name for one in registry.architectures() if one.name not in RELATIVES]


@parametrize_architectures(*OTHERS)
def test_architecture(architecture, check) -> None:
    check(architecture)


@parametrize_architectures(*RELATIVES, combinations=False)
def test_relative(architecture, check) -> None:
    check(architecture)


@pytest.mark.parametrize("mechanism", ["axial", "evolving", "linformer", "local", "performer"])
@pytest.mark.parametrize("relative", RELATIVES)
def test_relative_with(relative: str, mechanism: str) -> None:
    combination(registry.architecture(relative), registry.mechanism(mechanism))
