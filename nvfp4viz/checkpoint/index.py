"""The index: which shard holds which tensor, and whether the shards agree."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from nvfp4viz.checkpoint.problems import ContainerProblem, printable, problem
from nvfp4viz.checkpoint.sidecars import read_side_file
from nvfp4viz.checkpoint.source import INDEX_SUFFIX, Source, is_confined
from nvfp4viz.checkpoint.table import TensorTable


@dataclass(frozen=True, slots=True)
class Index:
    """What an index says.

    Attributes
    ----------
    file, nbytes
        The index's own name and size.
    weight_map
        Shard by tensor name; entries whose shard name is not confined to the folder are left out.
    problems
        What is wrong with it.
    alone
        It was asked for by name: files that it does not name do not belong to the checkpoint.
    """

    file: str
    nbytes: int
    weight_map: dict[str, str]
    problems: tuple[ContainerProblem, ...] = ()
    alone: bool = False

    def agrees_with(self, tables: dict[str, TensorTable]) -> bool:
        """Does it name exactly the tensors of these shards, each in its shard?  Then no name occurs in two of them."""
        if len(self.weight_map) != sum(map(len, tables.values())):
            return False
        homes = ((shard, list(map(self.weight_map.get, table.names))) for shard, table in tables.items())
        return all(found.count(shard) == len(found) for shard, found in homes)


def read_index(source: Source, files: list[str]) -> Index | None:
    """The index that was asked for, or the folder's; None where it has none."""
    asked: str | None = getattr(source, "index", None)
    found = [name for name in files if name.endswith(INDEX_SUFFIX)]
    if source.only is not None or not (asked or found):
        return None
    # A repo may carry a second one (a consolidated or diffusers copy); this is the one that loaders take.
    file = asked or ("model" + INDEX_SUFFIX if "model" + INDEX_SUFFIX in found else found[0])
    shards = [name for name in files if name.endswith(".safetensors")]
    side = read_side_file(source, file, "container.index-invalid", lambda data: _decode(data, shards))
    problems = list(side.problems)
    weight_map: dict[str, str] = {}
    if side.content is not None:
        stored: Any = side.content.get("weight_map")
        known = isinstance(side.content, _Decoded)
        if known or (isinstance(stored, dict) and set(map(type, stored.values())) <= {str}):
            weight_map = stored
        else:
            problems.append(problem("container.index-invalid.weight-map", file))
    outside = sorted(shard for shard in set(weight_map.values()) if not is_confined(shard))
    if outside:
        params = {"shard": printable(outside[0]), "count": len(outside)}
        problems.append(problem("container.index-invalid.outside-folder", file, params))
        weight_map = {name: shard for name, shard in weight_map.items() if shard not in outside}
    return Index(file, side.nbytes, weight_map, tuple(problems), alone=asked is not None)


class _Decoded(dict[str, Any]):
    """Content whose map is known to be one of texts."""


def _decode(data: bytes, shards: list[str]) -> dict[str, Any]:
    """The index's map by the shortest way that takes it.

    As a rule it names the shards that are here: a name that is known is not made again for every tensor.
    """
    known: Any = dict[str, Literal[tuple(shards)]] if shards else dict[str, str]  # type: ignore[misc]
    for fields in ([("weight_map", known)], [("weight_map", dict[str, str])]):
        try:
            found: Any = msgspec.json.decode(data, type=msgspec.defstruct("_Index", fields))
            return _Decoded(weight_map=found.weight_map)
        except msgspec.ValidationError:
            continue
    content: Any = msgspec.json.decode(data)
    return content  # type: ignore[no-any-return]


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
