"""Write a copy of a checkpoint with other tensors, without copying what stays the same.

Shards that do not change are hard-linked (copied where the file system cannot), the others are copied with the new
bytes in their place; so a change of one slot of a 400 GB checkpoint costs one shard.  Tensors that the source does not
have go into one more shard, and a shard of which nothing stays is left out.  The source is only read, and a folder
appears whole or not at all.
"""

from __future__ import annotations

import io
import os
import shutil
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from nvfp4viz.checkpoint.header import Header, TensorEntry
from nvfp4viz.checkpoint.open import Checkpoint, Progress
from nvfp4viz.checkpoint.problems import printable, system_words
from nvfp4viz.checkpoint.sidecars import read_side_file
from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG, LocalSource, Overlay
from nvfp4viz.checkpoint.writer import INDEX_NAME, Tensor, atomic_folder, file_bytes, json_bytes, refuse_taken
from nvfp4viz.errors import CheckpointError, InputError

_CHUNK = 16 * 1024 * 1024
# Other files than shards from this size on are linked too: a second set of weights, not something edited in place.
_LARGE = 64 * 1024 * 1024
# What a file system keeps for itself of a folder with some files.
_SPARE = 1024 * 1024
_METADATA = {"format": "pt"}
# Hears of bytes as they are written.
Told = Callable[[int], None]
# New tensors by name; None takes the tensor away.
Changes = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class Copied:
    """Files of a copy: written anew, and linked or copied as they are."""

    rewritten: tuple[str, ...]
    linked: tuple[str, ...]


@contextmanager
def changed_copy(
    checkpoint: Checkpoint,
    out: str | Path,
    new: Changes,
    files: Mapping[str, bytes] | None = None,
    extra: str = "extra",
    progress: Progress | None = None,
) -> Iterator[tuple[Path, Copied]]:
    """Fill the new folder ``out``; it gets its name when the block ends well, so that the block can look at it first.

    Parameters
    ----------
    new
        Tensors to replace, to take away (None), and to add.
    files
        Other files to write, such as a changed ``config.json``.
    extra
        Beginning of the name of the shard for tensors that the source does not have.
    progress
        Told (stage, MiB done, of) while files are written.

    Yields
    ------
    folder, copied
        The folder under its temporary name.

    Raises
    ------
    InputError
        As `check_place`, and ``fault.format`` for a tensor of another type or shape than the one it replaces.
    CheckpointError
        ``checkpoint.exists``, ``checkpoint.not-written``, ``copy.no-room``, ``source.unreadable``;
        ``checkpoint.damaged`` where a shard to rewrite is not sound.
    """
    place = check_place(checkpoint, out)
    plan = _plan(checkpoint, new, extra)
    other = {**(files or {}), **plan.whole}
    kept = [file for file in plan.names if file not in other and file not in plan.touched]
    linked = tuple(plan.called(file) for file in kept)
    with atomic_folder(out) as target:
        # Links first: what cannot be linked has to be copied, and then there must be room for it.
        copied = [file for file in kept if not _link(place, file, target / plan.called(file))]
        written = [file for file in plan.names if file in plan.touched]
        sizes = {file: place.size(file) for file in copied + written}
        _refuse_full(target, Path(out), sizes, other)
        told = _counter(progress, sum(sizes.values()))
        for file, size in sizes.items():
            # What cannot be read is the source's fault, and said before anything of it is written.
            place.read_range(file, 0, 1)
            with place.path(file).open("rb") as source, (target / plan.called(file)).open("wb") as stream:
                if file in plan.touched:
                    _rewrite(checkpoint, file, new, source, stream, told)
                else:
                    _copy(file, source, stream, 0, size, told)
                _settle(stream)
        for file, data in other.items():
            with (target / file).open("wb") as stream:
                stream.write(data)
                _settle(stream)
        yield target, Copied(plan.rewritten, linked)


def check_place(checkpoint: Checkpoint, out: str | Path) -> LocalSource:
    """Could a changed copy go to ``out``?  Worth asking before hours of work for it; returns the copy's source.

    Raises
    ------
    InputError
        ``copy.no-name``; ``copy.local`` where the source is no folder of this machine; ``fault.out-is-source`` where
        ``out`` lies in the source's folder or around it.
    CheckpointError
        ``checkpoint.exists``.
    """
    if not str(out):
        raise InputError("copy.no-name")
    place = checkpoint.source
    if not isinstance(place, LocalSource):
        raise InputError("copy.local", name=checkpoint.name)
    _refuse_overlap(place.folder, Path(out))
    refuse_taken(out)
    return place


def changed_in_memory(
    checkpoint: Checkpoint, new: Changes, files: Mapping[str, bytes] | None = None, extra: str = "extra"
) -> Overlay:
    """The copy of `changed_copy` without writing it, of any source: what changes is held in memory (``.new``).

    Raises
    ------
    InputError, CheckpointError
        ``fault.format``, ``checkpoint.damaged`` as `changed_copy`; ``source.*``.
    """
    plan, place = _plan(checkpoint, new, extra), checkpoint.source
    out: dict[str, bytes] = {}
    for file in plan.names:
        if file in plan.touched or plan.called(file) != file:
            whole, stream = io.BytesIO(place.read_range(file, 0, place.size(file))), io.BytesIO()
            if file in plan.touched:
                _rewrite(checkpoint, file, new, whole, stream)
            out[plan.called(file)] = (stream if file in plan.touched else whole).getvalue()
    kept = [file for file in plan.names if plan.called(file) == file]
    return Overlay(place, kept, {**out, **plan.whole, **(files or {})})


