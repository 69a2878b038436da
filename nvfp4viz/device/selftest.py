"""Does this GPU give the documented bits?  ``make selftest``, or ``python -m nvfp4viz.device.selftest``.

Where the GPU has an instruction (E2M1, E4M3 and UE8M0 conversions, the approximate reciprocal, the block-scaled MMA) it
is held against the software that computes the same bits elsewhere: conversions and reciprocal over all 2^32 float32
patterns, the MMA on random operands of every kind.  Then the GPU's path is held against the CPU's on ordinary and on
hostile blocks, once as compiled for this GPU and once with every instruction replaced by software.

The report names GPU, driver and versions and counts differing bits.  No Blackwell GPU has been tried yet: a report from
one is welcome, whatever it says.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.device import selftest_data as data
from nvfp4viz.device.build import nvrtc, source_hash, target_of
from nvfp4viz.device.load import kernel
from nvfp4viz.device.probe import require_cuda
from nvfp4viz.errors import NvError

__all__ = ["Check", "SelfTest", "run", "to_json", "to_markdown"]

PATTERNS = 1 << 32
THREADS = 256
PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "numpy", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    Attributes
    ----------
    name
        Stable id, such as ``"e2m1"``.
    what
        The comparison in words.
    compared
        How many values, or bytes, were compared; 0 if this GPU has nothing to compare.
    differing
        How many of them differ; ``None`` if there was nothing to compare.
    example
        A float32 pattern that differs, in hexadecimal, or where a byte differs; empty if none does.
    """

    name: str
    what: str
    compared: int
    differing: int | None
    example: str = ""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """A report.  ``instructions`` says which hardware paths this build uses."""

    gpu: str
    capability: tuple[int, int]
    target: str
    driver: str  # newest CUDA version that the driver serves
    nvrtc: str
    versions: dict[str, str]
    python: str
    date: str  # UTC
    sources: dict[str, str]  # kernel file and the first digits of its hash
    instructions: dict[str, bool]
    checks: tuple[Check, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing that could be compared differs."""
        return all(not check.differing for check in self.checks)


def run(on_check: Callable[[Check], None] | None = None) -> SelfTest:
    """Run everything on the current CUDA device; some seconds on a large GPU.

    Parameters
    ----------
    on_check
        Called with every check as soon as it is done.

    Raises
    ------
    DeviceError
        What keeps the GPU from computing.
    """
    gpu = require_cuda()
    import torch

    from nvfp4viz.device import describe_device, driver_release

    started = datetime.datetime.now(datetime.UTC)
    checks = []
    for check in _checks():
        checks.append(check)
        if on_check is not None:
            on_check(check)
    driver = describe_device().driver
    used = ("selftest.cu", "quantize.cu", "quantize_mx.cu", "dequantize.cu", "activation_quantize.cu", "gemm_w4a4.cu")
    return SelfTest(
        gpu=torch.cuda.get_device_name(),
        capability=gpu.capability,
        target=target_of(gpu.capability),
        driver=".".join(map(str, driver)) if driver else "",
        nvrtc=".".join(map(str, nvrtc().getVersion())),
        versions={"driver": driver_release()} | _versions() | {"torch's CUDA": str(torch.version.cuda)},
        python=platform.python_version(),
        date=started.strftime("%Y-%m-%d %H:%M UTC"),
        sources={name: source_hash(name)[:12] for name in used},
        instructions=instructions(),
        checks=tuple(checks),
        seconds=(datetime.datetime.now(datetime.UTC) - started).total_seconds(),
    )


def instructions() -> dict[str, bool]:
    """Which hardware paths the kernels take on this GPU."""
    import torch

    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    kernel("selftest.cu", "nv_selftest_paths")(1, 1, (out,))
    names = ("FP4 conversions", "E4M3 conversion", "block-scaled MMA", "approximate reciprocal")
    return dict(zip(names, (bool(flag) for flag in out.tolist()), strict=True))


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ------------------------------------------------------------------------------------------------- checks


def _checks() -> Iterator[Check]:
    here = instructions()
    yield from conversions(here)
    yield from unpacking(here)
    yield reciprocal(here["approximate reciprocal"])
    yield from mma_steps(here["block-scaled MMA"])
    yield from recipes()
    yield dequantizing()
    yield from activations()


def conversions(here: dict[str, bool]) -> Iterator[Check]:
    """All 2^32 patterns through the conversions."""
    count, example = _sweep("nv_selftest_conversions", 7)
    fp4, e4m3 = here["FP4 conversions"], here["E4M3 conversion"]
    for index, name, what, groups, there in (
        (0, "e2m1", "E2M1 instruction against its definition", 1, fp4),
        (1, "e2m1-soft", "E2M1 in software against its definition", 1, True),
        (2, "e2m1-packed", "E2M1 instruction, eight at a time, against its definition", 8, fp4),
        (3, "e2m1-packed-soft", "E2M1 in software, eight at a time, against its definition", 8, True),
        (6, "e2m1-small-soft", "E2M1 in software, eight small numbers at a time, against its definition", 8, True),
        (4, "e4m3", "E4M3 instruction against software", 1, e4m3),
        (5, "ue8m0", "UE8M0 instruction against software", 1, fp4),
    ):
        if there:
            yield Check(name, what, PATTERNS // groups, count[index], example[index])
        else:
            yield Check(name, what, 0, None)


def unpacking(here: dict[str, bool]) -> Iterator[Check]:
    """The 256 bytes of two codes, and the 256 of a scale."""
    count, example = _sweep("nv_selftest_unpack", 2, grid=1)
    for index, name, what, there in (
        (0, "e2m1-unpack", "E2M1 to FP16 instruction against software", here["FP4 conversions"]),
        (1, "e4m3-unpack", "E4M3 to FP16 instruction against software", here["E4M3 conversion"]),
    ):
        yield Check(name, what, 256, count[index], example[index]) if there else Check(name, what, 0, None)


def reciprocal(there: bool) -> Check:
    """All 2^32 patterns through rcp.approx.ftz.f32."""
    from nvfp4viz.device.ops.quantize import reciprocals

    what = "rcp.approx.ftz.f32 against the table measured on an H200"
    if not there:
        return Check("reciprocal", what, 0, None)
    import torch

    table = reciprocals(torch.device("cuda", torch.cuda.current_device()))
    count, example = _sweep("nv_selftest_reciprocal", 1, (table,))
    return Check("reciprocal", what, PATTERNS, count[0], example[0])


def _sweep(name: str, results: int, before: tuple[Any, ...] = (), grid: int = 4096) -> tuple[list[int], list[str]]:
    import torch

    differing = torch.zeros(results, dtype=torch.int64, device="cuda")
    example = torch.zeros(results, dtype=torch.int32, device="cuda")
    kernel("selftest.cu", name)(grid, THREADS, (*before, differing, example))
    counts = differing.tolist()
    patterns = (f"0x{pattern & 0xFFFFFFFF:08x}" for pattern in example.tolist())
    return counts, [pattern if count else "" for count, pattern in zip(counts, patterns, strict=True)]


def mma_steps(there: bool) -> Iterator[Check]:
    """One block-scaled instruction on many tiles, and grouped GEMMs of eight steps; instruction, software and CPU."""
    for kind in ("nvfp4", "mxfp4"):
        steps, products = f"{kind} MMA, one instruction", f"{kind} grouped GEMM, K = 512"
        if there:
            yield _compare(f"mma-{kind}", f"{steps}, against software", _tiles(kind, 512, soft=True))
            yield _compare(f"gemm-{kind}", f"{products}, instruction against software", _products(kind, soft=True))
        else:
            yield Check(f"mma-{kind}", f"{steps}, against software", 0, None)
            yield Check(f"gemm-{kind}", f"{products}, instruction against software", 0, None)
        yield _compare(f"mma-{kind}-cpu", f"{steps} or its software, against the CPU", _tiles(kind, 24, soft=False))
        yield _compare(f"gemm-{kind}-cpu", f"{products}, against the CPU", _products(kind, soft=False))


def _compare(name: str, what: str, pairs: Iterator[tuple[Array, Array]]) -> Check:
    """Float32 results of two ways; a NaN equals a NaN."""
    compared = differing = 0
    example = ""
    for case, (ours, other) in enumerate(pairs):
        wrong = data.differing_floats(ours, other)
        compared, differing = compared + ours.size, differing + len(wrong)
        if len(wrong) and not example:
            example = f"case {case}, element {int(wrong[0])}"
    return Check(name, what, compared, differing, example)


def _tiles(kind: str, tiles: int, soft: bool) -> Iterator[tuple[Array, Array]]:
    """Results of one instruction on every tile: the GPU's, and software's or the CPU's."""
    from nvfp4viz.device import ops
    from nvfp4viz.quant import mma_matmul

    for a, a_scales in data.mma_operands(kind, (tiles, 16), 64):
        for b, b_scales in data.mma_operands(kind, (tiles, 8), 64):
            for c in data.mma_accumulators(tiles):
                operands = [_cuda(each) for each in (a, a_scales, b, b_scales, c)]
                ours = ops.mma_tiles(*operands, kind=kind).cpu().numpy()
                if soft:
                    yield ours, ops.mma_tiles(*operands, kind=kind, soft=True).cpu().numpy()
                else:
                    sides = zip(a, a_scales, b, b_scales, c, strict=True)
                    yield ours, np.stack([mma_matmul(*side, kind=kind) for side in sides])  # type: ignore[arg-type]


def _products(kind: str, soft: bool) -> Iterator[tuple[Array, Array]]:
    """128 x 128 results of a grouped GEMM with one expert: the GPU's, and software's or the CPU's."""
    from nvfp4viz.quant import mma_matmul

    sides = zip(data.mma_operands(kind, (128,), 512), data.mma_operands(kind, (128,), 512), strict=True)
    for (a, a_scales), (b, b_scales) in sides:
        b, b_scales = b[::-1].copy(), b_scales[::-1].copy()
        ours = _product(kind, a, a_scales, b, b_scales, soft=False)
        if soft:
            yield ours, _product(kind, a, a_scales, b, b_scales, soft=True)
        else:
            yield ours, mma_matmul(a, a_scales, b, b_scales, c=None, kind=kind)  # type: ignore[arg-type]


def _product(kind: str, a: Array, a_scales: Array, b: Array, b_scales: Array, soft: bool) -> Array:
    import torch

    from nvfp4viz.device import ops

    rows, k = len(a), a.shape[1] * 2
    recipe = "vllm-cuda" if kind == "nvfp4" else "vllm-even"
    operand = ops.DeviceQuantized(_cuda(a), _cuda(a_scales), 1.0, recipe, (rows, k))
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=operand.packed.device)
    alphas = torch.ones(1, dtype=torch.float32, device=operand.packed.device)
    others = (_cuda(b[None]), _cuda(b_scales[None]), offsets, alphas, torch.float32)
    found: Array = ops.grouped_gemm_w4a4(operand, *others, soft=soft).cpu().numpy()
    return found


