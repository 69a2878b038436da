"""A layer's nine steps on a page: a recorded pair of runs in, drawn and scrubbed in the browser.

Everything is sent once, as bits.  The browser moves rows, looks up decoded codes and writes floats; step and route go
from there into the address, and nothing comes back to the server until the reader changes what is computed.
"""

from __future__ import annotations

import base64
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import streamlit as st

from nvfp4viz.figures import dataflow as facts
from nvfp4viz.formats import decode_e2m1, decode_e4m3
from nvfp4viz.moe import round_bf16
from nvfp4viz.moe.steps import STEPS
from nvfp4viz.ui.components import load
from nvfp4viz.ui.i18n import lang, t
from nvfp4viz.ui.numbers import exact
from nvfp4viz.ui.story_chain import f32
from nvfp4viz.ui.tensor_core_lab import subscript
from nvfp4viz.ui.text import table

if TYPE_CHECKING:
    from nvfp4viz.moe import ExpertsTrace, W4A4Experts
    from nvfp4viz.serving.twins import LayerTwins
    from nvfp4viz.ui.state import View

_COMPONENT = load("dataflow", "steps")
_PAGE = "dataflow"
# Marks of a row at a step, the gravest first.
SAME, DIFFERS, ZERO, NAN = ".", "≠", "0", "N"
OPENING = STEPS.index("permute") + 1
"""The step, from 1, that the covered picture opens at: rows lie by expert, and no scale has been read."""
_SCALE = {"quantize_1": "÷", "gemm_1": "×", "quantize_2": "÷", "gemm_2": "×"}
"""What a step does with its expert's ``input_scale``: the encode scale is one over it, alpha has it as a factor."""


def dataflow_lab(view: View, twins: LayerTwins, *, covered: bool) -> None:
    """Draw the layer; while `covered`, the faulty run is neither shown nor sent; the healthy one has both boards."""
    # Gone when the page is started over, and then another: the component goes back to where it opens.
    epoch = st.session_state.setdefault(f"{_PAGE}.epoch", time.monotonic_ns())
    _COMPONENT(
        key="dataflow_lab",
        data={
            "picture": picture(twins, covered=covered),
            "text": table(lang(), f"{_PAGE}.lab") | {"comma": t("ui.comma")},
            "epoch": str(epoch),
            "opening": OPENING,
            "step": view["step"],
            "route": view["route"],
            "defaults": {"step": first_step(twins, covered=covered), "route": facts.first_bad_route(twins)},
        },
    )


def first_step(twins: LayerTwins, *, covered: bool) -> int:
    """The step, from 1, that is shown until the reader chooses one: once uncovered, where the runs part."""
    return OPENING if covered else twins.comparison.first_difference or OPENING


def picture(twins: LayerTwins, *, covered: bool) -> dict[str, Any]:
    """The runs as the browser draws them; see `tensors` for the arrays."""
    plan = twins.healthy.dispatch
    other = _rows_that_differ(twins)
    return {
        "covered": covered,
        "topK": plan.ids.shape[1],
        "tokens": [
            # A special token's name is long; its place is the first anyway.
            {"text": name.strip("<>") if len(name) > 1 else name, "sub": subscript(position)}
            for position, name in enumerate(facts.token_names(twins))
        ],
        "experts": [_expert(twins, int(expert), covered) for expert in np.unique(plan.row_expert)],
        "routes": _routes(twins),
        "steps": _steps(twins, covered),
        "marks": None if covered else marks(twins),
        "first": None if covered else twins.comparison.first_difference,
        "firstNan": None if covered else twins.comparison.first_nan,
        "healthy": tensors(twins.healthy, np.arange(plan.rows)),
        "faulty": None if covered else {"rows": other.tolist(), **tensors(twins.faulty, other)},
        "values": {
            "e2m1": [exact(value) for value in decode_e2m1(np.arange(16, dtype=np.uint8))],
            "e4m3": [exact(value) for value in decode_e4m3(np.arange(256, dtype=np.uint8))],
        },
    }


def tensors(trace: ExpertsTrace, rows: np.ndarray) -> dict[str, str]:
    """The bits of the chosen permuted rows, little-endian in base64: ``x``, ``c1``, ``c2``, ``c3`` BF16, ``packed1``,
    ``scales1``, ``packed2``, ``scales2`` bytes, ``acc1``, ``acc2`` float32; and ``out`` BF16 of every token."""
    first, second = trace.input, trace.intermediate
    assert first.packed is not None
    assert first.scales is not None
    assert second.packed is not None
    assert second.scales is not None
    by_row = {
        "x": first.values,
        "packed1": first.packed,
        "scales1": first.scales,
        "acc1": trace.acc1,
        "c1": trace.c1,
        "c2": second.values,
        "packed2": second.packed,
        "scales2": second.scales,
        "acc2": trace.acc2,
        "c3": trace.c3,
    }
    chosen = {name: values[rows] for name, values in by_row.items()} | {"out": trace.out}
    return {name: base64.b64encode(values.tobytes()).decode("ascii") for name, values in chosen.items()}


