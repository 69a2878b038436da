"""The index: which shard holds which tensor, and whether the shards agree.

As a rule they do.  So an index is first taken as text and crossed off against the names that the headers have given
already, a piece at a time: no map of 178,176 texts comes to be, and nothing of a piece outlives it.  Only an index that
is not exactly the shards' becomes a map, and then every difference is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from nvfp4viz.checkpoint.problems import ContainerProblem, printable, problem
from nvfp4viz.checkpoint.sidecars import read_side_file
from nvfp4viz.checkpoint.source import INDEX, INDEX_SUFFIX, Source, is_confined
from nvfp4viz.checkpoint.table import TensorTable


@dataclass(frozen=True, slots=True)
class Index:
    """What an index says.

    Attributes
    ----------
    file, nbytes
        The index's own name and size.
    weight_map
        Shard by tensor name; entries whose shard name is not confined to the folder are left out.  Empty where the
        index is ``agreed``.
    problems
        What is wrong with it.
    alone
        It was asked for by name: files that it does not name do not belong to the checkpoint.
    agreed
        It names exactly the tensors of the shards, each in its shard: the headers say all that it says.
    outside
        Tensors of the entries that are left out.
    """

    file: str
    nbytes: int
    weight_map: dict[str, str]
    problems: tuple[ContainerProblem, ...] = ()
    alone: bool = False
    agreed: bool = False
    outside: frozenset[str] = frozenset()

    def agrees_with(self, tables: dict[str, TensorTable]) -> bool:
        """Does it name exactly the tensors of these shards, each in its shard?  Then no name occurs in two of them."""
        if len(self.weight_map) != sum(map(len, tables.values())):
            return False
        homes = ((shard, list(map(self.weight_map.get, table.names))) for shard, table in tables.items())
        return all(found.count(shard) == len(found) for shard, found in homes)


def asked_index(source: Source) -> str | None:
    """The index that was asked for by name."""
    return getattr(source, "index", None)


def read_index(source: Source, files: list[str], tables: Mapping[str, TensorTable] | None = None) -> Index | None:
    """The index that was asked for, or the folder's; None where it has none.

    Parameters
    ----------
    files
        Of the source.
    tables
        The shards' tensors, where their headers have been read already.
    """
    asked = asked_index(source)
    found = [name for name in files if name.endswith(INDEX_SUFFIX)]
    if source.only is not None or not (asked or found):
        return None
    # A repo may carry a second one (a consolidated or diffusers copy); this is the one that loaders take.
    file = asked or (INDEX if INDEX in found else found[0])
    shards = [name for name in files if name.endswith(".safetensors")]
    side = read_side_file(source, file, "container.index-invalid", lambda data: _decode(data, shards, tables or {}))
    if isinstance(side.content, _Agreed):
        return Index(file, side.nbytes, {}, side.problems, asked is not None, agreed=True)
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
    away = frozenset(name for name, shard in weight_map.items() if shard in outside) if outside else frozenset()
    if away:
        weight_map = {name: shard for name, shard in weight_map.items() if name not in away}
    return Index(file, side.nbytes, weight_map, tuple(problems), alone=asked is not None, outside=away)


class _Decoded(dict[str, Any]):
    """Content whose map is known to be one of texts."""


class _Agreed(dict[str, Any]):
    """Stands for content that says what the headers say."""


def _decode(data: bytes, shards: list[str], tables: Mapping[str, TensorTable]) -> dict[str, Any]:
    """The index's map by the shortest way that takes it.

    As a rule it names the shards that are here: a name that is known is not made again for every tensor.
    """
    if says_the_same(data, tables):
        return _Agreed()
    known: Any = dict[str, Literal[tuple(shards)]] if shards else dict[str, str]  # type: ignore[misc]
    for fields in ([("weight_map", known)], [("weight_map", dict[str, str])]):
        try:
            found: Any = msgspec.json.decode(data, type=msgspec.defstruct("_Index", fields))
            return _Decoded(weight_map=found.weight_map)
        except msgspec.ValidationError:
            continue
    content: Any = msgspec.json.decode(data)
    return content  # type: ignore[no-any-return]


_MAP = re.compile(rb'"weight_map"\s*:\s*\{')
# Bytes of a piece: its thousand names stay in the processor's cache, and their memory serves the next piece.
_PIECE = 1 << 16
# Stands for the map where the rest of the index is read.
_MARK = 7_770_001


def says_the_same(data: bytes, tables: Mapping[str, TensorTable]) -> bool:
    """Does this index name exactly the tensors of these shards, each once and in its shard?

    True is proven; False may also mean that the text is unusual (a brace in a name, say), and that another way has to
    tell.
    """
    match = _MAP.search(data)
    if match is None or not all(map(len, tables.values())) or not tables:
        return False
    begin, end = match.end(), data.find(b"}", match.end())
    rest = msgspec.defstruct("_Rest", [("weight_map", Literal[_MARK])])
    wanted, open_sets = dict(tables), dict[str, set[str]]()
    try:
        # Not the map of something deeper, nor one that a second one of its name replaces.
        msgspec.json.decode(b"%b%d%b" % (data[: begin - 1], _MARK, data[end + 1 :]), type=rest)
        for piece in _pieces(data, begin, end, tuple(tables)):
            shards = set(piece.values())
            for shard in shards:
                if shard in wanted:
                    open_sets[shard] = set(wanted.pop(shard).names)
                left = open_sets.get(shard, set())
                names = piece.keys() if len(shards) == 1 else {name for name, at in piece.items() if at == shard}
                before = len(left)
                left.difference_update(names)
                if before - len(left) != len(names):
                    return False
    except msgspec.DecodeError:
        return False
    return not wanted and not any(open_sets.values())


def _pieces(data: bytes, begin: int, end: int, shards: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """The map's entries, some hundred at a time.

    Where the text is cut does not matter: if both sides of a comma are the members of an object, the whole is one too.

    Raises
    ------
    msgspec.DecodeError
        A piece is not some members of an object whose values are known shards.
    """
    decoder = msgspec.json.Decoder(dict[str, Literal[shards]])  # type: ignore[valid-type]
    at = begin
    while at <= end:
        comma = data.find(b'",', at + _PIECE, end) + 1
        cut = comma or end
        piece = decoder.decode(b"{%b}" % data[at:cut])
        if not piece:
            # A comma too many.
            raise msgspec.DecodeError
        yield piece
        at = cut + 1


def other_shards(source: Source, files: Sequence[str], file: str) -> list[str]:
    """The other shards of the checkpoint of which this file is one, by its number or by an index beside it.

    An index is read only for a name without a number, and counts only where it names the file.

    >>> from nvfp4viz.checkpoint import MemorySource
    >>> other_shards(MemorySource({}), [], "model-00001-of-00002.safetensors")
    ['model-00002-of-00002.safetensors']
    """
    if is_numbered(file):
        return missing_by_number([file])
    return sorted(shard for shard in named_by_index(source, files, file) - {file} if is_confined(shard))


def named_by_index(source: Source, files: Sequence[str], file: str) -> set[str]:
    """The shards of the first index beside a shard that names it; none where no index does."""
    for index in (name for name in files if name.endswith(INDEX_SUFFIX) and file.endswith(".safetensors")):
        stored = (read_side_file(source, index, "container.index-invalid").content or {}).get("weight_map")
        shards = {shard for shard in stored.values() if isinstance(shard, str)} if isinstance(stored, dict) else set()
        if file in shards:
            return shards
    return set()


def is_numbered(file: str) -> bool:
    """Does a name count the shards?

    >>> is_numbered("model-00001-of-00002.safetensors"), is_numbered("model.safetensors")
    (True, False)
    >>> is_numbered("model_00001_of_00003.safetensors"), is_numbered("shard1of3.safetensors")
    (True, True)
    """
    return _NUMBERED.match(file) is not None


# Hugging Face's spelling, and others that say how many there are.
_NUMBERED = re.compile(
    r"^(?P<stem>.*?[^\d])??(?P<number>\d{1,6})(?P<of>[-_.]?of[-_.]?)(?P<count>\d{1,6})\.safetensors$", re.IGNORECASE
)


def missing_by_number(shards: list[str]) -> list[str]:
    """Shards that the names of the others promise.

    >>> missing_by_number(["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
    ['model-00002-of-00003.safetensors']
    >>> missing_by_number(["shard0of3.safetensors", "shard2of3.safetensors"])
    ['shard1of3.safetensors']
    """
    matches = [match for name in shards if (match := _NUMBERED.match(name))]
    # Some count from zero.
    zero = {match["stem"] for match in matches if not int(match["number"])}
    series = {(match["stem"], len(match["number"]), match["of"], match["count"]) for match in matches}
    promised = {
        f"{stem or ''}{k + (stem not in zero):0{width}d}{of}{count}.safetensors"
        for stem, width, of, count in series
        # A wild count in a file's name is no reason to make a long list.
        if int(count) <= 10_000
        for k in range(int(count))
    }
    return sorted(promised.difference(shards))
