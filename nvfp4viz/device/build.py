"""From ``kernels/*.cu`` to machine code: NVRTC, one explicit target, one cache.

A target is named in full (``sm_120a``, not ``sm_120``): a plain target compiles and silently takes the software path,
because the FP4 instructions exist only in architecture- and family-specific code.  ``--fmad=false`` keeps a multiply
and an add two roundings, as the NumPy reference has them, and nothing flushes subnormals.  This is why CuPy's own
``RawModule(code=…)`` is never used: it compiles for the plain target and adds ``-ftz=true``.

Compiling needs the NVRTC library and no GPU.  It ships no ``cuda_fp*.h`` and no ``<cstdint>``, so kernels include
nothing but files of their own folder.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import struct
import sys
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from nvfp4viz.device.nvrtc_library import find_nvrtc13
from nvfp4viz.errors import DeviceError

__all__ = [
    "KERNELS",
    "OPTIONS",
    "cache_dir",
    "compile_kernel",
    "cubin",
    "nvrtc",
    "source_hash",
    "sources_of",
    "target_of",
]

KERNELS = Path(__file__).parents[2] / "kernels"
OPTIONS = ("--fmad=false", "--std=c++17")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
TARGET = re.compile(r"sm_([1-9][0-9]{1,3})([af]?)")
DEFINE = re.compile(r"[A-Za-z_]\w*(=.*)?", re.ASCII | re.DOTALL)
FP4_FROM = 100  # data-centre Blackwell: from this number on a target without its letter loses instructions
DIGEST = hashlib.sha256().digest_size
_compiling: dict[str, threading.Lock] = {}  # by file name in the cache: two threads wait for one compilation


def target_of(capability: tuple[int, int]) -> str:
    """The compilation target of a device: from Blackwell on the architecture-specific one, which has the FP4 units.

    >>> target_of((9, 0)), target_of((10, 0)), target_of((12, 1))
    ('sm_90', 'sm_100a', 'sm_121a')
    """
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 10 else ''}"


def sources_of(source: str, folder: Path | None = None) -> dict[str, str]:
    """A kernel file and every file it includes with quotes, by name: ``{"quantize.cu": …, "nvfp4_math.cuh": …}``."""
    folder = folder or KERNELS
    texts: dict[str, str] = {}
    waiting = [source]
    while waiting:
        name = waiting.pop(0)
        if name in texts:
            continue
        path = folder / name
        if not path.is_file():
            raise DeviceError("device.no-source", file=name)
        texts[name] = path.read_text(encoding="utf-8")
        waiting += INCLUDE.findall(texts[name])
    return texts


def source_hash(source: str, folder: Path | None = None) -> str:
    """SHA-256 over a kernel and all it includes, names and texts, in hexadecimal."""
    digest = hashlib.sha256()
    for name, text in sorted(sources_of(source, folder).items()):
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()


@cache
def nvrtc() -> Any:
    """CuPy's binding of the NVRTC library; works without GPU and driver."""
    try:
        binding = importlib.import_module("cupy.cuda").nvrtc
        binding.getVersion()  # loads the library
    except Exception as error:
        raise DeviceError("device.no-nvrtc", reason=_first_line(error)) from error
    return binding


def check_target(target: str) -> tuple[int, str]:
    """Number and letter of a target: ``(120, "a")`` for ``"sm_120a"``.

    Raises
    ------
    DeviceError
        ``device.target`` for anything that does not read like ``sm_90`` or ``sm_120a``.
    """
    read = TARGET.fullmatch(target) if isinstance(target, str) else None
    if read is None:
        raise DeviceError("device.target", target=repr(target)[:60])
    return int(read[1]), read[2]


def _check_defines(defines: tuple[str, ...]) -> None:
    if isinstance(defines, str):
        raise DeviceError("device.define", define=repr(defines)[:60])
    for define in defines:
        if not isinstance(define, str) or not DEFINE.fullmatch(define):
            raise DeviceError("device.define", define=repr(define)[:60])


def _warn_of_plain(target: str) -> None:
    """A plain target compiles in silence and computes in software; whoever names one should know."""
    number, letter = check_target(target)
    if number >= FP4_FROM and not letter:
        error = DeviceError("device.plain-target", target=target, special=f"{target}a")
        warnings.warn(str(error), stacklevel=3)


def compiler_for(target: str) -> Any:
    """CuPy's NVRTC where it knows the target, else NVRTC 13 if one is installed beside it (Thor, ``sm_110a``)."""
    number, _ = check_target(target)
    if number not in nvrtc().getSupportedArchs():
        return find_nvrtc13() or nvrtc()
    return nvrtc()


