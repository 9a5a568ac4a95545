"""zoo-core: attention mechanisms as plugins, patched into real models.

    import zoo_core as zoo
    model = zoo.build("bert", attention="linformer")

Records are imported at once and need no torch; verbs load what they need on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zoo_core.architecture import Architecture, ArchitectureAdapter
from zoo_core.attention import AttentionModule, Context, Site
from zoo_core.errors import ZooError
from zoo_core.functions import from_function
from zoo_core.hookspecs import hookimpl
from zoo_core.mechanism import Mechanism, Options, Paper, Supports, option

if TYPE_CHECKING:
    from zoo_core import diagnose as diagnose
    from zoo_core import report as report
    from zoo_core import sentence_transformers as sentence_transformers
    from zoo_core.builder import build as build
    from zoo_core.checkpoint import load as load
    from zoo_core.checkpoint import save as save
    from zoo_core.diagnose.maps import attention_map as attention_map
    from zoo_core.fidelity.activations import ActivationCache as ActivationCache
    from zoo_core.fidelity.calibration import calibrate as calibrate
    from zoo_core.fidelity.distillation import distil as distil
    from zoo_core.fidelity.freezing import FreezeByHand as FreezeByHand
    from zoo_core.fidelity.freezing import FreezeConverged as FreezeConverged
    from zoo_core.fidelity.freezing import Freezing as Freezing
    from zoo_core.fidelity.freezing_callback import FreezingCallback as FreezingCallback
    from zoo_core.fidelity.retaining import retention as retention
    from zoo_core.hub.pulling import pull as pull
    from zoo_core.hub.pushing import push as push
    from zoo_core.inspection import inspect as inspect
    from zoo_core.patching import Patch as Patch
    from zoo_core.patching import auxiliary_loss as auxiliary_loss
    from zoo_core.patching import patch as patch
    from zoo_core.patching import redraw as redraw
    from zoo_core.plan import why as why
    from zoo_core.registry import architectures as architectures
    from zoo_core.registry import mechanisms as mechanisms
    from zoo_core.registry import presets as presets
    from zoo_core.registry import register as register
    from zoo_core.report.comparing import compare as compare
    from zoo_core.training import AuxiliaryLossMixin as AuxiliaryLossMixin

__version__ = "0.1.0"

_HOMES = {
    "ActivationCache": "zoo_core.fidelity.activations",
    "AuxiliaryLossMixin": "zoo_core.training",
    "FreezeByHand": "zoo_core.fidelity.freezing",
    "FreezeConverged": "zoo_core.fidelity.freezing",
    "Freezing": "zoo_core.fidelity.freezing",
    "FreezingCallback": "zoo_core.fidelity.freezing_callback",
    "Patch": "zoo_core.patching",
    "architectures": "zoo_core.registry",
    "attention_map": "zoo_core.diagnose.maps",
    "auxiliary_loss": "zoo_core.patching",
    "build": "zoo_core.builder",
    "calibrate": "zoo_core.fidelity.calibration",
    "compare": "zoo_core.report.comparing",
    "distil": "zoo_core.fidelity.distillation",
    "inspect": "zoo_core.inspection",
    "load": "zoo_core.checkpoint",
    "mechanisms": "zoo_core.registry",
    "patch": "zoo_core.patching",
    "presets": "zoo_core.registry",
    "pull": "zoo_core.hub",
    "push": "zoo_core.hub",
    "redraw": "zoo_core.patching",
    "register": "zoo_core.registry",
    "retention": "zoo_core.fidelity.retaining",
    "save": "zoo_core.checkpoint",
    "why": "zoo_core.plan",
}

# Public as they are: zoo.diagnose.measure(...).
_PACKAGES = ("diagnose", "report")
# Likewise, but they need a library that may not be there, which `import *` must not.
_BRIDGES = ("sentence_transformers",)

__all__ = [
    "Architecture",
    "ArchitectureAdapter",
    "AttentionModule",
    "Context",
    "Mechanism",
    "Options",
    "Paper",
    "Site",
    "Supports",
    "ZooError",
    "from_function",
    "hookimpl",
    "option",
    *_HOMES,
    *_PACKAGES,
]


def __getattr__(name: str) -> Any:
    if name in (*_PACKAGES, *_BRIDGES):
        return import_module(f"zoo_core.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo_core' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
