"""Checkpoints on a web server or on the Hugging Face hub, read by ranges.

One request for the first 64 KiB of every shard brings its size and often its header; a second brings the rest of the
header; the scalars follow as they are asked for.  Messages name the host and the path, never a query, a password or a
token.
"""

from __future__ import annotations

import os
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec

from nvfp4viz.checkpoint.header import HEADER_LIMIT
from nvfp4viz.checkpoint.index import is_numbered
from nvfp4viz.checkpoint.problems import printable
from nvfp4viz.checkpoint.sniff import PEEK, looks_like
from nvfp4viz.checkpoint.source import CONFIG, HF_QUANT_CONFIG, INDEX, INDEX_SUFFIX, is_confined
from nvfp4viz.checkpoint.transport import Answer, Transport, Wanted, host_of, reason_of
from nvfp4viz.errors import CheckpointError

# Bytes of a file that are asked for at first sight.
FIRST = 1 << 16
# Ranges that lie closer are one request.  A request costs a round trip of 50 ms on one of 16 connections that share
# 50 MB/s; in that time the connection brings 150 KB.  Bytes that were fetched in between are counted like all others.
GAP = 1 << 17
# Errors that are the host's, and so every file's.
NOBODY = ("source.connection", "source.no-answer")
# The same of an answer: every further one would be packed too.
PACKED = "source.encoded"
# Of a file that the server does not have.
ABSENT = "source.nothing-there"
# Told of a stage's name, how many files are done, and of how many.
Progress = Callable[[str, int, int], None]
Ranges = list[tuple[int, int]]
# File, size, and what its server says that changes with it: an ETag, a date, or a commit (of the whole, named "").
Version = tuple[tuple[str, int, str], ...]


