"""Draft (MTP, nextn) layers: their numbers come after the model's own under every naming, and every form says so."""

import csv
import io
import json

import msgspec
import numpy as np
import pytest

from nvfp4viz.audit import describe, run_audit
from nvfp4viz.audit.html import to_html
from nvfp4viz.audit.markdown import to_markdown
from nvfp4viz.audit.report import to_json
from nvfp4viz.audit.schema import schemas
from nvfp4viz.audit.tables import to_csv
from nvfp4viz.audit.terminal import to_text
from nvfp4viz.checkpoint import canonical, tensor, write_checkpoint
from nvfp4viz.cli import main
from tests.audit.layouts import LAYOUTS, bf16, linear, typed
from tests.audit.reading import found
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, opened

OWN, TWO = "model.layers.0", {**CONFIG, "num_hidden_layers": 1}
# Where a draft layer's experts stand, and the number that it has in a model of one layer.
NAMED = [
    ("mtp.layers.0.mlp.experts", 1), ("mtp.0.mlp.experts", 1), ("model.mtp.0.mlp.experts", 1),
    ("model.mtp.layers.0.mlp.experts", 1), ("model.layers.1.mlp.experts", 1), ("nextn.0.mlp.experts", 1),
    ("model.nextn.layers.0.mlp.experts", 1), ("mtp_layers.0.mlp.experts", 1), ("mtp.layers.1.mlp.experts", 2),
    ("mtp.1.mlp.experts", 2), ("nextn.1.mlp.experts", 2), ("mtp_layers.1.mlp.experts", 2), ("mtp.mlp.experts", 1),
]  # fmt: skip
WORDS = {"en": "draft layer", "zh": "草稿层"}


def drafted(block, *, lost=("input_scale",), expert=2, kind="up"):
    """The model's one layer, and a quantised draft layer that lacks something of one expert's projection."""
    own = base(1)
    second = {name.replace(f"{OWN}.mlp.experts", block): item for name, item in own.items() if ".experts." in name}
    for role in lost:
        del second[f"{block}.{expert}.{kind}_proj.{role}"]
    return {**own, **second}


def done(block, config=TWO, **more):
    return run_audit(opened(drafted(block, **more), config, QUANT))


@pytest.mark.parametrize(("block", "number"), NAMED)
def test_a_slot_of_a_draft_layer_is_no_slot_of_the_model(block, number):
    audited = done(block)
    report = audited.report
    assert found(report) == [("scale.missing", "backend", number, "up", (2,))]
    [item] = [one for one in report.findings if one.code == "scale.missing"]
    assert item.draft
    assert (report.model.moe_layers, report.model.draft_layers) == ((0,), (number,))
    data = json.loads(to_json(report))
    assert data["model"]["draft_layers"] == [number]
    assert [(one["layer"], one["draft"]) for one in data["findings"]] == [(number, True)]
    assert {at for one in data["backends"] for at in one["layers"]} == {number}
    # One row a slot, and none twice.
    rows = list(csv.DictReader(io.StringIO(to_csv(audited.rows()))))
    places = [(row["layer"], row["expert"], row["projection"], row["role"]) for row in rows]
    assert len(set(places)) == len(places)
    assert {(row["layer"], row["draft"]) for row in rows} == {("0", "False"), (str(number), "True")}
    assert all(row["tensor"].startswith(block) == (row["draft"] == "True") for row in rows)
    lost = [row for row in rows if row["status"] == "missing"]
    assert [(row["layer"], row["draft"]) for row in lost] == [(str(number), "True")]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("block", "number"), NAMED)
def test_every_form_for_people_calls_it_a_draft_layer(block, number, language):
    audited = done(block)
    [item] = audited.report.findings
    message, _ = describe(item, language)
    said = f"{WORDS[language]} {number}"
    assert said in message.lower()
    page = to_html(audited, language)
    assert f">D{number}</text>" in page
    assert f"<title>{said}, " in page
    assert ">D0<" not in page
    for text in (to_markdown(audited.report, language), to_text(audited.report, language, width=200), page):
        assert said in text.lower()
        # The head counts it apart.
        assert {"en": f"draft layers: {number}", "zh": f"草稿层：{number}"}[language] in text