def _first_line(error: object) -> str:
    """What a log or an exception says first, without the folders in front of a file's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    telling = next((line for line in lines if "error" in line.lower()), lines[0])
    return re.sub(r"(?:/[^\s/:]+)+/", "", telling)[:300]


def compile_kernel(
    source: str, target: str, defines: tuple[str, ...] = (), *, folder: Path | None = None, binding: Any = None
) -> bytes:
    """Compile without a cache.

    Parameters
    ----------
    source
        Name of a file in ``kernels/``.
    target
        In full, such as ``"sm_90"`` or ``"sm_120a"``.
    defines
        ``("NAME", "NAME=VALUE", …)``.  A plain target from ``sm_100`` on leaves out the FP4 instructions: a warning.
    folder, binding
        Another folder than ``kernels/``; another NVRTC than CuPy's, with the same functions.

    Raises
    ------
    DeviceError
        ``device.compile`` with the first error line of the compiler's log; ``device.target``; ``device.define``;
        ``device.no-nvrtc``; ``device.no-source``.
    """
    _check_defines(defines)
    _warn_of_plain(target)
    binding = binding or compiler_for(target)
    texts = sources_of(source, folder)
    headers = {name: text for name, text in texts.items() if name != source}
    program = binding.createProgram(
        texts[source], source, [text.encode() for text in headers.values()], [name.encode() for name in headers]
    )
    try:
        options = (f"--gpu-architecture={target}", *OPTIONS, *(f"--define-macro={define}" for define in defines))
        try:
            binding.compileProgram(program, options)
        except Exception as error:
            log = _first_line(binding.getProgramLog(program) or error)
            raise DeviceError("device.compile", file=source, target=target, log=log) from error
        return whole_elf(binding.getCUBIN(program))
    finally:
        binding.destroyProgram(program)


def whole_elf(code: bytes) -> bytes:
    """Machine code as long as its ELF header says.  CuPy 14.2 hands it out one byte short, and loaders refuse that.

    The byte that goes missing is padding, always zero.
    """
    if len(code) < 64 or code[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    program_table, section_table = struct.unpack_from("<QQ", code, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", code, 54)
    length = max(program_table + program_size * programs, section_table + section_size * sections)
    if length > len(code) + 1:
        raise ValueError(f"the ELF file ends after {len(code)} of {length} bytes")
    return code.ljust(length, b"\0")


def cache_dir() -> Path:
    """Where cubins are kept: ``$NVFP4VIZ_CACHE``, else the user's cache folder."""
    named = os.environ.get("NVFP4VIZ_CACHE")
    if named:
        return Path(named) / "cubin"
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        home = Path(base) if base else Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        home = Path(base) if base else Path.home() / ".cache"
    return home / "nvfp4viz" / "cubin"


def cubin(
    source: str, target: str, defines: tuple[str, ...] = (), *, folder: Path | None = None, anew: bool = False
) -> bytes:
    """Machine code of ``kernels/<source>`` for one target, from the cache or compiled now.

    The cache's key covers the source, every included header, target, options, defines and NVRTC's version.  Files are
    written aside and renamed, so any number of processes may share the folder; a folder that cannot be written to is
    done without.  A file ends with the SHA-256 of its code; one whose code is another is compiled again, as everything
    is with ``anew``.

    Raises
    ------
    DeviceError
        As `compile_kernel`.
    """
    _check_defines(defines)
    version = ".".join(map(str, compiler_for(target).getVersion()))
    key = "\0".join((source_hash(source, folder), target, *OPTIONS, *defines, version))
    name = f"{Path(source).stem}-{target}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"
    with _compiling.setdefault(name, threading.Lock()):
        kept = None if anew else _read(name)
        if kept is not None:
            _warn_of_plain(target)
        else:
            kept = compile_kernel(source, target, defines, folder=folder)
            _write(name, kept)
    return kept


def _read(name: str) -> bytes | None:
    try:
        kept = (cache_dir() / name).read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home folder
        return None
    code, digest = kept[:-DIGEST], kept[-DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(name: str, code: bytes) -> None:
    aside = None
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=name, suffix=".part", delete=False) as file:
            aside = Path(file.name)
            file.write(code + hashlib.sha256(code).digest())
        aside.replace(folder / name)
    except (OSError, RuntimeError):
        if aside is not None:
            aside.unlink(missing_ok=True)
