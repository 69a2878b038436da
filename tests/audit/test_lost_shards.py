"""Healthy checkpoints of which one shard is lost, or only one is given: nothing else is wrong, in any layout.

What the index places in a lost shard is unreadable, and never absent, whatever its format calls it.
"""

import json

import pytest

from nvfp4viz.audit import audit, run_audit
from nvfp4viz.checkpoint import file_bytes, memory_checkpoint
from nvfp4viz.checkpoint.dialects import recognise
from nvfp4viz.checkpoint.dialects.recognise import UNREAD
from tests.audit.families import FAMILIES, H, around, bf16, config, experts, norms, plain, sidecar
from tests.audit.layouts import LAYOUTS

# How tensors come to their shards: neighbours together, or the scales of a layer apart from its weights.
ORDERS = {
    "inserted": list,
    "sorted": lambda tensors: sorted(tensors),
    "by size": lambda tensors: sorted(tensors, key=lambda name: -len(tensors[name].tobytes())),
}


def healthy_sets():
    for name, layout in LAYOUTS.items():
        yield pytest.param(lambda layout=layout: (layout.tensors(), layout.config, layout.quant), id=f"layout {name}")
    for name, make in FAMILIES.items():

        def made(make=make):
            checkpoint = make()
            return checkpoint.read_tensors(), checkpoint.config, checkpoint.hf_quant_config

        yield pytest.param(made, id=f"family {name}")


