"""A file that lies alone, with nothing that tells of others: a whole model, or visibly a part of one."""

import json
import re

import numpy as np
import pytest

from nvfp4viz.audit import audit, run_audit
from nvfp4viz.audit.repair import POLICIES, plan_repair
from nvfp4viz.checkpoint import file_bytes, inspect, tensor
from nvfp4viz.errors import InputError
from tests.audit.families import FAMILIES
from tests.audit.layouts import HIDDEN, LAYOUTS, bf16, linear

PLAIN = {
    f"model.layers.0.mlp.experts.{e}.{kind}_proj.weight": bf16(32, 64) for e in range(8) for kind in ("gate", "up")
}
PLAIN |= {f"model.layers.0.mlp.experts.{e}.down_proj.weight": bf16(64, 32) for e in range(8)}
ENDS = {"model.embed_tokens.weight": bf16(8, HIDDEN), "model.norm.weight": bf16(HIDDEN)}
INSIDE = {"model.layers.0.input_layernorm.weight": bf16(HIDDEN), "model.layers.0.self_attn.o_proj.weight": bf16(64, 64)}


def alone(folder, tensors, name="part.safetensors"):
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    (folder / name).write_bytes(file_bytes(tensors))
    return folder / name


def told(report):
    return {item.text for item in report.findings if item.text != "config.absent.no-files"}


def is_a_part(path, why):
    for place in (path, path.parent):
        report = audit(place)
        assert {item.code for item in report.findings if item.severity != "info"} <= {"config.absent"}
        assert f"audit.partial.one-shard.{why}" in told(report)
        assert report.backends == ()
        assert [row.missing for row in report.coverage.values()] == [0, 0, 0]


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize("id", LAYOUTS)
def test_every_so_manieth_tensor_is_no_model(id, ways, tmp_path):
    names = sorted(LAYOUTS[id].tensors())
    for at in range(ways):
        part = {name: LAYOUTS[id].tensors()[name] for name in names[at::ways]}
        whole = inspect(alone(tmp_path / "x", part)).part is None
        report = audit(tmp_path / "x")
        assert whole or report.backends == ()
        # What is left of one fused layer may be whole for all anybody knows.
        assert whole or not {item.code for item in report.findings} & {"scale.missing", "expert.absent", "expert.gap"}
        assert not whole or LAYOUTS[id].arrangement != "expert" or not any("experts" in name for name in part)


@pytest.mark.parametrize("id", [name for name, layout in LAYOUTS.items() if layout.arrangement == "expert"])
def test_one_role_alone_is_no_model(id, tmp_path):
    layout = LAYOUTS[id]
    for role in layout.roles:
        names = {name for kind in layout.kinds for name in layout.names(kind, role)}
        is_a_part(alone(tmp_path / "x", {name: layout.tensors()[name] for name in names}), "pieces")


def test_plain_experts_that_are_never_whole_are_no_model(tmp_path):
    is_a_part(alone(tmp_path / "x", {name: PLAIN[name] for name in sorted(PLAIN)[::4]}), "pieces")
    assert "expert.gap" in {item.code for item in audit(alone(tmp_path / "x", _without(PLAIN, "experts.3."))).findings}


def _without(tensors, part):
    return {name: item for name, item in tensors.items() if part not in name}


def test_scales_of_ordinary_modules_without_their_codes(tmp_path):
    module = linear("model.layers.0.mlp.up_proj")
    scales = {name: item for name, item in module.items() if not name.endswith(".weight")}
    is_a_part(alone(tmp_path / "x", scales), "pieces")
    is_a_part(alone(tmp_path / "x", {name: item for name, item in module.items() if name not in scales}), "pieces")
    # One that lacks its codes among others is a hole.
    beside = {**scales, **linear("model.layers.1.mlp.up_proj")}
    assert "scale.missing" in {item.code for item in audit(alone(tmp_path / "x", beside)).findings}


@pytest.mark.parametrize("ends", [(), ("model.norm.weight",), ("model.embed_tokens.weight",)])
def test_layers_between_nothing_are_a_part(ends, tmp_path):
    """Cut where a shard was full: the last expert lacks what lies in the next one."""
    tensors = {**LAYOUTS["modelopt"].tensors(), **INSIDE, **{name: ENDS[name] for name in ends}}
    cut = _without(tensors, "experts.7.up_proj")
    is_a_part(alone(tmp_path / "x", cut), "ends")
    # With both it is a model with a hole.
    report = audit(alone(tmp_path / "x", {**cut, **ENDS}))
    assert {item.code for item in report.findings} & {"expert.absent", "expert.gap"}
    assert report.backends