@pytest.mark.parametrize("language", ["en", "zh"])
def test_without_a_draft_layer_nobody_speaks_of_one(language):
    audited = run_audit(opened(base(1), TWO, QUANT))
    assert audited.report.model.draft_layers == ()
    for text in (to_html(audited, language), to_markdown(audited.report, language), to_text(audited.report, language)):
        assert WORDS[language] not in text.lower()
    assert {row.draft for row in audited.rows()} == {False}
    assert not any(item.draft for item in audited.report.findings)


@pytest.mark.parametrize(("block", "number"), [pair for pair in NAMED if pair[0] != "mtp.mlp.experts"])
def test_ordinary_modules_of_a_draft_layer_have_its_number(block, number):
    """They had the number that stands in their names: ``mtp.layers.0`` was the model's first layer."""
    parent = block.removesuffix(".mlp.experts")
    for extra in (
        {f"{parent}.mlp.shared_expert.down_proj.weight_scale_2": tensor(np.float32(0))},
        {f"{parent}.mlp.shared_expert.down_proj.weight_scale": typed(np.full((32, 4), 0x38, np.uint8), "F8_E4M3")},
    ):
        tensors = {**drafted(block, lost=()), **linear(f"{parent}.mlp.shared_expert.down_proj", 32, 32), **extra}
        report = run_audit(opened(tensors, TWO, QUANT)).report
        [item] = [one for one in report.findings if one.severity == "error"]
        assert (item.layer, item.draft) == (number, True)
    # The same of the model's own.
    name = f"{OWN}.mlp.shared_expert.down_proj"
    tensors = {**drafted(block, lost=()), **linear(name, 32, 32), f"{name}.weight_scale_2": tensor(np.float32(0))}
    [item] = [one for one in run_audit(opened(tensors, TWO, QUANT)).report.findings if one.severity == "error"]
    assert (item.layer, item.draft) == (0, False)
    # One fault in both is in no one layer.
    other = f"{parent}.mlp.shared_expert.down_proj"
    tensors |= {**linear(other, 32, 32), f"{other}.weight_scale_2": tensor(np.float32(0))}
    [item] = [one for one in run_audit(opened(tensors, TWO, QUANT)).report.findings if one.severity == "error"]
    assert (item.layer, item.draft, item.count) == (None, False, 2)


def test_a_module_of_another_tower_is_in_no_layer_of_the_model():
    name = "model.visual.blocks.0.mlp.down_proj"
    tensors = {**base(1), **linear(name, 32, 32), f"{name}.weight_scale_2": tensor(np.float32(0))}
    [item] = [one for one in run_audit(opened(tensors, TWO, QUANT)).report.findings if one.code == "scale.zero"]
    assert (item.layer, item.draft) == (None, False)


def test_two_namings_of_one_number_stay_two_layers():
    blocks = ("mtp.0.mlp", "model.layers.1.mlp")
    both = {name: item for block in blocks for name, item in drafted(f"{block}.experts", lost=()).items()}
    places = set()
    for block in blocks:
        tensors = {name: item for name, item in both.items() if name != f"{block}.experts.2.up_proj.input_scale"}
        name = f"{block}.shared_expert.down_proj"
        tensors |= {**linear(name, 32, 32), f"{name}.weight_scale_2": tensor(np.float32(0))}
        report = run_audit(opened(tensors, TWO, QUANT)).report
        assert report.model.draft_layers == (1, 2)
        # The expert and the ordinary module beside it are of one layer.
        [at] = {(item.layer, item.draft) for item in report.findings}
        places.add(at)
    assert places == {(1, True), (2, True)}


def test_without_a_number_of_layers_a_draft_is_still_told():
    config = {key: value for key, value in CONFIG.items() if key != "num_hidden_layers"}
    audited = done("mtp.layers.0.mlp.experts", config)
    [item] = audited.report.findings
    assert item.draft
    assert item.layer not in audited.report.model.moe_layers
    assert (item.layer,) == audited.report.model.draft_layers


def test_drafts_in_the_terminal(tmp_path, capsys):
    checkpoint = opened(drafted("mtp.layers.0.mlp.experts"), TWO, QUANT)
    tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.tensors}
    write_checkpoint(tmp_path / "model", tensors, config=TWO, hf_quant_config=QUANT)
    assert main(["coverage", str(tmp_path / "model")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:-1]} == {"0", "D1"}
    assert lines[-1].startswith("D:")


