"""What a server does with a checkpoint: config, load with its unwritten slots, scales per backend, guard, sampling.

Names are loaded when asked for: the audit wants the promotion rule of `quant_config`, and not the forward pass.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvfp4viz.serving.backends import BACKENDS, BackendInfo
    from nvfp4viz.serving.evaluation import Collapse, collapse, evaluate
    from nvfp4viz.serving.guard import BadSlots, LoadGuard, check_slots
    from nvfp4viz.serving.loader import (
        ALLOCATORS,
        LayerParameters,
        LoadReport,
        RoleCount,
        UnwrittenSlot,
        load_parameters,
    )
    from nvfp4viz.serving.quant_config import Resolved, RuleStep, resolve_quantization
    from nvfp4viz.serving.scales import ConvertedScales, process_weights_after_loading
    from nvfp4viz.serving.served import ServedExperts, ServedModel, load

__all__ = [
    "ALLOCATORS",
    "BACKENDS",
    "BackendInfo",
    "BadSlots",
    "Collapse",
    "ConvertedScales",
    "LayerParameters",
    "LoadGuard",
    "LoadReport",
    "Resolved",
    "RoleCount",
    "RuleStep",
    "ServedExperts",
    "ServedModel",
    "UnwrittenSlot",
    "check_slots",
    "collapse",
    "evaluate",
    "load",
    "load_parameters",
    "process_weights_after_loading",
    "resolve_quantization",
]

_HOMES = {
    name: module
    for module, names in {
        "backends": ("BACKENDS", "BackendInfo"),
        "evaluation": ("Collapse", "collapse", "evaluate"),
        "guard": ("BadSlots", "LoadGuard", "check_slots"),
        "loader": ("ALLOCATORS", "LayerParameters", "LoadReport", "RoleCount", "UnwrittenSlot", "load_parameters"),
        "quant_config": ("Resolved", "RuleStep", "resolve_quantization"),
        "scales": ("ConvertedScales", "process_weights_after_loading"),
        "served": ("ServedExperts", "ServedModel", "load"),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
