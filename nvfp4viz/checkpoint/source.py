"""Where a checkpoint's bytes come from.  A small protocol, so that a server or the hub (`remote`) stands for a folder.

Names inside a source are relative (``model-00001-of-00003.safetensors``); no absolute path leaves this module, neither
in a name nor in a message.  Names that come out of an index are untrusted and are confined to the folder.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal, Protocol

from nvfp4viz.checkpoint.problems import printable, system_words
from nvfp4viz.errors import CheckpointError

# Names of side files that are looked for.
CONFIG, HF_QUANT_CONFIG = "config.json", "hf_quant_config.json"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX = "model" + INDEX_SUFFIX


class Source(Protocol):
    """What a checkpoint is read from.

    Attributes
    ----------
    name
        For people: a folder's or file's own name, an address without its secrets.
    only
        The one file that was asked for, or None for all of a folder.
    """

    name: str
    only: str | None

    def files(self) -> list[str]:
        """Names of all files that could belong to the checkpoint, sorted."""
        ...

    def size(self, file: str) -> int:
        """Bytes in a file.

        Raises
        ------
        CheckpointError
            ``source.not-found``, ``source.outside-folder``, ``source.not-a-file``.
        """
        ...

    def read_range(self, file: str, begin: int, end: int) -> bytes:
        """Bytes ``begin`` to ``end`` of a file; fewer only where the file ends.

        Raises
        ------
        CheckpointError
            As `size`, and ``source.unreadable``.
        """
        ...


def is_confined(name: str) -> bool:
    """May an untrusted name be used below a folder?

    >>> is_confined("model-00001-of-00002.safetensors"), is_confined("../secret"), is_confined("C:\\\\x")
    (True, False, False)
    """
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    return (
        bool(name)
        and "\0" not in name
        and "\\" not in name
        and not posix.is_absolute()
        and not windows.drive
        and ".." not in posix.parts
        and str(posix) not in ("", ".")
    )


class LocalSource:
    """A folder on this machine.

    Parameters
    ----------
    path
        A folder; a ``.safetensors`` file, whose neighbours serve as side files; or a ``*.index.json``, which stands
        for the shards that it names.
    links
        What a link in the folder may lead to: ``"anywhere"`` that the user may read (git-annex, DVC and farms of links
        keep files elsewhere), or only ``"inside"`` the folder and its hub cache, where somebody else chose the folder.

    Raises
    ------
    CheckpointError
        ``source.not-found`` and ``source.not-a-file``.
    """

    def __init__(self, path: str | Path, links: Literal["anywhere", "inside"] = "anywhere") -> None:
        given = Path(path)
        self._follows = links == "anywhere"
        try:
            found = "\0" not in str(path) and given.exists()
        except OSError:
            # A name too long, or a folder that may not be entered.
            found = False
        if not found:
            raise CheckpointError("source.not-found", name=printable(given.name))
        self.only: str | None = None
        self.index: str | None = None
        if given.is_dir():
            self._folder = given
        else:
            if not given.is_file():
                raise CheckpointError("source.not-a-file", name=printable(given.name))
            self._folder = given.parent
            if given.name.endswith(".index.json"):
                self.index = given.name
            else:
                self.only = given.name
        self._root = self._folder.resolve()
        self._checked: dict[str, Path] = {}
        # The root of all folders has no name of its own.
        self.name = given.name if self.only else self._root.name or self._root.anchor

    @property
    def folder(self) -> Path:
        """The folder on this machine, without links.  For copies; never for messages."""
        return self._root

    def files(self) -> list[str]:
        try:
            return sorted(item.name for item in self._folder.iterdir() if not item.is_dir())
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def folders_below(self, most: int = 1000) -> list[str]:
        """Folders in this one, or in one of these, that hold shards, and snapshots of the hub's cache at any height.

        Looks at few entries: of a cached model not at its blobs, which have no names of files.
        """
        found, waiting, seen = [], [self._folder], 0
        while waiting and seen < most:
            folder = waiting.pop(0)
            try:
                items = sorted(folder.iterdir())[:most]
                inside = [item for item in items if item.is_dir() and not item.is_symlink()]
            except OSError:
                continue
            seen += len(items)
            if folder != self._folder and any(item.name.endswith(".safetensors") for item in items):
                found.append(folder.relative_to(self._folder).as_posix())
            parts = folder.relative_to(self._folder).parts
            cached = next((at for at, part in enumerate(parts) if part.startswith("models--")), None)
            if folder.name.startswith("models--"):
                waiting += [item for item in inside if item.name == "snapshots"]
            elif len(parts) < 2 or (cached is not None and len(parts) == cached + 2):
                waiting += inside
        return found

    def path(self, file: str) -> Path:
        """The file's place on this machine, checked.  For hard links and copies; never for messages."""
        if file not in self._checked:
            self._checked[file] = self._check(file)
        return self._checked[file]

    def _check(self, file: str) -> Path:
        if not is_confined(file):
            raise CheckpointError("source.outside-folder", name=printable(file))
        try:
            # The commonest case first: a file of this folder that is no link, asked for every shard.
            here = os.path.join(self._root, file)
            if os.path.basename(file) == file and stat.S_ISREG(os.lstat(here).st_mode):
                return Path(here)
            real = os.path.realpath(self._folder / file, strict=True)
            mode = os.stat(real).st_mode
        except OSError:
            raise CheckpointError("source.not-found", name=printable(file)) from None
        target = Path(real)
        inside = target.is_relative_to(self._root)
        if not (inside or self._follows or self._in_hub_cache(target)):
            raise CheckpointError("source.outside-folder", name=printable(file))
        if not stat.S_ISREG(mode):
            raise CheckpointError("source.not-a-file", name=printable(file))
        return target

    def _in_hub_cache(self, target: Path) -> bool:
        """The hub's cache keeps ``snapshots/<revision>/name`` as a link into ``blobs/`` of the same repo."""
        return self._root.parent.name == "snapshots" and target.parent == self._root.parent.parent / "blobs"

    def size(self, file: str) -> int:
        path = self.path(file)
        try:
            return os.stat(path).st_size
        except OSError as error:
            raise _unreadable(file, error) from None

    def modified(self, file: str) -> tuple[int, int]:
        """When the file was last written, in nanoseconds: what was once seen of it may no longer be true.

        The first time is what programs set as they like (``cp -p``, ``rsync``, ``touch -r``), the second is the file
        system's own and moves with every write.  No inode: file systems over a network number files anew.
        """
        path = self.path(file)
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(file, error) from None
        return status.st_mtime_ns, status.st_ctime_ns

    def read_range(self, file: str, begin: int, end: int) -> bytes:
        return self.read_ranges(file, [(begin, end)])[0]

    def read_ranges(self, file: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Many ranges of one file with one opening of it."""
        path = self.path(file)
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                return [_pread(descriptor, begin, end) for begin, end in ranges]
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _unreadable(file, error) from None


def _unreadable(name: str, error: OSError) -> CheckpointError:
    return CheckpointError("source.unreadable", name=printable(name), reason=system_words(error))


def _pread(descriptor: int, begin: int, end: int) -> bytes:
    """``os.pread`` returns at most 2 GiB a call on Linux."""
    data = os.pread(descriptor, end - begin, begin)
    if len(data) == end - begin or not data:
        return data
    pieces, got = [data], len(data)
    while got < end - begin and (piece := os.pread(descriptor, end - begin - got, begin + got)):
        pieces.append(piece)
        got += len(piece)
    return b"".join(pieces)


class MemorySource:
    """Files held in memory: an upload, or a checkpoint that a test or the Fault lab makes.

    Parameters
    ----------
    files
        Content by name.
    name
        What to call the whole.
    only
        The shard that stands for itself; the others of its checkpoint were not given.
    """

    def __init__(self, files: Mapping[str, bytes], name: str = "upload", only: str | None = None) -> None:
        self._files = dict(files)
        self.name = name
        self.only = only

    def files(self) -> list[str]:
        return sorted(self._files)

    def size(self, file: str) -> int:
        return len(self._content(file))

    def read_range(self, file: str, begin: int, end: int) -> bytes:
        return self._content(file)[begin:end]

    def _content(self, file: str) -> bytes:
        if file not in self._files:
            raise CheckpointError("source.not-found", name=printable(file))
        return self._files[file]


class Overlay:
    """A source in which some files are others, held in memory.

    Parameters
    ----------
    base, kept
        Where files come from that are not in ``new``, and which of them there are.
    new
        Content by name.
    """

    def __init__(self, base: Source, kept: Iterable[str], new: Mapping[str, bytes]) -> None:
        self.new = dict(new)
        self.name = base.name
        self._base = base
        self._names = sorted({*kept, *self.new})
        shards = [name for name in self._names if name.endswith(".safetensors")]
        # What was one shard alone is two with the one that a repair adds.
        self.only: str | None = base.only if shards == [base.only] else None

    def files(self) -> list[str]:
        return list(self._names)

    def size(self, file: str) -> int:
        return len(self.new[file]) if file in self.new else self._base.size(file)

    def read_range(self, file: str, begin: int, end: int) -> bytes:
        return self.new[file][begin:end] if file in self.new else self._base.read_range(file, begin, end)


def is_address(source: object) -> bool:
    """Is this an address rather than a path?

    >>> is_address("https://example.org/model"), is_address("hf://owner/name"), is_address("C:/model")
    (True, True, False)
    """
    return isinstance(source, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source) is not None


def open_source(source: str | Path | Source, revision: str | None = None) -> Source:
    """A source from what a user typed.

    Parameters
    ----------
    revision
        Of a repository on the hub.

    Raises
    ------
    CheckpointError
        ``source.not-found``, ``source.not-a-file``; ``source.remote`` for an address of a kind that is not read;
        for addresses also what `nvfp4viz.checkpoint.remote` raises.
    """
    if not isinstance(source, (str, Path)):
        return source
    if isinstance(source, str) and is_address(source):
        scheme = source.split("://")[0].lower()
        if scheme not in ("http", "https", "hf"):
            raise CheckpointError("source.remote", scheme=printable(scheme, 20))
        # Its libraries are for those who need them.
        from nvfp4viz.checkpoint.remote import open_remote

        return open_remote(source, revision)
    return LocalSource(source)
