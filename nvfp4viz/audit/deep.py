"""``--deep``: every packed code and block scale read once, in file order, in bounded memory, and resumable.

Shards are independent: `scan_file` needs a way to read and a list of units, and gives one small record for each.  What
is done is kept shard by shard, so that a scan that was stopped goes on with the next shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from nvfp4viz.audit.bytescan import Scan, Scanner
from nvfp4viz.audit.containers import fingerprint
from nvfp4viz.audit.deep_plan import Unit, plan
from nvfp4viz.audit.linears import Linear
from nvfp4viz.checkpoint import CanonicalView, Checkpoint, printable
from nvfp4viz.errors import CheckpointError, InputError

# Bytes of one read, reads that wait while one is looked at, and the gap that is read over rather than skipped.
READ, AHEAD, GAP = 8 << 20, 2, 1 << 16
# Told of a stage's name, how many MiB are done, and of how many.
Progress = Callable[[str, int, int], None]
Read = Callable[[str, int, int], bytes]
# Shards with their records, or with why they have none.
Scanned = Iterator[tuple[str, list[Scan] | CheckpointError]]
Elsewhere = Callable[["dict[str, list[Unit]]"], Scanned]


def scan_file(read: Read, file: str, units: Sequence[Unit], told: Callable[[int], None] = lambda _: None) -> list[Scan]:
    """Read one file's units with ``read(file, begin, end)``; ``told`` hears of bytes as they are done.

    Raises
    ------
    CheckpointError
        ``source.*``; ``source.changed`` where the file has become shorter.
    """
    scanners = [Scanner(unit.kind) for unit in units]
    for begin, data, parts in _reads(read, file, units):
        array = np.frombuffer(data, np.uint8)
        for number, first, last in parts:
            if len(data) < last - begin:
                raise CheckpointError("source.changed", name=printable(file))
            scanners[number].add(array[first - begin : last - begin])
        told(sum(last - first for _, first, last in parts))
    return [scanner.done() for scanner in scanners]


# A part of a read: which unit, and the place in the file where its bytes begin and end.
Part = tuple[int, int, int]


def _reads(read: Read, file: str, units: Sequence[Unit]) -> Iterator[tuple[int, bytes, list[Part]]]:
    """Reads of about `READ` bytes in file order, the next ones under way while one is looked at."""
    with ThreadPoolExecutor(1) as reader:
        waiting: list[tuple[int, list[Part], Future[bytes]]] = []
        for begin, end, parts in _cuts(units):
            waiting.append((begin, parts, reader.submit(read, file, begin, end)))
            if len(waiting) > AHEAD:
                first, found, data = waiting.pop(0)
                yield first, data.result(), found
        for first, found, data in waiting:
            yield first, data.result(), found


def _cuts(units: Sequence[Unit]) -> Iterator[tuple[int, int, list[Part]]]:
    """Large tensors cut into reads, small neighbours joined into one."""
    begin, end, parts = 0, 0, list[Part]()
    for number, unit in enumerate(units):
        for first in range(unit.begin, unit.end, READ):
            last = min(first + READ, unit.end)
            if parts and (first < end or first - end > GAP or last - begin > READ):
                yield begin, end, parts
                parts = []
            if not parts:
                begin = first
            parts.append((number, first, last))
            end = last
    if parts:
        yield begin, end, parts


# ------------------------------------------------------------------------------------------------- the whole


@dataclass(frozen=True, slots=True)
class DeepScan:
    """Every unit with what was seen of it, and groups of experts whose codes are equal byte for byte.

    Attributes
    ----------
    twins
        (layer, projection) to groups of expert numbers.
    resumed
        Shards whose records came from an earlier scan.
    nbytes
        Bytes looked at, those of an earlier scan apart.
    elsewhere
        Bytes that others have read, small gaps between tensors included.
    """

    units: tuple[Unit, ...]
    scans: tuple[Scan, ...]
    twins: dict[tuple[int, str], list[tuple[int, ...]]]
    resumed: int
    nbytes: int
    elsewhere: int = 0


def deep_scan(
    checkpoint: Checkpoint,
    view: CanonicalView,
    linears: Sequence[Linear],
    *,
    progress: Progress | None = None,
    resume: bool = False,
    state: Path | None = None,
    elsewhere: Elsewhere | None = None,
) -> DeepScan:
    """Read all packed codes and block scales.

    Parameters
    ----------
    progress
        Is told of MiB done.
    resume
        Go on where an earlier scan of the same files stopped; see `can_resume`.
    state
        Where the records are kept until the scan is complete; by default below the user's cache folder.
    elsewhere
        Scans shards in another place, such as a cluster, and gives their records as they are finished, or the error
        that a shard's scan ended with.

    Raises
    ------
    InputError
        ``deep.cannot-resume``.
    CheckpointError
        What ``elsewhere`` raises.  A file that cannot be read is `Checkpoint.lost`, and no unit of it is scanned.
    """
    work = {file: units for file, units in plan(checkpoint, view, linears).items() if file not in checkpoint.lost}
    lasting = can_resume(checkpoint)
    if resume and not lasting:
        raise InputError("deep.cannot-resume", name=checkpoint.name)
    kept = _State((state or default_state(checkpoint, work)) if lasting else None, resume)
    total = sum(map(_size, work.values()))
    done, fresh, there = 0, 0, 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress("weights", done >> 20, max(1, total >> 20))

    scans: dict[str, list[Scan]] = {}
    for file, units in work.items():
        known = kept.scans.get(file)
        if known is not None and len(known) == len(units):
            scans[file] = known
            told(_size(units))
    left = {file: units for file, units in work.items() if file not in scans}
    resumed = len(scans)
    failed: dict[str, CheckpointError] = {}
    for file, found in _scan_here(checkpoint, left, told) if elsewhere is None else elsewhere(left):
        if isinstance(found, CheckpointError):
            failed[file] = found
            continue
        scans[file] = found
        fresh += sum(scan.nbytes for scan in found)
        kept.add(file, found)
        if elsewhere is not None:
            told(_size(left[file]))
            # As here: what lies between neighbours comes along.
            there += sum(end - begin for begin, end, _ in _cuts(left[file]))
    # In the order of the files, whichever ended first.
    for file in [file for file in left if file in failed]:
        checkpoint.lose(file, failed[file])
    flat_units = tuple(unit for file, units in work.items() if file in scans for unit in units)
    flat_scans = tuple(scan for file in work if file in scans for scan in scans[file])
    twins = _twins(checkpoint, flat_units, flat_scans)
    if len(scans) == len(work):
        kept.remove()
    return DeepScan(flat_units, flat_scans, twins, resumed, fresh, there)


def _scan_here(checkpoint: Checkpoint, left: dict[str, list[Unit]], told: Callable[[int], None]) -> Scanned:
    """File by file; those that cannot be read to their end have the error."""
    for file, units in left.items():
        try:
            yield file, scan_file(checkpoint.read_range, file, units, told)
        except CheckpointError as error:
            yield file, error


def _size(units: Sequence[Unit]) -> int:
    return sum(unit.end - unit.begin for unit in units)


def _twins(
    checkpoint: Checkpoint, units: Sequence[Unit], scans: Sequence[Scan]
) -> dict[tuple[int, str], list[tuple[int, ...]]]:
    """Experts of one layer whose packed codes are equal: by their sums first, and then byte by byte."""
    alike: dict[tuple[object, ...], list[Unit]] = {}
    for unit, scan in zip(units, scans, strict=True):
        if unit.role == "weight" and unit.expert is not None and scan.nonzero:
            key = (unit.layer, unit.projection, scan.nbytes, scan.total, scan.parity)
            alike.setdefault(key, []).append(unit)
    out: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    for group in alike.values():
        rest = group
        while len(rest) > 1:
            first, *others = rest
            same = [unit for unit in others if _equal(checkpoint, first, unit)]
            if same:
                assert first.layer is not None
                assert first.projection is not None
                ids = tuple(sorted(unit.expert for unit in (first, *same) if unit.expert is not None))
                out.setdefault((first.layer, first.projection), []).append(ids)
            rest = [unit for unit in others if unit not in same]
    return out


def _equal(checkpoint: Checkpoint, one: Unit, two: Unit) -> bool:
    """Are their bytes equal?  Where they cannot be read a second time nothing is said of them."""
    for at in range(0, one.end - one.begin, READ):
        pieces = []
        for unit in (one, two):
            begin, end = unit.begin + at, min(unit.begin + at + READ, unit.end)
            try:
                data = checkpoint.read_range(unit.file, begin, end)
            except CheckpointError as error:
                checkpoint.lose(unit.file, error)
                return False
            if len(data) != end - begin:
                checkpoint.lose(unit.file, CheckpointError("source.changed", name=printable(unit.file)))
                return False
            pieces.append(data)
        if pieces[0] != pieces[1]:
            return False
    return True


def can_resume(checkpoint: Checkpoint) -> bool:
    """Can the source tell that its files are still the same?  What an earlier scan has seen counts only then.

    A folder tells by times, the hub by its commit, a web server by strong ETags or dates, where it sends them.
    """
    return all(_mark(checkpoint, header.file) is not None for header in checkpoint.files)


def _mark(checkpoint: Checkpoint, file: str) -> object:
    modified = getattr(checkpoint.source, "modified", None)
    try:
        return None if modified is None else modified(file)
    except CheckpointError:
        # A file that cannot be had has nothing that could be read of it.
        return ""


def default_state(checkpoint: Checkpoint, work: dict[str, list[Unit]]) -> Path:
    """A file of the user's cache, named after what is scanned: layout, files, sizes, and where it is."""
    digest = hashlib.sha256(fingerprint(checkpoint.tensors).encode())
    for header in checkpoint.files:
        digest.update(f"\0{header.file}\0{header.size}\0{len(work.get(header.file, ()))}".encode())
        digest.update(str(_mark(checkpoint, header.file)).encode())
    digest.update(checkpoint.name.encode())
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "nvfp4viz" / f"deep-{digest.hexdigest()[:32]}.jsonl"


class _State:
    """Records of finished shards, one a line, or nothing kept; a line that was cut off counts as not written."""

    def __init__(self, path: Path | None, resume: bool) -> None:
        self._path = path
        self.scans: dict[str, list[Scan]] = {}
        if path is None:
            return
        if resume and path.exists():
            for line in path.read_bytes().splitlines():
                try:
                    file, scans = msgspec.json.decode(line, type=tuple[str, list[Scan]])
                except msgspec.MsgspecError:
                    continue
                self.scans[file] = scans
        # What was cut off goes; what is known stays.  Without anything to keep there is no file.
        if self.scans:
            self._write("wb", self.scans)
        else:
            self.remove()

    def add(self, file: str, scans: list[Scan]) -> None:
        self._write("ab", {file: scans})

    def _write(self, mode: str, scans: dict[str, list[Scan]]) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode) as out:
                for file, found in scans.items():
                    out.write(msgspec.json.encode((file, found)) + b"\n")
        except OSError:
            # Nowhere to keep it, or no room: the scan goes on, and can only be started anew.
            return

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            if self._path is not None:
                self._path.unlink(missing_ok=True)