def _rows_that_differ(twins: LayerTwins) -> np.ndarray:
    """Permuted rows for which any kept tensor has other bits: the faulty run's other rows are the healthy one's."""
    found = np.zeros(twins.healthy.dispatch.rows, np.bool_)
    for name in ("acc1", "c1", "acc2", "c3"):
        found |= _differ(getattr(twins.healthy, name), getattr(twins.faulty, name))
    for name in ("input", "intermediate"):
        for part in ("values", "packed", "scales"):
            a, b = (getattr(getattr(trace, name), part) for trace in (twins.healthy, twins.faulty))
            found |= _differ(a, b)
    return np.flatnonzero(found)


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = [np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1) for values in (a, b)]
    return np.asarray((bits[0] != bits[1]).any(axis=1))


def marks(twins: LayerTwins) -> list[str]:
    """One sign a route, one text a step."""
    found = twins.comparison
    signs = np.full(found.differs.shape, SAME)
    signs[found.differs] = DIFFERS
    signs[found.differs & found.zero] = ZERO
    signs[found.nan] = NAN
    return ["".join(row) for row in signs]


def _expert(twins: LayerTwins, expert: int, covered: bool) -> dict[str, Any]:
    plan = twins.healthy.dispatch
    return {
        "id": expert,
        "missing": expert in twins.missing and not covered,
        "offset": int(plan.expert_offsets[expert]),
        "end": int(plan.expert_offsets[expert + 1]),
        "scaleOffset": int(plan.blockscale_offsets[expert]),
        "sizes1": " × ".join(map(str, plan.problem_sizes1[expert].tolist())),
        "sizes2": " × ".join(map(str, plan.problem_sizes2[expert].tolist())),
        "healthy": _scales(twins.healthy_experts, expert),
        "faulty": None if covered else _scales(twins.faulty_experts, expert),
    }


def _scales(experts: W4A4Experts, expert: int) -> dict[str, str]:
    return {name: f32(getattr(experts, name)[expert]) for name in ("a1_gscale", "g1_alphas", "a2_gscale", "g2_alphas")}


def _routes(twins: LayerTwins) -> list[dict[str, Any]]:
    plan, weights = twins.healthy.dispatch, twins.healthy.weights
    visited = np.unique(plan.row_expert).tolist()
    return [
        {
            "token": t,
            "rank": j,
            "expert": visited.index(int(plan.ids[t, j])),
            "row": int(plan.c_map[t * plan.ids.shape[1] + j]),
            "weight": f32(weights[t, j]),
            "rounded": _bf16(round_bf16(weights[t : t + 1, j])),
        }
        for t in range(plan.ids.shape[0])
        for j in range(plan.ids.shape[1])
    ]


def _bf16(value: np.ndarray) -> str:
    return f"{exact(float(value[0]))}  0x{int(value.view(np.uint16)[0]):04X}"


def _steps(twins: LayerTwins, covered: bool) -> list[dict[str, str]]:
    rows, hidden = twins.healthy.input.values.shape
    inner = twins.healthy.intermediate.values.shape[1]
    tokens, top_k = twins.healthy.dispatch.ids.shape
    values = {
        "tokens": tokens,
        "k": top_k,
        "rows": rows,
        "hidden": hidden,
        "inner": inner,
        "double": 2 * inner,
        "hidden_bytes": hidden // 2,
        "hidden_blocks": hidden // 16,
        "inner_bytes": inner // 2,
        "inner_blocks": inner // 16,
        "experts": len(np.unique(twins.healthy.dispatch.row_expert)),
    }
    made = []
    for step, count in zip(STEPS, facts.counts(twins), strict=True):
        name = f"{_PAGE}.steps.{step}"
        said = "covered" if covered else "tokens" if step == "sum" else "rows"
        made.append(
            {
                "name": t(f"{name}.name"),
                "scale": _SCALE.get(step, ""),
                "words": t(f"{name}.words", **values),
                "shape": t(f"{name}.shape", **values),
                "said": t(f"{_PAGE}.said.{said}", **({} if covered else count)),
            }
        )
    return made
