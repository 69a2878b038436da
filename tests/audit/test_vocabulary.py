"""Every case has a test, every code can be triggered, and no code is outside the vocabulary."""

import re
from pathlib import Path

import numpy as np
import pytest

from nvfp4viz.audit import audit
from nvfp4viz.audit.texts import finding_texts
from nvfp4viz.checkpoint import MemorySource, file_bytes, tensor
from tests.audit.fault_matrix import FAULTS, Case
from tests.audit.layouts import LAYOUTS, bf16, linear
from tests.audit.test_cases_config import of_width
from tests.audit.test_shapes import resized
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, opened

HERE = Path(__file__).parent
# Case numbers of the specification; several reports share one.
CASES = range(1, 49)

# The vocabulary of findings, less those of files (`container.*`: tests/checkpoint) and of `--deep`.
CODES = {
    "scale.missing", "scale.zero", "scale.nan", "scale.inf", "scale.negative", "scale.subnormal", "scale.outlier",
    "scale.filled", "scale.identity", "scale.convention", "scale.pair-mismatch", "scale.shape", "block-scale.group",
    "weight.unquantised", "weight.shape", "expert.absent", "expert.gap", "expert.rank-hole", "scheme.pre-quant-scale",
    "format.ambiguous", "scheme.weight-only", "scheme.mislabelled", "scheme.mixed-layer", "config.absent",
    "config.conflict", "config.incomplete", "config.invalid", "config.excluded-but-quantised",
    "config.unquantised-not-excluded", "draft.unquantised", "kv.zero", "kv.invalid", "kv.identity", "kv.absent",
    "parallel.group-split", "parallel.alignment", "loader.note", "audit.partial",
}  # fmt: skip
DEEP = {
    "block-scale.nan", "block-scale.negative", "block-scale.exponent-cast", "weight.all-zero",
    "weight.duplicate-expert", "weight.saturated",
}  # fmt: skip


def test_every_case_has_a_test():
    text = "\n".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
    numbers = {int(n) for name in re.findall(r"def test_((?:\d\d_)+)", text) for n in name.strip("_").split("_")}
    assert numbers == set(CASES)


def one_short_expert(layout):
    return layout.open(resized(layout, layout.tensors(), "down", 5, 32, 32))


ELSEWHERE = {
    "config.incomplete": lambda: opened(base(), CONFIG, {"quantization": {"quant_algo": "NVFP4"}}),
    "config.invalid": lambda: MemorySource({"model.safetensors": file_bytes(base()), "config.json": b"{,}"}),
    "kv.absent": lambda: opened(
        base(), CONFIG, {"quantization": {**QUANT["quantization"], "kv_cache_quant_algo": "FP8"}}
    ),
    "parallel.alignment": lambda: of_width(80),
    "weight.shape": lambda: one_short_expert(LAYOUTS["modelopt"]),
    "loader.note": lambda: LAYOUTS["stacked"].open(),
    "audit.partial": lambda: opened({"lm_head.weight": bf16(4, 4)}, CONFIG, None),
    "scheme.weight-only": lambda: LAYOUTS["W4A16"].open(),
    "format.ambiguous": lambda: LAYOUTS["DeepSeek V4, U8"].open(),
}


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_can_be_triggered(code):
    if code == "parallel.group-split":
        report = audit(LAYOUTS["DeepSeek V4"].open(), tp=2)
    elif code in ELSEWHERE:
        report = audit(ELSEWHERE[code]())
    else:
        layout, case = next(
            (layout, case)
            for build in FAULTS.values()
            for layout in LAYOUTS.values()
            if isinstance(case := build(layout), Case) and code in {item[0] for item in case.expected}
        )
        report = case.report(layout)
    assert code in {item.code for item in report.findings}


def test_no_text_is_left_over():
    """Every text of a finding can be reached: its code is in the vocabulary."""
    for key in finding_texts("en"):
        # One text for all classes of value that an ordinary layer, FP8, or up beside its gate can hold.
        if not key.startswith(("why.", "scale.value.linear", "scale.value.fp8", "scale.value.up")):
            code = ".".join(key.split(".")[:2])
            assert code in CODES | DEEP, key


# Texts that no other test reaches.


@pytest.mark.parametrize(
    ("checkpoint", "options", "text"),
    [
        (lambda: LAYOUTS["Inkling"].open(), {}, "audit.partial.guessed"),
        (
            lambda: opened({**base(), **base(block="model.vision.layers.{}.experts".format)}),
            {},
            "audit.partial.towers",
        ),
        (lambda: LAYOUTS["modelopt"].open(), {"ep": 3}, "parallel.alignment.experts"),
        (lambda: LAYOUTS["gpt-oss"].open(), {"tp": 2}, "parallel.alignment.blocks"),
        (
            lambda: opened({**base(), **linear("x.qkv"), "x.qkv.input_scale": tensor(np.ones(3, np.float32))}),
            {},
            "scale.shape.several",
        ),
        (
            lambda: opened({**base(), **linear("x.o_proj"), "x.o_proj.input_scale": tensor(np.ones(5, np.float32))}),
            {},
            "scale.shape.linear",
        ),
    ],
)
def test_texts_of_rare_findings(checkpoint, options, text):
    assert text in {item.text for item in audit(checkpoint(), **options).findings}
