"""The tensor-core product on a CPU: our kernel against the scalar reference and against a float32 BLAS product."""

from __future__ import annotations

import statistics
import time

import numpy as np

from benchmarks import harness

SCALAR_GOAL = 300.0
BLAS_GOAL = 40.0
SCALAR_STEPS = 400


def operand(rng: np.random.Generator, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Random codes, and scale bytes as a quantised tensor has them: the upper third of E4M3."""
    packed = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
    return packed, rng.integers(0x50, 0x7F, (rows, k // 16), dtype=np.uint8)


def scalar_seconds_per_step(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray], steps: int) -> float:
    """Median over single steps of the scalar reference, on the matrices' own codes and scales."""
    from nvfp4viz.formats import unpack_nibbles
    from nvfp4viz.quant import mma_step_reference

    times = []
    for i in range(steps):
        m, n = i % len(a[0]), i % len(b[0])
        codes = [unpack_nibbles(x[0][r, :32]).tolist() for x, r in ((a, m), (b, n))]
        scales = [x[1][r, :4].tolist() for x, r in ((a, m), (b, n))]
        start = time.perf_counter()
        mma_step_reference(*codes, *scales, np.float32(i))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def compare_large(quick: bool) -> harness.Section:
    from nvfp4viz.quant import mma_matmul

    m, n, k = (32, 32, 256) if quick else (512, 512, 2048)
    rng = np.random.default_rng(0)
    a, b = operand(rng, m, k), operand(rng, n, k)
    x, y = (rng.standard_normal((rows, k), dtype=np.float32) for rows in (m, n))
    ours, numpy = mma_matmul(*a, *b), mma_matmul(*a, *b, path="numpy")
    assert np.array_equal(ours.view(np.uint32), numpy.view(np.uint32)), "the two paths differ"
    candidates = {
        "nvfp4viz, kernel": lambda: mma_matmul(*a, *b),
        "float32 BLAS (NumPy)": lambda: x @ y.T,
    }
    times = harness.interleave(candidates, 3 if quick else 15, warm=2)
    times |= harness.interleave({"nvfp4viz, NumPy path": lambda: mma_matmul(*a, *b, path="numpy")}, 2, warm=0)
    steps = m * n * k // 64
    per_step = scalar_seconds_per_step(a, b, 20 if quick else SCALAR_STEPS)
    kernel, blas = (statistics.median(times[name]) for name in list(times)[:2])
    rows = harness.rows_from(times, None, "float32 BLAS (NumPy)")
    scalar = per_step * steps
    rows.append(harness.Row("scalar reference (extrapolated)", scalar, scalar, scalar, None, blas / scalar))
    return harness.Section(
        f"Tensor-core product {m}x{n}x{k}",
        f"NVFP4, all BLAS threads, our two. {steps:,} steps of 64 products; the scalar reference was timed on single "
        "steps and multiplied. Kernel and NumPy path gave equal bits.",
        rows,
        "float32 BLAS (NumPy)",
        [
            harness.Goal("kernel, times the scalar reference", scalar / kernel, SCALAR_GOAL),
            harness.Goal("kernel, multiple of the float32 BLAS time", kernel / blas, BLAS_GOAL, at_most=True),
        ],
    )


def compare_small(quick: bool) -> harness.Section:
    """What generation asks for: few rows, each with an expert of its own, K = N = 128."""
    from nvfp4viz.quant import mma_grouped, mma_matmul

    rng = np.random.default_rng(1)
    experts = [operand(rng, 128, 128) for _ in range(32)]
    weights, scales = (np.stack(part) for part in zip(*experts, strict=True))
    candidates = {}
    for rows in (1, 4, 16):
        a = operand(rng, rows, 128)
        candidates[f"{rows} x 128 x 128, one weight"] = lambda a=a: mma_matmul(*a, *experts[0])
    for rows in (4, 16, 64):
        a, chosen = operand(rng, rows, 128), rng.integers(0, 32, rows)
        candidates[f"{rows} rows, 32 experts of 128 x 128"] = lambda a=a, c=chosen: mma_grouped(*a, c, weights, scales)
    times = harness.interleave(candidates, 5 if quick else 200, warm=5)
    return harness.Section("Small products, as in token generation", "One call from Python.", harness.rows_from(times))


def measure(quick: bool) -> list[harness.Section]:
    return [compare_large(quick), compare_small(quick)]


if __name__ == "__main__":
    harness.main(measure)
