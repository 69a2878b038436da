"""Write a copy of a checkpoint with one fault in it.

Shards that do not change are hard-linked (copied where the file system cannot), the others are copied with the new
bytes in their place; so a fault in one slot of a 400 GB checkpoint costs one shard.  The source is only read, and a
folder appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nvfp4viz.checkpoint.canonical import canonical
from nvfp4viz.checkpoint.faults import Changes, changes
from nvfp4viz.checkpoint.header import Header, TensorEntry
from nvfp4viz.checkpoint.open import Checkpoint, open_checkpoint
from nvfp4viz.checkpoint.sidecars import read_side_file
from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG, LocalSource
from nvfp4viz.checkpoint.writer import Tensor, atomic_folder, json_bytes
from nvfp4viz.errors import CheckpointError, InputError

_CHUNK = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Injection:
    """What `inject` did: tensors changed and removed, files rewritten and linked."""

    changed: tuple[str, ...]
    removed: tuple[str, ...]
    rewritten: tuple[str, ...]
    linked: tuple[str, ...]


def inject(
    source: str | Path,
    out: str | Path,
    fault: str,
    *,
    layer: int,
    expert: int,
    projection: str,
    role: str | None = None,
    value: float | None = None,
    seed: int = 0,
) -> Injection:
    """Copy ``source`` to the new folder ``out`` with one fault.

    Parameters and `InputError` as in `nvfp4viz.checkpoint.faults.changes`.

    Raises
    ------
    InputError
        Also ``fault.out-is-source`` where ``out`` lies in the source's folder or around it.
    CheckpointError
        ``checkpoint.exists``, ``checkpoint.damaged`` where a shard to rewrite is not sound, ``source.*``.
    """
    checkpoint = open_checkpoint(source)
    place = checkpoint.source
    assert isinstance(place, LocalSource)
    _refuse_overlap(Path(source), Path(out))
    new = changes(
        canonical(checkpoint),
        checkpoint.read_tensor,
        fault,
        layer=layer,
        expert=expert,
        projection=projection,
        role=role,
        value=value,
        seed=seed,
    )
    touched = {checkpoint.tensors[name].file for name in new}
    removed = tuple(name for name, item in new.items() if item is None)
    linked: list[str] = []
    with atomic_folder(out) as target:
        for file in _files(checkpoint):
            if file in touched:
                _rewrite(place, checkpoint, file, new, target / file)
            elif file == checkpoint.index_file and removed:
                (target / file).write_bytes(_index_without(checkpoint, removed, new))
            else:
                _link(place.path(file), target / file)
                linked.append(file)
    changed = tuple(name for name, item in new.items() if item is not None)
    return Injection(changed, removed, tuple(sorted(touched)), tuple(linked))


def _refuse_overlap(source: Path, out: Path) -> None:
    folder = (source if source.is_dir() else source.parent).resolve()
    place = out.resolve()
    if place == folder or place.is_relative_to(folder) or folder.is_relative_to(place):
        raise InputError("fault.out-is-source", out=out.name)


def _files(checkpoint: Checkpoint) -> list[str]:
    """What belongs to the copy: everything in the folder, or the one file and its configuration."""
    names = checkpoint.source.files()
    if checkpoint.source.only is None:
        return names
    return [checkpoint.source.only, *(name for name in (CONFIG, HF_QUANT_CONFIG) if name in names)]


def _link(source: Path, target: Path) -> None:
    """Link a shard; copy the small files, which people edit in place, and whatever cannot be linked."""
    if target.suffix == ".safetensors":
        try:
            os.link(source, target)
            return
        except OSError:
            pass
    shutil.copyfile(source, target)


def _rewrite(place: LocalSource, checkpoint: Checkpoint, file: str, new: Changes, target: Path) -> None:
    header = next(item for item in checkpoint.files if item.file == file)
    if not header.valid:
        raise CheckpointError("checkpoint.damaged", file=file)
    mine = {name: item for name, item in new.items() if name in header.entries}
    with place.path(file).open("rb") as source, target.open("wb") as stream:
        if any(item is None for item in mine.values()):
            _write_without(header, mine, source, stream)
            return
        shutil.copyfileobj(source, stream, _CHUNK)
        for name, item in mine.items():
            assert item is not None
            entry = header.entries[name]
            _check_fits(entry, item)
            stream.seek(entry.begin)
            stream.write(item.tobytes())


def _write_without(header: Header, mine: Mapping[str, Tensor | None], source: Any, stream: Any) -> None:
    """The file again without some tensors, the rest in the same order, patched on the way."""
    kept = [entry for entry in _in_file_order(header) if mine.get(entry.name, entry) is not None]
    described: dict[str, Any] = {"__metadata__": header.metadata} if header.metadata else {}
    end = 0
    for entry in kept:
        begin, end = end, end + entry.nbytes
        described[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    stream.write(struct.pack("<Q", len(text)) + text)
    for entry in kept:
        item = mine.get(entry.name)
        if item is not None:
            _check_fits(entry, item)
            stream.write(item.tobytes())
            continue
        source.seek(entry.begin)
        left = entry.nbytes
        while left:
            piece = source.read(min(left, _CHUNK))
            if not piece:
                raise CheckpointError("checkpoint.damaged", file=header.file)
            stream.write(piece)
            left -= len(piece)


def _in_file_order(header: Header) -> list[TensorEntry]:
    return sorted(header.entries.values(), key=lambda entry: (entry.begin, entry.end))


def _check_fits(entry: TensorEntry, item: Tensor) -> None:
    """A swap may bring another projection's tensor; gate and up have one shape, or it cannot be done in place."""
    if (item.dtype, tuple(item.shape)) != (entry.dtype, entry.shape):
        raise InputError("fault.format", fault="swap", tensor=entry.name, dtype=item.dtype)


def _index_without(checkpoint: Checkpoint, removed: tuple[str, ...], new: Changes) -> bytes:
    assert checkpoint.index_file is not None
    content = dict(read_side_file(checkpoint.source, checkpoint.index_file).content or {})
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if name not in removed}
    metadata = content.get("metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("total_size"), int):
        lost = sum(checkpoint.tensors[name].nbytes for name in removed)
        content["metadata"] = {**metadata, "total_size": metadata["total_size"] - lost}
    return json_bytes(content)
