"""Read, check, write and break checkpoints: header first, never more bytes than asked for.

Sources and containers (`source`, `header`, `open`), layouts and their one canonical view (`dialects`,
`canonical_view`), writing (`writer`) and fault injection on copies (`faults`).

What is not needed to read headers and scalars is loaded when asked for: whoever looks at a checkpoint in a script or a
job pays for Python's imports each time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nvfp4viz.checkpoint.header import Header, TensorEntry, read_header
from nvfp4viz.checkpoint.open import Checkpoint, inspect, memory_checkpoint, open_checkpoint
from nvfp4viz.checkpoint.problems import ContainerProblem, printable
from nvfp4viz.checkpoint.source import LocalSource, MemorySource, Source

if TYPE_CHECKING:
    from nvfp4viz.checkpoint.canonical_view import CanonicalView, Slot, canonical, canonical_of
    from nvfp4viz.checkpoint.faults import FAULTS, Fault, inject_tensors
    from nvfp4viz.checkpoint.injection import Injection, inject
    from nvfp4viz.checkpoint.modules import Module
    from nvfp4viz.checkpoint.preview import TensorPreview, preview_tensor
    from nvfp4viz.checkpoint.quantconfig import QuantConfig, SourceConfig, read_quant_config
    from nvfp4viz.checkpoint.writer import Tensor, file_bytes, tensor, write_checkpoint

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
    "canonical_view": ("CanonicalView", "Slot", "canonical", "canonical_of"),
    "faults": ("FAULTS", "Fault", "inject_tensors"),
    "injection": ("Injection", "inject"),
    "modules": ("Module",),
    "preview": ("TensorPreview", "preview_tensor"),
    "quantconfig": ("QuantConfig", "SourceConfig", "read_quant_config"),
    "writer": ("Tensor", "file_bytes", "tensor", "write_checkpoint"),
}
_HOME = {name: module for module, names in _LATER.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
