"""The streaming kernels on a GPU: how near to memory bandwidth they come, and how far from torch.compile and torchao.

8192 x 16384 elements (268 MB in BF16), a ring of inputs so that no call finds its own in the cache, medians of GPU
events, all candidates in turn in one process.  Every candidate runs three times and the third counts: what another one
left unwritten in L2 (50 MB on an H200) would be written at its expense, which costs the first run 3 to 9 µs and the
second half a µs.  A kernel's rate counts what it must read and write once; *of copy* is that rate over the rate of
torch's own copy of a tensor of the same size.  A second table holds every kernel against a copy that moves as many
bytes as the kernel must: a shorter one, timed in the same rounds.

A third decodes as many packed bytes as the first table's kernels read: dequantise reads a quarter of what it writes, so
that 8192 x 16384 is 75 MB of its input.  There its own kernel, compiled to move the same bytes and compute nothing,
says what the memory allows.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.bench_gpu_moe import PAUSE
from benchmarks.harness import Goal, Row, Section, installed, main

ROWS, COLUMNS = 8192, 16384
LONG = 65536  # columns whose packed codes are 268 MB
EXPERTS = 128
RING = 6  # inputs of a candidate
PACKED = 9 / 16  # bytes written for an NVFP4 element: a nibble and a sixteenth of a scale
PACKED_MX = 17 / 32

GOALS = {
    "quantise bf16, ieee": 0.92,
    "quantise bf16, vllm-cuda": 0.92,
    "quantise bf16, vllm-cuda, 128 ranges": 0.85,
    "quantise bf16, vllm-cuda, 128x4": 0.85,
    "quantise bf16, vllm-cuda, 128 ranges, 128x4": 0.85,
    "dequantise to bf16": 0.95,
    "silu*up + quantise": 0.85,
    "gelu_tanh*up + quantise": 0.85,
}
"""Of the copy's rate."""
LAUNCH = 12.0  # µs of Python for one launch
FASTER = {"torch.compile": 3.5, "torchao 0.18 compiled": 4.5}


def measure(quick: bool = False) -> list[Section]:
    from nvfp4viz import device
    from nvfp4viz.device.probe import require_cuda
    from nvfp4viz.errors import DeviceError

    try:
        require_cuda()
    except DeviceError as error:
        return [Section("Streaming kernels on the GPU", f"Not measured: {error.what} {error.why}", [])]
    gpu = ", ".join(found.name for found in device.describe_device().gpus)
    shape = (256, 2048) if quick else (ROWS, COLUMNS)
    repeats = 3 if quick else 40
    decoding = [
        _decoding((shape[0], columns), repeats, gpu) for columns in ((shape[1], LONG) if not quick else shape[1:])
    ]
    return [*_bandwidth(shape, repeats, gpu), *decoding, _rivals(shape, repeats, gpu), _launches(quick), _resources()]


