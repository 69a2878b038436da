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
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, cast

import streamlit as st

from nvfp4viz.audit import Audit, naive_check, run_audit
from nvfp4viz.checkpoint import inspect, printable
from nvfp4viz.checkpoint.source import is_address, open_source
from nvfp4viz.errors import CheckpointError, NvError
from nvfp4viz.ui import errors
from nvfp4viz.ui.explorer_open import Opened

if TYPE_CHECKING:
    from nvfp4viz.checkpoint.remote import RemoteSource, Version
    from nvfp4viz.ui.lesson import Lesson

# What addresses gave in this session, and how many of them are kept.
MEMORY = "explorer.kept.read"
REMEMBERED = 4
SCHEMES = ("http", "https", "hf")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", re.ASCII)
# Seconds between two looks at how far reading has come.
LOOK = 0.1


VARIABLE = "NVFP4VIZ_ADDRESSES"


def allowed() -> bool:
    """Whether readers may have this server open addresses.

    On their own machine, yes.  A server that others reach would fetch, in its own network and with its own hub token,
    whatever they type; its owner says so by setting ``NVFP4VIZ_ADDRESSES=1`` (or 0, to forbid it anywhere).
    """
    return served_for_all(VARIABLE)


def served_for_all(variable: str) -> bool:
    """``variable`` is ``"1"``; where it is not set, whether only this machine reaches the server."""
    said = os.environ.get(variable, "")
    return said == "1" if said else st.get_option("server.address") in ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """What an address gave.  ``version`` as `RemoteSource.version`; ``again``: nothing had changed since last time."""

    opened: Opened
    version: Version | None
    again: bool = False


def address_source(page: Lesson, place: str) -> Opened | None:
    """The field, and what its last submission gave; ``place`` is the beginning of the widgets' keys.

    Raises
    ------
    CheckpointError
        ``source.*``: what came instead of a checkpoint; again on every run until another address is sent.
    """
    field, sent, shown = f"{place}.address", f"{place}.kept.sent", f"{place}.kept.address"

    def send() -> None:
        # A press must not be lost if the page starts over before it gets here.
        st.session_state[sent] = st.session_state[field]

    form = st.form(place.replace(".", "_") + "_address", border=False)
    with form, st.container(horizontal=True, vertical_alignment="bottom"):
        st.text_input(page.t("address.label"), key=field, placeholder="hf://owner/name@revision", autocomplete="off")
        st.form_submit_button(page.t("address.open"), key=f"{field}_open", type="primary", on_click=send)
    st.caption(page.t("address.note"))
    typed: str | None = st.session_state.pop(sent, None)
    if typed is not None:
        # An address that fails must not leave the last one's checkpoint under its name, nor none its error.
        st.session_state.pop(shown, None)
        if typed.strip():
            st.session_state[shown] = _read_with_progress(page, typed.strip())
    kept: Read | NvError | None = st.session_state.get(shown)
    if kept is None:
        page.prose("address.waiting")
        return None
    if isinstance(kept, NvError):
        raise kept
    st.caption(
        page.t("address.shown", name=errors.escape(kept.opened.audit.report.source)) + _version_words(page, kept)
    )
    return kept.opened


def _version_words(page: Lesson, read: Read) -> str:
    """What the content is known by, and whether it was read again."""
    if read.version is None:
        return page.t("address.version_none")
    (first, _, mark), *_ = read.version
    known = "version_files" if first else "version_commit"
    said = page.t(f"address.{known}", count=len(read.version), mark=errors.escape(mark[:12]))
    return said + (page.t("address.again") if read.again else "")


def _read_with_progress(page: Lesson, typed: str) -> Read | NvError:
    bar = st.progress(0.0, page.t("address.connecting"))
    memory: dict[str, Read] = st.session_state.setdefault(MEMORY, {})
    # The address may hold a secret: what is kept is known by a digest of it.
    name = sha256(typed.encode()).hexdigest()

    def tell(stage: str, done: int, total: int) -> None:
        bar.progress(done / max(total, 1), page.t(f"address.stage.{stage}", done=done, total=total))

    try:
        read = read_address(typed, tell, memory.pop(name, None))
    except NvError as error:
        return error
    finally:
        bar.empty()
    memory[name] = read
    while len(memory) > REMEMBERED:
        del memory[next(iter(memory))]
    return read


def read_address(typed: str, tell: Callable[[str, int, int], None], known: Read | None = None) -> Read:
    """Read headers and scales of what an address names; ``tell`` is told of stages, how many are done, of how many.

    Parameters
    ----------
    known
        What the same address gave before: given back where the server says that nothing has changed.

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
    future = pool.submit(_examine, address, lambda *news: told.append(news), known)
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
        scheme = text.partition("://")[0]
        if scheme.lower() not in SCHEMES:
            raise CheckpointError("source.remote-field", scheme=printable(scheme, 20))
        return text
    if _HUB_ID.fullmatch(text):
        return f"hf://{text}"
    # Without a scheme it may still be an address with a password in front or a signature behind.
    public = re.split("[?#]", text)[0].rpartition("@")[2]
    if _HUB_ID.fullmatch(text.removesuffix("@")):
        public = text  # a repository whose revision is missing
    raise CheckpointError("source.not-an-address", name=printable(public, 100) or "…")


def public_address(address: str) -> str:
    """An address without its password, query and fragment.

    >>> public_address("https://me:secret@example.org:8080/model/?key=1#x"), public_address("hf://owner/name@main")
    ('https://example.org:8080/model/', 'hf://owner/name@main')
    """
    scheme, _, rest = re.split("[?#]", address)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host if scheme == 'hf' else host.rpartition('@')[2]}{slash}{path}"


def _examine(address: str, tell: Callable[[str, int, int], None], known: Read | None = None) -> Read:
    source = cast("RemoteSource", open_source(address))  # `as_address` lets nothing else through
    source.progress = tell
    version = source.version()
    whole = known is not None and not known.opened.audit.checkpoint.unread
    if known is not None and whole and version is not None and version == known.version:
        return dataclasses.replace(known, again=True)
    done = run_audit(inspect(source))
    naive = naive_check(done.checkpoint, done.view)
    # Asked again: what changed while it was read has no version, and is read anew next time.
    return Read(Opened(_identity(done), done, naive, "address", public_address(address)), source.version())


def _identity(done: Audit) -> str:
    """Over all that was read of the content: tensors by name, type and shape, and every scale."""
    digest = sha256(done.report.fingerprint.encode())
    for key, table in sorted(done.facts.tables.items()):
        digest.update(repr(key).encode() + table.stored.tobytes())
    return digest.hexdigest()
