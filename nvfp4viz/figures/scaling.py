"""Records and figures about two-level scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from nvfp4viz.figures.words import superscript
from nvfp4viz.formats import BLOCK, E4M3, bf16_to_f32, f32_to_bf16
from nvfp4viz.quant import RECIPES
from nvfp4viz.quant.compare import E4M3_SATURATES
from nvfp4viz.quant.types import BlockTrace

BlockState = Literal["nan", "nan_lost", "zero", "dies", "subnormal", "saturates", "survives"]

# Blocks to start from; each shows something else.  The contested one was searched for: most recipes differ on it.
BLOCKS: dict[str, tuple[float, ...]] = {
    "typical": (0.53, -1.2, 0.08, 2.4, -0.31, 0.94, -2.1, 0.17, 1.4, -0.66, 0.02, -1.7, 0.79, 0.41, -0.13, 1.05),
    "outlier": (0.53, -1.2, 0.08, 24.0, -0.31, 0.94, -2.1, 0.17, 1.4, -0.66, 0.02, -1.7, 0.79, 0.41, -0.13, 1.05),
    "tiny": tuple(v * 2.0**-12 for v in (3, -1, 2, 0.5, -2, 1, 0, -3, 1.5, 2.5, -0.5, 1, -1.5, 0.25, 2, -2.5)),
    "huge": tuple(v * 2.0**10 for v in (3, -1, 2, 0.5, -2, 1, 0, -3, 1.5, 2.5, -0.5, 1, -1.5, 0.25, 2, -2.5)),
    "nan": (0.53, -1.2, math.nan, 2.4, -0.31, 0.94, -2.1, 0.17, 1.4, -0.66, 0.02, -1.7, 0.79, 0.41, -0.13, 1.05),
    "zero": (0.0,) * 16,
    "contested": (
        *(-2.890625, -1.4453125, -1.4453125, 0.8671875, 0.8671875, -3.46875, -0.578125, 2.03125),
        *(1.734375, -5.78125, 6.9375, -1.15625, 1.4453125, -0.8671875, -3.46875, -1.15625),
    ),
}
# The largest magnitude of the tensor that each block is thought to belong to.
TENSOR_AMAX = dict.fromkeys(BLOCKS, 12.0) | {"outlier": 32.0, "contested": 111.0}
# Stops of the sliders: doublings, and the values above.
AMAX_STOPS = tuple(sorted({2.0**k for k in range(-10, 15)} | set(TENSOR_AMAX.values())))
HEADROOM_FACTORS = tuple(2.0**k for k in range(-6, 19))


def sample_tensor(rows: int = 48, columns: int = 384, seed: int = 5) -> npt.NDArray[np.float32]:
    """Activations as an expert's second layer may see them: small, uneven, with a few outlier channels.

    Normal values of standard deviation 2^-8; each run of 16 is scaled by a power of two from 2^-5 to 1, three channels
    by another 64.  BF16 values, as float32.
    """
    rng = np.random.default_rng(seed)
    blocks = 2.0 ** rng.integers(-5, 1, (rows, columns // BLOCK))
    values = rng.standard_normal((rows, columns)) * 2.0**-8 * np.repeat(blocks, BLOCK, axis=1)
    values[:, rng.choice(columns, 3, replace=False)] *= 64
    return bf16_to_f32(f32_to_bf16(values.astype(np.float32)))


def block_state(trace: BlockTrace) -> BlockState:
    """What became of a block's scale: the byte it got, against the value that was asked for.

    ``dies``: the byte is 0, every element is lost.  ``saturates``: the byte is the largest although so much more was
    asked for that it is no rounding (`nvfp4viz.quant.compare.E4M3_SATURATES`).  ``zero``: there was nothing to lose.
    ``nan_lost``: an element was NaN, and only the codes of the block's other elements still mean what went in.
    ``subnormal``: fewer than three mantissa bits are left, so the scale itself is coarse.
    """
    asked = asked_scale(trace)
    if math.isnan(trace.scale):
        return "nan"
    if not trace.x.any():
        return "zero"
    if np.isnan(np.asarray(trace.x, np.float32)).any():
        return "nan_lost"
    if trace.scale == 0:
        return "dies"
    if abs(asked) > E4M3_SATURATES:
        return "saturates"
    return "subnormal" if abs(trace.scale) < E4M3.min_normal else "survives"


def asked_scale(trace: BlockTrace) -> float:
    """The block scale before it was rounded to E4M3."""
    return float(next(step.value for step in trace.steps if step.name == "scale"))


def power_of_two(exponent: float) -> str:
    """A power of two as a label.

    >>> power_of_two(-10)
    '2⁻¹⁰'
    """
    return f"2{superscript(round(exponent))}"


def gauge_of(trace: BlockTrace) -> dict[str, Any]:
    """Where the block's scale falls among the values of E4M3, as powers of two for drawing."""
    low, high = -14.0, 14.0
    smallest, normal, largest = (math.log2(v) for v in (E4M3.min_subnormal / 2, E4M3.min_normal, E4M3.max_value))
    beyond = math.log2(E4M3_SATURATES)
    asked = abs(asked_scale(trace))
    if math.isnan(asked):
        at = None
    else:
        at = low if asked == 0 else high if math.isinf(asked) else math.log2(asked)
    return {
        "from": low,
        "to": high,
        "value": at,
        "zones": [
            {"id": "dies", "from": low, "to": smallest},
            {"id": "subnormal", "from": smallest, "to": normal},
            {"id": "normal", "from": normal, "to": beyond},
            {"id": "saturates", "from": beyond, "to": high},
        ],
        "ticks": [
            {"power": smallest, "label": power_of_two(smallest)},
            {"power": normal, "label": power_of_two(normal)},
            {"power": 0.0, "label": "1"},
            {"power": largest, "label": f"{E4M3.max_value:g}"},
        ],
    }


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """One implementation's answer for a block, against the first one's."""

    name: str
    standing: str
    scale_byte: int
    byte_differs: bool
    codes: tuple[int, ...]
    code_differs: tuple[bool, ...]
    worst_error: float


