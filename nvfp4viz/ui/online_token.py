"""Scales per token: what they need, what they run, and a row of zeros; a part of the page on online quantisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import streamlit as st

from nvfp4viz.formats import E2M1, E4M3
from nvfp4viz.model.corpus import DEMO_PROMPTS
from nvfp4viz.quant import per_token
from nvfp4viz.serving.backends import BACKENDS
from nvfp4viz.serving.quant_config import VLLM
from nvfp4viz.ui import caches, predict
from nvfp4viz.ui.loading_parts import HOLED, PROMPTS, TOKENS, quoted
from nvfp4viz.ui.numbers import exact, four, hex_byte
from nvfp4viz.ui.online_parts import PAGE
from nvfp4viz.ui.pick import pick_one

if TYPE_CHECKING:
    from nvfp4viz.ui.lesson import Lesson

FAMILY = 100
"""Compute capability family that vLLM asks for; `numerics-vllm.md` section 8."""
TOKEN_BACKEND = "vllm-flashinfer-trtllm"
ROWS = ("ordinary", "tiny", "zero")


def token_part(page: Lesson) -> None:
    """One scale a row: what it needs, what it runs, and what a row of zeros becomes."""
    if not _zero_row(page):
        return
    view = page.view
    st.selectbox(page.t("token.prompt"), PROMPTS, format_func=lambda name: page.t(f"prompt.{name}"), **view.widget("p"))
    rows = []
    for backend, by_token in (("vllm-cutlass", False), (TOKEN_BACKEND, True)):
        build = caches.Build(HOLED, backend=backend, per_token=by_token)
        answer = caches.generation(build, DEMO_PROMPTS[view["p"]], TOKENS).generation
        scales = caches.served(build).scales_of(0).w13_input_scale
        rows.append((page.t(f"token.{'on' if by_token else 'off'}"), quoted(answer.text), backend, _spread(scales)))
    page.table(("setting", "answer", "backend", "input_scales"), rows)
    page.finding(
        "token.seen",
        base=exact(float(per_token.BASE)),
        product=exact(E2M1.max_value * E4M3.max_value),
        flag=next(info.flag for info in BACKENDS.values() if info.per_token),
    )
    page.prose("token.text", vllm=VLLM, one=exact(1.0), family=FAMILY)
    page.heading("zero.heading")
    cases = per_token.token_cases()
    made = {version: per_token.quantize_tokens(cases, version) for version in per_token.VERSIONS}
    pick_one(page, "row", ROWS, label="zero.row", texts="row")
    row = ROWS.index(view["row"])
    page.table(
        ("version", ">decode", ">encode", ">byte", ">last_codes", "nan"),
        [
            (
                page.t(f"version.{version.replace('-', '_').replace('.', '_')}"),
                four(one.decode[row]),
                four(one.encode[row]),
                f"`{hex_byte(one.scales[row, -1])}`",
                f"`{' '.join(f'{int(code):X}' for code in one.codes[row, -4:])}`",
                page.t("yes" if np.isnan(one.decoded[row]).any() else "no"),
            )
            for version, one in made.items()
        ],
    )
    page.prose("zero.text")


def _spread(scales: npt.NDArray[np.float32]) -> str:
    low, high = float(scales.min()), float(scales.max())
    return exact(low) if low == high else f"{four(low)} … {four(high)}"


def token_rows() -> list[dict[str, object]]:
    """Every version on the three rows."""
    cases = per_token.token_cases()
    return [
        {
            "version": version,
            "row": ROWS[row],
            "decode_scale": float(one.decode[row]),
            "encode_scale": float(one.encode[row]),
            "block_scale_bytes": " ".join(hex_byte(byte) for byte in one.scales[row].tolist()),
            "codes": "".join(f"{int(code):X}" for code in one.codes[row]),
            "holds_nan": bool(np.isnan(one.decoded[row]).any()),
        }
        for version in per_token.VERSIONS
        for one in [per_token.quantize_tokens(cases, version)]
        for row in range(len(ROWS))
    ]


def _zero_row(page: Lesson) -> bool:
    """Asked: which versions turn a row of zeros into NaN?"""
    cases = per_token.token_cases()[-1:]
    nan = tuple(v for v in per_token.VERSIONS if per_token.quantize_tokens(cases, v).nan_rows)
    answers = {(): "none", per_token.VERSIONS[:2]: "fast", per_token.VERSIONS[:1]: "old", per_token.VERSIONS: "all"}
    return predict.ask(
        f"{PAGE}.predict.zero",
        tuple(answers.values()),
        answer=answers[nan],
        nan=len(nan),
        versions=len(per_token.VERSIONS),
    )
