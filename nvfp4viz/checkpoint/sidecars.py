"""The JSON files beside the shards: ``config.json``, ``hf_quant_config.json`` and the index."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from nvfp4viz.checkpoint.problems import ContainerProblem, from_error, printable, problem
from nvfp4viz.checkpoint.sniff import looks_like
from nvfp4viz.checkpoint.source import INDEX_SUFFIX, Source, is_confined
from nvfp4viz.errors import CheckpointError

SIDE_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SideFile:
    """A side file's content (None where it could not be used), its size in bytes, and what is wrong with it."""

    content: dict[str, Any] | None
    nbytes: int
    problems: tuple[ContainerProblem, ...] = ()


def read_side_file(
    source: Source, file: str, code: str = "config.invalid", decode: Callable[[bytes], Any] = msgspec.json.decode
) -> SideFile:
    """Read one JSON object; says what the file is where it is none.

    Parameters
    ----------
    code
        ``"config.invalid"``, or ``"container.index-invalid"`` for an index: the texts have the same last parts.
    decode
        The object's bytes to a dict; what raises ``msgspec.DecodeError`` is read by the standard library instead.
    """
    try:
        size = source.size(file)
        if size > SIDE_LIMIT:
            return SideFile(None, 0, (problem(f"{code}.too-large", file, {"size": size, "limit": SIDE_LIMIT}),))
        data = source.read_range(file, 0, size)
    except CheckpointError as error:
        return SideFile(None, 0, (from_error(code, file, error),))
    problems: list[ContainerProblem] = []
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
        problems.append(problem(f"{code}.bom", file, severity="warn"))
    kind = looks_like(data[:512])
    if kind is not None and kind != "json":
        suffix = kind if kind in ("lfs-pointer", "html") else "not-json"
        position = {} if suffix == kind else {"line": 1, "column": 1}
        return SideFile(None, size, (*problems, problem(f"{code}.{suffix}", file, position)))
    try:
        # msgspec is the fast reader; the standard one says where a text goes wrong.
        try:
            content: Any = decode(data)
        except msgspec.DecodeError:
            content = json.loads(data.decode("utf-8"))
    except json.JSONDecodeError as error:
        params = {"line": error.lineno, "column": error.colno}
        return SideFile(None, size, (*problems, problem(f"{code}.not-json", file, params)))
    except (UnicodeDecodeError, RecursionError, ValueError):
        params = {"line": 1, "column": 1}
        return SideFile(None, size, (*problems, problem(f"{code}.not-json", file, params)))
    if not isinstance(content, dict):
        return SideFile(None, size, (*problems, problem(f"{code}.not-an-object", file)))
    return SideFile(content, size, tuple(problems))


@dataclass(frozen=True, slots=True)
class Index:
    """An index: which shard holds which tensor.

    Attributes
    ----------
    file
        The index's own name.
    weight_map
        Shard by tensor name; entries whose shard name is not confined to the folder are left out.
    """

    file: str
    weight_map: dict[str, str]
    nbytes: int
    problems: tuple[ContainerProblem, ...] = ()


class _IndexFile(msgspec.Struct):
    weight_map: dict[str, str]


_INDEX = msgspec.json.Decoder(_IndexFile)


def _decode_index(data: bytes) -> dict[str, Any]:
    """Decoding into typed dicts is twice as fast as into any; what is not of the usual form comes as it is."""
    try:
        return {"weight_map": _INDEX.decode(data).weight_map}
    except msgspec.ValidationError:
        content: Any = msgspec.json.decode(data)
        return content  # type: ignore[no-any-return]


def read_index(source: Source, files: list[str]) -> Index | None:
    """The folder's index, or None where it has none."""
    found = [name for name in files if name.endswith(INDEX_SUFFIX)]
    if not found or source.only is not None:
        return None
    # A repo may carry a second one (a consolidated or diffusers copy); this is the one that loaders take.
    file = "model" + INDEX_SUFFIX if "model" + INDEX_SUFFIX in found else found[0]
    side = read_side_file(source, file, "container.index-invalid", _decode_index)
    problems = list(side.problems)
    weight_map: dict[str, str] = {}
    if side.content is not None:
        stored = side.content.get("weight_map")
        if isinstance(stored, dict) and set(map(type, stored.values())) <= {str}:
            weight_map = stored
        else:
            problems.append(problem("container.index-invalid.weight-map", file))
    outside = sorted(shard for shard in set(weight_map.values()) if not is_confined(shard))
    if outside:
        params = {"shard": printable(outside[0]), "count": len(outside)}
        problems.append(problem("container.index-invalid.outside-folder", file, params))
        weight_map = {name: shard for name, shard in weight_map.items() if shard not in outside}
    return Index(file, weight_map, side.nbytes, tuple(problems))


_NUMBERED = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})\.safetensors$")


def missing_by_number(shards: list[str]) -> list[str]:
    """Shards that the names of the others promise.

    >>> missing_by_number(["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
    ['model-00002-of-00003.safetensors']
    """
    present = set(shards)
    missing: set[str] = set()
    for name in shards:
        match = _NUMBERED.match(name)
        # A wild count in a file's name is no reason to make a long list.
        if match and int(match["count"]) <= 10_000:
            width = len(match["number"])
            missing |= {
                f"{match['stem']}-{k:0{width}d}-of-{match['count']}.safetensors"
                for k in range(1, int(match["count"]) + 1)
            } - present
    return sorted(missing)
