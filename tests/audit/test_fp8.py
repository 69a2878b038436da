"""FP8 modules around four-bit experts: the shape of their block scales, against the configuration and by itself."""

import numpy as np
import pytest

from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import memory_checkpoint
from tests.audit.config_faults import fp8_beside, section_of, with_section
from tests.audit.families import FAMILIES
from tests.audit.layouts import ALLOWED, LAYOUTS, packed, typed, with_quant
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


@pytest.mark.parametrize(
    ("algo", "good", "bad"),
    [
        ("MXFP8", (64, 2), (1, 1)),
        ("FP8", (1, 1), (64, 3)),
        ("FP8", (), (64, 3)),
        ("FP8_PB_WO", (1, 1, 1, 1), (64, 1)),
        ("FP8_PB_WO", (1, 1), (2, 1, 1, 1)),
        ("FP8_PER_CHANNEL_PER_TOKEN", (64,), (1, 1)),
        ("FP8_PER_CHANNEL_PER_TOKEN", (64, 1), ()),
    ],
)
def test_what_an_allow_list_calls_it(algo, good, bad):
    layout = LAYOUTS["MIXED_PRECISION"]
    quant = {"quantization": {**section_of(layout), "quantized_layers": {**ALLOWED, ATTENTION: {"quant_algo": algo}}}}
    assert found(beside("MIXED_PRECISION", ATTENTION, (64, 64), good, quant=quant)) == []
    report = beside("MIXED_PRECISION", ATTENTION, (64, 64), bad, quant=quant)
    assert found(report) == [("block-scale.group", "error", 0, None, None)]


@pytest.mark.parametrize("id", ["modelopt", "W4A16", "MIXED_PRECISION", "compressed-tensors"])
def test_modelopts_blocks_keep_the_axes_that_they_were_cut_along(id):
    """[out blocks, 1, in blocks, 1], as ModelOpt writes FP8_PB_WO and vLLM allocates it: no shape of a fault."""
    changes, wrong = {}, [("block-scale.group", "error", 0, None, None)]
    if id == "MIXED_PRECISION":
        # Its list says plain FP8, which is one number a tensor.
        assert found(beside(id, ATTENTION, (256, 384), (2, 1, 3, 1))) == wrong
        listed = {**ALLOWED, ATTENTION: {"quant_algo": "FP8_PB_WO"}}
        changes = {"quant": {"quantization": {**section_of(LAYOUTS[id]), "quantized_layers": listed}}}
    assert found(beside(id, ATTENTION, (256, 384), (2, 1, 3, 1), **changes)) == []
    for bad in ((2, 1, 2, 1), (1, 2, 1, 3), (2, 3, 1, 1)):
        assert found(beside(id, ATTENTION, (256, 384), bad, **changes)) == wrong


@pytest.mark.parametrize("nested", [True, False])
def test_an_algorithm_of_the_whole_file(nested):
    """A dense model in ModelOpt's FP8 by blocks."""
    name, body = "model.layers.0.self_attn.q_proj", {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]}
    flat = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]}
    for shape, said in (((2, 1, 3, 1), []), ((256, 1), [("block-scale.group", "error", 0, None, None)])):
        tensors = fp8(name, (256, 384), shape)
        files = {"config": {}, "hf_quant_config": {"quantization": body}} if nested else {"config": with_quant(flat)}
        report = audit(memory_checkpoint(tensors, **files))
        assert found(report) == said
        # What the list excludes is of another origin.
        tensors = fp8("lm_head", (256, 384), (256, 1))
        assert "block-scale.group" not in {item.code for item in audit(memory_checkpoint(tensors, **files)).findings}


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


# Routed experts in FP8: DeepSeek V4 -Base, V3 and Qwen's own FP8, compressed-tensors.

NAMED = {
    "layers.0.ffn.experts": ("scale", {"gate": "w1", "up": "w3", "down": "w2"}),
    "model.layers.0.mlp.experts": ("weight_scale_inv", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
ROWS = {"gate": (200, 384), "up": (200, 384), "down": (384, 200)}
WIDE = {"num_hidden_layers": 1, "hidden_size": 384, "moe_intermediate_size": 200, "num_experts": 4}
DUE = {"gate": (2, 3), "up": (2, 3), "down": (3, 2)}


def experts_in_fp8(prefix, suffix, disk, shapes, count=4):
    out = {}
    for expert in range(count):
        for kind, name in disk.items():
            out |= fp8(f"{prefix}.{expert}.{name}", ROWS[kind], shapes[kind], suffix)
    return out


def section(prefix, **more):
    base = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], **more}
    return {**WIDE, "quantization_config": base, **({"expert_dtype": "fp8"} if prefix.startswith("layers") else {})}


