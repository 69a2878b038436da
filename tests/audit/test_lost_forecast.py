"""What backends make of a shard that is missing: what its tensors would do that were missing by themselves."""

import json

import pytest

from nvfp4viz.audit import audit
from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.checkpoint import file_bytes
from tests.audit.layouts import HIDDEN, LAYOUTS, bf16, ct_linear, linear

SILENT = [name for name, family in FAMILIES.items() if family.engine in ("vllm", "sglang")]
BLIND = [name for name in SILENT if FAMILIES[name].reach == "none"]
READERS = [name for name in SILENT if name not in BLIND]
WITH_INPUTS = [
    name for name, layout in LAYOUTS.items() if layout.with_input and layout.block == "NVFP4" and name != "W4A8"
]
LOST = "part-lost.safetensors"


def without(folder, layout, tensors, gone, *, index=True):
    """A folder whose index places these tensors in a shard that is missing; without index, what is left as it is."""
    folder.mkdir()
    kept = {name: item for name, item in tensors.items() if name not in gone}
    (folder / "part-here.safetensors").write_bytes(file_bytes(kept))
    homes = dict.fromkeys(kept, "part-here.safetensors") | (dict.fromkeys(gone, LOST) if index else {})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    for name, content in (("config.json", layout.config), ("hf_quant_config.json", layout.quant)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def forecasts(report, names=SILENT):
    return {item.name: (item.outcome, item.possible, item.scope) for item in report.backends if item.name in names}


def shard_and_singly(tmp_path, layout, tensors, gone):
    """The forecasts of a lost shard, and of the same tensors missing from a shard that is there."""
    lost = audit(without(tmp_path / "lost", layout, tensors, gone))
    assert [item.code for item in lost.findings if item.severity == "error"] == ["container.missing-shard"]
    return lost, audit(without(tmp_path / "singly", layout, tensors, gone, index=False))


@pytest.mark.parametrize("kinds", [("down",), ("gate", "up", "gate_up")])
@pytest.mark.parametrize("id", WITH_INPUTS)
def test_lost_activation_scales_are_missing_ones(id, kinds, tmp_path):
    layout = LAYOUTS[id]
    gone = {name for kind in layout.kinds if kind in kinds for name in layout.names(kind, "input_scale")}
    lost, singly = shard_and_singly(tmp_path, layout, layout.tensors(), gone)
    found, expected = forecasts(lost), forecasts(singly)
    # FlashInfer's B12X does not read down's.
    assert {item[0] for item in expected.values()} - {"unsupported"} == {"undefined", "ignored"}
    assert found == expected
    layers = {item.name: item.layers for item in singly.backends}
    assert all(item.layers == layers[item.name] for item in lost.backends if item.name in SILENT)
    assert {found[name][0] for name in BLIND} - {"unsupported"} == {"ignored"}
    for item in lost.backends:
        assert (LOST in item.why) == (item.outcome in ("ignored", "load-error"))


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "projection-major", "non-gated"])
def test_a_stored_nan_beside_lost_scales_stays_certain(id, tmp_path):
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    layout.put(tensors, 1, "down", "input_scale", float("nan"))
    gone = {layout.name(expert, "down", "input_scale") for expert in (2, 3)}
    lost, singly = shard_and_singly(tmp_path, layout, tensors, gone)
    found = forecasts(lost)
    assert found == forecasts(singly)
    assert found["vllm-emulation"] == ("nan", (), "layer")


@pytest.mark.parametrize("role", ["weight", "weight_scale", "weight_scale_2"])
@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "stacked", "fused", "Quark NVFP4"])
def test_lost_weights_leave_garbage_everywhere(id, role, tmp_path):
    layout = LAYOUTS[id]
    gone = {name for kind in layout.kinds for name in layout.names(kind, role)}
    report = audit(without(tmp_path / "x", layout, layout.tensors(), gone))
    assert set(forecasts(report).values()) == {("undefined", ("degraded", "nan", "zero"), "model")}
    others = forecasts(report, [name for name in FAMILIES if name not in SILENT])
    assert set(others.values()) == {("load-error", (), "model")}


@pytest.mark.parametrize("id", [name for name, layout in LAYOUTS.items() if layout.arrangement == "expert"])
def test_no_role_in_a_shard_of_its_own_leaves_backends_out(id, tmp_path):
    layout = LAYOUTS[id]
    healthy = [item.name for item in audit(without(tmp_path / "whole", layout, layout.tensors(), set())).backends]
    for role in layout.roles:
        gone = {name for kind in layout.kinds for name in layout.names(kind, role)}
        report = audit(without(tmp_path / role, layout, layout.tensors(), gone))
        assert [item.name for item in report.backends] == healthy
        assert "safe" not in {item.outcome for item in report.backends}


def test_of_a_shard_that_only_a_number_tells_of_everything_may_be_lost(tmp_path):
    layout = LAYOUTS["modelopt"]
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(file_bytes(layout.tensors()))
    (tmp_path / "config.json").write_text(json.dumps(layout.config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(layout.quant))
    found = forecasts(audit(tmp_path))
    assert {found[name] for name in READERS} == {("undefined", ("degraded", "nan", "safe", "zero"), "model")}
    assert {found[name] for name in BLIND} == {("undefined", ("degraded", "ignored", "nan", "safe", "zero"), "model")}


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors"])
def test_an_ordinary_layers_activation_scale(id, tmp_path):
    layout = LAYOUTS[id]
    at = "model.layers.0.self_attn.o_proj"
    tensors = layout.tensors() | (ct_linear if layout.divisors else linear)(at)
    [gone] = [name for name in tensors if name.startswith(at) and "input" in name]
    lost, singly = shard_and_singly(tmp_path, layout, tensors, {gone})
    found = forecasts(lost)
    assert found == forecasts(singly)
    # Its kernel is picked apart from the experts'.
    assert {found[name] for name in BLIND} == {("undefined", ("degraded", "ignored", "nan", "safe", "zero"), "layer")}
    assert {found[name] for name in READERS} == {("undefined", ("degraded", "nan", "safe", "zero"), "layer")}
    # A router beside it is no scale.
    more = {**tensors, "model.layers.0.self_attn.k_proj.weight": bf16(HIDDEN, HIDDEN)}
    wide = audit(without(tmp_path / "wide", layout, more, {gone, "model.layers.0.self_attn.k_proj.weight"}))
    assert set(forecasts(wide).values()) == {("undefined", ("degraded", "nan", "zero"), "model")}
