"""Groups without ``input_activations`` beside stored activation scales: vLLM ignores these, and others read them."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from tests.audit.layouts import LAYOUTS
from tests.audit.reading import found, outcomes

IDS = [
    id for id, layout in LAYOUTS.items()
    if layout.with_input and layout.block == "NVFP4" and layout.quant
    and layout.quant["quantization"]["quant_algo"] == "NVFP4" and "input_scale" in layout.suffixes
]  # fmt: skip
WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
GROUPS = {
    "null": {"weights": WEIGHTS, "input_activations": None, "targets": ["Linear"]},
    "absent": {"weights": WEIGHTS, "targets": ["Linear"]},
    "said": {"weights": WEIGHTS, "input_activations": WEIGHTS, "targets": ["Linear"]},
}
WARNED = ("config.conflict", "warn")


def report_of(id, group, tensors=None):
    layout = LAYOUTS[id]
    section = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_scheme": None,
        "ignore": layout.quant["quantization"]["exclude_modules"], "config_groups": {"group_0": GROUPS[group]},
    }  # fmt: skip
    return audit(layout.open(tensors, config={**layout.config, "quantization_config": section}, quant=None))


def test_what_is_asked():
    assert {"modelopt", "projection-major", "w1/w2/w3", "non-gated", "stacked", "fused"} <= set(IDS)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("id", IDS)
def test_all_scales_stored(id, group):
    report = report_of(id, group)
    if group == "said":
        assert found(report) == []
        assert set(outcomes(report).values()) == {"safe"}
        return
    assert [row[:2] for row in found(report)] == [WARNED]
    [item] = [one for one in report.findings if one.code == "config.conflict"]
    assert item.text == "config.conflict.promoted"
    for language in ("en", "zh"):
        assert item.tensors[0] in describe(item, language)[0]
    for one in report.backends:
        family = FAMILIES[one.name]
        promoted = family.engine == "vllm" and "W4A16" not in family.schemes
        assert one.outcome == ("unsupported" if promoted else "safe")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("value", [None, np.nan])
@pytest.mark.parametrize("id", IDS)
def test_a_bad_one_is_found_for_those_who_read_it(id, value, group):
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    if value is not None:
        layout.put(tensors, 3, "down", "input_scale", value)
    elif layout.arrangement == "expert":
        del tensors[layout.name(3, "down", "input_scale")]
    else:
        del tensors[layout.name(0, "down", "input_scale")]
    report = report_of(id, group, tensors)
    bad = ("scale.missing" if value is None else "scale.nan", "backend")
    assert sorted(row[:2] for row in found(report)) == sorted([bad, *([] if group == "said" else [WARNED])])
    said = outcomes(report)
    assert said["vllm-marlin"] in ("safe", "ignored")
    assert said["sglang-generic"] == ("undefined" if value is None else "nan")
    assert said["tensorrt-llm"] == ("load-error" if value is None else "nan")
    assert (said["vllm-cutlass"] == "unsupported") == (group != "said")
