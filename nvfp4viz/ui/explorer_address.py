"""The Explorer's third source: an address on the web or a repository on the hub, read by ranges.

What was typed may hold a password or a signature, so it stays in this session: it goes into no link and no message, and
what was read is not shared with other sessions.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from hashlib import sha256
from typing import TYPE_CHECKING

import streamlit as st

from nvfp4viz.audit import Audit, for_gpu, naive_check, run_audit
from nvfp4viz.checkpoint import inspect, printable
from nvfp4viz.checkpoint.source import is_address
from nvfp4viz.errors import CheckpointError, NvError
from nvfp4viz.ui import errors
from nvfp4viz.ui.explorer_open import Opened

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

# What the last address gave: a checkpoint or an error.
_SESSION = "_explorer_address"
_SENT = "_explorer_address_sent"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", re.ASCII)
FIELD = "explorer.address"
# Seconds between two looks at how far reading has come.
LOOK = 0.1


VARIABLE = "NVFP4VIZ_ADDRESSES"


def allowed() -> bool:
    """Whether readers may have this server open addresses.

    On their own machine, yes.  A server that others reach would fetch, in its own network and with its own hub token,
    whatever they type; its owner says so by setting ``NVFP4VIZ_ADDRESSES=1`` (or 0, to forbid it anywhere).
    """
    said = os.environ.get(VARIABLE, "")
    return said == "1" if said else st.get_option("server.address") in ("127.0.0.1", "localhost", "::1")


def address_source(page: Lesson, gpu: str | None) -> Opened | None:
    """The field, and what its last submission gave.

    Raises
    ------
    CheckpointError
        ``source.*``: what came instead of a checkpoint; again on every run until another address is sent.
    """
    with st.form("explorer_address", border=False), st.container(horizontal=True, vertical_alignment="bottom"):
        st.text_input(page.t("address.label"), key=FIELD, placeholder="hf://owner/name@revision", autocomplete="off")
        st.form_submit_button(page.t("address.open"), key="explorer.address_open", type="primary", on_click=_send)
    st.caption(page.t("address.note"))
    typed = st.session_state.pop(_SENT, "").strip()
    if typed:
        # An address that fails must not leave the last one's checkpoint under its name.
        st.session_state.pop(_SESSION, None)
        st.session_state[_SESSION] = _read_with_progress(page, typed)
    kept: Opened | NvError | None = st.session_state.get(_SESSION)
    if kept is None:
        page.prose("address.waiting")
        return None
    if isinstance(kept, NvError):
        raise kept
    st.caption(page.t("address.shown", name=errors.escape(kept.audit.report.source)))
    if gpu is None:
        return kept
    return dataclasses.replace(kept, identity=f"{kept.identity}/{gpu}", audit=for_gpu(kept.audit, gpu))


def _send() -> None:
    """The form's callback: a press must not be lost if the page starts over before it gets here."""
    st.session_state[_SENT] = st.session_state[FIELD]


def _read_with_progress(page: Lesson, typed: str) -> Opened | NvError:
    bar = st.progress(0.0, page.t("address.connecting"))

    def tell(stage: str, done: int, total: int) -> None:
        bar.progress(done / max(total, 1), page.t(f"address.stage.{stage}", done=done, total=total))

    try:
        return read_address(typed, tell)
    except NvError as error:
        return error
    finally:
        bar.empty()


def read_address(typed: str, tell: Callable[[str, int, int], None]) -> Opened:
    """Read headers and scales of what an address names; ``tell`` is told of stages, how many are done, of how many.

    Raises
    ------
    CheckpointError
        ``source.*``.
    """
    address = as_address(typed)
    told: deque[tuple[str, int, int]] = deque(maxlen=1)
    # The transport tells of its progress from a thread that all sessions share, and a page may only be drawn from its
    # own: reading runs beside it, and this one looks on.
    pool = ThreadPoolExecutor(1, thread_name_prefix="explorer-address")
    future = pool.submit(_examine, address, lambda *news: told.append(news))
    # A reader who leaves in the middle does not wait for the rest.
    pool.shutdown(wait=False)
    while not future.done():
        wait([future], timeout=LOOK)
        if told:
            tell(*told.pop())
    return future.result()


def as_address(typed: str) -> str:
    """What was typed, as an address: never as a path of the machine that serves the page.

    >>> as_address("owner/name@main"), as_address(" https://example.org/model/ ")
    ('hf://owner/name@main', 'https://example.org/model/')
    """
    text = typed.strip()
    if is_address(text):
        return text
    if _HUB_ID.fullmatch(text):
        return f"hf://{text}"
    # Without a scheme it may still be an address with a password in front or a signature behind.
    public = re.split("[?#]", text)[0].rpartition("@")[2]
    raise CheckpointError("source.not-an-address", name=printable(public, 100) or "…")


def _examine(address: str, tell: Callable[[str, int, int], None]) -> Opened:
    done = run_audit(inspect(address, progress=tell))
    return Opened(_identity(done), done, naive_check(done.checkpoint, done.view))


def _identity(done: Audit) -> str:
    """Over all that was read of the content: tensors by name, type and shape, and every scale."""
    digest = sha256(done.report.fingerprint.encode())
    for key, table in sorted(done.facts.tables.items()):
        digest.update(repr(key).encode() + table.stored.tobytes())
    return digest.hexdigest()
