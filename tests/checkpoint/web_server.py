"""Web servers for the tests of remote sources: sound ones, and every kind of unsound one."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import unquote, urlsplit

from nvfp4viz.checkpoint.remote import FIRST


@dataclass
class Site:
    """What a server has, how it misbehaves, and what it was asked.

    Attributes
    ----------
    ranges
        False: answers every request with the whole file, as ``python -m http.server`` does.
    lists
        Shows a page with links for the folder.
    status
        Answers this for a file instead of giving it.
    late
        Of a file: a place, and what is answered for ranges from there on (0: the connection is closed).
    cut
        Closes the connection after so many bytes of each answer.
    silent
        Waits so many seconds before each body.
    drip, dripping
        Sends so many bytes of each body at a time, and waits so many seconds after them; of these files, or of all.
    missing
        What it answers for a file that it does not have.
    page
        Answers everything with this page and 200, as a login wall does.
    redirect
        Sends every file to this address.
    fail_first
        Answers 503 to so many requests, then recovers.
    chunked
        Says no length.
    packed
        Sends every body through gzip, whatever was asked for.
    tagged
        Marks each file with a strong ETag of its content.
    fickle
        Marks every answer with another strong ETag.
    crumbs
        Sends so many bytes of each body, and says so, whatever part it says that it is.
    room
        Answers so many requests at a time, in 5 ms each, and says nothing to those that come on top.
    wait
        Sent along with each status of ``status`` and with 503 as ``Retry-After``.
    asked, sent
        (path, Range, Authorization) of each request; bytes of bodies that were written, errors' words apart.
    """

    files: Mapping[str, bytes]
    ranges: bool = True
    lists: bool = False
    status: dict[str, int] = field(default_factory=dict)
    late: dict[str, tuple[int, int]] = field(default_factory=dict)
    cut: int | None = None
    silent: float = 0.0
    drip: tuple[int, float] | None = None
    dripping: tuple[str, ...] | None = None
    missing: tuple[int, bytes] = (404, b"<html>not found</html>")
    page: bytes | None = None
    redirect: str | None = None
    fail_first: int = 0
    chunked: bool = False
    packed: bool = False
    tagged: bool = False
    fickle: bool = False
    crumbs: int | None = None
    shift: int = 0
    room: int | None = None
    wait: str | None = None
    busy: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    api: dict[str, tuple[int, Any, dict[str, str]]] = field(default_factory=dict)
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    sent: int = 0
    address: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        site, path = self.site, unquote(urlsplit(self.path).path)
        site.asked.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if site.room is None:
            return self._respond(site, path)
        with site.lock:
            full = site.busy >= site.room
            site.busy += not full
        if full:
            site.over.wait(60)
            self.close_connection = True
            return
        try:
            time.sleep(0.005)
            self._respond(site, path)
        finally:
            with site.lock:
                site.busy -= 1

    def _respond(self, site: Site, path: str) -> None:
        name = path.rpartition("/")[2]
        if site.fail_first > 0:
            site.fail_first -= 1
            return self._answer(503, b"busy", {"Retry-After": site.wait} if site.wait else {})
        if path in site.api:
            status, content, headers = site.api[path]
            return self._answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **headers})
        if name in site.status:
            return self._answer(site.status[name], b"no")
        if site.page is not None:
            return self._answer(200, site.page)
        if site.redirect is not None:
            return self._answer(302, b"", {"Location": site.redirect + name})
        if path.rpartition("/")[0].rpartition("/")[2] in site.files:
            # Below a file there is nothing.
            return self._answer(404, b"<html>not found</html>")
        if not name and site.lists:
            links = "".join(f'<a href="{key}">{key}</a>' for key in [*site.files, "../", "?C=N"])
            return self._answer(200, f"<!doctype html><html>{links}</html>".encode())
        if name not in site.files:
            return self._answer(*site.missing)
        self._file(site.files[name], *site.late.get(name, (1 << 62, 0)))

    def _file(self, data: bytes, late: int, status: int) -> None:
        wanted = self.headers.get("Range")
        mark = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'} if self.site.tagged else {}
        if self.site.fickle:
            mark = {"ETag": f'"{len(self.site.asked)}"'}
        if wanted is None or not self.site.ranges:
            return self._answer(200, data, mark)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last) + 1, len(data))
        if begin >= late:
            self.close_connection = not status
            return self._answer(status, b"no") if status else None
        if begin >= len(data):
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        begin, end = begin + self.site.shift, end + self.site.shift
        return self._answer(
            206, data[begin:end][: self.site.crumbs], {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}", **mark}
        )

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        if self.site.packed:
            body, headers = gzip.compress(body), {**(headers or {}), "Content-Encoding": "gzip"}
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if self.site.chunked:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.site.silent:
            time.sleep(self.site.silent)
        if self.site.cut is not None and len(body) > self.site.cut:
            body = body[: self.site.cut]
            self.close_connection = True
        name = unquote(urlsplit(self.path).path).rpartition("/")[2]
        drips = self.site.drip is not None and (self.site.dripping is None or name in self.site.dripping)
        step, pause = self.site.drip if drips and self.site.drip else (4096, 0.0)
        try:
            for at in range(0, len(body), step):
                # Counted before it goes: a client that has its last byte may look at the count at once.
                with self.site.lock:
                    self.site.sent += len(body[at : at + step]) if status < 400 else 0
                self.wfile.write(body[at : at + step])
                if pause and self.site.over.wait(pause):
                    break
        except OSError:
            # The client has seen enough.
            self.close_connection = True


def header_end(data: bytes) -> int:
    """Where a safetensors file's tensors begin."""
    return 8 + int.from_bytes(data[:8], "little")


def apart(folder: Path) -> tuple[dict[str, bytes], dict[str, int]]:
    """A folder's files with headers so long that no number comes at first sight; and where tensors begin, by shard."""
    files, begins = {}, {}
    for path in folder.iterdir():
        files[path.name] = data = path.read_bytes()
        if path.suffix == ".safetensors":
            text = data[8 : header_end(data)].ljust(FIRST + 64)
            files[path.name] = len(text).to_bytes(8, "little") + text + data[header_end(data) :]
            begins[path.name] = 8 + len(text)
    return files, begins


class _Quiet(HTTPServer):
    """A client may hang up whenever it likes: what the server thinks of it is no output of the code under test."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Threaded(ThreadingMixIn, _Quiet):
    daemon_threads = True


@contextmanager
def serve(site: Site, threads: bool = True) -> Iterator[Site]:
    """The site at ``site.address``, such as ``http://127.0.0.1:40001``.

    Without ``threads`` it serves one connection until that has been idle for a while, and only then the next.
    """
    handler = type("Handler", (_Handler,), {"site": site, "timeout": None if threads else 0.3})
    server = (_Threaded if threads else _Quiet)(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    site.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield site
    finally:
        site.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
