"""Open a checkpoint: headers and side files only, then exactly the ranges that are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint.dtypes import DTYPES, SCALE_BYTES
from nvfp4viz.checkpoint.gather import gather_numbers
from nvfp4viz.checkpoint.header import Header, TensorEntry, TensorTable, read_header
from nvfp4viz.checkpoint.index import asked_index, read_index
from nvfp4viz.checkpoint.merge import merge_shards
from nvfp4viz.checkpoint.problems import ContainerProblem, from_error, lost_since, printable
from nvfp4viz.checkpoint.sidecars import read_side_file
from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG, LocalSource, MemorySource, Source, open_source
from nvfp4viz.errors import CheckpointError

if TYPE_CHECKING:
    from nvfp4viz.checkpoint.quantconfig import QuantConfig
    from nvfp4viz.checkpoint.writer import Tensor

Array = npt.NDArray[Any]
# Told of a stage's name, how many files or ranges are done, and of how many.
Progress = Callable[[str, int, int], None]
# A file of at most this many bytes is read at once where all of its tensors are wanted.
AT_ONCE = 1 << 26


class Checkpoint:
    """A checkpoint whose headers have been read; no weight has.

    Attributes
    ----------
    name
        For people; never a path.
    files
        One `Header` per shard, in name order: size, header bytes, metadata, problems.
    tensors
        Every readable tensor by name: a mapping of `TensorEntry`, kept as columns.
    unreadable
        Names that the headers or the index promise but that cannot be read, and the file that is to blame.
    config, hf_quant_config
        The side files' content, or None.
    index
        Shard by tensor name, or None where the checkpoint has no index.
    problems
        All that is wrong with the files.
    beside
        Of a shard that was asked for alone: the others of its checkpoint, which were not looked at.
    part
        Of a file that lies alone: what tells that it is no whole model (`nvfp4viz.checkpoint.lone`), or None.
    lost
        Files whose header was read and whose tensors cannot be (any more), with what stood in the way; see `lose`.
    opening_bytes
        Bytes fetched from shards on opening; see also `bytes_read` and `side_bytes`.
    """

    def __init__(self, source: Source, shards: list[str]) -> None:
        self.source = source
        self.name = printable(source.name)
        self._shards = shards
        self._asked = 0
        self._side_asked = 0
        _call(source, "prefetch", shards)
        self.files = tuple(self._header(file) for file in shards)
        self.opening_bytes = self.bytes_read
        self.index: Mapping[str, str] | None = None
        self.index_file: str | None = None
        self.tensors: TensorTable = TensorTable.empty()
        self.unreadable: dict[str, str] = {}
        self.blind_files: tuple[str, ...] = ()
        self.beside: tuple[str, ...] = ()
        self.part: str | None = None
        self.problems: list[ContainerProblem] = []
        self.lost: dict[str, CheckpointError] = {}
        self.config: dict[str, Any] | None = None
        self.hf_quant_config: dict[str, Any] | None = None

    @cached_property
    def quant_config(self) -> QuantConfig:
        """What the side files say about quantisation."""
        from nvfp4viz.checkpoint.quantconfig import read_quant_config

        return read_quant_config(self.config, self.hf_quant_config)

    def _header(self, file: str) -> Header:
        try:
            size = self.source.size(file)
            return read_header(file, size, lambda begin, end: self._fetch(file, begin, end))
        except CheckpointError as error:
            return Header(file, 0, problems=(from_error("container.unreadable", file, error),))

    def read_range(self, file: str, begin: int, end: int) -> bytes:
        """Bytes of a shard, whatever they belong to; fewer only where the file ends.  Counted in `bytes_read`."""
        return self._fetch(file, begin, end)

    def _fetch(self, file: str, begin: int, end: int) -> bytes:
        data = self.source.read_range(file, begin, end)
        self._count(len(data))
        return data

    def _count(self, size: int) -> None:
        self._asked += size

    @property
    def bytes_read(self) -> int:
        """Bytes fetched from shards until now; where a source counts what it received, that."""
        received = getattr(self.source, "received", None)
        return self._asked if received is None else sum(received.get(file, 0) for file in self._shards)

    @property
    def side_bytes(self) -> int:
        """The same of side files, the index, and a server's list of files."""
        received = getattr(self.source, "received", None)
        return self._side_asked if received is None else sum(received.values()) - self.bytes_read

    @property
    def unread(self) -> tuple[str, ...]:
        """Files that the source has and did not give, in the order of `problems`: they may be sound or not."""
        return tuple(dict.fromkeys(item.file for item in self.problems if item.unread))

    def reopened(self) -> Checkpoint:
        """The same files for another reading, to which what was `lost` in this one is no news: nothing is read here."""
        other = copy(self)
        gone = [lost_since(file, error) for file, error in self.lost.items()]
        other.problems, other.lost = [item for item in self.problems if item not in gone], {}
        return other

    def lose(self, file: str, error: CheckpointError) -> None:
        """Note that a file gave its header and does not give what follows; it is `unread`, and not asked again."""
        if file not in self.lost:
            self.lost[file] = error
            self.problems.append(lost_since(file, error))

    @property
    def nbytes(self) -> int:
        """Size of all shards."""
        return sum(header.size for header in self.files)

    @property
    def header_bytes(self) -> int:
        return sum(header.header_bytes for header in self.files)

    def read_bytes(self, name: str) -> bytes:
        """A tensor's raw bytes.

        Raises
        ------
        CheckpointError
            ``checkpoint.no-tensor`` where there is none of this name, ``checkpoint.unreadable`` where its file
            ends before it.
        """
        entry = self.entry(name)
        data = self._fetch(entry.file, entry.begin, entry.end)
        if len(data) != entry.nbytes:
            raise CheckpointError("checkpoint.unreadable", tensor=printable(name), file=printable(entry.file))
        return data

    def read_first(self, name: str, count: int) -> bytes:
        """A tensor's first ``count`` bytes, or all where it has fewer."""
        entry = self.entry(name)
        return self._fetch(entry.file, entry.begin, min(entry.end, entry.begin + count))

    def try_first(self, name: str, count: int | None = None) -> bytes | None:
        """A tensor's first ``count`` bytes, or all of them; None where its file is `lost`, be it from now on."""
        entry = self.entry(name)
        size = entry.nbytes if count is None else min(entry.nbytes, count)
        if entry.file in self.lost:
            return None
        try:
            data = self._fetch(entry.file, entry.begin, entry.begin + size)
            if len(data) == size:
                return data
            self.lose(entry.file, CheckpointError("source.changed", name=printable(entry.file)))
        except CheckpointError as error:
            self.lose(entry.file, error)
        return None

    def read(self, name: str) -> Array:
        """A tensor as a read-only array of its type (`nvfp4viz.checkpoint.dtypes`).

        Scale bytes and packed codes are ``uint8``.  Shape as the header says; types below 8 bits come as a flat array
        of their bytes.
        """
        entry = self.entry(name)
        array = np.frombuffer(self.read_bytes(name), dtype=DTYPES[entry.dtype].view)
        return array if DTYPES[entry.dtype].bits < 8 else array.reshape(entry.shape)

    def read_tensor(self, name: str) -> Tensor:
        """A tensor with its type, ready for `write_checkpoint`."""
        from nvfp4viz.checkpoint.writer import Tensor

        entry = self.entry(name)
        return Tensor(entry.dtype, entry.shape, self.read_bytes(name))

    def read_tensors(self) -> dict[str, Tensor]:
        """Everything.  For checkpoints that fit in memory; a small file is read at once, and not tensor by tensor.

        Raises
        ------
        CheckpointError
            ``checkpoint.unreadable`` where a file ends before a tensor.
        """
        from nvfp4viz.checkpoint.writer import Tensor

        entries = list(self.tensors.values())
        ends: dict[str, int] = {}
        for entry in entries:
            ends[entry.file] = max(ends.get(entry.file, 0), entry.end)
        whole = {file: self._fetch(file, 0, end) for file, end in ends.items() if end <= AT_ONCE}
        found = {}
        for entry in entries:
            data = whole.get(entry.file)
            piece = self.read_bytes(entry.name) if data is None else data[entry.begin : entry.end]
            if len(piece) != entry.nbytes:
                raise CheckpointError("checkpoint.unreadable", tensor=printable(entry.name), file=printable(entry.file))
            found[entry.name] = Tensor(entry.dtype, entry.shape, piece)
        return found

    def read_scalar(self, name: str) -> np.float32:
        """A one-element F32, F64, BF16 or F16 tensor (``[]``, ``[1]`` or ``[1, 1]``), as float32.

        Raises
        ------
        CheckpointError
            ``checkpoint.not-a-scalar``.
        """
        return self.read_scalars([name])[name]

    def read_scalars(self, names: Iterable[str], *, partly: bool = False) -> dict[str, np.float32]:
        """As `scalars`, by name; ``partly``: without those in files that are `lost`."""
        wanted = list(dict.fromkeys(names))
        found = dict(zip(wanted, self.scalars(wanted, partly=partly), strict=True))
        if not (partly and self.lost):
            return found
        return {name: value for name, value in found.items() if self.tensors[name].file not in self.lost}

    def scalars(self, names: Sequence[str], *, partly: bool = False) -> npt.NDArray[np.float32]:
        """Many one-element tensors with few reads: neighbours in a file are fetched together.

        BF16 and F16 come as float32 too, which changes no value; F64 is rounded to it, as servers round.

        Parameters
        ----------
        partly
            Go on without files that cannot be read: they are `lost` from then on, and their numbers mean nothing.

        Returns
        -------
        (len(names),) float32

        Raises
        ------
        CheckpointError
            As `entry`; ``source.*`` where a file cannot be read; ``checkpoint.not-a-scalar`` for tensors that are no
            F32, F64, BF16 or F16 scalar.
        """
        table = self.tensors
        known = table.rows
        try:
            rows = np.array([known[name] for name in names], np.int64)
        except KeyError as error:
            self.entry(error.args[0])
            raise
        return self.scalars_at(rows, partly=partly)

    def scalars_at(self, rows: npt.NDArray[np.int64], *, partly: bool = False) -> npt.NDArray[np.float32]:
        """As `scalars`, for rows of `tensors`."""
        table = self.tensors
        kind = table.kind[rows]
        # An empty tensor has no type's width either.
        width = np.array([SCALE_BYTES.get(dtype, -1) for dtype, _ in table.kinds] or [-1])[kind]
        wrong = np.flatnonzero(table.end[rows] - table.begin[rows] != width)
        if len(wrong):
            raise _no_scalar(table.entry_at(int(rows[wrong[0]])))
        return self._numbers(table.file[rows], table.begin[rows], kind, partly)

    def vectors(self, names: Sequence[str], *, partly: bool = False) -> list[npt.NDArray[np.float32]]:
        """Short F32, F64, BF16 or F16 vectors with few reads, such as one scale an expert; as `scalars`.

        Raises
        ------
        CheckpointError
            As `entry`.
        """
        entries = [self.entry(name) for name in names]
        rows = np.array([self.tensors.rows[name] for name in names], np.int64)
        width = np.array([SCALE_BYTES[entry.dtype] for entry in entries], np.int64)
        lengths = np.array([entry.nbytes for entry in entries], np.int64) // width
        cuts = np.cumsum(lengths)
        each = np.repeat(np.arange(len(entries)), lengths)
        places = np.arange(len(each)) - np.repeat(cuts - lengths, lengths)
        begin = self.tensors.begin[rows][each] + width[each] * places
        numbers = self._numbers(self.tensors.file[rows][each], begin, self.tensors.kind[rows][each], partly)
        return np.split(numbers, cuts[:-1]) if entries else []

    def _numbers(
        self, shard: npt.NDArray[np.int64], begin: npt.NDArray[np.int64], kind: npt.NDArray[np.int64], partly: bool
    ) -> npt.NDArray[np.float32]:
        """Numbers at places in files (by their number in the table), of the types of their kinds."""
        without = self.lost if partly else ()
        values, lost = gather_numbers(self.source, self.tensors, shard, begin, kind, self._count, without)
        for file, error in lost.items():
            if not partly:
                raise error
            self.lose(file, error)
        return values

    def scalar_rows(self) -> npt.NDArray[np.int64]:
        """Rows of `tensors` that are one F32, F64, BF16 or F16 number, whatever its shape."""
        return self.tensors.rows_where(
            [dtype in SCALE_BYTES and math.prod(shape) == 1 for dtype, shape in self.tensors.kinds]
        )

    def all_scalars(self) -> npt.NDArray[np.float32]:
        """Every one-number tensor's value, in the order of `scalar_rows`."""
        return self.scalars_at(self.scalar_rows())

    def entry(self, name: str) -> TensorEntry:
        """Where a tensor lies.

        Raises
        ------
        CheckpointError
            ``checkpoint.no-tensor``, or ``checkpoint.unreadable`` where its file is absent, cut short or damaged.
        """
        entry = self.tensors.get(name)
        if entry is None:
            if name in self.unreadable:
                file = printable(self.unreadable[name])
                raise CheckpointError("checkpoint.unreadable", tensor=printable(name), file=file)
            raise CheckpointError("checkpoint.no-tensor", tensor=printable(name), name=self.name)
        return entry


