"""Every layout's names lead to one matrix of layer × expert × projection × role."""

import numpy as np
import pytest

from nvfp4viz.checkpoint import canonical, canonical_of, file_bytes, read_header, tensor
from nvfp4viz.checkpoint.dialects import parse_expert_name
from tests.checkpoint.checkpoint_fixtures import CONFIG, CT_QUANT, EXPERTS, QUANT, base, ct_base, opened, without

E = "model.layers.0.mlp.experts"
W123 = {"gate": "w1", "up": "w3", "down": "w2"}

LAYOUTS = {
    "modelopt": base(2),
    "Mixtral": base(2, block="model.layers.{}.block_sparse_moe.experts".format, names=W123),
    "projection-major": base(2, projection_major=True),
    "Gemma 4, .moe.": base(2, block="model.language_model.layers.{}.moe.experts".format),
    "Gemma 4, nvidia": base(2, block="model.layers.{}.experts".format),
    "Gemma 4, old prefix": base(2, block="language_model.model.layers.{}.moe.experts".format),
    "no prefix": base(2, block="layers.{}.ffn.experts".format),
    "compressed-tensors": ct_base(2),
}


def view_of(tensors, config=None):
    data = file_bytes(tensors)
    return canonical_of(read_header("f", len(data), lambda a, b: data[a:b]).entries, config)


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_matrix_whatever_the_names(name):
    view = view_of(LAYOUTS[name], {"num_hidden_layers": 2, "num_experts": EXPERTS})
    assert (view.scheme, view.moe_layers, view.experts) == ("W4A4", (0, 1), EXPERTS)
    assert view.projections == ("gate", "up", "down")
    assert view.dialect == ("compressed-tensors" if name == "compressed-tensors" else "modelopt")
    assert view.divisors == (name == "compressed-tensors")
    slots = list(view.slots())
    assert len(slots) == 2 * EXPERTS * 3 * 4
    assert all(slot.entry is not None and slot.entry.name == slot.name for slot in slots)
    assert {slot.name for slot in slots} == {tensor for tensor in LAYOUTS[name] if ".experts." in tensor}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("role", ["weight", "weight_scale", "weight_scale_2", "input_scale"])
def test_a_missing_tensor_keeps_the_name_it_would_have(name, role):
    whole = LAYOUTS[name]
    lost = view_of(whole).slot(1, 2, "up", role).name
    view = view_of({key: item for key, item in whole.items() if key != lost})
    [slot] = [slot for slot in view.slots() if slot.entry is None]
    assert (slot.layer, slot.expert, slot.projection, slot.role, slot.name) == (1, 2, "up", role, lost)


def test_without_a_gate_there_is_no_gate_to_miss():
    view = view_of(base(gated=False, block="backbone.layers.{}.mixer.experts".format))
    assert view.projections == ("up", "down")
    assert all(slot.entry for slot in view.slots())


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.shared_experts.gate_proj.input_scale",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "model.layers.0.moe.router.per_expert_scale",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate_proj.weight_scale_2",
        "model.layers.0.mlp.experts.gate_up_proj_weight_scale",
        "model.layers.0.mlp.experts.e_score_correction_bias",
        "model.layers.0.mlp.experts.x.gate_proj.weight",
        "model.layers.0.mlp.experts.1234567.gate_proj.weight",
        "experts",
        "",
    ],
)
def test_what_is_no_routed_expert(name):
    assert parse_expert_name(name) is None


def test_slots_can_be_narrowed():
    view = view_of(base(2))
    assert [slot.name for slot in view.slots(layer=1, expert=3, projection="down", role="input_scale")] == [
        "model.layers.1.mlp.experts.3.down_proj.input_scale"
    ]
    assert len(list(view.slots(role="weight_scale_2"))) == 2 * EXPERTS * 3


def test_weight_only_needs_no_activation_scale():
    view = view_of(without(base(), "input_scale"))
    assert view.scheme == "W4A16"
    assert view.roles == ("weight", "weight_scale", "weight_scale_2")
    assert all(slot.entry for slot in view.slots())


def test_an_unquantised_expert_has_no_slots():
    tensors = without(base(), "experts.1.")
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors[f"{E}.1.{name}.weight"] = tensor(np.zeros((16, 32), np.float16))
    view = view_of(tensors)
    assert view.module(0, 1, "gate").state == "unquantised"
    assert {slot.expert for slot in view.slots()} == {0, 2, 3}


def test_the_configuration_says_how_many_experts_there_should_be():
    view = canonical(opened(without(base(), "experts.3."), CONFIG))
    assert view.experts == EXPERTS
    assert view.module(0, 3, "gate").state == "absent"
    assert view.slot(0, 3, "gate", "weight").name == f"{E}.3.gate_proj.weight"
    nested = canonical(opened(base(), {"text_config": {"n_routed_experts": 6, "num_hidden_layers": 1}}))
    assert nested.experts == 6


def test_facts_about_the_model():
    view = canonical(opened(base()))
    assert (view.architecture, view.layers, view.top_k, view.group_size) == ("Qwen3MoeForCausalLM", 1, 2, 16)
    assert view.complete


