"""Opening a checkpoint on the Explorer page: a sample, or files that the reader gave us for this session."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from nvfp4viz.audit import Audit, NaiveCheck, naive_check, run_audit
from nvfp4viz.checkpoint import MemorySource
from nvfp4viz.ui import caches

if TYPE_CHECKING:
    from nvfp4viz.checkpoint import Source

UPLOAD = "upload"
_SESSION = "_explorer_upload"


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A checkpoint with everything the page draws from.  ``identity`` changes with the content."""

    identity: str
    audit: Audit
    naive: NaiveCheck


def open_sample(sample: str, gpu: str | None) -> Opened:
    """A shipped sample, built first if need be.

    Raises
    ------
    CheckpointError
        If nothing of it can be read.
    """
    return open_folder(caches.sample_path(sample), gpu)


def open_folder(path: Path, gpu: str | None) -> Opened:
    """A folder of this machine, read anew when one of its files changes.

    Raises
    ------
    CheckpointError
        If nothing of it can be read.
    """
    return _open_path(str(path), caches.stamp(path), gpu)


@st.cache_resource(max_entries=12, show_spinner=False)
def _open_path(path: str, identity: caches.Stamp, gpu: str | None) -> Opened:
    return _examine(path, repr(identity), gpu)


def open_upload(files: Sequence[Any], gpu: str | None) -> Opened:
    """Files from the uploader, kept for this session alone: other readers never see them.

    Raises
    ------
    CheckpointError
        If nothing of them can be read, for example a pickle or a web page under a checkpoint's name.
    """
    contents = {file.name: file.getvalue() for file in files}
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(name.encode() + b"\0" + hashlib.sha256(contents[name]).digest())
    identity = f"{digest.hexdigest()}/{gpu}"
    kept = st.session_state.get(_SESSION)
    if kept is None or kept.identity != identity:
        kept = _examine(MemorySource(contents, UPLOAD), identity, gpu)
        st.session_state[_SESSION] = kept
    return kept


def _examine(source: str | Source, identity: str, gpu: str | None) -> Opened:
    done = run_audit(source, gpu=gpu)
    return Opened(identity, done, naive_check(done.checkpoint, done.view))
