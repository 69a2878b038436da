"""One MoE layer on a GPU, W4A16: BF16 grouped GEMM, decode first, and the kernel that widens FP4 as it loads.

The layer has the shape of Gemma 4's routed experts: 128 experts, 8 a token, H 2816, I 704.  All candidates permute,
activate and un-permute with the same ops, in one process, in turn.  Times are the GPU's own (events), medians; a pause
on the stream lets Python queue the whole layer first, so that launches are not what is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.harness import Goal, Row, Section, interleave, main, rows_from

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2816, 704
TOKENS = (64, 512, 4096)
GOALS = {512: 1.7, 64: 1.0}  # of BF16's time, at most
PAUSE = 4_000_000  # cycles: about 2 ms


def measure(quick: bool = False) -> list[Section]:
    from nvfp4viz import device
    from nvfp4viz.device.probe import require_cuda
    from nvfp4viz.errors import DeviceError

    try:
        require_cuda()
    except DeviceError as error:
        return [Section("MoE layer on the GPU", f"Not measured: {error.what} {error.why}", [])]
    gpu = ", ".join(found.name for found in device.describe_device().gpus)
    layer = Layer(EXPERTS if not quick else 8)
    sections = [_section(layer, tokens, gpu, 3 if quick else 30) for tokens in (TOKENS if not quick else (64,))]
    return [*sections, _routing(layer, 5 if quick else 200), _kernels()]


class Layer:
    """Random weights of one layer in FP4, prepared for the fused kernel, and in BF16."""

    def __init__(self, experts: int) -> None:
        import torch

        from nvfp4viz.device import ops

        self.torch, self.ops, self.experts = torch, ops, experts
        self.generator = torch.Generator(device="cuda").manual_seed(0)
        self.w13, self.w2 = self._weight(2 * INTERMEDIATE, HIDDEN), self._weight(HIDDEN, INTERMEDIATE)

    def _weight(self, n: int, k: int) -> dict[str, object]:
        torch, ops = self.torch, self.ops
        random = {"device": "cuda", "generator": self.generator}
        packed = torch.randint(0, 256, (self.experts, n, k // 2), dtype=torch.uint8, **random)
        scales = torch.randint(0x60, 0x7F, (self.experts, n, k // 16), dtype=torch.uint8, **random)
        decode = torch.full((self.experts,), 0.25 / (100.0 * k**0.5), device="cuda")
        ready = ops.pack_w4a16(packed, scales)
        wide = ops.widened_weight(ready)
        for expert in range(self.experts):  # in place: BF16 weights as a BF16 checkpoint would hold them
            wide[expert].mul_(decode[expert])
        return {"packed": packed, "scales": scales, "decode": decode, "ready": ready, "wide": wide}

    def inputs(self, tokens: int) -> tuple[object, object, object]:
        """Activations, and experts and weights chosen at random, evenly."""
        torch = self.torch
        random = {"device": "cuda", "generator": self.generator}
        x = torch.randn(tokens, HIDDEN, **random).to(torch.bfloat16)
        scores = torch.rand(tokens, self.experts, **random)
        weights, ids = torch.softmax(scores, -1).topk(TOP_K, dim=-1)
        return x, ids.to(torch.int32), weights.contiguous()

    def gemm(self, how: str, x, weight, offsets):
        if how == "BF16 _grouped_mm":
            return self.torch._grouped_mm(x, weight["wide"].transpose(-2, -1), offs=offsets[1:])
        if how == "decode, then _grouped_mm":
            args = (weight["packed"], weight["scales"], weight["decode"], offsets, "dequantize")
            return self.ops.grouped_gemm_w4a16(x, *args)
        return self.ops.grouped_gemm_w4a16(x, weight["ready"], None, weight["decode"], offsets)

    def run(self, how: str, x, ids, weights):
        plan = self.ops.permute(x, ids, self.experts, validate=False)
        both = self.gemm(how, plan.rows, self.w13, plan.offsets)
        gate, up = both.chunk(2, dim=-1)
        hidden = self.torch.nn.functional.gelu(gate, approximate="tanh") * up
        return self.ops.unpermute(self.gemm(how, hidden, self.w2, plan.offsets), plan, weights)


METHODS = ("BF16 _grouped_mm", "decode, then _grouped_mm", "fused")


def gpu_times(torch, candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds on the GPU of every candidate, taking turns."""
    for call in candidates.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, call in candidates.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(PAUSE)
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3)
    return times