class RemoteSource(ABC):
    """What the two kinds of remote source share; see `nvfp4viz.checkpoint.source.Source`.

    Attributes
    ----------
    gap
        Bytes between two ranges that are sooner fetched along than asked around.
    received
        Bytes that really came, by file: also those of repeated attempts and those nobody asked to keep.
    progress
        Is told how far fetching has come.
    """

    gap = GAP

    def __init__(self, name: str, only: str | None, transport: Transport) -> None:
        self.name = name
        self.only = only
        self.progress: Progress | None = None
        self._transport = transport
        self._sizes: dict[str, int] = {}
        self._versions: dict[str, str | None] = {}
        self.changed: dict[str, None] = {}
        self._errors: dict[str, CheckpointError] = {}
        # The first bytes of each file, as far as they have been fetched.
        self._held: dict[str, bytes] = {}

    @property
    def received(self) -> Mapping[str, int]:
        return self._transport.received

    @abstractmethod
    def _url(self, file: str) -> str: ...

    @abstractmethod
    def files(self) -> list[str]: ...

    def size(self, file: str) -> int:
        self._look([file])
        if file in self._errors:
            raise self._errors[file]
        return self._sizes[file]

    def read_range(self, file: str, begin: int, end: int) -> bytes:
        return self.read_ranges(file, [(begin, end)])[0]

    def read_ranges(self, file: str, ranges: Ranges) -> list[bytes]:
        """Many ranges of one file at a time."""
        return self.read_many({file: ranges})[file]

    def read_many(self, plan: Mapping[str, Ranges]) -> dict[str, list[bytes]]:
        """Many ranges of many files at a time; fewer bytes only where a file ends.

        Raises
        ------
        CheckpointError
            ``source.*``, of the first file of which a range cannot be had.
        """
        out = {}
        for file, found in self.try_many(plan).items():
            if isinstance(found, CheckpointError):
                raise found
            out[file] = found
        return out

    def try_many(self, plan: Mapping[str, Ranges]) -> dict[str, list[bytes] | CheckpointError]:
        """As `read_many`; an error stands in the place of a file of which some range cannot be had."""
        self._look(plan)
        out: dict[str, list[bytes] | CheckpointError] = {}
        wanted = []
        for file, ranges in plan.items():
            if file in self._errors:
                continue
            held, size = len(self._held.get(file, b"")), self._sizes[file]
            for begin, end in ranges:
                first, last = max(begin, held), min(end, size)
                if first < last:
                    wanted.append(Wanted(self._url(file), file, first, last))
        answers = iter(self._fetch("ranges", wanted))
        for file, ranges in plan.items():
            lost = self._errors.get(file)
            if lost is not None:
                out[file] = lost
                continue
            prefix, size = self._held.get(file, b""), self._sizes[file]
            pieces = []
            for begin, end in ranges:
                data = prefix[begin:end]
                if max(begin, len(prefix)) < min(end, size):
                    answer = next(answers)
                    if isinstance(answer, CheckpointError):
                        lost = lost or answer
                        continue
                    self._note_version(file, answer)
                    data += answer.data
                pieces.append(data)
            out[file] = lost or pieces
        return out

    def prefetch(self, files: Iterable[str]) -> None:
        """Fetch the headers of many shards at a time; what fails fails when it is asked for."""
        shards = list(files)
        self._look(shards)
        rest = {}
        for file in shards:
            head = self._held.get(file, b"")
            if len(head) >= 8:
                end = min(8 + struct.unpack("<Q", head[:8])[0], self._sizes[file])
                if len(head) < end <= 8 + HEADER_LIMIT:
                    rest[file] = end
        wanted = [Wanted(self._url(file), file, len(self._held[file]), end) for file, end in rest.items()]
        for file, answer in zip(rest, self._fetch("headers", wanted), strict=True):
            if isinstance(answer, Answer):
                self._note_version(file, answer)
                self._held[file] += answer.data
            else:
                self._errors[file] = answer

    def version(self) -> Version | None:
        """What changes when the content does: name, size and the server's own mark of every file that matters.

        None where some file cannot be had, has no mark that can be relied on, or changed between two answers.  Asks for
        the first bytes of files that were not looked at yet.

        Raises
        ------
        CheckpointError
            ``source.*``, where the server does not say which files there are.
        """
        matter = [name for name in self.files() if name.endswith((".safetensors", INDEX_SUFFIX))]
        matter += [name for name in self.files() if name in (CONFIG, HF_QUANT_CONFIG)]
        self._look(matter)
        found = []
        for file in matter:
            mark = self._versions.get(file)
            if file in self._errors or mark is None:
                return None
            found.append((file, self._sizes[file], mark))
        return tuple(found)

    def modified(self, file: str) -> str | None:
        """What the server says of a file that changes when its content does; None where it says nothing to rely on."""
        self._look([file])
        return self._versions.get(file)

    def _note_version(self, file: str, answer: Answer) -> None:
        known = self._versions.get(file)
        if answer.version != known:
            if known is not None and answer.version is not None:
                self.changed[file] = None
            self._versions[file] = None

    def forget(self) -> None:
        """Drop long headers and a long index; what came at first sight stays, side files and small shards' scalars."""
        self._held = {file: data for file, data in self._held.items() if len(data) <= FIRST}

    def _look(self, files: Iterable[str]) -> None:
        """Sizes and first bytes of files not seen before."""
        new = [file for file in files if file not in self._sizes and file not in self._errors]
        for file in [file for file in new if not is_confined(file)]:
            self._errors[file] = CheckpointError("source.outside-folder", name=printable(file))
            new.remove(file)
        wanted = [Wanted(self._url(file), file, 0, FIRST) for file in new]
        for file, answer in zip(new, self._fetch("files", wanted), strict=True):
            if isinstance(answer, CheckpointError):
                if answer.code == PACKED:
                    raise answer
                self._errors[file] = answer
            elif answer.total is None:
                self._errors[file] = CheckpointError("source.bad-range", name=printable(file))
            else:
                self._sizes[file], self._held[file] = answer.total, answer.data
                self._versions[file] = answer.version

    def _fetch(self, stage: str, wanted: list[Wanted]) -> list[Answer | CheckpointError]:
        report = self.progress
        done = None if report is None else (lambda count: report(stage, count, len(wanted)))
        return self._transport.fetch(wanted, done) if wanted else []

    def _present(self, files: Iterable[str], absent: tuple[str, ...] = (ABSENT, "source.forbidden")) -> list[str]:
        """Those of some files that the server has.  Storage may refuse what it does not have (S3 without listing)."""
        asked = list(files)
        self._look(asked)
        return [file for file in asked if file not in self._errors or self._errors[file].code not in absent]


