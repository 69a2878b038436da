"""Byte ranges over HTTP: many at a time, never more than asked for, and every received byte counted.

fsspec's HTTP file system brings the event loop, the session, proxies and redirects; what it does not do is refuse.  A
server that ignores ``Range`` answers 200 and would send all of a shard, so an answer is looked at before its body is
read.  A connection that breaks is taken up again where it stopped.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from nvfp4viz.checkpoint.pace import Pace
from nvfp4viz.checkpoint.problems import printable
from nvfp4viz.errors import CheckpointError

# Attempts that bring nothing before a range is given up, and the first pause between them in seconds.
TRIES, PAUSE = 3, 0.25
# More of them while others are answered: the number of requests at a time has to be halved six times from 64 to 1.
HALVINGS = 6
# Seconds that a server may ask for before the next attempt.
MOST_PAUSE = 30.0
CHUNK = 1 << 16
# So many answers in a row that end after fewer bytes than this: nobody waits for a file that comes in crumbs.
CRUMBS, CRUMB = 40, 1024
# Answers of up to so many bytes are all waiting and no transfer: so many times as many are asked for at a time.
SMALL, MORE = 4096, 4
# Errors of a host that says nothing, and those of them that cost a whole timeout.
SILENT = ("source.timeout", "source.no-answer", "source.connection", "source.cut")
UNHEARD = ("source.timeout", "source.no-answer")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)$")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes ``begin`` to ``end`` of the file called ``name`` in messages."""

    url: str
    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came: fewer bytes only where the file ends.

    Attributes
    ----------
    total
        The file's size, where the server says it.
    version
        What the server says that changes with the content; see `version_of`.
    """

    data: bytes
    total: int | None
    version: str | None = None


def version_of(headers: Mapping[str, str]) -> str | None:
    """A strong ``ETag``, or else a ``Last-Modified`` that was over when the answer was sent (RFC 9110, 8.8).

    A weak tag may stay while bytes change, and a file may be written twice in one second: neither is one.

    >>> version_of({"ETag": '"5f-1"'}), version_of({"ETag": 'W/"5f-1"'})
    ('"5f-1"', None)
    """
    tag = headers.get("ETag", "")
    if re.fullmatch(r'"[\x21\x23-\x7e\x80-\xff]{1,500}"', tag):
        return tag
    try:
        changed, sent = (parsedate_to_datetime(headers[name]) for name in ("Last-Modified", "Date"))
        return headers["Last-Modified"] if (sent - changed).total_seconds() >= 1 else None
    except (KeyError, ValueError, TypeError):
        return None


class _Interrupted(Exception):
    """The attempt failed in a way that another may mend; ``error`` is for when none does.

    ``pause`` is how many seconds the server asks to wait, ``busy`` says that fewer requests at a time may help.
    """

    def __init__(self, error: CheckpointError, pause: float = 0.0, busy: bool = True) -> None:
        super().__init__()
        self.error, self.pause, self.busy = error, pause, busy


class Transport:
    """Range requests.

    Parameters
    ----------
    timeout
        Seconds without a byte, or with hardly any (and seconds to connect), after which a server counts as silent.
    parallel
        Most requests at a time; four times as many where all are for a few bytes.  See also `Pace`.
    headers
        Sent with every request to the address itself; credentials among them do not follow a redirect elsewhere.
    """

    def __init__(self, timeout: float = 30.0, parallel: int = 16, headers: Mapping[str, str] | None = None) -> None:
        import aiohttp
        from fsspec.implementations.http import HTTPFileSystem

        self._timeout, self._parallel, self._headers = timeout, parallel, dict(headers or {})
        limits = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        options = {"timeout": limits, "trust_env": True, "auto_decompress": False}
        self._fs = HTTPFileSystem(client_kwargs=options, skip_instance_cache=True)
        self._pace = Pace()
        self.received: dict[str, int] = {}

    def fetch(
        self, wanted: Sequence[Wanted], done: Callable[[int], None] | None = None
    ) -> list[Answer | CheckpointError]:
        """All of ``wanted``, in order; an error stands in the place of what could not be had.

        ``done`` is told after each range how many are there.
        """
        over = threading.Event()

        async def all_of_them() -> list[Answer | CheckpointError]:
            try:
                return await self._all(wanted, done)
            finally:
                over.set()

        running = asyncio.run_coroutine_threadsafe(all_of_them(), self._fs.loop)
        try:
            return running.result()
        except BaseException:
            # Ctrl-C: requests that nobody waits for must not be left under way when the interpreter goes.
            running.cancel()
            over.wait(1.0)
            raise

    async def _all(
        self, wanted: Sequence[Wanted], done: Callable[[int], None] | None
    ) -> list[Answer | CheckpointError]:
        small = all(item.end - item.begin <= SMALL for item in wanted)
        most, pace, count = self._parallel * (MORE if small else 1), self._pace, 0

        async def guarded(item: Wanted) -> Answer | CheckpointError:
            nonlocal count
            async with pace.turn(most):
                before = pace.answers
                try:
                    if pace.lost is not None:
                        return _same(pace.lost, item)
                    answer = await self._whole(item)
                    pace.answered()
                    return answer
                except CheckpointError as error:
                    if error.code in SILENT:
                        pace.lost = error if pace.answers == before else None
                    else:
                        # No, too, is an answer.
                        pace.answered()
                    return error
                finally:
                    count += 1
                    if done is not None:
                        done(count)

        return list(await asyncio.gather(*map(guarded, wanted)))

    async def _whole(self, item: Wanted) -> Answer:
        """One range, taken up again after each break for as long as bytes come."""
        got, fruitless, crumbs, heard = bytearray(), 0, 0, self._pace.answers
        while True:
            before, begun = len(got), self._pace.begun()
            try:
                total, version = await self._attempt(item, got)
                if total is None or len(got) >= min(item.end, total) - item.begin or len(got) == before:
                    return Answer(bytes(got), total, version)
            except _Interrupted as broken:
                # Silence after a few bytes costs as much as after none.
                least = CRUMB if broken.error.code == "source.timeout" else 1
                fruitless = 1 if len(got) - before >= least else fruitless + 1
                crumbs = crumbs + 1 if len(got) - before < CRUMB else 0
                if broken.busy:
                    self._pace.trouble(begun)
                tries = TRIES + HALVINGS * (broken.busy and self._pace.answers > heard)
                # Who has never answered is not asked again and again for half a minute each time.
                unheard = broken.error.code in UNHEARD and not self._pace.answers
                if fruitless >= tries or crumbs >= CRUMBS or unheard:
                    raise broken.error from None
                await asyncio.sleep(max(broken.pause, PAUSE * 2 ** min(fruitless - 1, TRIES)))

    async def _attempt(self, item: Wanted, got: bytearray) -> tuple[int | None, str | None]:
        """Ask for what is still missing, add what comes to ``got``; returns the file's size and version."""
        import aiohttp

        begin, name = item.begin + len(got), printable(item.name)
        headers = {**self._headers, "Range": f"bytes={begin}-{item.end - 1}", "Accept-Encoding": "identity"}
        try:
            session = await self._fs.set_session()
            async with session.get(self._fs.encode_url(item.url), headers=headers) as response:
                expected, total = _expected(name, begin, item.end, response.status, response.headers)
                version = version_of(response.headers)
                await self._receive(item, response, expected, got)
        except aiohttp.ConnectionTimeoutError:
            seconds = f"{self._timeout:g}"
            silent = CheckpointError("source.no-answer", name=host_of(item.url), seconds=seconds)
            raise _Interrupted(silent) from None
        except TimeoutError:
            host, seconds = host_of(item.url), f"{self._timeout:g}"
            raise _Interrupted(CheckpointError("source.timeout", name=name, host=host, seconds=seconds)) from None
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionResetError):
            # Many servers cut long answers, however few they have to give.
            cut = CheckpointError("source.cut", name=name, received=len(got))
            raise _Interrupted(cut, busy=item.begin + len(got) == begin) from None
        except aiohttp.TooManyRedirects:
            raise CheckpointError("source.redirects", name=name) from None
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
            raise CheckpointError("source.not-an-address", name=name) from None
        except (aiohttp.ClientError, OSError) as error:
            # Behind a redirect it is another host than the address's that is missing.
            known: Any = error if getattr(error, "host", None) else None
            name = printable(f"{known.host}:{known.port}") if known else host_of(item.url)
            raise _Interrupted(CheckpointError("source.connection", name=name, reason=reason_of(error))) from None
        # Without any length the end of the answer is the end of the file.
        return (item.begin + len(got) if expected is None else total), version

    async def _receive(self, item: Wanted, response: Any, expected: int | None, got: bytearray) -> None:
        """Read the body into ``got``, and not one byte more than ``expected``.

        Raises
        ------
        TimeoutError
            Bytes come, but fewer than `CRUMB` of them in the time of a server that is silent.
        """
        limit = item.end - item.begin if expected is None else len(got) + expected
        if limit > len(got):
            since, few = time.monotonic(), 0
            async for chunk in response.content.iter_chunked(CHUNK):
                self.received[item.name] = self.received.get(item.name, 0) + len(chunk)
                few += len(chunk)
                if few >= CRUMB:
                    since, few = time.monotonic(), 0
                room = limit - len(got)
                got += chunk[:room]
                if len(chunk) > room and expected is None:
                    raise CheckpointError("source.no-range", name=printable(item.name))
                if len(chunk) >= room and expected is not None:
                    break
                if time.monotonic() - since > self._timeout:
                    raise TimeoutError
        if expected is not None and len(got) < limit:
            raise _Interrupted(CheckpointError("source.cut", name=printable(item.name), received=len(got)), busy=False)


