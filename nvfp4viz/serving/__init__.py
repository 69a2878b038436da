"""What a server does with a checkpoint: config, load with its unwritten slots, scales per backend, guard, sampling."""

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