def recipes() -> Iterator[Check]:
    """Every recipe, on every dtype, hostile blocks and global scales, both layouts, with and without instructions."""
    from nvfp4viz.device.ops.quantize import RECIPE_KERNELS

    for recipe in RECIPE_KERNELS:
        compared = differing = 0
        example = ""
        for dtype in data.DTYPES:
            for seed, x in enumerate(data.matrices(dtype)):
                for g in data.global_scales(recipe):
                    expected = data.on_cpu(x, recipe, g)
                    for layout in ("linear", "swizzled"):
                        for soft in (False, True):
                            found = data.on_gpu(x, recipe, g, layout, soft)
                            wrong = data.differing_bytes(found, expected, layout)
                            compared, differing = compared + sum(map(np.size, found)), differing + wrong
                            if wrong and not example:
                                example = f"{dtype}, matrix {seed}, global scale {g}, {layout}, soft={soft}"
        yield Check(f"recipe-{recipe}", f"{recipe}: bytes of the GPU against the CPU", compared, differing, example)


def dequantizing() -> Check:
    """All pairs of packed and scale bytes, hostile global scales, BF16 and float32."""
    compared = differing = 0
    for ours, theirs in data.decoded_pairs():
        compared += ours.size
        differing += int((ours != theirs).sum())
    return Check("dequantize", "decoded values of the GPU against the CPU", compared, differing)


