"""One table of tensors out of all shards, and what the shards and the index say of each other.

An absent or unreadable shard is one problem, and the tensors that the index places there are noted as unreadable, so
that nobody reports each of them as missing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from nvfp4viz.checkpoint.header import Header
from nvfp4viz.checkpoint.index import Index, is_numbered, missing_by_number, named_by_index, other_shards
from nvfp4viz.checkpoint.problems import printable, problem
from nvfp4viz.checkpoint.source import INDEX, LocalSource
from nvfp4viz.checkpoint.table import Homes, TensorTable

if TYPE_CHECKING:
    from nvfp4viz.checkpoint.open import Checkpoint


def merge_shards(checkpoint: Checkpoint, shards: list[str], index: Index | None) -> None:
    """Fill ``tensors``, ``unreadable``, ``blind_files`` and ``problems`` of an opened checkpoint."""
    _merge(checkpoint, shards, index)
    # What the index places outside the folder is told of with the index, and nobody's loss besides.
    if index is not None:
        gone = (name for name in index.outside if name not in checkpoint.tensors)
        checkpoint.unreadable.update(dict.fromkeys(gone, index.file))


def _merge(checkpoint: Checkpoint, shards: list[str], index: Index | None) -> None:
    if index and index.agreed:
        checkpoint.tensors = TensorTable.joined([header.entries for header in checkpoint.files], unique=True)
        for header in checkpoint.files:
            checkpoint.unreadable.update(dict.fromkeys(header.unreadable, header.file))
        checkpoint.index = Homes(checkpoint.tensors)
        return
    weight_map = index.weight_map if index else {}
    indexed = set(weight_map.values())
    # Where no indexed shard is here, the index is stale or foreign: then all shards are looked at.
    foreign = not indexed & set(shards)
    extra = [] if not indexed or foreign else [header for header in checkpoint.files if header.file not in indexed]
    used = [header for header in checkpoint.files if header not in extra] if extra else list(checkpoint.files)
    tables = [header.entries for header in used]
    for header in used:
        checkpoint.unreadable.update(dict.fromkeys(header.unreadable, header.file))
    if index and indexed and not extra and index.agrees_with({header.file: header.entries for header in used}):
        checkpoint.tensors = TensorTable.joined(tables, unique=True)
        return
    checkpoint.tensors = TensorTable.joined(tables, weight_map)
    if len(checkpoint.tensors) != sum(len(header.entries) for header in used):
        _settle_duplicates(checkpoint, used)
    if weight_map:
        assert index is not None
        _compare_with_index(checkpoint, index, set(shards), extra, foreign)
    else:
        if index and not index.problems and len(checkpoint.tensors):
            # Transformers goes by a file of this name before it looks for an index.
            severity = "warn" if "model.safetensors" in shards else "error"
            params = {"count": len(checkpoint.tensors)}
            checkpoint.problems.append(problem("container.index-mismatch.empty", index.file, params, severity=severity))
        source, only = checkpoint.source, checkpoint.source.only
        # Of a shard that was asked for alone the others may lie beside it: not looked at, and not missing.
        around = source.files() if only is not None else []
        missing = missing_by_number(shards) if only is None else other_shards(source, around, only)
        # Of a folder on this machine it is known what lies there; an index beside one file may be of another time.
        known = only is None or (isinstance(source, LocalSource) and is_numbered(only))
        gone = set(missing) - set(around) if known else set()
        if gone and only is not None:
            # A copy leaves out a shard of which nothing stays: the numbers still count it, the index does not.
            gone &= named_by_index(source, around, only) or gone
        for file in sorted(gone):
            checkpoint.problems.append(problem("container.missing-shard.by-number", file))
        checkpoint.beside = tuple(file for file in missing if only is not None and file not in gone)
        checkpoint.blind_files = (*missing, *(header.file for header in checkpoint.files if not header.readable))


def _settle_duplicates(checkpoint: Checkpoint, headers: list[Header]) -> None:
    """Report names of which several files have a tensor; `TensorTable.joined` has chosen one already."""
    counts = Counter(name for header in headers for name in header.entries)
    twice = tuple(name for name, count in counts.items() if count > 1)
    files = sorted(header.file for header in headers if not header.entries.keys().isdisjoint(twice))
    params = {"tensor": printable(twice[0]), "count": len(twice), "files": ", ".join(map(printable, files[:3]))}
    checkpoint.problems.append(problem("container.duplicate-tensor", files[0], params, severity="warn", tensors=twice))


def _compare_with_index(
    checkpoint: Checkpoint, index: Index, shards: set[str], extra: list[Header], foreign: bool
) -> None:
    found, weight_map = checkpoint.tensors, index.weight_map
    if not foreign:
        for header in extra:
            new = sum(name not in found for name in header.entries)
            params: dict[str, object] = {"count": len(header.entries), "new": new}
            severity = "warn" if new else "info"
            text = f"container.unindexed-shard{'.broken' * _set_aside(checkpoint, header, index)}"
            checkpoint.problems.append(problem(text, header.file, params, severity=severity))
    by_shard: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_shard.setdefault(file, []).append(name)
    _report_absent(checkpoint, {file: names for file, names in by_shard.items() if file not in shards})
    for header in checkpoint.files:
        names = by_shard.get(header.file, [])
        gone = [name for name in names if name not in header.entries and name not in header.unreadable]
        if header.readable and gone:
            elsewhere = sum(name in found for name in gone)
            params = {"tensor": printable(gone[0]), "count": len(gone), "elsewhere": elsewhere}
            severity = "warn" if elsewhere == len(gone) else "error"
            checkpoint.problems.append(
                problem("container.index-mismatch.absent", header.file, params, severity=severity, tensors=tuple(gone))
            )
        checkpoint.unreadable.update({name: header.file for name in gone if name not in found})
    unlisted = () if foreign else tuple(name for name in found if name not in weight_map and name not in index.outside)
    if unlisted:
        params = {"tensor": printable(unlisted[0]), "count": len(unlisted)}
        file = found[unlisted[0]].file
        checkpoint.problems.append(
            problem("container.index-mismatch.unlisted", file, params, severity="warn", tensors=unlisted)
        )


def _set_aside(checkpoint: Checkpoint, header: Header, index: Index) -> bool:
    """Is a file that the index does not name broken?  Then that is a warning: most loaders never open it.

    They look for an index of this one name; of a folder with another they open every file.
    """
    mine = [item for item in header.problems if item.severity == "error" and not item.unread]
    if not mine or index.file != INDEX:
        return False
    checkpoint.problems = [
        replace(item, severity="warn", params={**item.params, "aside": True}) if item in mine else item
        for item in checkpoint.problems
    ]
    return True


def _report_absent(checkpoint: Checkpoint, absent: dict[str, list[str]]) -> None:
    """Shards that only the index knows: lost, or only cut another way."""
    lost = {file: [name for name in names if name not in checkpoint.tensors] for file, names in absent.items()}
    if absent and not any(lost.values()):
        assert checkpoint.index_file is not None
        params = {"count": len(absent), "first": printable(min(absent)), "shards": len(checkpoint.files)}
        checkpoint.problems.append(problem("container.stale-index", checkpoint.index_file, params))
    for file, names in sorted(lost.items()):
        if names:
            checkpoint.problems.append(
                problem("container.missing-shard", file, {"count": len(names)}, tensors=tuple(names))
            )
            checkpoint.unreadable.update(dict.fromkeys(names, file))
