"""Read machine code back with NVIDIA's ``cuobjdump`` and write the extracts of ``kernels/sass/`` (``make sass``).

The tools come as wheels with the development requirements; no CUDA toolkit and no GPU is needed.
"""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

from nvfp4viz.device import build, nvrtc_library, sass

__all__ = ["Code", "cuobjdump", "disassemble", "extract"]

RESOURCES = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
FUNCTION = re.compile(r"^\s*Function : (\w+)\s*$")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\*")


@dataclass(frozen=True, slots=True)
class Code:
    """One kernel's machine code, as text."""

    name: str
    registers: int  # per thread
    stack_bytes: int  # per thread: what would be local memory traffic
    shared_bytes: int  # per block, static
    instructions: tuple[str, ...]  # in order, without addresses and encodings

    def opcodes(self) -> list[str]:
        """The operations alone, in order: ``"LDG.E.128"`` of ``"@!P0 LDG.E.128 R4, …"``."""
        return [sass.opcode(line) for line in self.instructions]


def cuobjdump() -> Path | None:
    """The tool from its wheel, or from the path."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for tool in Path(folder).glob("cu1?/bin/cuobjdump"):
            return tool
    found = shutil.which("cuobjdump")
    return Path(found) if found else None


def disassemble(code: bytes) -> list[Code]:
    """All kernels of a cubin, in the order of their names.  Needs ``cuobjdump`` and, beside it, ``nvdisasm``."""
    tool = cuobjdump()
    if tool is None:
        raise FileNotFoundError("cuobjdump is not installed (pip install -r requirements-dev.txt)")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "code.cubin"
        path.write_bytes(code)
        environment = os.environ | {"PATH": f"{tool.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        text = subprocess.run(
            [tool, "-sass", "-res-usage", path], env=environment, capture_output=True, text=True, check=True
        ).stdout
    resources = {name: tuple(map(int, numbers)) for name, *numbers in RESOURCES.findall(text)}
    lines: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if named := FUNCTION.match(line):
            current = lines.setdefault(named[1], [])
        elif instruction := INSTRUCTION.match(line):
            current.append(" ".join(instruction[1].split()))
    found = []
    for name in sorted(lines):
        registers, stack, shared, local = resources[name]
        found.append(Code(name, registers, stack + local, shared, tuple(lines[name])))
    return found


def extract(source: str, *, cached: bool = False) -> str:
    """The text of ``kernels/sass/<source>.txt``: every kernel of a file for every target, compiled with NVRTC 13.

    ``cached``: what `build.cubin` keeps will do, where it comes from an NVRTC of the same version.
    """
    binding = nvrtc_library.find_nvrtc13()
    if binding is None:
        raise FileNotFoundError("NVRTC 13 is not installed (pip install -r requirements-dev.txt)")

    digest = build.source_hash(
        source
    )  # before compiling: sources edited meanwhile leave a stale extract, not a wrong one

    def one(target: str) -> list[Code]:
        kept = cached and build.compiler_for(target).getVersion() == binding.getVersion()
        code = build.cubin(source, target) if kept else build.compile_kernel(source, target, binding=binding)
        return disassemble(code)

    with warnings.catch_warnings(), concurrent.futures.ThreadPoolExecutor(2) as pool:
        warnings.filterwarnings("ignore", ".*leaves out the FP4")  # plain targets, on purpose
        by_target = dict(zip(sass.EXTRACTED, pool.map(one, sass.EXTRACTED), strict=True))
    records = tuple(
        sass.KernelOnTarget(
            source, code.name, target, code.registers, code.shared_bytes, code.stack_bytes, len(code.instructions),
            sass.telling(code.instructions),
        )
        for name in sorted({code.name for codes in by_target.values() for code in codes})
        for target, codes in by_target.items()
        for code in codes
        if code.name == name
    )  # fmt: skip
    nvrtc = ".".join(map(str, binding.getVersion()))
    tools = importlib.metadata.version("nvidia-cuda-nvdisasm")
    return sass.to_text(sass.Extract(source, digest, nvrtc, tools, records))


def main(everything: bool) -> None:
    """Rewrite the extracts whose sources have changed, or all of them; drop those of files that are gone."""
    sass.FOLDER.mkdir(exist_ok=True)
    sources = sass.kernel_sources()
    for stale in set(sass.FOLDER.glob("*.txt")) - {sass.path_of(source) for source in sources}:
        stale.unlink()
        print(f"{stale.name}: dropped")
    for source in sources:
        if not everything and sass.is_fresh(source):
            print(f"{source}: up to date")
            continue
        sass.path_of(source).write_text(extract(source), encoding="utf-8")
        print(f"{source}: written", flush=True)


if __name__ == "__main__":
    main("--all" in sys.argv[1:])
