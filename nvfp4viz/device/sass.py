"""What the kernels become on each architecture: the committed extracts of ``kernels/sass/``, read as records.

``make sass`` writes one file per kernel file.  It names a hash over the kernel and all it includes, so that an extract
of older sources is recognised, and gives for every kernel and target what it takes of the machine and its telling
instructions: conversions, matrix steps, wide loads and stores, anything that touches local memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nvfp4viz.device.build import KERNELS, source_hash

__all__ = ["PLAIN", "TARGETS", "Extract", "Instruction", "KernelOnTarget", "is_fresh", "kernel_sources", "read_extract"]

TARGETS = (
    "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a",
    "sm_100a", "sm_100f", "sm_103a", "sm_110a", "sm_120a", "sm_120f", "sm_121a",
)  # fmt: skip
# Never run (`build.target_of` does not name them), kept in the extracts to show what such a build lacks.
PLAIN = ("sm_100", "sm_120")
EXTRACTED = (*TARGETS, *PLAIN)
FOLDER = KERNELS / "sass"
TELLING = re.compile(
    r"F2FP\.\S*(E2M1|E4M3|E8)\S*|[OHQI]MMA\S*|UTC\S*|MUFU\.\S+|(LDG|STG)\S*\.(64|128|256)\S*|LDGSTS\S*|LDSM\S*|LDL\S*|STL\S*"
)
PREDICATE = re.compile(r"^@!?U?P\w+\s+")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One telling operation of a kernel."""

    opcode: str  # with all its modifiers
    count: int  # how many of them the code holds (not: how often they run)
    example: str  # the first one, with its registers


@dataclass(frozen=True, slots=True)
class KernelOnTarget:
    """One kernel compiled for one target."""

    source: str
    name: str
    target: str
    registers: int  # per thread
    shared_bytes: int  # per block, static
    stack_bytes: int  # per thread; 0 where nothing spills
    instructions: int  # how many there are altogether
    telling: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Extract:
    """All kernels of one file."""

    source: str
    source_hash: str  # of the sources that were compiled
    nvrtc: str
    nvdisasm: str
    kernels: tuple[KernelOnTarget, ...]


def kernel_sources() -> list[str]:
    """Names of all kernel files, in order."""
    return sorted(path.name for path in KERNELS.glob("*.cu"))


def path_of(source: str) -> Path:
    """Where the extract of a kernel file lies."""
    return FOLDER / f"{Path(source).stem}.txt"


def opcode(line: str) -> str:
    """The operation of one line of machine code, without its predicate and operands.

    >>> opcode("@!P0 LDG.E.128 R4, desc[UR4][R2.64]")
    'LDG.E.128'
    """
    return PREDICATE.sub("", line).split(None, 1)[0]


def telling(lines: Iterable[str]) -> tuple[Instruction, ...]:
    """Count the telling operations, in the order of their names."""
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    for line in lines:
        name = opcode(line)
        if TELLING.fullmatch(name):
            first.setdefault(name, line)
            counts[name] = counts.get(name, 0) + 1
    return tuple(Instruction(name, counts[name], first[name]) for name in sorted(first))


def to_text(extract: Extract) -> str:
    """The file's text; ``from_text`` reads it back.  Targets for which a kernel is the same share a paragraph."""
    lines = [
        f"# {extract.source}: what it becomes, by `make sass`; not to be edited",
        f"# sources {extract.source_hash}",
        f"# nvrtc {extract.nvrtc}, nvdisasm {extract.nvdisasm}",
    ]
    by_name: dict[str, dict[str, list[str]]] = {}
    for kernel in extract.kernels:
        body = [
            f"registers {kernel.registers}, shared {kernel.shared_bytes}, stack {kernel.stack_bytes}, "
            f"instructions {kernel.instructions}",
            *(f"    {one.count} {one.opcode} | {one.example}" for one in kernel.telling),
        ]
        by_name.setdefault(kernel.name, {}).setdefault("\n".join(body), []).append(kernel.target)
    for name, bodies in by_name.items():
        lines += ["", name, *(f"  {' '.join(targets)}: {body}" for body, targets in bodies.items())]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Extract:
    """Read what ``to_text`` wrote.  A line that does not fit is an error: the file is ours."""
    head, *paragraphs = text.rstrip("\n").split("\n\n")
    first, sources, tools = head.splitlines()
    source = first[2:].split(":")[0]
    nvrtc, nvdisasm = (part.split()[-1] for part in tools.split(","))
    kernels = []
    for paragraph in paragraphs:
        name, *groups = re.split(r"\n  (?! )", paragraph)
        found = [kernel for group in groups for kernel in _read_group(source, name, group)]
        kernels += sorted(found, key=lambda kernel: EXTRACTED.index(kernel.target))
    return Extract(source, sources.split()[-1], nvrtc, nvdisasm, tuple(kernels))


def _read_group(source: str, name: str, group: str) -> list[KernelOnTarget]:
    """``"sm_90 sm_90a: registers 40, …"`` and the lines below it: one record per target."""
    head, *lines = group.splitlines()
    targets, numbers = head.split(": ")
    registers, shared, stack, count = (int(part.split()[1]) for part in numbers.split(", "))
    found = []
    for line in lines:
        operation, example = line.split(" | ", 1)
        times, operation = operation.split()
        found.append(Instruction(operation, int(times), example))
    return [
        KernelOnTarget(source, name, target, registers, shared, stack, count, tuple(found))
        for target in targets.split()
    ]


def read_extract(source: str) -> Extract:
    """The committed extract of a kernel file; ``FileNotFoundError`` where ``make sass`` has not run."""
    return from_text(path_of(source).read_text(encoding="utf-8"))


def is_fresh(source: str) -> bool:
    """Whether the committed extract belongs to the present sources."""
    return path_of(source).exists() and read_extract(source).source_hash == source_hash(source)
