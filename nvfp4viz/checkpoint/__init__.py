"""Read, check, write and break checkpoints: header first, never more bytes than asked for.

Sources and containers (`source`, `header`, `open`), layouts and their one canonical view (`dialects`, `canonical`),
writing (`writer`) and fault injection on copies (`faults`).

What breaks copies and what decodes values is loaded when asked for: who reads headers needs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nvfp4viz.checkpoint.canonical import CanonicalView, Slot, canonical, canonical_of
from nvfp4viz.checkpoint.header import Header, TensorEntry, read_header
from nvfp4viz.checkpoint.modules import Module
from nvfp4viz.checkpoint.open import Checkpoint, inspect, memory_checkpoint, open_checkpoint
from nvfp4viz.checkpoint.problems import ContainerProblem, printable
from nvfp4viz.checkpoint.quantconfig import QuantConfig, SourceConfig, read_quant_config
from nvfp4viz.checkpoint.source import LocalSource, MemorySource, Source
from nvfp4viz.checkpoint.writer import Tensor, file_bytes, tensor, write_checkpoint

if TYPE_CHECKING:
    from nvfp4viz.checkpoint.faults import FAULTS, Fault, inject_tensors
    from nvfp4viz.checkpoint.injection import Injection, inject
    from nvfp4viz.checkpoint.preview import TensorPreview, preview_tensor

__all__ = [
    "FAULTS",
    "CanonicalView",
    "Checkpoint",
    "ContainerProblem",
    "Fault",
    "Header",
    "Injection",
    "LocalSource",
    "MemorySource",
    "Module",
    "QuantConfig",
    "Slot",
    "Source",
    "SourceConfig",
    "Tensor",
    "TensorEntry",
    "TensorPreview",
    "canonical",
    "canonical_of",
    "file_bytes",
    "inject",
    "inject_tensors",
    "inspect",
    "memory_checkpoint",
    "open_checkpoint",
    "preview_tensor",
    "printable",
    "read_header",
    "read_quant_config",
    "tensor",
    "write_checkpoint",
]

_LATER = {
    "FAULTS": "faults",
    "Fault": "faults",
    "Injection": "injection",
    "TensorPreview": "preview",
    "inject": "injection",
    "inject_tensors": "faults",
    "preview_tensor": "preview",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
