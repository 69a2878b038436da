"""``--deep --scheduler ADDRESS``: the same scan with the shards spread over a Dask cluster.

A task is one shard: its source, its name and its units go out, one small record a unit comes back.  A task whose worker
dies is run again by the scheduler, on another.  Every worker must be able to open the source: a folder that all of them
mount at the same place, or an address.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

from nvfp4viz.audit.bytescan import Scan
from nvfp4viz.audit.deep import Unit, scan_file
from nvfp4viz.checkpoint.problems import NO_FILE, printable
from nvfp4viz.checkpoint.source import open_source
from nvfp4viz.errors import CheckpointError, InputError

# Seconds without any worker after which nobody waits for one; a cluster that grows on demand needs some for its first.
PATIENCE = 60.0


def scan_on_cluster(
    address: str,
    place: str,
    work: Mapping[str, Sequence[Unit]],
    alone: Callable[[float], None] = lambda _: None,
) -> Iterator[tuple[str, list[Scan] | CheckpointError]]:
    """Shards with their records, as they are finished.

    In place of its records a shard may have the error that a scan of it ended with: what its source said where the
    worker is, ``source.worker`` where that sees no such source, or where too many workers died under it,
    ``source.no-worker`` where there was none any more for `PATIENCE`, or ``source.scheduler-gone``.

    Parameters
    ----------
    address
        Of the scheduler, such as ``"tcp://10.0.0.1:8786"``.
    place
        What the workers open: a path or an address.
    alone
        Is told for how many seconds a worker is waited for, as soon as there is none.

    Raises
    ------
    InputError
        ``cli.no-dask``: `distributed` is not installed; ``cli.scheduler``: nobody answers there.
    CheckpointError
        ``source.no-workers``: no worker came for `PATIENCE`, and none has scanned anything.
    """
    try:
        from distributed import Client
        from distributed.comm.addressing import parse_address, parse_host_port
        from distributed.comm.registry import get_backend
    except ImportError:
        raise InputError("cli.no-dask") from None
    try:
        # A client that fails at one of these prints a traceback when it is collected.
        scheme, location = parse_address(address)
        get_backend(scheme)
        if scheme in ("tcp", "tls"):
            parse_host_port(location)
        client = Client(address, timeout=15, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise InputError("cli.scheduler", address=printable(address, 80), reason=type(error).__name__) from None
    with _in_silence(), client, client.as_current():
        files = {
            client.submit(scan_shard, place, file, list(units), key=f"nvfp4viz-{number}-{file}", pure=False): file
            for number, (file, units) in enumerate(work.items())
        }
        for future, found in _finished(client, list(files), alone):
            file = files.pop(future)
            future.release()
            if "Cancelled" in type(found).__name__:
                # Nobody takes a task back but a client that has lost its scheduler.
                found = CheckpointError("source.scheduler-gone", name=printable(file))
            elif isinstance(found, Exception) and not isinstance(found, CheckpointError):
                # Whatever a cluster can do to a task: the shard's name and the kind of failure are what is known.
                found = CheckpointError("source.worker", name=printable(file), reason=type(found).__name__)
            yield file, found
        if work and len(files) == len(work):
            # Of a cluster that nobody works in the shards are not to blame.
            raise CheckpointError("source.no-workers", address=printable(address, 80), seconds=f"{PATIENCE:g}")
        for file in files.values():
            yield file, CheckpointError("source.no-worker", name=printable(file), seconds=f"{PATIENCE:g}")


@contextmanager
def _in_silence() -> Iterator[None]:
    """Without the log of `distributed`, which prints a traceback where a connection ends: here that is an error."""
    log = logging.getLogger("distributed")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def _finished(client: Any, futures: Sequence[Any], alone: Callable[[float], None]) -> Iterator[tuple[Any, Any]]:
    """Futures with what they ended with, as they do; the others never end, where no worker is left and none comes."""
    from distributed import as_completed

    waiting = as_completed(futures)
    asked, seen, working = float("-inf"), monotonic(), True
    while not waiting.is_empty():
        if waiting.has_ready():
            future = next(waiting)
            try:
                ended = future.result(timeout=PATIENCE)
            except Exception as error:
                if isinstance(error, TimeoutError) and future.status != "error":
                    # It was finished, and its worker is gone with what it found: the scheduler runs it again elsewhere.
                    waiting.add(future)
                    continue
                ended = error
            yield future, ended
            continue
        now = monotonic()
        if now - asked > 1:
            asked, had = now, working
            working = _has_workers(client)
            if working:
                seen = now
            elif had:
                alone(PATIENCE)
            if now - seen > PATIENCE:
                return
        sleep(0.02)


def _has_workers(client: Any) -> bool:
    try:
        return bool(client.scheduler_info()["workers"])
    except Exception:
        # A scheduler that does not answer has none either.
        return False


def scan_shard(place: str, file: str, units: list[Unit]) -> list[Scan]:
    """One task: open the source here, and read one shard's units."""
    try:
        source = open_source(place)
    except CheckpointError as error:
        if error.code not in NO_FILE:
            raise
        # The one who asks has it open: it is this worker that does not see it.
        raise CheckpointError("source.worker", name=printable(file), reason=error.code) from None
    return scan_file(source.read_range, file, units)
