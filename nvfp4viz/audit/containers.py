"""Findings about the files, one a file and cause, and the fingerprint of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from nvfp4viz.audit.findings import make
from nvfp4viz.audit.report import Finding
from nvfp4viz.audit.two_files import one_file
from nvfp4viz.checkpoint import Checkpoint, printable
from nvfp4viz.checkpoint.module_rules import too_slow
from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG
from nvfp4viz.checkpoint.table import TensorTable


def container_findings(checkpoint: Checkpoint, since: int = 0) -> Iterator[Finding]:
    """What opening the files and reading them has shown, from one problem on; their words are those of the errors."""
    for item in checkpoint.problems[since:]:
        count = max(1, len(item.tensors))
        # What was not read is no fault of the checkpoint, and no reason for a server to stop.
        severity = "warn" if item.unread else item.severity
        fill = item.params
        # A broken older file stops who goes by it; the others never open it.
        beside = item.file == HF_QUANT_CONFIG and CONFIG in checkpoint.quant_config.files
        if severity == "error" and item.code == "config.invalid" and beside:
            severity, fill = "backend", {**fill, **one_file(HF_QUANT_CONFIG, CONFIG)}
        yield make(item.code, severity, text=item.text, tensors=item.tensors, count=count, fill=fill)


def unread_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """``audit.partial``: files that a server or a disk did not give, or no further than their headers."""
    whole = [file for file in checkpoint.unread if file not in checkpoint.lost]
    for text, files in (("audit.partial.unread", whole), ("audit.partial.unread.numbers", list(checkpoint.lost))):
        if files:
            yield make("audit.partial", "info", text=text, count=len(files), fill={"file": printable(files[0], 200)})


def changed_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """``audit.partial``: files of which a server gave parts under two marks; what is said of them may mix two versions.

    Servers behind one address may have marks of their own, so that it is no proof.
    """
    changed = list(getattr(checkpoint.source, "changed", ()))
    if changed:
        fill = {"file": printable(changed[0], 200)}
        yield make("audit.partial", "info", text="audit.partial.changed", count=len(changed), fill=fill)


def slow_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """``audit.partial``: expressions of the configuration that were given up, after everything was asked of them."""
    given_up = list(dict.fromkeys(too_slow([checkpoint.config, checkpoint.hf_quant_config])))
    if given_up:
        fill = {"pattern": printable(given_up[0], 200)}
        yield make("audit.partial", "info", text="audit.partial.expression", count=len(given_up), fill=fill)


def fingerprint(tensors: TensorTable) -> str:
    """Identity of a checkpoint's layout: equal for copies and re-shardings, whatever the values.

    ``sha256`` over one line per tensor, sorted by name: name, NUL, dtype, NUL, sizes joined by commas, line feed.

    >>> fingerprint(TensorTable.empty())[:20]
    'sha256:e3b0c44298fc1'
    """
    # Thousands of experts share a handful of shapes.
    tails = [f"\0{dtype}\0{','.join(map(str, shape))}\n" for dtype, shape in tensors.kinds]
    named = [name + tails[kind] for name, kind in zip(tensors.names, tensors.kind.tolist(), strict=True)]
    if any("\0" in name for name in tensors.names):
        order = sorted(range(len(named)), key=tensors.names.__getitem__)
        named = [named[row] for row in order]
    else:
        # NUL sorts before everything else, so that lines are in the order of their names.
        named.sort()
    return f"sha256:{hashlib.sha256(''.join(named).encode()).hexdigest()}"
