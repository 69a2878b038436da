"""One way of reading a checkpoint's names, shapes and scalars, timed in a process of its own.

``python -m benchmarks.read_phase METHOD FOLDER`` prints one line of JSON: seconds (imports done before the clock
starts), a check over what was read, and, where the kernel counts it, the bytes that the process really read meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

# (tensors, scalars, sum of all scalars' bits as unsigned integers)
Check = tuple[int, int, int]
Method = Callable[[str], tuple[Check, dict[str, object]]]


def _check(names: int, shapes: int, scalars: list) -> Check:
    import numpy as np

    assert names == shapes
    bits = np.array(scalars, np.float32).view(np.uint32)
    return names, len(bits), int(bits.sum(dtype=np.uint64))


def read_ours(folder: str) -> tuple[Check, dict[str, object]]:
    from nvfp4viz.checkpoint import inspect

    checkpoint = inspect(folder)
    table = checkpoint.tensors
    names, shapes = list(table), list(map(table.kinds.__getitem__, table.kind.tolist()))
    values = checkpoint.all_scalars()
    counted = {"bytes_read": checkpoint.bytes_read, "side_bytes": checkpoint.side_bytes}
    return _check(len(names), len(shapes), values), counted


def read_safe_open(folder: str) -> tuple[Check, dict[str, object]]:
    from safetensors import safe_open

    names, shapes, scalars = [], [], []
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                piece = file.get_slice(name)
                names.append(name)
                shapes.append((piece.get_dtype(), piece.get_shape()))
                if shapes[-1] == ("F32", []):
                    scalars.append(file.get_tensor(name))
    return _check(len(names), len(shapes), scalars), {}


def read_hub(folder: str) -> tuple[Check, dict[str, object]]:
    from huggingface_hub import get_local_safetensors_metadata
    from safetensors import safe_open

    metadata = get_local_safetensors_metadata(folder)
    names, shapes, scalars = [], [], []
    for name, header in metadata.files_metadata.items():
        with safe_open(Path(folder) / name, "np") as file:
            for key, tensor in header.tensors.items():
                names.append(key)
                shapes.append((tensor.dtype, tensor.shape))
                if shapes[-1] == ("F32", []):
                    scalars.append(file.get_tensor(key))
    return _check(len(names), len(shapes), scalars), {}


def audit_ours(folder: str) -> tuple[Check, dict[str, object]]:
    from nvfp4viz.audit import run_audit

    report = run_audit(folder).report
    return (report.container.tensors, 0, 0), {"verdict": report.verdict}


def deep_ours(folder: str) -> tuple[Check, dict[str, object]]:
    from nvfp4viz.audit import run_audit
    from nvfp4viz.audit.deep_findings import deepen

    report = deepen(run_audit(folder)).report
    return (report.container.tensors, 0, 0), {"verdict": report.verdict, "bytes_read": report.container.bytes_read}


def read_sequential(folder: str) -> tuple[Check, dict[str, object]]:
    total, buffer = 0, bytearray(8 << 20)
    for path in sorted(Path(folder).glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return (0, 0, 0), {"bytes_read": total}


METHODS: dict[str, Method] = {
    "nvfp4viz": read_ours,
    "safe_open": read_safe_open,
    "huggingface_hub": read_hub,
    "audit": audit_ours,
    "deep": deep_ours,
    "sequential": read_sequential,
}


def _bytes_by_kernel() -> int | None:
    """All bytes that this process has asked the kernel to read, cached or not."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def main() -> None:
    method, folder = METHODS[sys.argv[1]], sys.argv[2]
    # What a method imports is loaded by reading nothing: the clock is for reading.
    import huggingface_hub  # noqa: F401
    import safetensors.numpy  # noqa: F401

    import nvfp4viz.audit.deep_findings
    import nvfp4viz.checkpoint  # noqa: F401

    before = _bytes_by_kernel()
    start = time.perf_counter()
    check, extra = method(folder)
    seconds = time.perf_counter() - start
    after = _bytes_by_kernel()
    kernel = None if before is None or after is None else after - before
    print(json.dumps({"seconds": seconds, "check": check, "kernel_bytes": kernel, **extra}))


if __name__ == "__main__":
    main()
