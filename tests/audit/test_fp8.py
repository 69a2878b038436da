"""FP8 modules around four-bit experts: the shape of their block scales, against the configuration and by itself."""

import numpy as np
import pytest

from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import memory_checkpoint
from tests.audit.config_faults import fp8_beside, section_of, with_section
from tests.audit.families import FAMILIES
from tests.audit.layouts import ALLOWED, LAYOUTS, typed, with_quant
from tests.audit.reading import found, outcomes
from tests.audit.test_families import changed
from tests.audit.test_shapes import refused

DSV4 = "layers.0.ffn.shared_experts.w1"
ATTENTION = "model.layers.0.linear_attn.out_proj"


def fp8(name, weight, scale, suffix="weight_scale", dtype="F32"):
    bits = typed(np.ones(scale, np.float32) if dtype == "F32" else np.full(scale, 120, np.uint8), dtype)
    return {f"{name}.weight": typed(np.full(weight, 0x38, np.uint8), "F8_E4M3"), f"{name}.{suffix}": bits}


def beside(id, name, weight, scale, *args, **changes):
    layout = LAYOUTS[id]
    return audit(layout.open({**layout.tensors(), **fp8(name, weight, scale, *args)}, **changes))


@pytest.mark.parametrize("id", LAYOUTS)
def test_one_block_has_one_scale_in_every_layout(id):
    layout = LAYOUTS[id]
    assert found(audit(layout.open({**layout.tensors(), **fp8_beside(layout, 1, 1)}))) == []
    for shape in ((128, 4), (2, 1), (1, 2)):
        report = audit(layout.open({**layout.tensors(), **fp8_beside(layout, *shape)}))
        assert found(report) == [("block-scale.group", "error", 0, None, None)]
        assert refused(report)


@pytest.mark.parametrize("id", ["DeepSeek V4", "DeepSeek V4, U8", "DeepSeek V4, three formats"])
@pytest.mark.parametrize(
    ("weight", "good", "bad"),
    [
        ((256, 384), (2, 3), (3, 2)),
        ((256, 384), (2, 3), (256, 12)),
        ((200, 130), (2, 2), (1, 1)),
        ((256, 256), (2, 2), (1,)),
        ((256, 256), (2, 2), (256, 1)),
        ((32, 64), (1, 1), (128, 4)),
        ((32, 64), (), (2,)),
    ],
)
def test_the_configuration_says_the_block(id, weight, good, bad):
    name = "layers.0.attn.wo_a"
    assert found(beside(id, name, weight, good, "scale", "F8_E8M0")) == []
    report = beside(id, name, weight, bad, "scale", "F8_E8M0")
    assert found(report) == [("block-scale.group", "error", 0, None, None)]
    [item] = [one for one in report.findings if one.code == "block-scale.group"]
    assert item.text == "block-scale.group.fp8"
    assert item.tensors == (f"{name}.scale",)
    assert (item.params["weight"], item.params["shape"], item.params["block"]) == (
        str(list(weight)), str(list(bad)), "128 × 128",
    )  # fmt: skip
    assert refused(report)


def test_a_shared_expert_of_deepseek_v4():
    report = beside("DeepSeek V4", DSV4, (64, 64), (128, 4), "scale", "F8_E8M0")
    assert found(report) == [("block-scale.group", "error", 0, None, None)]
    [item] = report.findings
    assert item.message == (
        "1 layer in FP8: [128, 4] scales do not fit a weight [64, 64] in the configuration's blocks of 128 × 128, "
        f"which have [1, 1]; first {DSV4}.scale."
    )


@pytest.mark.parametrize("size", [[64, 32], [128, 128], None, [128], "128"])
def test_other_block_sizes(size):
    layout = LAYOUTS["DeepSeek V4"]
    section = {**section_of(layout), "weight_block_size": size}
    changes = with_section(layout, section)
    due = (1, 2) if size == [64, 32] else (1, 1)
    for shape in ((1, 1), (1, 2)):
        tensors = {**layout.tensors(), **fp8(DSV4, (64, 64), shape, "scale", "F8_E8M0")}
        assert found(audit(layout.open(tensors, **changes))) == (
            [] if shape == due else [("block-scale.group", "error", 0, None, None)]
        )


@pytest.mark.parametrize(
    "shape",
    [(), (1,), (1, 1), (3,), (256,), (256, 1), (256, 12), (2, 3), (4, 6), (8, 12), (1, 2), (256, 3), (256, 24)],
)
def test_without_a_word_every_scheme_of_fp8_is_right(shape):
    assert found(beside("modelopt", ATTENTION, (256, 384), shape)) == []
    assert found(beside("compressed-tensors", ATTENTION, (256, 384), shape)) == []


@pytest.mark.parametrize("shape", [(4,), (384,), (1, 384), (3, 2), (2, 1), (2, 3, 1), (12, 256), (256, 11)])
def test_what_no_scheme_has(shape):
    for id in ("modelopt", "compressed-tensors", "Quark"):
        report = beside(id, ATTENTION, (256, 384), shape)
        assert found(report) == [("block-scale.group", "error", 0, None, None)]
        assert refused(report)


def test_parts_of_a_fused_module_may_begin_blocks_of_their_own():
    name = "model.layers.0.linear_attn.in_proj_qkvz"
    assert found(beside("modelopt", name, (320, 128), (4, 1))) == []
    assert found(beside("modelopt", name, (320, 128), (4, 2))) == [("block-scale.group", "error", 0, None, None)]


@pytest.mark.parametrize(("algo", "good", "bad"), [("MXFP8", (64, 2), (1, 1)), ("FP8", (1, 1), (64, 3))])
def test_what_an_allow_list_calls_it(algo, good, bad):
    layout = LAYOUTS["MIXED_PRECISION"]
    quant = {"quantization": {**section_of(layout), "quantized_layers": {**ALLOWED, ATTENTION: {"quant_algo": algo}}}}
    assert found(beside("MIXED_PRECISION", ATTENTION, (64, 64), good, quant=quant)) == []
    report = beside("MIXED_PRECISION", ATTENTION, (64, 64), bad, quant=quant)
    assert found(report) == [("block-scale.group", "error", 0, None, None)]


def test_the_same_fault_in_all_layers_is_one_finding():
    checkpoint = FAMILIES["DeepSeek-V4"]()
    wide = {name: typed(np.full((2, 2), 120, np.uint8), "F8_E8M0")
            for name in checkpoint.tensors if name.endswith("attn.wkv.scale")}  # fmt: skip
    report = audit(changed(checkpoint, replace=wide))
    assert found(report) == [("block-scale.group", "error", None, None, None)]
    assert report.findings[0].count == len(wide) == 3


def test_a_dense_model_in_fp8_has_it_too():
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    name = "model.layers.0.self_attn.q_proj"
    for shape, said in (((1, 1), []), ((128, 4), [("block-scale.group", "error", 0, None, None)])):
        tensors = fp8(name, (64, 64), shape, "weight_scale_inv")
        report = audit(memory_checkpoint(tensors, config=with_quant(section)))
        assert found(report) == said
        assert outcomes(report) == {}
