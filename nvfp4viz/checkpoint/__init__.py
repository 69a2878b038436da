"""Read, check, write and break checkpoints: header first, never more bytes than asked for.

Sources and containers (`source`, `header`, `open`), layouts and their one canonical view (`dialects`, `canonical`),
writing (`writer`) and fault injection on copies (`faults`).
"""

from nvfp4viz.checkpoint.canonical import CanonicalView, Slot, canonical, canonical_of
from nvfp4viz.checkpoint.faults import FAULTS, Fault, inject_tensors
from nvfp4viz.checkpoint.header import Header, TensorEntry, read_header
from nvfp4viz.checkpoint.injection import Injection, inject
from nvfp4viz.checkpoint.modules import Module
from nvfp4viz.checkpoint.open import Checkpoint, inspect, memory_checkpoint, open_checkpoint
from nvfp4viz.checkpoint.preview import TensorPreview, preview_tensor
from nvfp4viz.checkpoint.problems import ContainerProblem, printable
from nvfp4viz.checkpoint.quantconfig import QuantConfig, SourceConfig, read_quant_config
from nvfp4viz.checkpoint.source import LocalSource, MemorySource, Source
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