def test_the_schema_knows_both_fields():
    kinds = schemas()["audit-1.schema.json"]["$defs"]
    assert kinds["Finding"]["properties"]["draft"] == {"type": "boolean", "default": False}
    assert kinds["ModelInfo"]["properties"]["draft_layers"]["items"] == {"type": "integer"}
    # What an older version wrote still reads.
    data = json.loads(to_json(done("mtp.0.mlp.experts").report))
    for item in data["findings"]:
        del item["draft"]
    del data["model"]["draft_layers"]
    from nvfp4viz.audit.report import Report

    assert not any(item.draft for item in msgspec.json.decode(json.dumps(data).encode(), type=Report).findings)


@pytest.mark.parametrize("id", ["DeepSeek V4, three formats"])
def test_deepseeks_own(id):
    layout = LAYOUTS[id]
    tensors = layout.tensors()
    tensors["mtp.0.attn.wq_a.weight"] = bf16(8, 8)
    assert canonical(layout.open(tensors)).draft_layers == (1,)
    audited = run_audit(layout.open(tensors))
    assert {(row.layer, row.draft) for row in audited.rows()} == {(0, False), (1, True)}


def test_every_command_names_a_draft_layer_in_one_way(tmp_path, capsys):
    block = "model.layers.1.mlp.experts"
    write_checkpoint(tmp_path / "model", drafted(block), config=TWO, hf_quant_config=QUANT)
    folder = str(tmp_path / "model")

    def told(*words):
        main([*words])
        return capsys.readouterr().out

    assert "layer D1, expert 2, up" in told("show", folder, f"{block}.2.up_proj.weight_scale_2")
    assert "layer D1, expert 2, up" in told("repair", folder, str(tmp_path / "out"), "--policy", "peer-max")
    assert "   D1  input_scale" in told("coverage", folder)
    # The model's own layers as ever.
    assert "layer 0, expert 2, up" in told("show", folder, f"{OWN}.mlp.experts.2.up_proj.weight_scale_2")
    main(["repair", folder, str(tmp_path / "out"), "--policy", "peer-max", "--apply"])
    [slot] = json.loads((tmp_path / "out" / "nvfp4viz-repair.json").read_text())["slots"]
    assert (slot["layer"], slot["draft"]) == (1, True)


# A draft layer in FP8, as DeepSeek's own is, and as some exporters leave it beside NVFP4.


def in_fp8(suffix, shared, exclude, rows=32):
    parent = "model.layers.1.mlp"
    names = [f"{parent}.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")]
    names += [f"{parent}.shared_experts.{p}_proj" for p in ("gate", "up", "down")] if shared else []
    tensors = base(1)
    for name in names:
        tensors[f"{name}.weight"] = typed(np.full((rows, rows), 0x38, np.uint8), "F8_E4M3")
        tensors[f"{name}.{suffix}"] = tensor(np.ones((1, 1), np.float32))
    quant = {"quantization": {**QUANT["quantization"], "exclude_modules": ["*mlp.gate", *exclude]}}
    return run_audit(opened(tensors, TWO, quant)).report, len(names)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
def test_a_draft_in_fp8_has_one_verdict(suffix, shared):
    report, modules = in_fp8(suffix, shared, ["model.layers.1*"])
    said = [(item.code, item.text, item.severity, item.count) for item in report.findings]
    assert said == [("config.excluded-but-quantised", "config.excluded-but-quantised.fp8", "warn", modules)]
    # Nobody calls it unquantised where it is not excluded either.
    report, _ = in_fp8(suffix, shared, [])
    assert {item.code for item in report.findings} == {"config.conflict"}


def test_a_plain_draft_is_unquantised_as_ever():
    tensors = {**base(1), **{f"model.layers.1.mlp.experts.{e}.up_proj.weight": bf16(32, 32) for e in range(4)}}
    quant = {"quantization": {**QUANT["quantization"], "exclude_modules": ["*mlp.gate", "model.layers.1*"]}}
    assert "draft.unquantised" in {item.code for item in run_audit(opened(tensors, TWO, quant)).report.findings}