@pytest.mark.parametrize("prefix", NAMED)
def test_routed_experts_have_a_scale_for_each_of_their_blocks(prefix):
    suffix, disk = NAMED[prefix]
    sound = experts_in_fp8(prefix, suffix, disk, DUE)
    assert found(audit(memory_checkpoint(sound, config=section(prefix)))) == []
    for kind, bad in (("gate", (3, 2)), ("up", (1, 3)), ("down", (384, 2)), ("down", (1,)), ("gate", (4, 3))):
        name = f"{prefix}.2.{disk[kind]}"
        tensors = {**sound, **fp8(name, ROWS[kind], bad, suffix)}
        report = audit(memory_checkpoint(tensors, config=section(prefix)))
        assert found(report) == [("block-scale.group", "error", 0, kind, (2,))]
        [item] = [one for one in report.findings if one.code == "block-scale.group"]
        assert item.tensors == (f"{name}.{suffix}",)
        due = str(list(DUE[kind]))
        assert (item.params["weight"], item.params["shape"], item.params["expected"]) == (
            str(list(ROWS[kind])), str(list(bad)), due,
        )  # fmt: skip
        assert due in item.message
        assert "128 × 128" in item.message


@pytest.mark.parametrize("prefix", NAMED)
def test_an_expert_without_the_scale_that_the_others_have(prefix):
    suffix, disk = NAMED[prefix]
    sound = experts_in_fp8(prefix, suffix, disk, DUE)
    lost = {f"{prefix}.{expert}.{disk['up']}.{suffix}" for expert in (1, 3)}
    report = audit(memory_checkpoint({n: t for n, t in sound.items() if n not in lost}, config=section(prefix)))
    assert found(report) == [("scale.missing", "error", 0, "up", (1, 3))]
    [item] = [one for one in report.findings if one.code == "scale.missing"]
    assert set(item.tensors) == lost
    assert {one.text for one in report.findings if one.code == "audit.partial"} == {"audit.partial.fp8"}
    # Cast as they are, none has one; but by blocks of the configuration each should.
    cast = {name: item for name, item in sound.items() if not name.endswith(suffix)}
    config = section(prefix)
    report = audit(memory_checkpoint(cast, config=config))
    assert found(report) == [("scale.missing", "error", 0, kind, (0, 1, 2, 3)) for kind in ("gate", "up", "down")]
    del config["quantization_config"]["weight_block_size"]
    report = audit(memory_checkpoint(cast, config=config))
    assert found(report) == []
    # And it does not claim to have checked what is not there.
    assert {one.text for one in report.findings} == {"audit.partial.fp8.bare"}


def test_all_experts_of_a_layer_are_one_finding_a_projection():
    prefix = "layers.0.ffn.experts"
    suffix, disk = NAMED[prefix]
    tensors = experts_in_fp8(prefix, suffix, disk, {**DUE, "down": (6, 4)})
    report = audit(memory_checkpoint(tensors, config=section(prefix)))
    assert found(report) == [("block-scale.group", "error", 0, "down", (0, 1, 2, 3))]


