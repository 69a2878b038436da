"""Scales whose weight is gone: ordinary modules and routed experts in FP8 and in MXFP4, beside sound ones."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.linears import collect_linears
from nvfp4viz.checkpoint import canonical, memory_checkpoint, tensor
from tests.audit.families import FAMILIES
from tests.audit.layouts import EXPERTS, LAYOUTS, bf16, packed, typed
from tests.audit.reading import found
from tests.audit.test_families import changed
from tests.audit.test_fp8 import DUE, NAMED, experts_in_fp8, fp8, section

ATTENTION = "model.layers.0.self_attn"


def scaled(checkpoint):
    """Modules in FP8 or MXFP4 that have a scale, one of each kind in each layer."""
    every = collect_linears(checkpoint, canonical(checkpoint))
    return [each.name for each in every if each.format in ("FP8", "MXFP4") and len(each.tensors) > 1]


CASES = [(id, name) for id in FAMILIES for name in scaled(FAMILIES[id]())]


def test_every_kind_is_among_the_cases():
    assert {id for id, _ in CASES} >= {"DeepSeek-V4", "MiniMax-M3", "Nemotron 3 Super"}
    names = {name for _, name in CASES}
    assert {"mtp.0.attn.wkv", "mtp.0.ffn.shared_experts.w1", "layers.1.ffn.shared_experts.w2"} <= names


@pytest.mark.parametrize(("id", "name"), CASES)
def test_a_module_without_its_weight(id, name):
    checkpoint = FAMILIES[id]()
    assert found(audit(checkpoint)) == []
    report = audit(changed(checkpoint, drop=[f"{name}.weight"]))
    [row] = found(report)
    assert row[:2] == ("scale.missing", "error")
    [item] = [each for each in report.findings if each.code == "scale.missing"]
    assert (item.role, item.tensors) == ("weight", (f"{name}.weight",))
    assert "safe" not in {one.outcome for one in report.backends}


@pytest.mark.parametrize("suffixes", [("weight_scale",), ("weight_scale", "input_scale"), ("weight_scale_inv",)])
@pytest.mark.parametrize("id", ["modelopt", "MIXED_PRECISION", "compressed-tensors", "Quark", "gpt-oss"])
def test_in_every_dialect_and_in_all_layers_at_once(id, suffixes):
    """No namesake is left to tell: what every exporter quantises had a weight."""
    layout = LAYOUTS[id]
    tensors = {f"{ATTENTION}.o_proj.{suffix}": tensor(np.float32(1e-3)) for suffix in suffixes}
    report = audit(layout.open({**layout.tensors(), **tensors}))
    assert found(report) == [("scale.missing", "error", 0, None, None)]
    for language in ("en", "zh"):
        [item] = [each for each in report.findings if each.code == "scale.missing"]
        assert f"{ATTENTION}.o_proj.weight" in describe(item, language)[0]


@pytest.mark.parametrize(
    "stored",
    [
        # Gemma 4's router, a lookup in shards, a norm, codes of another format, a tower.
        {"model.layers.0.router.scale": tensor(np.float32(np.ones(64)))},
        {"model.ngram_embedding.weight_scale": tensor(np.float32(1)), "model.ngram_embedding.0.weight": bf16(8, 8)},
        {"model.layers.0.pre_norm.scale": bf16(64)},
        {f"{ATTENTION}.o_proj.qweight": typed(np.zeros((8, 8), np.int32), "I32"),
         f"{ATTENTION}.o_proj.weight_scale": bf16(8, 8)},
        {"vision_tower.layers.0.self_attn.o_proj.weight_scale": tensor(np.float32(1))},
    ],
)  # fmt: skip
def test_a_scale_that_scales_something_else(stored):
    layout = LAYOUTS["modelopt"]
    assert found(audit(layout.open({**layout.tensors(), **stored}))) == []


@pytest.mark.parametrize("prefix", NAMED)
@pytest.mark.parametrize("kind", ["gate", "up", "down"])
def test_a_routed_expert_in_fp8(prefix, kind):
    suffix, disk = NAMED[prefix]
    sound = experts_in_fp8(prefix, suffix, disk, DUE)
    assert found(audit(memory_checkpoint(sound, config=section(prefix)))) == []
    lost = {f"{prefix}.{expert}.{disk[kind]}.weight" for expert in (1, 3)}
    report = audit(memory_checkpoint({n: t for n, t in sound.items() if n not in lost}, config=section(prefix)))
    assert found(report) == [("scale.missing", "error", 0, kind, (1, 3))]
    [item] = [each for each in report.findings if each.code == "scale.missing"]
    assert (item.role, set(item.tensors)) == ("weight", lost)


@pytest.mark.parametrize("algo", ["FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8"])
def test_a_routed_expert_in_fp8_beside_four_bit_ones(algo):
    layout, block = LAYOUTS["MIXED_PRECISION"], "model.layers.1.mlp.experts"
    tensors, listed = layout.tensors(), {}
    shapes = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    for expert in range(EXPERTS):
        for last, (rows, columns) in shapes.items():
            name, mx = f"{block}.{expert}.{last}", algo == "MXFP8"
            grid = {"FP8": (), "FP8_PB_WO": (1, 1, 1, 1), "MXFP8": (rows, columns // 32)}.get(algo, (rows, 1))
            tensors |= fp8(name, (rows, columns), grid, dtype="F8_E8M0" if mx else "F32")
            tensors |= {f"{name}.input_scale": tensor(np.float32(2e-3))} if algo == "FP8" else {}
            listed[name] = {"quant_algo": algo}
    body = {
        **layout.quant["quantization"],
        "quantized_layers": {**layout.quant["quantization"]["quantized_layers"], **listed},
    }
    changes = {"config": {**layout.config, "num_hidden_layers": 2}, "quant": {"quantization": body}}
    assert found(audit(layout.open(tensors, **changes))) == []
    lost = f"{block}.3.up_proj.weight"
    report = audit(layout.open({n: t for n, t in tensors.items() if n != lost}, **changes))
    assert found(report) == [("scale.missing", "error", 1, "up", (3,))]
    assert "safe" not in {one.outcome for one in report.backends}


def test_of_a_group_in_compressed_tensors():
    """All of one kind gone: the configuration means it, by a pattern."""
    layout = LAYOUTS["compressed-tensors"]
    quant = packed("mixed-precision")
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["re:.*kv_a_proj.*"]}
    quant["config_groups"]["group_1"] = {**group, "format": "float-quantized"}
    config = {**layout.config, "quantization_config": quant}
    sound = fp8(f"{ATTENTION}.kv_a_proj", (64, 64), (64, 1))
    assert found(audit(layout.open({**layout.tensors(), **sound}, config=config))) == []
    del sound[f"{ATTENTION}.kv_a_proj.weight"]
    report = audit(layout.open({**layout.tensors(), **sound}, config=config))
    assert found(report) == [("scale.missing", "error", 0, None, None)]
