"""Opening a checkpoint on the Explorer page: a sample, or files that the reader gave us for this session."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from nvfp4viz.audit import Audit, NaiveCheck, for_gpu, for_ranks, naive_check, run_audit
from nvfp4viz.checkpoint import LocalSource, MemorySource, printable
from nvfp4viz.checkpoint.index import missing_by_number
from nvfp4viz.checkpoint.source import INDEX_SUFFIX
from nvfp4viz.errors import CheckpointError
from nvfp4viz.ui import caches

if TYPE_CHECKING:
    from nvfp4viz.checkpoint import Source

UPLOAD = "upload"
# Kinds of a checkpoint's place, as the page offers them.
KINDS = ("sample", UPLOAD, "address", "server")


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A checkpoint with everything the page draws from.

    Attributes
    ----------
    identity
        Changes with the content.
    kind
        Of `KINDS`.
    address
        What others would type to open it: of an address, without its secrets.
    """

    identity: str
    audit: Audit
    naive: NaiveCheck
    kind: str
    address: str = ""


def asked(opened: Opened, gpu: str | None, tp: int | None, ep: int | None) -> Opened:
    """The same with the backend that vLLM picks on a GPU, and for experts split over ranks; reads nothing."""
    done = opened.audit
    if tp is not None or ep is not None:
        done = for_ranks(done, tp, ep)
    return replace(opened, audit=done if gpu is None else for_gpu(done, gpu))


def open_sample(sample: str) -> Opened:
    """A shipped sample, built first if need be.

    Raises
    ------
    CheckpointError
        If nothing of it can be read.
    """
    return open_folder(caches.sample_path(sample), "sample")


def open_folder(path: Path, kind: str = "server") -> Opened:
    """A folder of this machine, read anew when one of its files changes.

    Raises
    ------
    CheckpointError
        If nothing of it can be read.
    """
    return _open_path(str(path), caches.stamp(path), kind)


@st.cache_resource(max_entries=12, show_spinner=False)
def _open_path(path: str, stamp: caches.Stamp, kind: str) -> Opened:
    # Of a server's folders a reader sees what lies in them, whatever their links lead to.
    source = LocalSource(path, links="inside")
    return _examine(source, hashlib.sha256(repr((path, stamp)).encode()).hexdigest(), kind)


def open_upload(files: Sequence[Any], place: str) -> Opened:
    """Files from the uploader, kept for this session alone under ``place``: other readers never see them.

    Raises
    ------
    CheckpointError
        If nothing of them can be read, for example a pickle or a web page under a checkpoint's name;
        ``source.twice`` for two files of one name that differ: the uploader keeps what was given before.
    """
    contents: dict[str, bytes] = {}
    for file in files:
        data = file.getvalue()
        if contents.setdefault(file.name, data) != data:
            raise CheckpointError("source.twice", name=file.name)
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(name.encode() + b"\0" + hashlib.sha256(contents[name]).digest())
    identity = digest.hexdigest()
    return caches.kept(kept_upload(place), identity, lambda: _examine(_given(contents), identity, UPLOAD))


def _given(contents: dict[str, bytes]) -> MemorySource:
    """What was given; of a numbered shard that stands alone, the others are not asked for.

    An index beside it asks for them: then they are missing, as in a folder.
    """
    shards = [name for name in contents if name.endswith(".safetensors")]
    indexed = any(name.endswith(INDEX_SUFFIX) for name in contents)
    alone = len(shards) == 1 and not indexed and bool(missing_by_number(shards))
    return MemorySource(contents, called(shards), only=shards[0] if alone else None)


def called(shards: Sequence[str]) -> str:
    """What an upload is called, after its shards: two of them side by side have names of their own.

    >>> called(["model.safetensors"]), called(["b.safetensors", "C:\\\\me\\\\a.safetensors"]), called([])
    ('model.safetensors', 'a.safetensors + 1', 'upload')
    """
    # A browser gives no path; a name that has one all the same loses it.
    names = sorted(re.split(r"[/\\]", name)[-1] for name in shards)
    if not names:
        return UPLOAD
    return printable(names[0], 80) + (f" + {len(names) - 1}" if names[1:] else "")


def kept_upload(place: str) -> str:
    """Where this session keeps what was read of the files given at ``place``."""
    return f"{place}.kept.upload"


def remember(opened: Opened | None) -> None:
    """Keep what the Explorer has open for other pages of this session; a sample is in their links already."""
    st.session_state["explorer.now"] = None if opened is None or opened.kind == "sample" else opened


def remembered() -> Opened | None:
    """What a reader has opened in the Explorer from files, an address or a folder; None for a sample."""
    return st.session_state.get("explorer.now")


def _examine(source: Source, identity: str, kind: str) -> Opened:
    done = run_audit(source)
    return Opened(identity, done, naive_check(done.checkpoint, done.view), kind)
