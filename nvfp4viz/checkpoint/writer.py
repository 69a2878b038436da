"""Write a checkpoint folder as an exporter does: shards, index, ``config.json``, ``hf_quant_config.json``.

The bytes of a shard are those of the reference `safetensors` package (dtype enum descending, then names
bytewise; header padded with spaces to a multiple of 8), which is tested.  Equal input gives equal bytes: no
time stamps, no dict order of the metadata.  A folder appears whole or not at all: it is written beside its
place and then renamed.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint.dtypes import DTYPES, byte_count, names_of_arrays
from nvfp4viz.checkpoint.problems import printable, system_words
from nvfp4viz.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor on its way into a file, or out of one.

    Attributes
    ----------
    dtype
        Name of the safetensors format: ``"U8"``, ``"F8_E4M3"``, ``"BF16"``, ``"F32"``, …
    shape
        Logical shape; ``()`` is a scalar.
    data
        Raw little-endian bytes, or an array whose memory is those bytes (C order is enforced).
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | Array

    def tobytes(self) -> bytes:
        """The bytes as they go to disk."""
        return self.data if isinstance(self.data, bytes) else np.ascontiguousarray(self.data).tobytes()

    def array(self) -> Array:
        """A read-only array of the NumPy dtype that `nvfp4viz.checkpoint.dtypes` names for this type."""
        view = np.frombuffer(self.tobytes(), dtype=DTYPES[self.dtype].view)
        return view if DTYPES[self.dtype].bits < 8 else view.reshape(self.shape)


def tensor(array: npt.ArrayLike, dtype: str | None = None) -> Tensor:
    """Wrap an array; ``dtype`` names what its bytes mean where NumPy cannot (``uint8`` holding E4M3 or E8M0).

    >>> tensor(np.float32(2e-3)).dtype, tensor(np.zeros((16, 2), np.uint8), "F8_E4M3").shape
    ('F32', (16, 2))
    """
    values = np.asarray(array)
    name = dtype or names_of_arrays().get(values.dtype)
    if name is None or name not in DTYPES:
        raise CheckpointError("checkpoint.unwritable-dtype", dtype=str(dtype or values.dtype))
    return Tensor(name, tuple(values.shape), values)


def file_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """One whole safetensors file.

    Parameters
    ----------
    tensors
        Any order; the file is in the format's own.
    metadata
        Strings for ``__metadata__``; sorted, so that equal input gives equal bytes.

    Raises
    ------
    CheckpointError
        ``checkpoint.unwritable-dtype``, ``checkpoint.size-mismatch``.
    """
    return b"".join(_chunks(tensors, metadata))


def _chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[bytes]:
    """The file piece by piece: length, header, then each tensor."""
    order = sorted(tensors, key=lambda name: (_rank(tensors[name]), name.encode()))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        item = tensors[name]
        begin, end = end, end + _checked_size(name, item)
        header[name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        yield tensors[name].tobytes()


def _rank(item: Tensor) -> int:
    if item.dtype not in DTYPES:
        raise CheckpointError("checkpoint.unwritable-dtype", dtype=item.dtype)
    return DTYPES[item.dtype].rank


def _checked_size(name: str, item: Tensor) -> int:
    expected = byte_count(item.dtype, item.shape)
    stored = len(item.data) if isinstance(item.data, bytes) else item.data.nbytes
    if expected is None or expected != stored:
        raise CheckpointError(
            "checkpoint.size-mismatch",
            tensor=name,
            dtype=item.dtype,
            shape=list(item.shape),
            expected=expected,
            stored=stored,
        )
    return stored


def split_shards(sizes: Iterable[tuple[str, int]], max_shard_bytes: int | None) -> list[list[str]]:
    """Names per shard, in the given order; a shard is closed when the next tensor would not fit.

    >>> split_shards([("a", 6), ("b", 5), ("c", 4)], 10)
    [['a'], ['b', 'c']]
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes:
        if max_shard_bytes is not None and shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def shard_names(count: int) -> list[str]:
    """File names as Hugging Face exporters give them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]


def write_checkpoint(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    config: Mapping[str, Any] | None = None,
    hf_quant_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write ``folder`` and return its files in the order written.

    Parameters
    ----------
    folder
        Must not exist yet (or be empty), unless ``overwrite``.
    tensors
        In the order in which they should fill the shards.
    config, hf_quant_config
        Written as ``config.json`` and ``hf_quant_config.json``; None leaves the file out.
    max_shard_bytes
        Tensor bytes per shard; None writes one ``model.safetensors`` and no index.
    metadata
        ``__metadata__`` of every shard; ``{"format": "pt"}`` is what exporters write.
    extra_files
        Further files by name (tokenizer, statistics); plain names only.

    Raises
    ------
    CheckpointError
        ``checkpoint.exists``, ``checkpoint.unwritable-dtype``, ``checkpoint.size-mismatch``.
    """
    shards = split_shards(
        ((name, _checked_size(name, item)) for name, item in tensors.items() if _rank(item) >= 0),
        max_shard_bytes,
    )
    names = shard_names(len(shards))
    written: list[str] = []
    with atomic_folder(folder, overwrite=overwrite) as target:
        for file, shard in zip(names, shards, strict=True):
            with (target / file).open("wb") as stream:
                stream.writelines(_chunks({name: tensors[name] for name in shard}, metadata))
            written.append(file)
        if len(shards) > 1:
            weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            total = sum(_checked_size(name, item) for name, item in tensors.items())
            _write_json(target / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
            written.append(INDEX_NAME)
        for file, content in (("config.json", config), ("hf_quant_config.json", hf_quant_config)):
            if content is not None:
                _write_json(target / file, content)
                written.append(file)
        for file, data in (extra_files or {}).items():
            (target / Path(file).name).write_bytes(data)
            written.append(file)
    return [Path(folder) / name for name in written]


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Indented JSON with a final newline, keys in the given order."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_bytes(json_bytes(content))


def refuse_taken(folder: str | Path) -> None:
    """Refuse a place where something is that would have to be overwritten.

    Raises
    ------
    CheckpointError
        ``checkpoint.exists``, ``checkpoint.not-written`` for what the system refuses to look at.
    """
    path = Path(folder)
    try:
        # A link that leads nowhere is something, too.
        if path.is_symlink() and not path.exists():
            raise CheckpointError("checkpoint.exists", folder=_called(path))
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError("checkpoint.exists", folder=_called(path))
    except (OSError, RuntimeError, ValueError) as error:
        raise _refused(path, error) from None


def _called(folder: Path) -> str:
    """A folder's own name, of ``.`` too."""
    return printable(os.path.basename(os.path.abspath(folder)) or os.sep)


def _refused(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError("checkpoint.not-written", folder=_called(folder), reason=system_words(error))


@contextmanager
def atomic_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill that takes its name only when the block ends well; an error or Ctrl-C leaves nothing.

    Raises
    ------
    CheckpointError
        ``checkpoint.exists`` where the folder is there already and holds something, ``checkpoint.not-written`` for
        what the system refuses.
    """
    # Also of ``.``, which has no name of its own, and of a name so long that nothing can be added to it.
    folder = Path(os.path.abspath(folder))
    partial = folder.parent / f".{folder.name[:40]}.partial-{os.getpid()}"
    old = folder.parent / f".{folder.name[:40]}.old-{os.getpid()}"
    _remove(partial)
    try:
        if not overwrite:
            refuse_taken(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        try:
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
        except BaseException:
            if old.exists() and not folder.exists():
                old.rename(folder)
            raise
    except BaseException as error:
        _remove(partial)
        if isinstance(error, OSError):
            raise _refused(folder, error) from None
        raise
    if old.is_dir():
        _remove(old)
    else:
        old.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Gone, also where Ctrl-C is pressed again meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