@pytest.mark.parametrize("shape", [(), (1,), (200,), (200, 1), (200, 12), (2, 3), (13, 24)])
def test_experts_of_which_nothing_is_said_have_any_scheme_of_fp8(shape):
    prefix = "model.layers.0.mlp.experts"
    _, disk = NAMED[prefix]
    shapes = {"gate": shape, "up": shape, "down": DUE["down"]}
    config = {**WIDE, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    assert found(audit(memory_checkpoint(experts_in_fp8(prefix, "weight_scale", disk, shapes), config=config))) == []
    for bad in ((7, 3), (384,), (2,) * 3):
        report = audit(
            memory_checkpoint(experts_in_fp8(prefix, "weight_scale", disk, {**shapes, "up": bad}), config=config)
        )
        assert found(report) == [("block-scale.group", "error", 0, "up", (0, 1, 2, 3))]
        assert {item.text for item in report.findings if item.severity == "error"} == {
            "block-scale.group.fp8.any.experts"
        }


def test_modelopts_plain_fp8_is_one_number_a_tensor():
    prefix = "model.layers.0.mlp.experts"
    _, disk = NAMED[prefix]
    config = {**WIDE, "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}}
    for shape in ((), (1,), (1, 1)):
        sound = experts_in_fp8(prefix, "weight_scale", disk, dict.fromkeys(ROWS, shape))
        # That label means stored activation scales too.
        for module in [name.removesuffix(".weight") for name in sound if name.endswith(".weight")]:
            sound[f"{module}.input_scale"] = typed(np.float32(0.01).reshape(()), "F32")
        assert found(audit(memory_checkpoint(sound, config=config))) == []
    for bad in ((200,), (200, 1), (2, 3)):
        tensors = {**sound}
        for expert in range(4):
            tensors |= fp8(f"{prefix}.{expert}.{disk['up']}", ROWS["up"], bad)
        report = audit(memory_checkpoint(tensors, config=config))
        assert found(report) == [("block-scale.group", "error", 0, "up", (0, 1, 2, 3))]
    # A scale that each should have, and none has.
    cast = {name: item for name, item in sound.items() if not name.endswith("weight_scale")}
    report = audit(memory_checkpoint(cast, config=config))
    assert {row[:2] for row in found(report)} == {("scale.missing", "error")}


@pytest.mark.parametrize("prefix", NAMED)
def test_fp8_experts_that_are_not_there(prefix):
    """As for BF16 and four-bit ones: numbers with a gap, at the end, or one projection."""
    suffix, disk = NAMED[prefix]
    sound = experts_in_fp8(prefix, suffix, disk, DUE)
    for lost, said in (
        (f"{prefix}.1.", ("expert.gap", "error", 0, None, (1,))),
        (f"{prefix}.3.", ("expert.absent", "error", 0, None, (3,))),
        (f"{prefix}.1.{disk['up']}.", ("expert.absent", "error", 0, "up", (1,))),
        (f"{prefix}.1.{disk['down']}.", ("expert.absent", "error", 0, "down", (1,))),
    ):
        left = {name: item for name, item in sound.items() if not name.startswith(lost)}
        assert found(audit(memory_checkpoint(left, config=section(prefix)))) == [said]
    # Pruned on purpose: as many as the configuration says.
    left = {name: item for name, item in sound.items() if not name.startswith(f"{prefix}.1.")}
    assert found(audit(memory_checkpoint(left, config={**section(prefix), "num_experts": 3}))) == []


@pytest.mark.parametrize("scale", ["scale_inv", "scale", "weight_scale"])
@pytest.mark.parametrize(
    ("weight", "good", "bad"), [((4, 384, 256), (4, 3, 2), (4, 2, 3)), ((4, 200, 384), (4, 2, 3), (2, 3))]
)
def test_experts_in_one_tensor(scale, weight, good, bad):
    prefix = "model.layers.0.mlp.experts"
    for shape, said in ((good, []), (bad, [("block-scale.group", "error", 0, "gate_up", None)])):
        tensors = {
            f"{prefix}.gate_up_proj": typed(np.full(weight, 0x38, np.uint8), "F8_E4M3"),
            f"{prefix}.gate_up_proj_{scale}": typed(np.ones(shape, np.float32), "F32"),
        }
        assert found(audit(memory_checkpoint(tensors, config=section(prefix)))) == said
    # By the configuration's blocks it has some.
    del tensors[f"{prefix}.gate_up_proj_{scale}"]
    report = audit(memory_checkpoint(tensors, config=section(prefix)))
    assert found(report) == [("scale.missing", "error", 0, "gate_up", None)]
    [item] = [one for one in report.findings if one.code == "scale.missing"]
    assert item.tensors[0].startswith(f"{prefix}.gate_up_proj_")


def test_a_layer_of_fp8_experts_beside_four_bit_ones():
    """Mixed by layers: every load stops at the FP8 ones."""
    layout = LAYOUTS["MIXED_PRECISION"]
    prefix = "model.layers.1.mlp.experts"
    quant = {
        "quantization": {**section_of(layout), "quantized_layers": {**ALLOWED, prefix: {"quant_algo": "FP8_PB_WO"}}}
    }
    shapes = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    for bad in (None, (3, 4)):
        tensors = layout.tensors()
        for expert in range(8):
            for kind, disk in NAMED["model.layers.0.mlp.experts"][1].items():
                scale = bad if bad and (expert, kind) == (5, "up") else (1, 1)
                tensors |= fp8(f"{prefix}.{expert}.{disk}", shapes[kind], scale)
        report = audit(layout.open(tensors, quant=quant, config={**layout.config, "num_hidden_layers": 2}))
        assert found(report) == ([("block-scale.group", "error", 1, "up", (5,))] if bad else [])
        assert refused(report) == bool(bad)


# compressed-tensors: how the groups of FP8 weights say that they are cut.

STRATEGIES = [
    # what the group says, scales that it means, scales that it does not
    ({"strategy": "tensor"}, [(), (1,), (1, 1)], [(256, 1), (2, 3), (256,), (3,)]),
    ({"strategy": "channel"}, [(256, 1), (256,)], [(), (1,), (384,), (2, 3), (256, 3)]),
    ({"strategy": "block", "block_structure": [128, 128]}, [(2, 3)], [(3, 2), (256, 1), (1,), (4, 6)]),
    ({"strategy": "block", "block_structure": "64x32"}, [(4, 12)], [(2, 3), (12, 4)]),
    ({"strategy": "group", "group_size": 32}, [(256, 12)], [(256, 24), (256, 1), (2, 3)]),
    ({"strategy": "CHANNEL"}, [(256, 1)], [(1,)]),
    # Absent, the package takes it from the size of the groups.
    ({}, [(1,), ()], [(256, 1)]),
    ({"group_size": -1}, [(256, 1)], [(1,)]),
    ({"group_size": 128}, [(256, 3)], [(1,)]),
    # Whatever is not known here says nothing: any shape of FP8.
    ({"strategy": "attn_head"}, [(1,), (256, 1), (2, 3), (256, 12)], [(7, 5)]),
    ({"strategy": "block"}, [(1,), (256, 1), (2, 3)], [(7, 5)]),
    ({"strategy": "block", "block_structure": [128]}, [(1,), (256, 1), (2, 3)], [(7, 5)]),
    ({"strategy": "block", "block_structure": "axb"}, [(1,), (256, 1), (2, 3)], [(7, 5)]),
    ({"strategy": 7}, [(1,), (256, 1), (2, 3)], [(7, 5)]),
]  # fmt: skip


def in_groups(says, target, ignore=()):
    """A section of compressed-tensors with a second group for FP8 weights."""
    eight = {"weights": {"num_bits": 8, "type": "float", **says}, "targets": [target]}
    base = packed()
    groups = {**base["config_groups"], "group_1": eight}
    return {**base, "format": "mixed-precision", "config_groups": groups, "ignore": [*base["ignore"], *ignore]}


@pytest.mark.parametrize(("says", "good", "bad"), STRATEGIES)
@pytest.mark.parametrize("id", ["compressed-tensors", "Gemma 4, CT"])
def test_strategy_of_a_group(id, says, good, bad):
    layout = LAYOUTS[id]
    name = "model.layers.0.self_attn.o_proj"
    for target in (name, "re:.*self_attn.*"):
        changes = with_section(layout, in_groups(says, target))
        for shape in good:
            assert found(beside(id, name, (256, 384), shape, **changes)) == []
        for shape in bad:
            report = beside(id, name, (256, 384), shape, **changes)
            assert found(report) == [("block-scale.group", "error", 0, None, None)]
            assert refused(report)


def test_strategy_of_another_group_says_nothing():
    """A module that the list leaves alone, or that only a four-bit group means, is FP8 for reasons of its own."""
    layout, name = LAYOUTS["compressed-tensors"], "model.layers.0.linear_attn.out_proj"
    for section in (in_groups({"strategy": "tensor"}, name, [name]), in_groups({"strategy": "tensor"}, "other")):
        report = beside("compressed-tensors", name, (256, 384), (2, 3), **with_section(layout, section))
        assert "block-scale.group" not in {item.code for item in report.findings}


# The same scheme's scales of a 384 × 256 weight, by those of a 256 × 384 one.
TURNED = {(): (), (256, 1): (384, 1), (2, 3): (3, 2), (4, 12): (6, 8), (256, 12): (384, 8)}


@pytest.mark.parametrize(("says", "good", "bad"), STRATEGIES[:5])
def test_strategy_of_experts_in_fp8(says, good, bad):
    prefix, name = "model.layers.0.mlp.experts", "up_proj"
    eight = {"weights": {"num_bits": 8, "type": "float", **says}, "targets": ["Linear"]}
    quant = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": eight}}
    config = {**WIDE, "moe_intermediate_size": 256, "quantization_config": {**quant, "ignore": ["lm_head"]}}
    for shape in (*good, *bad):
        tensors = {}
        for expert in range(4):
            tensors |= fp8(f"{prefix}.{expert}.gate_proj", (256, 384), good[0])
            tensors |= fp8(f"{prefix}.{expert}.down_proj", (384, 256), TURNED[good[0]])
            tensors |= fp8(f"{prefix}.{expert}.{name}", (256, 384), shape)
        wrong = [("block-scale.group", "error", 0, "up", (0, 1, 2, 3))]
        assert found(audit(memory_checkpoint(tensors, config=config))) == ([] if shape in good else wrong)


# Quark: `qscheme` of an entry.

SCHEMES = [
    ({"qscheme": "per_tensor"}, [(), (1,), (1, 1)], [(256, 1), (2, 3), (256,)]),
    ({"qscheme": "per_channel", "ch_axis": 0}, [(256, 1), (256,)], [(), (1,), (384,), (2, 3)]),
    ({"qscheme": "per_channel"}, [(256, 1), (256,)], [(), (384,)]),
    ({"qscheme": "per_group", "group_size": 32}, [(256, 12)], [(256, 24), (256, 1)]),
    # Whatever is not known here says nothing.
    ({"qscheme": "per_channel", "ch_axis": 1}, [(1,), (256,), (2, 3)], [(7, 5)]),
    ({"qscheme": "per_group", "group_size": "32"}, [(1,), (256, 12)], [(7, 5)]),
    ({"qscheme": "per_block"}, [(1,), (256,), (2, 3)], [(7, 5)]),
    ({"qscheme": 7}, [(1,), (256,), (2, 3)], [(7, 5)]),
    ({}, [(1,), (256,), (2, 3)], [(7, 5)]),
]  # fmt: skip


@pytest.mark.parametrize(("says", "good", "bad"), SCHEMES)
def test_qscheme_of_an_entry(says, good, bad):
    layout, name = LAYOUTS["Quark"], "model.layers.0.self_attn.o_proj"
    entry = {"weight": {"dtype": "fp8_e4m3", **says}, "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": True}}
    base = section_of(layout)
    section = {**base, "layer_quant_config": {**base.get("layer_quant_config", {}), "*self_attn*": entry}}
    for shape in (*good, *bad):
        report = beside("Quark", name, (256, 384), shape, **with_section(layout, section))
        assert found(report) == ([] if shape in good else [("block-scale.group", "error", 0, None, None)])
        assert refused(report) == (shape in bad)
    # What it leaves out is of another origin.
    section["exclude"] = [*base.get("exclude", []), name]
    for shape in (*good, *bad):
        report = beside("Quark", name, (256, 384), shape, **with_section(layout, section))
        wrong = shape == (7, 5) or shape == (384,)
        assert ("block-scale.group" in {item.code for item in report.findings}) == wrong


@pytest.mark.parametrize(("says", "good", "bad"), SCHEMES[:4])
def test_qscheme_of_experts_in_fp8(says, good, bad):
    prefix = "model.layers.0.mlp.experts"
    entry = {"weight": {"dtype": "fp8_e4m3", **says}, "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": True}}
    config = {**WIDE, "moe_intermediate_size": 256}
    config["quantization_config"] = {"quant_method": "quark", "global_quant_config": entry, "exclude": ["lm_head"]}
    for shape in (*good, *bad):
        tensors = {}
        for expert in range(4):
            tensors |= fp8(f"{prefix}.{expert}.gate_proj", (256, 384), good[0])
            tensors |= fp8(f"{prefix}.{expert}.down_proj", (384, 256), TURNED[good[0]])
            tensors |= fp8(f"{prefix}.{expert}.up_proj", (256, 384), shape)
        wrong = [("block-scale.group", "error", 0, "up", (0, 1, 2, 3))]
        assert found(audit(memory_checkpoint(tensors, config=config))) == ([] if shape in good else wrong)