@dataclass(frozen=True, slots=True)
class _Plan:
    """Files of a copy.

    Attributes
    ----------
    names
        Of the source.
    touched
        Shards to write anew.
    renamed
        What shards are called in the copy, where that is another name.
    shard
        The additional one, or "".
    whole
        New files: that shard and the index.
    """

    names: tuple[str, ...]
    touched: frozenset[str]
    renamed: Mapping[str, str]
    shard: str
    whole: Mapping[str, bytes]

    def called(self, file: str) -> str:
        return self.renamed.get(file, file)

    @property
    def rewritten(self) -> tuple[str, ...]:
        return tuple(sorted({*map(self.called, self.touched), *([self.shard] if self.shard else [])}))


def _plan(checkpoint: Checkpoint, new: Changes, extra: str) -> _Plan:
    emptied = left_out(checkpoint, new)
    names = [file for file in _files(checkpoint) if file not in emptied]
    changed, added = touched(checkpoint, new), _added(checkpoint, new)
    removed = {name for name, item in new.items() if item is None}
    renamed, shard = _shard_names(checkpoint, names, extra) if added else ({}, "")
    whole = {shard: file_bytes(added, _METADATA)} if added else {}
    if added or (removed and checkpoint.index_file):
        whole[checkpoint.index_file or INDEX_NAME] = _index(checkpoint, removed, added, renamed, shard)
    return _Plan(tuple(names), changed, renamed, shard, whole)


def left_out(checkpoint: Checkpoint, new: Changes) -> frozenset[str]:
    """Shards of which nothing stays: no index can name them, and in the copy they would be strays.

    Without an index they stay, empty: the numbers of the others promise that they are there.
    """
    removed = {name for name, item in new.items() if item is None}
    if not removed or checkpoint.index_file is None:
        return frozenset()
    mine = {checkpoint.tensors[name].file for name in removed}
    return frozenset(
        header.file for header in checkpoint.files if header.file in mine and header.entries.keys() <= removed
    )


def touched(checkpoint: Checkpoint, new: Changes) -> frozenset[str]:
    """Shards of the source that a copy writes anew."""
    files = {checkpoint.tensors[name].file for name in new if name in checkpoint.tensors}
    return frozenset(files - left_out(checkpoint, new))


def _added(checkpoint: Checkpoint, new: Changes) -> dict[str, Tensor]:
    return {name: item for name, item in new.items() if item is not None and name not in checkpoint.tensors}


def to_write(checkpoint: Checkpoint, new: Changes) -> tuple[int, int]:
    """Shards that a copy writes anew, the additional one among them, and their bytes; the rest is linked."""
    changed, added = touched(checkpoint, new), _added(checkpoint, new)
    removed = {name for name, item in new.items() if item is None}
    size = 0
    for header in checkpoint.files:
        if header.file in changed and not removed.isdisjoint(header.entries):
            kept, start = _without(header, removed)
            size += len(start) + sum(entry.nbytes for entry in kept)
        elif header.file in changed:
            size += header.size
    return len(changed) + bool(added), size + (len(file_bytes(added, _METADATA)) if added else 0)


def _shard_names(checkpoint: Checkpoint, names: list[str], extra: str) -> tuple[dict[str, str], str]:
    """What shards are called in the copy, and what the additional one is.

    One ``model.safetensors`` would be taken for the whole model, index or not, so it becomes the first of two.
    """
    shards = [header.file for header in checkpoint.files]
    if checkpoint.index_file is None and len(shards) == 1:
        return {shards[0]: "model-00001-of-00002.safetensors"}, "model-00002-of-00002.safetensors"
    number, shard = 1, f"{extra}.safetensors"
    while shard in names:
        number += 1
        shard = f"{extra}-{number}.safetensors"
    return {}, shard


def _refuse_overlap(folder: Path, out: Path) -> None:
    try:
        place = out.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        # A loop of links, or a zero byte.
        reason = system_words(error)
        raise CheckpointError("checkpoint.not-written", folder=printable(out.name), reason=reason) from None
    if place == folder or place.is_relative_to(folder) or folder.is_relative_to(place):
        raise InputError("fault.out-is-source", out=out.name)


def _files(checkpoint: Checkpoint) -> list[str]:
    """What belongs to the copy: everything in the folder, or the one file and its configuration."""
    names = checkpoint.source.files()
    if checkpoint.source.only is None:
        return names
    return [checkpoint.source.only, *(name for name in (CONFIG, HF_QUANT_CONFIG) if name in names)]


