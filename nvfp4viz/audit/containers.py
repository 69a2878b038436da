"""Findings about the files, one a file and cause, and the fingerprint of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.checkpoint import Checkpoint, TensorEntry


def container_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What opening the files has shown; their words are those of the errors."""
    for item in checkpoint.problems:
        count = max(1, len(item.tensors))
        yield make(item.code, item.severity, text=item.text, tensors=item.tensors, count=count, fill=item.params)


def fingerprint(tensors: Mapping[str, TensorEntry]) -> str:
    """Identity of a checkpoint's layout: equal for copies and re-shardings, whatever the values.

    ``sha256`` over one line per tensor, sorted by name: name, NUL, dtype, NUL, sizes joined by commas, line feed.

    >>> fingerprint({})[:20]
    'sha256:e3b0c44298fc1'
    """
    tails: dict[tuple[str, tuple[int, ...]], str] = {}
    lines = []
    for name in sorted(tensors):
        entry = tensors[name]
        kind = (entry.dtype, entry.shape)
        # Thousands of experts share a handful of shapes.
        if kind not in tails:
            tails[kind] = f"\0{entry.dtype}\0{','.join(map(str, entry.shape))}\n"
        lines.append(name + tails[kind])
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