# The sizes of experts in FP8.


def sized(prefix, **changes):
    """FP8 experts with one number a tensor; of some (expert, projection) another shape."""
    suffix, disk = NAMED[prefix]
    out = experts_in_fp8(prefix, suffix, disk, dict.fromkeys(ROWS, ()))
    for (expert, kind), shape in changes.get("other", {}).items():
        out |= fp8(f"{prefix}.{expert}.{disk[kind]}", shape, (), suffix)
    return out


def plain_section(prefix, **more):
    config = section(prefix)
    del config["quantization_config"]["weight_block_size"]
    return {**config, **more}


@pytest.mark.parametrize("prefix", NAMED)
def test_sizes_of_fp8_experts(prefix):
    assert found(audit(memory_checkpoint(sized(prefix), config=plain_section(prefix)))) == []
    # One expert of another shape than its peers.
    for kind, shape in (("up", (100, 384)), ("down", (384, 400)), ("gate", (384, 200))):
        report = audit(memory_checkpoint(sized(prefix, other={(2, kind): shape}), config=plain_section(prefix)))
        assert found(report) == [("weight.shape", "error", 0, kind, (2,))]
        [item] = [one for one in report.findings if one.code == "weight.shape"]
        assert item.tensors == (f"{prefix}.2.{NAMED[prefix][1][kind]}.weight",)
        assert (item.params["found"], item.params["expected"]) == (list(shape), list(ROWS[kind]))
    # A projection that fits neither of the others.
    other = {(expert, "down"): (384, 400) for expert in range(4)}
    report = audit(memory_checkpoint(sized(prefix, other=other), config=plain_section(prefix)))
    assert found(report) == [("weight.shape", "error", 0, "down", None)]


