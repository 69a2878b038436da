"""Read, check, write and break checkpoints: header first, never more bytes than asked for.

Sources and containers (`source`, `header`, `open`), layouts and their one canonical view (`dialects`,
`canonical`), writing (`writer`) and fault injection on copies (`faults`).
"""

from nvfp4viz.checkpoint.writer import Tensor, file_bytes, tensor, write_checkpoint

__all__ = ["Tensor", "file_bytes", "tensor", "write_checkpoint"]
