"""Looking inside a model: attention maps, pictures, and the theory's warnings as measurements.

Importing it loads no torch; each name loads its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo_core.diagnose.capacity import capacity_curve as capacity_curve
    from zoo_core.diagnose.capacity import fixture_mechanisms as fixture_mechanisms
    from zoo_core.diagnose.capacity import key_recall as key_recall
    from zoo_core.diagnose.capacity import random_pattern as random_pattern
    from zoo_core.diagnose.capacity import smallest_width as smallest_width
    from zoo_core.diagnose.capacity import sparse_pattern as sparse_pattern
    from zoo_core.diagnose.depth import advise as advise
    from zoo_core.diagnose.flow import cls_map as cls_map
    from zoo_core.diagnose.flow import rollout as rollout
    from zoo_core.diagnose.illustrating import illustrate as illustrate
    from zoo_core.diagnose.maps import attention_map as attention_map
    from zoo_core.diagnose.measuring import measure as measure
    from zoo_core.diagnose.pictures import draw_maps as draw_maps
    from zoo_core.diagnose.pictures import draw_on_image as draw_on_image
    from zoo_core.diagnose.rank import rank_collapse as rank_collapse
    from zoo_core.diagnose.rank import residual_ratio as residual_ratio
    from zoo_core.diagnose.smoothness import lipschitz as lipschitz
    from zoo_core.diagnose.smoothness import sensitivity as sensitivity

_HOMES = {
    "advise": "depth",
    "attention_map": "maps",
    "capacity_curve": "capacity",
    "cls_map": "flow",
    "draw_maps": "pictures",
    "draw_on_image": "pictures",
    "fixture_mechanisms": "capacity",
    "illustrate": "illustrating",
    "key_recall": "capacity",
    "lipschitz": "smoothness",
    "measure": "measuring",
    "random_pattern": "capacity",
    "rank_collapse": "rank",
    "residual_ratio": "rank",
    "rollout": "flow",
    "sensitivity": "smoothness",
    "smallest_width": "capacity",
    "sparse_pattern": "capacity",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo_core.diagnose' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