class HttpSource(RemoteSource):
    """A folder or a file below a web address.

    A server that lists a folder is asked for the list; of one that does not, the index names the shards.  The address
    of an ``*.index.json`` stands for the shards that it names.

    Parameters
    ----------
    address
        ``http(s)://…``; a query (a signature, say) is sent along with every request and shown nowhere.

    Raises
    ------
    CheckpointError
        ``source.not-an-address``.
    """

    def __init__(self, address: str, timeout: float = 30.0, parallel: int = 16) -> None:
        try:
            parts = urlsplit(address)
            host = parts.hostname
            port = f":{parts.port}" if parts.port else ""
        except ValueError:
            host, port = None, ""
        if not host or any(ord(c) < 33 for c in address):
            raise CheckpointError("source.not-an-address", name=printable(address.partition("?")[0].rpartition("@")[2]))
        folder, _, last = parts.path.rpartition("/")
        only = None
        if last.endswith(".safetensors"):
            only = unquote(last)
        elif not last.endswith(".index.json"):
            folder = parts.path.rstrip("/")
        self._parts, self._folder = parts, folder
        self._files: list[str] | None = None
        self.index = unquote(last) if last.endswith(".index.json") else None
        shown = f"{host}{port}{unquote(parts.path).rstrip('/')}"
        self._shown = False
        super().__init__(printable(shown), only, Transport(timeout, parallel))

    def _url(self, file: str) -> str:
        return self._address(f"{self._folder}/{quote(file)}")

    def _address(self, path: str) -> str:
        return urlunsplit((self._parts.scheme, self._parts.netloc, path, self._parts.query, ""))

    def files(self) -> list[str]:
        if self._files is None:
            self._files = self._find_files()
        return list(self._files)

    def _find_files(self) -> list[str]:
        if self.only is not None:
            self.size(self.only)
            # A name without a number does not say whether it is all: an index may.
            whole = [] if is_numbered(self.only) or not self.only.endswith(".safetensors") else [INDEX]
            beside = self._present([CONFIG, HF_QUANT_CONFIG, *whole])
            return sorted([self.only, *(name for name in beside if not self._is_guess(name))])
        index = self.index or INDEX
        if self.index is not None:
            self.size(self.index)
        listed = self._listing()
        found = set(listed or self._present([index, CONFIG, HF_QUANT_CONFIG, "model.safetensors"]))
        if index in found and not listed:
            named = set(self._indexed(index))
            if named:
                found = {name for name in found if name in (index, *named) or not self._is_guess(name)}
            # Shards that are not there are for the comparison with the index to report; one that is refused may be.
            found |= set(self._present(named, (ABSENT,)))
        if not found and self._is_a_file():
            return self._find_files()
        if not found:
            self._raise_if_down()
        return sorted(found)

    def _is_guess(self, file: str) -> bool:
        """Is a name that nobody but this program has brought up none of the server's?

        Some servers give a page for every name that they do not have.  Beside an index nobody needs a
        ``model.safetensors``, so that an error, too, says nothing of the checkpoint there.
        """
        kind = looks_like(self._held.get(file, b"")[:PEEK])
        single = file == "model.safetensors"
        return kind in ("html", "text") or (single and (kind == "json" or file in self._errors))

    def _is_a_file(self) -> bool:
        """Where there is no such folder the address may be a file's, of which its first bytes say what it is."""
        folder, _, last = self._parts.path.rpartition("/")
        if self._shown or "." not in last:
            return False
        answer = self._transport.fetch([Wanted(self._address(self._parts.path), unquote(last), 0, FIRST)])[0]
        if isinstance(answer, CheckpointError) or not is_confined(unquote(last)):
            return False
        self.only = unquote(last)
        self._folder = folder
        # What was asked for before was asked for below the file.
        self._errors.clear()
        return True

    def _raise_if_down(self) -> None:
        """Nothing was found: say so only if the server said so.  A folder that it shows is there, and has no shards."""
        for file in (INDEX, "model.safetensors", CONFIG):
            error = self._errors.get(file)
            if error is not None and not (self._shown and error.code == ABSENT):
                raise CheckpointError(error.code, **{**error.params, "name": self.name})

    def _indexed(self, index: str) -> list[str]:
        from nvfp4viz.checkpoint.sidecars import SIDE_LIMIT

        size = self.size(index)
        if size > SIDE_LIMIT:
            return []
        try:
            # Whoever compares the index with the shards asks for it again.
            self._held[index] = data = self.read_range(index, 0, size)
            content = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            weight_map = msgspec.json.decode(content.get("weight_map", b"{}"), type=dict[str, str])
        except (msgspec.MsgspecError, CheckpointError, UnicodeDecodeError):
            return []
        return sorted({shard for shard in weight_map.values() if is_confined(shard)})

    def _listing(self) -> list[str]:
        """Names in the page that a server shows for a folder; empty where it shows none."""
        page = self._transport.fetch([Wanted(self._address(f"{self._folder}/"), "", 0, 1 << 20)])[0]
        if isinstance(page, CheckpointError) and page.code in NOBODY:
            # Each file would be asked for in vain too.
            raise page
        if isinstance(page, CheckpointError) or page.data.lstrip()[:1] != b"<":
            return []
        self._shown = True
        links = re.findall(rb"""href=["']?(?:\./)?([^"'?#/<> ]+)["'?#> ]""", page.data, re.IGNORECASE)
        names = {unquote(link.decode("utf-8", "replace")) for link in links}
        wanted = {name for name in names if is_confined(name) and name.endswith((".safetensors", ".json"))}
        return sorted(wanted) if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in wanted) else []