def steady_times(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds on the GPU of every candidate, taking turns, each right after two calls of its own."""
    import torch

    for call in candidates.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, call in candidates.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(PAUSE)  # long enough for Python to queue the three calls
            call()
            call()
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3)
    return times


def _inputs(shape: tuple[int, int], dtype: Any, count: int = RING) -> list[Any]:
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for _ in range(count)]


def _bandwidth(shape: tuple[int, int], repeats: int, gpu: str) -> list[Section]:
    import torch

    from nvfp4viz.device import ops

    rows, columns = shape
    elements = rows * columns
    bf16 = _inputs(shape, torch.bfloat16)
    f16, f32 = [x.half() for x in bf16], [x.float() for x in bf16[:3]]
    cuts = torch.randint(0, rows + 1, (EXPERTS - 1,), generator=torch.Generator().manual_seed(1)).sort().values
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([rows])]).to(torch.int32).cuda()
    of_range = torch.linspace(200, 600, EXPERTS, device="cuda")
    of_row = torch.linspace(200, 600, rows, device="cuda")
    ranged = {"global_scale": of_range, "offsets": offsets}

    def quantise(inputs: list[Any], **how: Any) -> Callable[[], object]:
        ring = itertools.cycle(inputs)
        return lambda: ops.quantize(next(ring), **how)

    def fused(**how: Any) -> Callable[[], object]:
        ring = itertools.cycle(bf16)
        return lambda: ops.activation_quantize(next(ring), **how)

    def copied(inputs: list[Any]) -> Callable[[], object]:
        ring, out = itertools.cycle(inputs), torch.empty_like(inputs[0])
        return lambda: out.copy_(next(ring))

    def moved(count: int) -> Callable[[], object]:
        """A copy that reads and writes ``count`` bytes together."""
        inputs = [x.view(torch.uint8).reshape(-1) for x in (bf16 if count <= 4 * elements else f32)]
        half, out = count // 2, torch.empty_like(inputs[0])
        ring = itertools.cycle(inputs)
        return lambda: out[:half].copy_(next(ring)[:half])

    def decoded(dtype: Any, **how: Any) -> Callable[[], object]:
        ring = itertools.cycle([ops.quantize(x, recipe="vllm-cuda", **how) for x in bf16])
        return lambda: ops.dequantize(next(ring), dtype)

    def topped(**how: Any) -> Callable[[], object]:
        ring = itertools.cycle(bf16)
        return lambda: ops.amax(next(ring), **how)

    one, vllm = {"global_scale": 448.0}, {"recipe": "vllm-cuda"}
    narrow, wide = 2 + PACKED, 4 + PACKED
    # every range is padded to whole tiles, and the padding is written too
    tiles = ops.quantize(bf16[0], **vllm, **ranged, layout="swizzled").scales.numel() / elements
    tiles_of_half = (
        ops.activation_quantize(bf16[0], activation="silu", **ranged, layout="swizzled").scales.numel() / elements
    )
    candidates: dict[str, tuple[Callable[[], object], float]] = {
        "copy bf16": (copied(bf16), 4),
        "copy f32": (copied(f32), 8),
        "quantise bf16, ieee": (quantise(bf16, recipe="ieee", **one), narrow),
        "quantise bf16, vllm-cuda": (quantise(bf16, **vllm, **one), narrow),
        "quantise f16, vllm-cuda": (quantise(f16, **vllm, **one), narrow),
        "quantise f32, vllm-cuda": (quantise(f32, **vllm, **one), wide),
        "quantise bf16, vllm-cuda, 128 ranges": (quantise(bf16, **vllm, **ranged), narrow),
        "quantise bf16, vllm-cuda, a scale a row": (quantise(bf16, **vllm, global_scale=of_row), narrow),
        "quantise bf16, vllm-cuda, 128x4": (quantise(bf16, **vllm, **one, layout="swizzled"), narrow),
        "quantise bf16, vllm-cuda, 128 ranges, 128x4": (
            quantise(bf16, **vllm, **ranged, layout="swizzled"),
            2.5 + tiles,
        ),
        "quantise bf16, ieee, 128 ranges": (quantise(bf16, recipe="ieee", **ranged), narrow),
        "quantise bf16, vllm-even (MXFP4)": (quantise(bf16, recipe="vllm-even"), 2 + PACKED_MX),
        "quantise bf16, deepgemm-ceil (MXFP4)": (quantise(bf16, recipe="deepgemm-ceil"), 2 + PACKED_MX),
        "dequantise to bf16": (decoded(torch.bfloat16, **one), narrow),
        "dequantise to bf16, 128 ranges": (decoded(torch.bfloat16, **ranged), narrow),
        "dequantise to bf16, 128x4": (decoded(torch.bfloat16, **one, layout="swizzled"), narrow),
        "dequantise to f32": (decoded(torch.float32, **one), wide),
        "amax": (topped(), 2),
        "amax of every row": (topped(per="token"), 2),
        "silu*up + quantise": (fused(activation="silu", **ranged), 2 + PACKED / 2),
        "gelu_tanh*up + quantise": (fused(activation="gelu_tanh", **ranged), 2 + PACKED / 2),
        "silu*up + quantise, 128x4": (fused(activation="silu", **ranged, layout="swizzled"), 2.25 + tiles_of_half),
    }
    kernels = {name: round(each * elements) for name, (_, each) in candidates.items() if "copy" not in name}
    copies = {f"copy that moves {count:,} bytes": count for count in sorted(set(kernels.values()))}
    calls = {name: call for name, (call, _) in candidates.items()} | {n: moved(count) for n, count in copies.items()}
    times = steady_times(calls, repeats)
    rates = {n: candidates[n][1] * elements / statistics.median(times[n]) / 1e9 for n in candidates}
    found = []
    for name in candidates:
        values = times[name]
        copy = "copy f32" if "f32" in name else "copy bf16"
        middle = statistics.median(values)
        found.append(Row(name, middle, min(values), max(values), rates[name], rates[name] / rates[copy]))
    goals = [Goal(f"{name}, of copy", rates[name] / rates["copy bf16"], least) for name, least in GOALS.items()]
    note = (
        f"{gpu}; {rows} x {columns}, {RING} inputs in a ring, medians of {repeats}. GB/s counts each byte that must be "
        "read or written once; the last column is that rate over the rate of torch's copy of the same tensor."
    )
    same = {count: statistics.median(times[name]) for name, count in copies.items()}
    second = []
    for name, count in (copies | kernels).items():
        middle = statistics.median(times[name])
        rate = count / middle / 1e9
        second.append(Row(name, middle, min(times[name]), max(times[name]), rate, same[count] / middle))
    note_second = (
        "The same times; the last column is the time of a copy that moves as many bytes over the kernel's time."
    )
    return [
        Section("Streaming kernels, of copy", note, found, "copy", goals),
        Section("Streaming kernels, of a copy that moves as many bytes", note_second, second, "such a copy"),
    ]


def _decoding(shape: tuple[int, int], repeats: int, gpu: str) -> Section:
    """Dequantise to BF16 beside a copy of its output, a copy of as many bytes, and its own loads and stores alone."""
    import torch

    from nvfp4viz.device import ops
    from nvfp4viz.device.load import kernel
    from nvfp4viz.device.ops.dequantize import THREADS, UNITS

    elements, ring = shape[0] * shape[1], RING if shape[1] < LONG else 3
    generator = torch.Generator(device="cuda").manual_seed(0)
    packed, scales = [], []
    for _ in range(ring):
        random = {"dtype": torch.uint8, "device": "cuda", "generator": generator}
        packed.append(torch.randint(0, 256, (shape[0], shape[1] // 2), **random))
        scales.append(torch.randint(0, 0x7F, (shape[0], shape[1] // 16), **random))
    inputs = list(zip(packed, scales, strict=True))
    wide = _inputs(shape, torch.bfloat16, ring)
    out, both = torch.empty_like(wide[0]), round((2 + PACKED) * elements)
    turn, turn_flat = itertools.cycle(wide), itertools.cycle([x.view(torch.uint8).reshape(-1) for x in wide])
    out_flat = out.view(torch.uint8).reshape(-1)
    stored = itertools.cycle([ops.DeviceQuantized(*pair, 448.0, "vllm-cuda", shape) for pair in inputs])
    moving, only = itertools.cycle(inputs), kernel("dequantize.cu", "nv_dequantize_bf16_whole", ("NV_MOVE_ONLY",))
    blocks, how = elements // (8 * UNITS * THREADS), (None, np.float32(448), np.int32(0))
    times = steady_times(
        {
            "copy bf16": lambda: out.copy_(next(turn)),
            f"copy that moves {both:,} bytes": lambda: out_flat[: both // 2].copy_(next(turn_flat)[: both // 2]),
            "dequantise to bf16": lambda: ops.dequantize(next(stored)),
            "its loads and stores, nothing computed": lambda: only(blocks, THREADS, (*next(moving), out, *how)),
        },
        repeats,
    )
    counted = {name: 4 * elements if name == "copy bf16" else both for name in times}
    rates = {name: counted[name] / statistics.median(values) / 1e9 for name, values in times.items()}
    base = rates["copy bf16"]
    found = [Row(n, statistics.median(v), min(v), max(v), rates[n], rates[n] / base) for n, v in times.items()]
    read = round(PACKED * elements / 1e6)
    goal = Goal(f"dequantise to bf16 from {read} MB, of copy", rates["dequantise to bf16"] / base, 0.95)
    note = (
        f"{gpu}; {shape[0]} x {shape[1]}, {read} MB of codes and scales, {ring} inputs in a ring, medians of {repeats}."
    )
    return Section(f"Dequantise, {read} MB of input", note, found, "copy", [goal])


def _rivals(shape: tuple[int, int], repeats: int, gpu: str) -> Section:
    """`ieee` at G = 1 by torch.compile, and torchao's own function, on the same tensors; their bytes are ours."""
    import torch

    from nvfp4viz.device import ops

    bf16 = _inputs(shape, torch.bfloat16)

    def turning(call: Callable[[Any], object]) -> Callable[[], object]:
        ring = itertools.cycle(bf16)
        return lambda: call(next(ring))

    ours = ops.quantize(bf16[0], recipe="ieee", global_scale=1.0)
    compiled = torch.compile(torch_quantize)
    scales, packed = compiled(bf16[0])
    assert torch.equal(packed, ours.packed)
    assert torch.equal(scales.view(torch.uint8), ours.scales)
    candidates = {
        "ours, ieee": turning(lambda x: ops.quantize(x, recipe="ieee", global_scale=1.0)),
        "torch.compile": turning(compiled),
    }
    version = installed(("torchao",)).get("torchao")
    note = f"{gpu}; {shape[0]} x {shape[1]} BF16, {RING} inputs in a ring, medians of {repeats}."
    if version:
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

        package = torch.compile(nvfp4_quantize)
        scales, packed = package(bf16[0], 16)
        same = torch.equal(packed.view(torch.uint8).reshape(ours.packed.shape), ours.packed)
        assert same, "torchao gives other codes"
        candidates[f"torchao {version.rsplit('.', 1)[0]} compiled"] = turning(lambda x: package(x, 16))
    else:
        note += " torchao is not installed on this machine and was not measured."
    times = steady_times(candidates, repeats)
    middle = {name: statistics.median(values) for name, values in times.items()}
    elements = shape[0] * shape[1]
    found = [
        Row(n, middle[n], min(v), max(v), (2 + PACKED) * elements / middle[n] / 1e9, middle[n] / middle["ours, ieee"])
        for n, v in times.items()
    ]
    goals = [
        Goal(f"times as fast as {n}", middle[n] / middle["ours, ieee"], f) for n, f in FASTER.items() if n in middle
    ]
    return Section("Against torch.compile and torchao (ratio: our speed over theirs)", note, found, "", goals)


def _launches(quick: bool) -> Section:
    """What one launch costs Python: rounds of 200, the queue empty before each, so that none waits for room in it."""
    import torch

    from nvfp4viz.device.load import kernel

    probe = kernel("probe.cu", "nv_probe")
    seeds, each = torch.zeros(32, dtype=torch.int32, device="cuda"), 200
    arguments = (seeds, torch.zeros_like(seeds), np.int32(32))
    times = []
    for _ in range(5 if quick else 50):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(each):
            probe(1, 32, arguments)
        times.append((time.perf_counter() - begin) / each)
    middle = statistics.median(times)
    goal = Goal("µs of Python for a launch", middle * 1e6, LAUNCH, at_most=True)
    note = f"Wall time of `Kernel.__call__` with two tensors and a number; medians of {len(times)} rounds of {each}."
    return Section("Launching", note, [Row("one launch", middle, min(times), max(times))], "", [goal])


def torch_quantize(x: Any) -> tuple[Any, Any]:
    """`ieee` at G = 1 in plain torch: E4M3 scales and packed codes."""
    import torch

    blocks = x.float().view(*x.shape[:-1], -1, 16)
    scales = (blocks.abs().amax(-1) / 6).clamp(max=448.0).to(torch.float8_e4m3fn)
    s = scales.float()
    factor = torch.where(s == 0, torch.zeros_like(s), 1 / s)
    y = blocks * factor.unsqueeze(-1)
    size = y.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for midpoint, inclusive in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code = code + (size >= midpoint if inclusive else size > midpoint).to(torch.uint8)
    code = code | (torch.signbit(y).to(torch.uint8) << 3)
    code = code.view(*x.shape[:-1], -1)
    return scales, code[..., 0::2] | (code[..., 1::2] << 4)


def _resources() -> Section:
    """Registers and occupancy of the kernels that the goals are about."""
    from nvfp4viz.device.load import kernel

    lines = []
    for source, name, threads in (
        ("quantize.cu", "nv_quantize_bf16_ieee_linear", 256),
        ("quantize.cu", "nv_quantize_bf16_vllm_linear", 256),
        ("quantize.cu", "nv_quantize_bf16_vllm_swizzled", 256),
        ("quantize.cu", "nv_quantize_bf16_vllm_placed", 256),
        ("dequantize.cu", "nv_dequantize_bf16_whole", 512),
        ("activation_quantize.cu", "nv_activation_quantize_vllm_linear_shared", 512),
    ):
        found = kernel(source, name)
        taken, blocks = found.resources(), found.blocks_per_multiprocessor(threads)
        lines.append(
            f"{name}: {taken.registers} registers, {taken.local_bytes} bytes spilled, {taken.static_shared_bytes} "
            f"bytes shared, {blocks} blocks of {threads} threads a multiprocessor ({blocks * threads / 2048:.0%})"
        )
    return Section("Resources", "; ".join(lines) + ".", [])


if __name__ == "__main__":
    main(measure)