@pytest.mark.parametrize("block", ["mtp.layers.0.mlp.experts", "model.layers.1.mlp.experts"])
def test_draft_layers_stand_apart(block):
    draft = base(block=lambda _: block)
    view = canonical(opened({**base(), **draft}))
    assert view.moe_layers == (0,)
    assert view.draft_layers == (1,)
    assert view.slot(1, 0, "up", "weight").entry.name.startswith(block)


def test_two_towers_are_not_mixed():
    text = base(2, block="model.language_model.layers.{}.mlp.experts".format)
    vision = base(1, block="model.vision.layers.{}.mlp.experts".format)
    view = view_of({**text, **vision})
    assert view.moe_layers == (0, 1)
    assert view.blocks[0] == "model.language_model.layers.0.mlp.experts"
    assert view.other_blocks == ("model.vision.layers.0.mlp.experts",)


def u8(*shape):
    return tensor(np.zeros(shape, np.uint8))


def e4m3(*shape):
    return tensor(np.full(shape, 0x38, np.uint8), "F8_E4M3")


def e8m0(*shape):
    return tensor(np.full(shape, 120, np.uint8), "F8_E8M0")


def f32(*shape):
    return tensor(np.full(shape, 1e-4, np.float32))


OTHERS = {
    "gpt-oss": (
        {
            f"{E}.gate_up_proj_blocks": u8(4, 32, 1, 16),
            f"{E}.gate_up_proj_scales": u8(4, 32, 1),
            f"{E}.down_proj_blocks": u8(4, 32, 1, 16),
            f"{E}.down_proj_scales": u8(4, 32, 1),
        },
        "MXFP4",
    ),
    "deepseek-v4": (
        {
            f"layers.0.ffn.experts.{k}.{w}.{s}": v
            for k in range(4)
            for w in ("w1", "w2", "w3")
            for s, v in (("weight", tensor(np.zeros((32, 32), np.int8))), ("scale", e8m0(32, 2)))
        },
        "MXFP4",
    ),
    "quark": (
        {
            f"{E}.{k}.{p}.{s}": v
            for k in range(4)
            for p in ("gate_proj", "up_proj", "down_proj")
            for s, v in (("weight", u8(32, 32)), ("weight_scale", u8(32, 2)))
        },
        "MXFP4",
    ),
    "modelopt-fused": (
        {
            f"{E}.gate_up_proj": u8(4, 32, 16),
            f"{E}.gate_up_proj_weight_scale": e4m3(4, 32, 2),
            f"{E}.gate_up_proj_weight_scale_2": f32(),
            f"{E}.gate_up_proj_input_scale": f32(),
            f"{E}.down_proj": u8(4, 32, 8),
            f"{E}.down_proj_weight_scale": e4m3(4, 32, 1),
            f"{E}.down_proj_weight_scale_2": f32(),
            f"{E}.down_proj_input_scale": f32(),
        },
        "W4A4",
    ),
    "modelopt-stacked": (
        {
            f"model.layers.0.moe.{p}.{s}": v
            for p in ("gate_proj", "up_proj", "down_proj")
            for s, v in (
                ("weight", u8(4, 16, 16)),
                ("weight_scale", e4m3(4, 16, 2)),
                ("weight_scale_2", f32(4)),
                ("input_scale", f32(4)),
            )
        },
        "W4A4",
    ),
    "mixed": ({**base(1), **{k.replace("layers.0", "layers.1"): v for k, v in ct_base(1).items()}}, "MIXED"),
    "unquantised": (
        {f"{E}.{k}.gate_proj.weight": tensor(np.zeros((16, 32), np.float32)) for k in range(4)},
        "UNQUANTISED",
    ),
    "unknown": (
        {
            f"{E}.{k}.{p}_proj.weight": e4m3(*shape)
            for k in range(4)
            for p, shape in (("gate", (16, 32)), ("up", (16, 32)), ("down", (32, 16)))
        },
        "UNQUANTISED",
    ),
}


@pytest.mark.parametrize("dialect", OTHERS)
def test_other_layouts_are_recognised_and_not_misread(dialect):
    tensors, scheme = OTHERS[dialect]
    view = view_of(tensors)
    assert (view.dialect, view.scheme) == (dialect, scheme)
    assert view.complete == (dialect != "unknown")


def test_a_dense_model_has_no_moe_layers():
    dense = {f"model.layers.0.mlp.gate_proj.{s}": v for s, v in (("weight", u8(16, 16)), ("weight_scale_2", f32()))}
    view = view_of(dense)
    assert (view.dialect, view.scheme, view.moe_layers) == ("modelopt", "W4A16", ())


def test_dialect_comes_from_the_tensors_not_from_the_configuration():
    """A config without quant_method, or with the wrong one, changes nothing (FreeToken#430)."""
    wrong = {**CONFIG, "quantization_config": {**CT_QUANT, "quant_method": "fp8"}}
    assert canonical(opened(ct_base(), wrong, None)).dialect == "compressed-tensors"
    assert canonical(opened(base(), wrong, QUANT)).dialect == "modelopt"