class HubSource(RemoteSource):
    """A model repository on the Hugging Face hub (or on what ``HF_ENDPOINT`` names), at one commit.

    Raises
    ------
    CheckpointError
        ``source.hub-name``, ``source.hub-no-revision``, ``source.hub-repository``, ``source.hub-revision``,
        ``source.hub-gated``, ``source.hub-offline``, ``source.connection``, ``source.no-answer``.
    """

    def __init__(self, repository: str, revision: str | None = None, timeout: float = 30.0, parallel: int = 16) -> None:
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        if not re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", repository, re.ASCII):
            raise CheckpointError("source.hub-name", name=printable(repository.partition(":")[0]) or "hf://")
        if revision == "":
            raise CheckpointError("source.hub-no-revision", name=f"hf://{repository}@")
        shown = f"hf://{repository}" + (f"@{printable(revision)}" if revision else "")
        endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        # Redirects to storage leave the hub's host, and the token stays behind.
        super().__init__(shown, None, Transport(timeout, parallel, build_hf_headers()))
        info = self._ask(HfApi(endpoint=endpoint), repository, revision, timeout)
        self._endpoint, self._repository, self._commit = endpoint, repository, info.sha or revision or "main"
        self._names = sorted(item.rfilename for item in info.siblings or [] if "/" not in item.rfilename)

    def _ask(self, api: Any, repository: str, revision: str | None, timeout: float) -> Any:
        """The repository's commit and files, or what the hub says instead, without its addresses."""
        from huggingface_hub import errors

        try:
            return api.model_info(repository, revision=revision, timeout=timeout)
        except errors.GatedRepoError:
            raise CheckpointError("source.hub-gated", name=self.name) from None
        except errors.RevisionNotFoundError:
            raise CheckpointError("source.hub-revision", name=self.name) from None
        except errors.RepositoryNotFoundError:
            raise CheckpointError("source.hub-repository", name=self.name) from None
        except errors.OfflineModeIsEnabled:
            raise CheckpointError("source.hub-offline", name=self.name) from None
        except errors.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            # Mirrors of the hub say it by the status alone.
            if status == 404:
                raise CheckpointError("source.hub-repository", name=self.name) from None
            code = "source.forbidden" if status in (401, 403) else "source.status"
            raise CheckpointError(code, name=self.name, status=status) from None
        except Exception as error:
            # The hub's client has changed its HTTP library before; whatever it raises, nobody answered.
            host = host_of(api.endpoint)
            if "timeout" in type(error).__name__.lower():
                raise CheckpointError("source.no-answer", name=host, seconds=f"{timeout:g}") from None
            raise CheckpointError("source.connection", name=host, reason=reason_of(error)) from None

    def files(self) -> list[str]:
        return list(self._names)

    @property
    def pinned(self) -> str:
        """The address of this commit, for others who are to read the same files."""
        return f"hf://{self._repository}@{self._commit}"

    def modified(self, file: str) -> str | None:
        """The commit, where the hub has told it: of one commit nothing changes."""
        return self._commit if re.fullmatch("[0-9a-f]{40}", self._commit) else None

    def version(self) -> Version | None:
        """The commit, where the hub has told it."""
        commit = self.modified("")
        return None if commit is None else (("", 0, commit),)

    def _url(self, file: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self._repository, file, revision=self._commit, endpoint=self._endpoint)


HUB_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/tree/([^/?#]+))?/?", re.ASCII
)


def open_remote(address: str, revision: str | None = None) -> RemoteSource:
    """A source from ``http(s)://…``, from ``hf://owner/name[@revision]``, or from a repository's page on the hub.

    Parameters
    ----------
    revision
        Of a hub repository: a branch, a tag or a commit; wins over the address's own.
    """
    page = HUB_PAGE.fullmatch(address)
    if page:
        return HubSource(page[1], revision or (unquote(page[2]) if page[2] else None))
    if address.startswith("hf://"):
        # A hub id has no query and no password; what looks like one must not reach a message.
        repository, at, named = re.split("[?#]", address.removeprefix("hf://"))[0].partition("@")
        return HubSource(repository.strip("/"), revision or (named if at else None))
    return HttpSource(address)