def _section(layer: Layer, tokens: int, gpu: str, repeats: int) -> Section:
    torch = layer.torch
    x, ids, weights = layer.inputs(tokens)
    results = {how: layer.run(how, x, ids, weights).float() for how in METHODS}
    for how in METHODS[1:]:  # BF16 rounding at four places separates them, nothing more
        distance = (results[how] - results[METHODS[0]]).norm() / results[METHODS[0]].norm()
        assert distance < 0.02, f"{how} differs from BF16 by {float(distance):.3f} of its norm"
    layers = {f"layer, {how}": (lambda how=how: layer.run(how, x, ids, weights)) for how in METHODS}
    plan = layer.ops.permute(x, ids, layer.experts, validate=False)
    hidden = torch.randn(len(plan.rows), INTERMEDIATE, device="cuda").to(torch.bfloat16)
    operands = {"w13": (plan.rows, layer.w13), "w2": (hidden, layer.w2)}
    gemms = {
        f"{name}, {how}": (lambda how=how, rows=rows, w=w: layer.gemm(how, rows, w, plan.offsets))
        for name, (rows, w) in operands.items()
        for how in METHODS
    }
    times = gpu_times(torch, {**layers, **gemms}, repeats)
    met = int((plan.counts > 0).sum())
    counted = {name: _bytes(layer, name, len(plan.rows), met) for name in times}
    base = statistics.median(times[f"layer, {METHODS[0]}"])
    rows = []
    for name, values in times.items():
        middle, ours = statistics.median(values), counted[name]
        ratio = base / middle if name.startswith("layer") else None
        rows.append(Row(name, middle, min(values), max(values), ours / middle / 1e9 if ours else None, ratio))
    fused = statistics.median(times["layer, fused"])
    goals = []
    if tokens in GOALS:
        goals = [Goal(f"fused layer at {tokens} tokens, time over BF16's", fused / base, GOALS[tokens], at_most=True)]
    note = (
        f"{gpu}; {layer.experts} experts ({met} met), top {TOP_K}, H {HIDDEN}, I {INTERMEDIATE}, {tokens} tokens. "
        "GB/s counts the bytes a GEMM must move: weights of the experts met, activations, results."
    )
    title = f"MoE layer W4A16, {tokens} tokens"
    return Section(title, note, rows, f"layer, {METHODS[0]}", goals)


def _routing(layer: Layer, repeats: int) -> Section:
    """`ops.permute` as Python sees it, waiting for the GPU: without its look at the ids, and with it (the default)."""
    x, ids, _ = layer.inputs(512)

    def permuted(validate: bool) -> Callable[[], object]:
        def call() -> None:
            layer.ops.permute(x, ids, layer.experts, validate=validate)
            layer.torch.cuda.synchronize()

        return call

    candidates = {"permute, ids trusted": permuted(False), "permute, ids looked at": permuted(True)}
    rows = rows_from(interleave(candidates, repeats, warm=3), baseline="permute, ids trusted")
    note = f"Wall time until the GPU is done, 512 tokens to {layer.experts} experts, top {TOP_K}; medians of {repeats}."
    return Section("Routing", note, rows, "ids trusted")


def _bytes(layer: Layer, name: str, rows: int, met: int) -> int | None:
    """What one GEMM reads and writes once; None for a whole layer and for decode-first, which moves more than once."""
    n, k = (2 * INTERMEDIATE, HIDDEN) if name.startswith("w13") else (HIDDEN, INTERMEDIATE)
    if name.startswith("layer") or "decode" in name:
        return None
    weight = n * k * 2 if "BF16" in name else n * k * 9 // 16
    return met * weight + rows * (n + k) * 2


def _kernels() -> Section:
    from nvfp4viz.device.load import kernel
    from nvfp4viz.device.ops.gemm import ROW_TILES, THREADS, shared_bytes

    lines = []
    for tokens in ROW_TILES:
        found = kernel("gemm_w4a16.cu", f"nv_grouped_w4a16_{tokens}")
        taken, shared = found.resources(), shared_bytes(tokens)
        blocks = found.blocks_per_multiprocessor(THREADS, shared)
        lines.append(
            f"nv_grouped_w4a16_{tokens}: {taken.registers} registers, {taken.local_bytes} bytes spilled, "
            f"{shared} bytes shared, {blocks} blocks of {THREADS} threads a multiprocessor "
            f"({blocks * THREADS / 2048:.0%} of its threads)"
        )
    return Section("The fused kernel's resources", "; ".join(lines) + ".", [])


if __name__ == "__main__":
    main(measure)