def recipe_rows(traces: Mapping[str, BlockTrace], against: str = "vllm-cuda") -> tuple[RecipeRow, ...]:
    """Rows of a table in which what differs from one implementation can be marked."""
    first = traces[against]
    order = [against, *(name for name in traces if name != against)]
    return tuple(
        RecipeRow(
            name,
            RECIPES[name].standing,
            traces[name].scale_byte,
            traces[name].scale_byte != first.scale_byte,
            tuple(int(code) for code in traces[name].codes),
            tuple((traces[name].codes != first.codes).tolist()),
            worst_error(traces[name]),
        )
        for name in order
    )


def outcomes(rows: Sequence[RecipeRow]) -> int:
    """How many different answers there are."""
    return len({(row.scale_byte, row.codes) for row in rows})


def worst_error(trace: BlockTrace) -> float:
    """The largest distance between what went in and what comes back, over the elements that were numbers."""
    numbers = np.abs(trace.error[~np.isnan(np.asarray(trace.x, np.float32))])
    return float(numbers.max()) if numbers.size else math.nan


def trace_rows(trace: BlockTrace) -> list[dict[str, object]]:
    """The block's elements as rows to download."""
    return [
        {
            "element": index,
            "x": float(trace.x[index]),
            "scaled": float(trace.products[index]),
            "code": int(trace.codes[index]),
            "value": float(trace.element_values[index]),
            "read_back": float(trace.decoded[index]),
            "error": float(trace.error[index]),
        }
        for index in range(len(trace.x))
    ]


def step_rows(trace: BlockTrace) -> list[dict[str, object]]:
    """The block's steps as rows to download."""
    return [
        {"step": step.name, "formula": f"{step.symbol} = {step.formula}", "value": float(step.value), "bits": step.bits}
        for step in trace.steps
    ]