@pytest.mark.parametrize(("key", "value"), [("moe_intermediate_size", 100), ("hidden_size", 512)])
@pytest.mark.parametrize("prefix", NAMED)
def test_sizes_of_fp8_experts_against_the_configuration(prefix, key, value):
    report = audit(memory_checkpoint(sized(prefix), config=plain_section(prefix, **{key: value})))
    assert found(report) == [("config.conflict", "error", None, None, None)]
    [item] = [one for one in report.findings if one.code == "config.conflict"]
    assert (item.params["key"], item.params["claimed"]) == (key, value)
    # Without a word of it nothing is wrong.
    config = plain_section(prefix)
    del config[key]
    assert found(audit(memory_checkpoint(sized(prefix), config=config))) == []


@pytest.mark.parametrize("weight", [(4, 384, 400), (4, 400, 384)])
def test_fused_fp8_experts_may_be_stored_either_way_around(weight):
    prefix = "model.layers.0.mlp.experts"
    tensors = {f"{prefix}.gate_up_proj": typed(np.full(weight, 0x38, np.uint8), "F8_E4M3"),
               f"{prefix}.gate_up_proj_scale": typed(np.ones(4, np.float32), "F32")}  # fmt: skip
    assert found(audit(memory_checkpoint(tensors, config=plain_section(prefix)))) == []


def test_a_layer_of_fp8_experts_is_held_to_its_four_bit_neighbours():
    layout = LAYOUTS["MIXED_PRECISION"]
    prefix = "model.layers.1.mlp.experts"
    quant = {"quantization": {**section_of(layout), "quantized_layers": {**ALLOWED, prefix: {"quant_algo": "FP8"}}}}
    shapes = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    for wide in (1, 2):
        tensors = layout.tensors()
        for expert in range(8):
            for kind, disk in NAMED["model.layers.0.mlp.experts"][1].items():
                rows, columns = shapes[kind]
                size = (wide * rows, columns) if kind == "down" else (rows, wide * columns)
                name = f"{prefix}.{expert}.{disk}"
                tensors |= fp8(name, size, ()) | {f"{name}.input_scale": typed(np.float32(0.1).reshape(()), "F32")}
        report = audit(layout.open(tensors, quant=quant, config={**layout.config, "num_hidden_layers": 2}))
        assert found(report) == ([] if wide == 1 else [("config.conflict", "error", None, None, None)])
        assert refused(report) == (wide == 2)
