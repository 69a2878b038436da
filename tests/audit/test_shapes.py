"""Experts of another size than their peers, their other projections, or the configuration: every load stops."""

import re

import numpy as np
import pytest

from nvfp4viz import serving
from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import Tensor, memory_checkpoint
from nvfp4viz.errors import ServingError
from tests.audit.config_faults import section_of, with_section
from tests.audit.families import FAMILIES
from tests.audit.layouts import CONFIG, EXPERTS, HIDDEN, LAYOUTS, SIZES, WIDTH, bf16, typed
from tests.audit.reading import found, outcomes
from tests.audit.test_families import changed
from tests.checkpoint.checkpoint_fixtures import CONFIG as FOUR
from tests.checkpoint.checkpoint_fixtures import base, opened

PACKED = [id for id, layout in LAYOUTS.items() if {"weight", "weight_scale"} <= set(layout.roles)]
APART = [id for id in PACKED if LAYOUTS[id].arrangement == "expert"]
WHOLE = [id for id in PACKED if LAYOUTS[id].arrangement != "expert" and id != "Inkling"]


def resized(layout, tensors, kind, expert, rows, columns):
    """Codes and block scales of another size, in agreement with one another."""
    out = dict(tensors)
    shapes = {"weight": (rows, columns // 2), "weight_scale": (rows, columns // layout.group)}
    dtypes = {"weight": layout.code_type, "weight_scale": layout.scale_type}
    for role, shape in shapes.items():
        if layout.arrangement != "expert":
            shape = (EXPERTS, *shape)
        if role == "weight" and layout.dialect == "gpt-oss":
            shape = (*shape[:-1], -1, 16)
            flat = np.full((EXPERTS, rows, columns // 2), 0x38, np.uint8).reshape(shape)
        else:
            flat = np.full(shape, 0x38 if layout.block == "NVFP4" else 120, np.uint8)
        out[layout.name(expert, kind, role)] = typed(flat, dtypes[role])
    bias = f"{layout.prefix}.{layout.disk[kind]}_bias"
    return {**out, bias: bf16(EXPERTS, rows)} if bias in out else out


def refused(report):
    return all(name in ("load-error", "unsupported") for name in outcomes(report).values()) and (
        "load-error" in outcomes(report).values()
    )


@pytest.mark.parametrize("id", APART)
@pytest.mark.parametrize("factor", [(0.5, 1), (1, 2), (2, 1)])
def test_one_expert_of_another_shape(id, factor):
    layout = LAYOUTS[id]
    for kind in layout.kinds:
        rows, columns = (int(side * f) for side, f in zip(SIZES[kind], factor, strict=True))
        report = audit(layout.open(resized(layout, layout.tensors(), kind, 5, rows, columns)))
        assert found(report) == [("weight.shape", "error", 0, kind, (5,))]
        assert report.findings[0].params["found"] == [rows, columns]
        assert report.findings[0].tensors == (layout.name(5, kind, "weight"),)
        assert refused(report)


def test_two_kinds_of_experts_that_the_configuration_lists():
    """ERNIE 4.5 VL: experts of text, and narrower ones of images."""
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for expert in range(EXPERTS // 2, EXPERTS):
        for kind, (rows, columns) in SIZES.items():
            if kind in layout.kinds:
                narrow = (rows, columns // 2) if kind == "down" else (rows // 2, columns)
                tensors = resized(layout, tensors, kind, expert, *narrow)
    half = EXPERTS // 2
    listed = {key: value for key, value in CONFIG.items() if key != "num_experts"}
    listed |= {"moe_num_experts": [half, half], "moe_intermediate_size": [WIDTH, WIDTH // 2]}
    report = audit(layout.open(tensors, config=listed))
    assert found(report) == []
    assert not refused(report)
    # One of the wide ones is no narrow one, and other widths than those are wrong as ever.
    [item] = found(audit(layout.open(resized(layout, tensors, "up", 1, WIDTH // 2, HIDDEN), config=listed)))
    assert item == ("weight.shape", "error", 0, "up", (1,))
    many = tuple(range(half, EXPERTS))
    for widths in ([WIDTH, WIDTH // 4], [WIDTH], WIDTH):
        report = audit(layout.open(tensors, config={**listed, "moe_intermediate_size": widths}))
        assert [one for one in found(report) if one[0] == "weight.shape"] == [
            ("weight.shape", "error", 0, kind, many) for kind in layout.kinds
        ]


@pytest.mark.parametrize("id", PACKED)
def test_the_same_tensors_rewritten_are_sound(id):
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    for kind in layout.kinds:
        for expert in range(EXPERTS):
            tensors = resized(layout, tensors, kind, expert, *SIZES[kind])
    # Of Inkling's names only the second-level scale's is public.
    assert found(audit(layout.open(tensors))) == []


@pytest.mark.parametrize("id", [*APART, *WHOLE])
@pytest.mark.parametrize("size", [(32, WIDTH), (HIDDEN, 2 * WIDTH)])
def test_a_down_projection_that_fits_neither_gate_nor_up(id, size):
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    for expert in range(EXPERTS):
        tensors = resized(layout, tensors, "down", expert, *size)
    for config in (layout.config, {"num_hidden_layers": 1}):
        if config is not layout.config and "quantization_config" in layout.config:
            config = {**config, "quantization_config": layout.config["quantization_config"]}
        report = audit(layout.open(tensors, config=config))
        assert ("weight.shape", "error", 0, "down", None) in found(report)
        assert refused(report)


@pytest.mark.parametrize("id", [*APART, *WHOLE])
@pytest.mark.parametrize(("key", "value"), [("moe_intermediate_size", 48), ("hidden_size", 128)])
def test_sizes_against_the_configuration(id, key, value):
    layout = LAYOUTS[id]
    text = layout.config.get("text_config")
    changed = {**layout.config, key: value} if text is None else {**layout.config, "text_config": {**text, key: value}}
    report = audit(layout.open(config=changed))
    assert found(report) == [("config.conflict", "error", None, None, None)]
    assert report.findings[0].params["claimed"] == value
    assert refused(report)


def test_a_latent_space_is_no_contradiction():
    """Nemotron 3 Super's experts see 1024 of the model's 4096."""
    layout = LAYOUTS["non-gated"]
    narrow = {**CONFIG, "hidden_size": 4 * HIDDEN}
    assert found(audit(layout.open(config=narrow))) == [("config.conflict", "error", None, None, None)]
    assert found(audit(layout.open(config={**narrow, "moe_latent_size": HIDDEN}))) == []
    latent = {**layout.tensors(), "backbone.layers.0.mixer.fc1_latent_proj.weight": Tensor("BF16", (1, 1), b"\0\0")}
    assert found(audit(layout.open(latent, config=narrow))) == []


def test_layers_of_different_widths_fit_without_a_configured_one():
    """Pruned by layers: each agrees with itself."""
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for kind in layout.kinds:
        rows, columns = (side // 2 if side == WIDTH else side for side in SIZES[kind])
        for expert in range(EXPERTS):
            second = resized(layout, layout.tensors(), kind, expert, rows, columns)
            for role in layout.roles:
                name = layout.name(expert, kind, role)
                tensors[name.replace("layers.0", "layers.1")] = second[name]
    config = {key: value for key, value in CONFIG.items() if key != "moe_intermediate_size"} | {"num_hidden_layers": 2}
    assert found(audit(layout.open(tensors, config=config))) == []
    assert found(audit(layout.open(tensors, config={**config, "moe_intermediate_size": [32, 16]}))) == []
    searched = {**config, "moe_intermediate_size": WIDTH, "block_configs": [{}, {}]}
    assert found(audit(layout.open(tensors, config=searched))) == []
    report = audit(layout.open(tensors, config={**config, "moe_intermediate_size": WIDTH}))
    assert found(report) == [("config.conflict", "error", None, None, None)]
    assert report.backends[0].layers == (1,)


def test_two_halves_of_a_layer_are_judged_by_the_other_layers():
    layout, tensors = LAYOUTS["modelopt"], base(2)
    for expert in (0, 1):
        for role, shape in (("weight", (16, 8)), ("weight_scale", (16, 1))):
            name = f"model.layers.0.mlp.experts.{expert}.down_proj.{role}"
            tensors[name] = typed(np.full(shape, 0x38, np.uint8), tensors[name].dtype)
    report = audit(opened(tensors, {**FOUR, "num_hidden_layers": 2}, layout.quant))
    assert found(report) == [("weight.shape", "error", 0, "down", (0, 1))]


def test_the_loader_agrees(tiny_full):
    """What the audit forecasts for one short expert is what a load does."""
    before = outcomes(audit(tiny_full))
    assert before["vllm-cutlass"] == "safe"
    tensors = {name: tiny_full.read_tensor(name) for name in tiny_full.tensors}
    for role in ("weight", "weight_scale"):
        name = f"model.layers.1.experts.5.down_proj.{role}"
        item = tensors[name]
        rows, columns = item.shape
        tensors[name] = Tensor(item.dtype, (rows // 2, columns), item.tobytes()[: rows // 2 * columns])
    short = memory_checkpoint(tensors, config=tiny_full.config, hf_quant_config=tiny_full.hf_quant_config)
    report = audit(short)
    assert found(report) == [("weight.shape", "error", 1, "down", (5,))]
    # A choice of backend that is refused never gets there.
    refused = {name for name, outcome in before.items() if outcome == "unsupported"}
    assert outcomes(report) == {name: "unsupported" if name in refused else "load-error" for name in before}
    with pytest.raises(ServingError) as caught:
        serving.load(short, device="cpu")
    assert caught.value.code == "serving.shape"


@pytest.fixture(scope="module")
def tiny_full():
    from nvfp4viz.checkpoint import open_checkpoint

    return open_checkpoint("sample_checkpoints/built/tiny-moe-nvfp4-full")


@pytest.mark.parametrize("key", ["n_routed_experts", "num_local_experts"])
def test_layers_searched_one_by_one_have_numbers_of_experts_of_their_own(key):
    """Puzzle: the second layer keeps two of four; one that then lacks its last is a loss all the same."""
    layout = LAYOUTS["modelopt"]
    dropped = re.compile(r"layers\.1\..*experts\.[23]\.")
    tensors = {name: tensor for name, tensor in base(2).items() if not dropped.search(name)}
    router = "model.layers.1.mlp.gate.weight"
    tensors[router] = bf16(2, FOUR["hidden_size"])
    config = {**FOUR, "num_hidden_layers": 2, "block_configs": [{key: 4}, {key: 2}]}
    assert found(audit(opened(tensors, config, layout.quant))) == []
    whole = {**tensors, router: bf16(4, FOUR["hidden_size"])}
    assert found(audit(opened(whole, config, layout.quant))) == [("weight.shape", "error", 1, None, None)]
    config["block_configs"] = [{key: 4}, {key: 3}]
    assert found(audit(opened(tensors, config, layout.quant))) == [("expert.absent", "error", 1, None, (2,))]
    config["block_configs"] = [{key: 4}, {key: 1}]
    assert found(audit(opened(tensors, config, layout.quant))) == [("config.conflict", "error", None, None, None)]


def test_scales_padded_for_a_kernel_fit_no_blocks():
    """Rows to 128 and blocks to 4, as kernels want them: no width to speak of."""
    name = "model.layers.0.mlp.experts.1.gate_proj.weight_scale"
    report = audit(opened({**base(), name: typed(np.full((128, 4), 0x38, np.uint8), "F8_E4M3")}, FOUR))
    assert found(report) == [("block-scale.group", "error", 0, "gate", (1,))]
    assert report.findings[0].text == "block-scale.group.unrelated"
    assert "128, 4" in report.findings[0].message
    assert refused(report)


# Families whose experts are as wide as `intermediate_size` says, and layouts that they are stored in.
ONE_WIDTH = [
    ("gpt-oss", {"model_type": "gpt_oss"}), ("gpt-oss", {"architectures": ["GptOssForCausalLM"]}), ("gpt-oss", {}),
    ("fused", {"model_type": "gpt_oss"}), ("fused", {"model_type": "llama4_text", "interleave_moe_layer_step": 1}),
    ("w1/w2/w3", {"model_type": "mixtral"}), ("w1/w2/w3", {"architectures": ["MixtralForCausalLM"]}),
    ("w1/w2/w3", {}), ("w1/w2/w3", {"model_type": "minimax_m2"}), ("modelopt", {"model_type": "olmoe"}),
    ("compressed-tensors", {"model_type": "mixtral"}), ("Quark", {"model_type": "mixtral"}),
    ("stacked", {"model_type": "granitemoe"}), ("modelopt", {"architectures": ["PhimoeForCausalLM"]}),
]  # fmt: skip


def of_size(id, hidden, width, stored, **more):
    """All experts stored in one size, and a configuration without `moe_intermediate_size`."""
    layout = LAYOUTS[id]
    sizes = {"gate": stored[::-1], "up": stored[::-1], "gate_up": (2 * stored[1], stored[0]), "down": stored}
    tensors = layout.tensors()
    for kind in layout.kinds:
        for expert in range(EXPERTS if layout.arrangement == "expert" else 1):
            tensors = resized(layout, tensors, kind, expert, *sizes[kind])
    [router] = [name for name in tensors if name.endswith(".gate.weight")]
    tensors[router] = bf16(EXPERTS, stored[0])
    said = {"hidden_size": hidden, "intermediate_size": width, "moe_intermediate_size": None, **more}
    return audit(layout.open(tensors, **with_section(layout, section_of(layout), **said)))


@pytest.mark.parametrize(("id", "family"), ONE_WIDTH)
def test_intermediate_size_of_families_that_have_one_width(id, family):
    assert found(of_size(id, 64, 64, (64, 64), **family)) == []
    for stored, key, number in (((64, 96), "intermediate_size", 96), ((96, 64), "hidden_size", 96)):
        report = of_size(id, 64, 64, stored, **family)
        assert found(report) == [("config.conflict", "error", None, None, None)]
        [item] = [one for one in report.findings if one.code == "config.conflict"]
        assert (item.params["key"], item.params["claimed"], item.params["found"]) == (key, 64, number)
        assert refused(report)


@pytest.mark.parametrize(
    ("id", "more"),
    [
        ("modelopt", {}),
        ("modelopt", {"model_type": "qwen3_moe"}),
        ("w1/w2/w3", {"model_type": "minimax_m3"}),
        ("w1/w2/w3", {"num_hidden_layers": 3}),
        ("w1/w2/w3", {"model_type": "mixtral", "moe_ffn_hidden_size": 96}),
        ("gpt-oss", {"model_type": "gpt_oss", "moe_intermediate_size": 96}),
        ("gpt-oss", {"model_type": "gpt_oss", "intermediate_size": "64"}),
    ],
)
def test_intermediate_size_that_may_be_the_dense_layers(id, more):
    report = of_size(id, 64, 64, (64, 96), **more)
    assert not [item for item in report.findings if "key" in item.params]


@pytest.mark.parametrize("id", ["gpt-oss", "w1/w2/w3", "modelopt", "compressed-tensors", "fused", "Quark"])
@pytest.mark.parametrize(("axis", "said", "stored", "to"), [(1, 640, 768, 256), (1, 288, 320, 64), (0, 416, 512, 128)])
def test_a_size_that_was_probably_padded(id, axis, said, stored, to):
    """2880 as 3072 is a kernel's padding; a loader that takes slices never notices, another stops."""
    size, claimed = [64, 64], [64, 64]
    size[axis], claimed[axis] = stored, said
    report = of_size(id, *claimed, tuple(size), model_type="mixtral")
    assert found(report) == [("config.conflict", "backend", None, None, None)]
    [item] = [one for one in report.findings if one.code == "config.conflict"]
    assert item.text == "config.conflict.size.padded"
    assert (item.params["found"], item.params["multiple"]) == (stored, to)
    served = {forecast.outcome for forecast in report.backends}
    assert served <= {"load-error", "unsupported"}
    # Where the format is not served at all, a load that goes through ends there.
    unserved = {f.name for f in of_size(id, *size, tuple(size)).backends if f.outcome == "unsupported"}
    for f in report.backends:
        if f.outcome == "load-error":
            assert f.possible == ("load-error", "unsupported" if f.name in unserved else "safe")


@pytest.mark.parametrize("id", ["fused", "gpt-oss"])
@pytest.mark.parametrize("kind", ["gate_up", "down"])
def test_block_scales_of_half_the_experts_are_one_finding(id, kind):
    """The codes are there for all of them: nobody is absent."""
    layout = LAYOUTS[id]
    name = layout.name(0, kind, "weight_scale")
    tensors = layout.tensors()
    item = tensors[name]
    half = np.frombuffer(item.tobytes(), np.uint8).reshape(item.shape)[: item.shape[0] // 2]
    report = audit(layout.open({**tensors, name: typed(half, layout.scale_type)}))
    assert [row[:2] for row in found(report)] == [("block-scale.group", "error")]


@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (128, 256)])
def test_an_fp8_weight_that_its_scales_do_not_fit_is_one_finding(shape):
    checkpoint = FAMILIES["DeepSeek-V4"]()
    name = "layers.0.ffn.shared_experts.w1.weight"
    whole = checkpoint.tensors[name].shape
    bits = typed(np.full(shape, 0x38, np.uint8), "F8_E4M3")
    report = audit(changed(checkpoint, replace={name: bits}))
    assert len(found(report)) == (1 if shape != whole else 0)