def sharded(folder, tensors, config, quant, order, count):
    """A folder of so many shards with an index; their paths."""
    names = ORDERS[order](tensors)
    size = -(-len(names) // count)
    paths, index = [], {}
    for at in range(count):
        path = folder / f"model-{at + 1:05}-of-{count:05}.safetensors"
        part = names[at * size : (at + 1) * size]
        path.write_bytes(file_bytes({name: tensors[name] for name in part}))
        index |= dict.fromkeys(part, path.name)
        paths.append(path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name, content in (("config.json", config), ("hf_quant_config.json", quant)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return paths


def worse_than_info(report):
    return [(item.code, item.text, item.tensors[:1]) for item in report.findings if item.severity != "info"]


def texts(report):
    return {item.text for item in report.findings if item.severity == "info"}


def check_each_lost(paths, folder, *, cut=False):
    """Each shard lost in turn, or cut to the half: that shard is what is wrong, and slots in it are unreadable."""
    healthy = run_audit(folder).report
    assert worse_than_info(healthy) == []
    for path in paths:
        kept = path.read_bytes()
        path.write_bytes(kept[: len(kept) * 3 // 4]) if cut else path.unlink()
        report = run_audit(folder).report
        path.write_bytes(kept)
        assert {code for code, *_ in worse_than_info(report)} == {
            "container.truncated" if cut else "container.missing-shard"
        }, worse_than_info(report)
        assert len(worse_than_info(report)) == 1
        more = texts(report) - texts(healthy)
        # Where nothing that is left tells the format, its experts are not looked into, and the report says so.
        told = "audit.partial.format" not in more
        assert more <= {"audit.partial.layers", "audit.partial.format"}
        # Nor does anybody know the format of a draft layer of which nothing is left.
        told &= report.model.draft_layers == healthy.model.draft_layers
        for role, row in report.coverage.items():
            assert row.missing == 0
            assert row.present + row.unreadable == row.expected
            assert not told or row.expected == healthy.coverage[role].expected, (path.name, role)
    return texts(healthy)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("made", healthy_sets())
def test_a_lost_shard_is_all_that_is_wrong(made, order, count, tmp_path):
    paths = sharded(tmp_path, *made(), order, count)
    whole = check_each_lost(paths, tmp_path)
    for path in paths:
        alone = run_audit(path).report
        assert worse_than_info(alone) == []
        assert alone.backends == ()
        more = texts(alone) - whole - {"audit.partial.layers", "audit.partial.format", "audit.partial.no-experts"}
        assert more == {"audit.partial.one-shard"}


@pytest.mark.parametrize("name", ["modelopt", "compressed-tensors", "fused", "stacked", "gpt-oss", "Quark NVFP4"])
def test_a_cut_shard_is_all_that_is_wrong(name, tmp_path):
    layout = LAYOUTS[name]
    check_each_lost(sharded(tmp_path, layout.tensors(), layout.config, layout.quant, "sorted", 2), tmp_path, cut=True)


# ------------------------------------------------------------------------- layers whose attention is of another kind

ORDINARY = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
FUSED = ("qkv_proj", "out_proj", "output_gate")
MIXED = {
    "the last one latent (Kimi Linear)": (ORDINARY, ORDINARY, ORDINARY, LATENT),
    "the last one apart (MiniMax-Text-01)": (FUSED, FUSED, FUSED, ORDINARY),
    "all latent": (LATENT,) * 3,
}


def with_attention(*layers):
    tensors = around()
    for at, parts in enumerate(layers):
        head = f"model.layers.{at}"
        tensors |= plain(*(f"{head}.self_attn.{part}" for part in parts))
        tensors |= norms(f"{head}.input_layernorm", f"{head}.post_attention_layernorm")
        tensors |= {f"{head}.mlp.gate.weight": bf16(4, H), **experts(f"{head}.mlp.experts")}
    return tensors, config(len(layers)), sidecar("NVFP4", ["lm_head", "*gate", "*self_attn*"])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layers", MIXED.values(), ids=MIXED)
def test_no_name_is_missed_that_no_such_layer_has(layers, order, tmp_path):
    for count in (2, 3, 5):
        folder = tmp_path / str(count)
        folder.mkdir()
        check_each_lost(sharded(folder, *with_attention(*layers), order, count), folder)


def test_every_second_layer_may_take_the_keys_of_the_first():
    """HunYuan's cross-layer attention, which its configuration tells of."""
    tensors, fields, quant = with_attention(ORDINARY, ("q_proj", "o_proj"))
    for use, codes in ((True, set()), (False, {"scale.missing"})):
        given = {**fields, "use_cla": use, "cla_share_factor": 2}
        report = audit(memory_checkpoint(tensors, config=given, hf_quant_config=quant))
        assert {code for code, *_ in worse_than_info(report)} == codes


# ----------------------------------------------------------------------------------- what is missed all the same


@pytest.mark.parametrize(
    "gone",
    ["self_attn.k_proj.weight", "mlp.gate.weight", "mlp.experts.2.up_proj.weight_scale_2", "mlp.experts.1.down_proj"],
)
def test_a_true_hole_is_told_beside_a_lost_shard(gone, tmp_path):
    """The index places it in no file."""
    tensors, fields, quant = with_attention(*(ORDINARY,) * 3)
    kept = {name: item for name, item in tensors.items() if not name.startswith(f"model.layers.0.{gone}")}
    paths = sharded(tmp_path, kept, fields, quant, "sorted", 3)
    # The last shard holds the last layer, and nothing of the first.
    assert "layers.0." not in paths[-1].read_bytes()[:100_000].decode("latin1")
    paths[-1].unlink()
    found = worse_than_info(run_audit(tmp_path).report)
    [(code, _, names)] = [item for item in found if item[0] != "container.missing-shard"]
    assert code in ("scale.missing", "expert.gap", "expert.absent")
    assert names[0].startswith(f"model.layers.0.{gone}")


@pytest.mark.parametrize(
    ("types", "arrangement", "method", "whole", "block"),
    [
        # Quark's NVFP4 has a second level, which its own method does not tell from MXFP4.
        ({"weight": "U8", "weight_scale": "F8_E4M3"}, "expert", "quark", True, "MXFP4"),
        ({"weight": "U8", "weight_scale": "F8_E4M3"}, "expert", "quark", False, "NVFP4"),
        ({"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": UNREAD}, "expert", "quark", True, "NVFP4"),
        ({"weight": "U8", "weight_scale": UNREAD}, "expert", "quark", True, "MXFP4"),
        ({"weight": "U8", "weight_scale": UNREAD}, "expert", "quark", False, None),
        ({"weight_packed": "U8", "weight_scale": UNREAD}, "expert", "compressed-tensors", True, "MXFP4"),
        ({"weight_packed": "I32", "weight_scale": UNREAD}, "expert", "compressed-tensors", True, None),
        ({"weight": UNREAD, "weight_scale": UNREAD}, "expert", "modelopt", True, None),
        ({"weight": "U8", "scale": UNREAD}, "expert", "fp8", True, "MXFP4"),
        ({"weight": "F8_E4M3", "scale": UNREAD}, "expert", "fp8", True, None),
        # FP8's scales have the same name as the fused layout's.
        ({"": UNREAD, "weight_scale": "F32"}, "fused", None, True, None),
        ({"": UNREAD, "weight_scale": "F8_E4M3"}, "fused", None, True, "NVFP4"),
        ({"weight_scale": "F32"}, "fused", None, False, None),
    ],
)
def test_what_a_name_without_a_type_tells(types, arrangement, method, whole, block):
    dialect = recognise(types, arrangement, method, whole=whole)
    assert (dialect and dialect.block) == block


@pytest.mark.parametrize("method", ["quark", "modelopt"])
@pytest.mark.parametrize("lost", [("weight",), ("weight_scale",), ("weight", "weight_scale")])
def test_the_label_of_all_experts_settles_what_lost_types_leave_open(lost, method):
    types = {"weight": "U8", "weight_scale": "U8"} | dict.fromkeys(lost, UNREAD)
    found = recognise(types, "expert", method, label="MXFP4")
    assert (found.block, found.id) == ("MXFP4", method)
    for label in (None, "MXFP8", "FP8"):
        other = recognise(types, "expert", method, label=label)
        assert other == recognise(types, "expert", method)
    # What can be read contradicts it.
    assert recognise({**types, "weight": "F8_E4M3"}, "expert", method, label="MXFP4") is None