def activations() -> Iterator[Check]:
    """All 65536 BF16 gates."""
    for activation in ("silu", "gelu_tanh"):
        compared = differing = 0
        for found, expected in data.activated_pairs(activation):
            compared += sum(map(np.size, found))
            differing += data.differing_bytes(found, expected, "linear")
        yield Check(
            f"activation-{activation}", f"{activation}, times up, quantised: GPU against CPU", compared, differing
        )


def _cuda(array: Array) -> Any:
    from nvfp4viz.device.dispatch import to_cuda

    return to_cuda(array)


# ------------------------------------------------------------------------------------------------- reports


def to_json(report: SelfTest) -> str:
    """The report for machines."""
    return json.dumps(asdict(report) | {"passed": report.passed}, indent=1) + "\n"


def to_markdown(report: SelfTest) -> str:
    """The report for people."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    used = ", ".join(name for name, there in report.instructions.items() if there) or "none"
    lacking = ", ".join(name for name, there in report.instructions.items() if not there) or "none"
    lines = [
        f"# Self-test on {report.gpu}",
        "",
        f"* {report.date}, {report.seconds:.0f} s, **{'everything agrees' if report.passed else 'BITS DIFFER'}**",
        f"* compute capability {report.capability[0]}.{report.capability[1]}, compiled for {report.target}",
        f"* driver for CUDA {report.driver}, NVRTC {report.nvrtc}, Python {report.python}, {versions}",
        f"* instructions used: {used}; not available here: {lacking}",
        "",
        "| comparison | compared | differing | example |",
        "|---|---:|---:|---|",
    ]
    for check in report.checks:
        differing = "not available here" if check.differing is None else f"{check.differing}"
        lines.append(f"| {check.what} | {check.compared or ''} | {differing} | {check.example} |")
    hashes = ", ".join(f"{name} {digest}" for name, digest in report.sources.items())
    return "\n".join([*lines, "", f"Sources: {hashes}."]) + "\n"


def main() -> int:
    """Run, print, and write ``selftest-<gpu>.md`` and ``.json``; 1 where bits differ, 2 if no GPU reaches the end."""
    parser = argparse.ArgumentParser(description="Compare this GPU's instructions with software, and it with the CPU.")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the report (default: here)")
    options = parser.parse_args()
    try:
        report = run(lambda check: print(f"{check.name}: {_outcome(check)}", flush=True))
    except (NvError, RuntimeError) as error:  # RuntimeError: torch's, when a kernel has brought the GPU down
        print(f"{type(error).__name__}: {error}" if isinstance(error, RuntimeError) else error, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    stem = "selftest-" + "".join(c if c.isalnum() else "-" for c in report.gpu.lower())
    for ending, text in ((".md", to_markdown(report)), (".json", to_json(report))):
        (options.out / (stem + ending)).write_text(text, encoding="utf-8")
    print(f"{'everything agrees' if report.passed else 'BITS DIFFER'}: {options.out / stem}.md")
    return 0 if report.passed else 1


def _outcome(check: Check) -> str:
    if check.differing is None:
        return "not available here"
    return f"{check.differing} of {check.compared} differ" + (f", such as {check.example}" if check.example else "")


if __name__ == "__main__":
    sys.exit(main())