@pytest.mark.parametrize("id", LAYOUTS)
def test_a_whole_file_without_anything_else_is_judged(id, tmp_path):
    """Experts alone, as tests and small examples have them; one hole is one hole."""
    layout = LAYOUTS[id]
    path = alone(tmp_path / "x", layout.tensors(), "mine.safetensors")
    assert inspect(path).part is None
    assert audit(path).backends
    if layout.arrangement == "expert" and "weight_scale_2" in layout.roles:
        hole = layout.tensors()
        del hole[layout.name(3, "down", "weight_scale_2")]
        assert ("scale.missing", "error") in {
            (item.code, item.severity) for item in audit(alone(tmp_path / "x", hole)).findings
        }


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_in_one_file_is_taken_for_a_part(name, tmp_path):
    tensors = FAMILIES[name]().read_tensors()
    outside = [each for each in tensors if "layers." not in each]
    if any("embed" in each for each in outside) and not any("norm" in each for each in outside):
        # What these examples leave out.
        tensors["model.norm.weight"] = bf16(HIDDEN)
    assert inspect(alone(tmp_path / "x", tensors, "mine.safetensors")).part is None


def test_what_tells_of_the_whole_is_believed(tmp_path):
    layout = LAYOUTS["modelopt"]
    codes = {name: item for name, item in layout.tensors().items() if name.endswith("weight_scale_2")}
    path = alone(tmp_path / "x", codes)
    assert inspect(path).part == "pieces"
    # A model in one file is called so.
    assert inspect(alone(tmp_path / "x", codes, "model.safetensors")).part is None
    # A configuration or an index beside it.
    for file, content in (
        ("config.json", layout.config), ("hf_quant_config.json", layout.quant),
        ("model.safetensors.index.json", {"weight_map": dict.fromkeys(codes, "part.safetensors")}),
    ):  # fmt: skip
        alone(tmp_path / "x", codes)
        (tmp_path / "x" / file).write_text(json.dumps(content))
        assert inspect(path).part is inspect(path.parent).part is None
    # Another file beside it, where the folder is asked for.
    alone(tmp_path / "x", codes)
    (tmp_path / "x" / "rest.safetensors").write_bytes(file_bytes(_without(layout.tensors(), "weight_scale_2")))
    assert inspect(path.parent).part is None
    assert audit(path.parent).backends


# Not DeepSeek V4's that holds a draft too.
EACH = [
    layout for layout in LAYOUTS.values()
    if layout.arrangement == "expert" and not any("mtp." in name for name in layout.tensors())
]  # fmt: skip


@pytest.mark.parametrize("layout", EACH, ids=[layout.id for layout in EACH])
@pytest.mark.parametrize("name", ["part.safetensors", "model.safetensors"])
def test_later_layers_without_either_end_are_a_part_whatever_lies_beside_them(layout, name, tmp_path):
    """Cut out of a model: the experts of layer 3 from the third on."""
    norm = {f"{layout.prefix.partition('layers.')[0]}layers.0.input_layernorm.weight": bf16(HIDDEN)}
    tail = {at: item for at, item in layout.tensors().items() if not re.search(r"experts(\.\w+)?\.[01]\.", at)}
    experts = {at.replace("layers.0.", "layers.3."): item for at, item in tail.items()}
    cut = experts | {at.replace("layers.0.", "layers.3."): item for at, item in norm.items()}
    path = alone(tmp_path / "x", cut, name)
    for config in (None, layout.config or {}):
        if config is not None:
            (path.parent / "config.json").write_text(json.dumps(config))
        for place in (path, path.parent):
            assert inspect(place).part == "ends"
            report = audit(place)
            assert "audit.partial.one-shard.ends" in told(report)
            assert not {item.code for item in report.findings} & {"expert.absent", "expert.gap", "scale.missing"}
            assert report.backends == ()
    # Experts alone are judged, as small examples have them; so is what has an end, or is a draft's own file.
    others = (
        experts, {**cut, "lm_head.weight": bf16(8, HIDDEN)}, {**cut, **ENDS}, {**tail, **norm},
        {**cut, "model.layers.3.eh_proj.weight": bf16(HIDDEN, 2 * HIDDEN)},
    )  # fmt: skip
    for tensors in others:
        path = alone(tmp_path / "x", tensors, name)
        (path.parent / "config.json").write_text(json.dumps(layout.config or {}))
        assert inspect(path.parent).part is None


def test_bad_values_of_a_part_are_told_and_not_mended(tmp_path):
    layout = LAYOUTS["modelopt"]
    codes = {name: item for name, item in layout.tensors().items() if name.endswith("weight_scale_2")}
    codes[layout.name(2, "down", "weight_scale_2")] = tensor(np.float32("nan"))
    done = run_audit(alone(tmp_path / "x", codes))
    [bad] = [item for item in done.report.findings if item.severity == "error"]
    assert (bad.code, bad.experts) == ("scale.nan", (2,))
    for policy in POLICIES:
        with pytest.raises(InputError) as caught:
            plan_repair(done, policy, value=1.0 if policy == "constant" else None)
        assert caught.value.code == "repair.one-part"