def _link(place: LocalSource, file: str, target: Path) -> bool:
    """Link a shard, where the system can; the small files, which people edit in place, are copied."""
    if target.suffix != ".safetensors" and place.size(file) < _LARGE:
        return False
    try:
        os.link(place.path(file), target)
    except OSError:
        return False
    return True


def _refuse_full(target: Path, out: Path, sizes: Mapping[str, int], other: Mapping[str, bytes]) -> None:
    """A disk that cannot take the copy is found out before an hour of writing, not after."""
    need = sum(sizes.values()) + sum(map(len, other.values())) + _SPARE
    free = shutil.disk_usage(target).free
    if need > free:
        shards = sum(file.endswith(".safetensors") for file in sizes)
        raise CheckpointError(
            "copy.no-room", folder=printable(out.name), need=f"{need:,}", free=f"{free:,}", shards=shards
        )


def _counter(progress: Progress | None, total: int) -> Told:
    done = 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress("copy", done >> 20, max(1, total >> 20))

    return told


def _settle(stream: BinaryIO) -> None:
    """Onto the disk, before the folder gets its name: a machine that loses power then has a whole copy or none."""
    stream.flush()
    os.fsync(stream.fileno())


def _copy(file: str, source: BinaryIO, stream: BinaryIO, begin: int, end: int, told: Told) -> None:
    """Bytes ``begin`` to ``end`` of a file, in pieces."""
    source.seek(begin)
    while begin < end:
        piece = source.read(min(end - begin, _CHUNK))
        if not piece:
            # It has become shorter since its header was read.
            raise CheckpointError("checkpoint.damaged", file=printable(file))
        stream.write(piece)
        begin += len(piece)
        told(len(piece))


def _rewrite(
    checkpoint: Checkpoint,
    file: str,
    new: Changes,
    source: BinaryIO,
    stream: BinaryIO,
    told: Told = lambda _: None,
) -> None:
    header = next(item for item in checkpoint.files if item.file == file)
    if not header.valid:
        raise CheckpointError("checkpoint.damaged", file=file)
    mine = {name: item for name, item in new.items() if name in header.entries}
    if any(item is None for item in mine.values()):
        _write_without(header, mine, source, stream, told)
        return
    _copy(file, source, stream, 0, header.size, told)
    for name, item in mine.items():
        assert item is not None
        entry = header.entries[name]
        _check_fits(entry, item)
        stream.seek(entry.begin)
        stream.write(item.tobytes())


def _write_without(
    header: Header, mine: Mapping[str, Tensor | None], source: BinaryIO, stream: BinaryIO, told: Told
) -> None:
    """The file again without some tensors, the rest in the same order, patched on the way."""
    kept, start = _without(header, {name for name, item in mine.items() if item is None})
    stream.write(start)
    # Neighbours are copied together: a scalar of four bytes is no read of its own.
    first = last = 0
    for entry in kept:
        item = mine.get(entry.name)
        if item is None and entry.begin == last:
            last = entry.end
            continue
        _copy(header.file, source, stream, first, last, told)
        first, last = (entry.begin, entry.end) if item is None else (entry.end, entry.end)
        if item is not None:
            _check_fits(entry, item)
            stream.write(item.tobytes())
    _copy(header.file, source, stream, first, last, told)


def _without(header: Header, removed: Collection[str]) -> tuple[list[TensorEntry], bytes]:
    """The tensors that stay, and the file's beginning up to the first of them."""
    kept = [entry for entry in _in_file_order(header) if entry.name not in removed]
    described: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    end = 0
    for entry in kept:
        begin, end = end, end + entry.nbytes
        described[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    return kept, struct.pack("<Q", len(text)) + text


def _in_file_order(header: Header) -> list[TensorEntry]:
    return sorted(header.entries.values(), key=lambda entry: (entry.begin, entry.end))


def _check_fits(entry: TensorEntry, item: Tensor) -> None:
    """A swap may bring another projection's tensor; gate and up have one shape, or it cannot be done in place."""
    if (item.dtype, tuple(item.shape)) != (entry.dtype, entry.shape):
        raise InputError("fault.format", fault="swap", tensor=entry.name, dtype=item.dtype)


def _index(
    checkpoint: Checkpoint, removed: set[str], added: Mapping[str, Tensor], renamed: Mapping[str, str], shard: str
) -> bytes:
    """The source's index without ``removed`` and with ``added``, or a first one."""
    tensors = checkpoint.tensors
    content: dict[str, Any] = {"metadata": {"total_size": int((tensors.end - tensors.begin).sum())}}
    places = {name: tensors[name].file for name in tensors} if checkpoint.index_file is None else {}
    if checkpoint.index_file is not None:
        content = dict(read_side_file(checkpoint.source, checkpoint.index_file).content or {})
        places = dict(content["weight_map"])
    kept = {name: renamed.get(file, file) for name, file in places.items() if name not in removed}
    content["weight_map"] = kept | dict.fromkeys(added, shard)
    metadata = content.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int):
        more = sum(len(item.tobytes()) for item in added.values()) - sum(tensors[name].nbytes for name in removed)
        content["metadata"] = {**metadata, "total_size": metadata["total_size"] + more}
    return json_bytes(content)
