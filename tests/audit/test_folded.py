"""Sound files whose second-level weight scales are too small for the backend that folds them into the block scales."""

import numpy as np
import pytest

from nvfp4viz import formats
from nvfp4viz.audit import audit, describe
from tests.audit.layouts import EXPERTS, LAYOUTS
from tests.audit.reading import found

B12X = "vllm-flashinfer-b12x"
SCALED = {
    name: layout for name, layout in LAYOUTS.items() if layout.block == "NVFP4" and "weight_scale_2" in layout.roles
}
# What the product with E4M3's largest number becomes: nothing, a number of one to three bits, a normal one.
OUTCOMES = {2e-6: "zero", 3e-6: "degraded", 3e-5: "degraded", 3.6e-5: "safe", 1e-3: "safe"}


def scaled(layout, value, kinds=None, who=range(EXPERTS)):
    tensors = layout.tensors()
    for kind in kinds or layout.kinds:
        for expert in who:
            layout.put(tensors, expert, kind, "weight_scale_2", layout.stored(np.float32(value)))
    return audit(layout.open(tensors))


@pytest.mark.parametrize("value", OUTCOMES)
@pytest.mark.parametrize("id", SCALED)
def test_block_scales_that_the_second_level_makes_too_small(id, value):
    layout, outcome = SCALED[id], OUTCOMES[value]
    report = scaled(layout, value)
    assert [row for row in found(report) if row[0].startswith("scale.")] == []
    largest = formats.decode_e4m3(formats.encode_e4m3(np.float32([value]) * np.float32(448)))[0]
    assert ("zero" if largest == 0 else "degraded" if largest < 2**-6 else "safe") == outcome
    for one in report.backends:
        if one.name == B12X and one.outcome not in ("unsupported", "load-error"):
            assert one.outcome == outcome
            assert one.possible == (("degraded", "zero") if outcome == "degraded" else ())
            assert one.layers == (() if outcome == "safe" else (0,))
        elif one.name != B12X:
            assert not one.text.startswith("why.folded")
    if outcome != "safe":
        [one] = [one for one in report.backends if one.name == B12X]
        for language in ("en", "zh"):
            assert one.outcome in ("unsupported", "load-error") or "E4M3" in describe(one, language)[0]


@pytest.mark.parametrize("kinds", [("gate", "up"), ("down",)], ids="/".join)
def test_the_experts_are_named(kinds):
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for kind in layout.kinds:
        for expert in range(EXPERTS):
            small = expert == 3 and kind in kinds
            layout.put(tensors, expert, kind, "weight_scale_2", np.float32(3e-5 if small else 6e-5))
    [one] = [one for one in audit(layout.open(tensors)).backends if one.name == B12X]
    assert (one.text, one.scope, one.params["experts"]) == ("why.folded.degraded", "experts", "3")