def _no_scalar(entry: TensorEntry) -> CheckpointError:
    shape, shown = list(entry.shape), printable(entry.name)
    return CheckpointError("checkpoint.not-a-scalar", tensor=shown, dtype=entry.dtype, shape=shape)


def _call(source: Source, method: str, *arguments: object) -> None:
    """Tell a source what only some kinds want to know."""
    wanted = getattr(source, method, None)
    if wanted is not None:
        wanted(*arguments)


def open_checkpoint(
    source: str | Path | Source, *, revision: str | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Open a folder, a file, an ``*.index.json``, an address or any `Source`; reads headers, never weights.

    Parameters
    ----------
    source
        A path, ``http(s)://…`` of a folder or file, or ``hf://owner/name[@revision]``.
    revision
        Of a repository on the hub.
    progress
        Is told how far a remote source has come, until the source is done with.

    Raises
    ------
    CheckpointError
        Where nothing at all can be read: ``source.*``, or the first file's ``container.*``.  A checkpoint of which
        some part can be read opens, with the rest in ``problems``.
    """
    checkpoint = inspect(source, revision=revision, progress=progress)
    if not any(header.readable for header in checkpoint.files):
        raise next(item for item in checkpoint.problems if item.severity == "error").error()
    return checkpoint


def inspect(
    source: str | Path | Source, *, revision: str | None = None, progress: Progress | None = None
) -> Checkpoint:
    """As `open_checkpoint`, but a checkpoint of which nothing can be read comes back with its problems.

    Raises
    ------
    CheckpointError
        ``source.*``: there is no such place, or no safetensors file and no index in it; of a remote source also
        where no shard can be had at all.
    """
    place = open_source(source, revision)
    if progress is not None and hasattr(place, "progress"):
        place.progress = progress
    names = place.files()
    shards = [place.only] if place.only else [name for name in names if name.endswith(".safetensors")]
    # An index that was asked for says which shards to open; any other is read after them and compared.
    index = read_index(place, names) if asked_index(place) or not shards else None
    if index is not None and index.alone and index.weight_map:
        named = set(index.weight_map.values())
        shards = [name for name in shards if name in named]
    if not shards and index is None:
        below = place.folders_below() if isinstance(place, LocalSource) else []
        if below:
            listed = ", ".join(printable(name) for name in below[:3]) + (", …" if len(below) > 3 else "")
            raise CheckpointError("source.in-subfolder", name=printable(place.name), folders=listed)
        others = _pickled(names)
        if not others:
            raise CheckpointError("source.no-weights", name=printable(place.name))
        raise CheckpointError("source.no-safetensors", name=printable(place.name), others=others)
    checkpoint = Checkpoint(place, shards)
    if index is None:
        index = read_index(place, names, {header.file: header.entries for header in checkpoint.files})
    if index:
        checkpoint.problems += index.problems
        checkpoint.index, checkpoint.index_file = index.weight_map, index.file
        checkpoint._side_asked += index.nbytes
    _call(place, "forget")
    for header in checkpoint.files:
        checkpoint.problems += header.problems
    _raise_if_cut_off(checkpoint)
    merge_shards(checkpoint, shards, index)
    _read_configs(checkpoint, names)
    if len(checkpoint.files) == 1:
        # Only here does opening look at what names mean.
        from nvfp4viz.checkpoint.lone import settle_lone

        settle_lone(checkpoint, names)
    return checkpoint


def _raise_if_cut_off(checkpoint: Checkpoint) -> None:
    """One server that gives no shard is one error, not one a shard."""
    heads = [header.problems[0] for header in checkpoint.files if header.problems]
    lost = [head for head in heads if head.code == "container.unreadable"]
    if hasattr(checkpoint.source, "received") and lost and len(lost) == len(checkpoint.files):
        raise lost[0].error()


def memory_checkpoint(
    tensors: Mapping[str, Tensor],
    *,
    config: Mapping[str, Any] | None = None,
    hf_quant_config: Mapping[str, Any] | None = None,
    name: str = "in memory",
) -> Checkpoint:
    """A checkpoint that exists only in memory, read through the same code as one on disk."""
    from nvfp4viz.checkpoint.writer import file_bytes, json_bytes

    files = {"model.safetensors": file_bytes(tensors)}
    if config is not None:
        files[CONFIG] = json_bytes(config)
    if hf_quant_config is not None:
        files[HF_QUANT_CONFIG] = json_bytes(hf_quant_config)
    return open_checkpoint(MemorySource(files, name))


def _pickled(names: list[str]) -> str:
    """What else lies there: pickled weights are named, and stay closed."""
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".ckpt"))]
    return ", ".join(printable(name) for name in others[:3])


def _read_configs(checkpoint: Checkpoint, names: list[str]) -> None:
    contents: dict[str, dict[str, Any] | None] = {}
    for file in (CONFIG, HF_QUANT_CONFIG):
        if file in names:
            side = read_side_file(checkpoint.source, file)
            checkpoint._side_asked += side.nbytes
            checkpoint.problems += side.problems
            contents[file] = side.content
    checkpoint.config = contents.get(CONFIG)
    checkpoint.hf_quant_config = contents.get(HF_QUANT_CONFIG)