def _same(lost: CheckpointError, item: Wanted) -> CheckpointError:
    """What one file's request met, of another file: the host's error names the host."""
    own = {"name": printable(item.name)} if lost.code in ("source.timeout", "source.cut") else {}
    return CheckpointError(lost.code, **{**lost.params, **own})


def _expected(
    name: str, begin: int, end: int, status: int, headers: Mapping[str, str]
) -> tuple[int | None, int | None]:
    """Bytes that the answer will bring, and the file's size; raises for answers that are not to be read.

    (None, None): an answer without any length, which may be read as far as the range goes.
    """
    length = headers.get("Content-Length", "")
    size = int(length) if length.isdigit() and len(length) < 20 else None
    match = _CONTENT_RANGE.match(headers.get("Content-Range", ""))
    coding = headers.get("Content-Encoding", "").strip().lower()
    if status in (200, 206) and coding not in ("", "identity"):
        # Nobody asked for it (RFC 9110, 12.5.3), and a part of a packed file cannot be unpacked.
        raise CheckpointError("source.encoded", name=name, coding=printable(coding, 40))
    if status == 206:
        if match is None or match[1] is None or int(match[1]) != begin or int(match[2]) < begin:
            raise CheckpointError("source.bad-range", name=name)
        return min(int(match[2]) + 1, end) - begin, None if match[3] == "*" else int(match[3])
    if status == 416:
        stored = int(match[3]) if match and match[3] != "*" else None
        # It refuses what lies inside the file, or a file's first bytes without a word on how many there are.
        if begin < stored if stored is not None else begin == 0:
            raise CheckpointError("source.bad-range", name=name)
        return 0, begin if stored is None else stored
    if status == 200:
        # The whole file: welcome where the whole was wanted, or more than there is.
        if begin == 0 and (size is None or size <= end):
            return size, size
        raise CheckpointError("source.no-range", name=name)
    if status in (401, 403):
        raise CheckpointError("source.forbidden", name=name, status=status)
    if status in (404, 410):
        raise CheckpointError("source.nothing-there", name=name, status=status)
    error = CheckpointError("source.status", name=name, status=status)
    if status != 429 and status < 500:
        raise error
    asked = headers.get("Retry-After", "")
    seconds = float(asked) if asked.isascii() and asked.isdigit() and len(asked) < 9 else 0.0
    raise _Interrupted(error, min(seconds, MOST_PAUSE))


def host_of(url: str) -> str:
    """The host and port of an address, for messages: neither path nor query, and no password.

    >>> host_of("https://user:secret@example.org:8443/model?sig=1"), host_of("http://example.org/model")
    ('example.org:8443', 'example.org:80')
    """
    parts = urlsplit(url)
    return printable(f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}")


def reason_of(error: BaseException) -> str:
    """The system's words for a connection that does not come about; never an address with what it may hold."""
    seen: BaseException | None = error
    while seen is not None:
        # aiohttp keeps the system's error in a field; requests and httpx only among the causes.
        for inner in (getattr(seen, "os_error", None), getattr(seen, "certificate_error", None), seen):
            words = getattr(inner, "verify_message", None) or getattr(inner, "strerror", None)
            # asyncio puts its own words in that place, with an address in them.
            if type(inner) is OSError or isinstance(inner, ConnectionError):
                words = os.strerror(inner.errno) if inner.errno else words
            if isinstance(words, str) and words:
                return printable(words, 120)
        seen = seen.__cause__ or seen.__context__
    return printable(type(error).__name__, 120)
