"""Notes say that a naming is sound, and never that a file is; and what a vector of fused scales is."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES
from nvfp4viz.checkpoint import memory_checkpoint, tensor
from tests.audit.config_faults import section_of
from tests.audit.layouts import ALLOWED, CONFIG, EXPERTS, LAYOUTS, typed
from tests.audit.reading import NARROW
from tests.audit.test_cases_config import of_width

ATTENTION = "model.layers.0.self_attn.o_proj"

NOTED = [id for id, layout in LAYOUTS.items() if "loader.note" in layout.notes]


@pytest.mark.parametrize("id", NOTED)
def test_a_note_beside_a_broken_file_does_not_call_it_sound(id):
    layout = LAYOUTS[id]
    broken = layout.tensors()
    layout.put(broken, 2, layout.kinds[0], "weight_scale_2", np.float32(np.nan))
    for tensors in (None, broken):
        report = audit(layout.open(tensors), ep=3)
        assert report.verdict == ("error" if tensors else "info")
        notes = [item for item in report.findings if item.code == "loader.note"]
        assert notes
        for item in notes:
            assert "file is" not in describe(item, "en")[0].lower()
            assert "文件" not in describe(item, "zh")[0]


@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
@pytest.mark.parametrize("kind", ["gate_up", "down"])
def test_a_vector_where_one_number_is_usual(kind, role):
    """Accepted, said, and judged expert by expert: a bad number is its expert's."""
    layout = LAYOUTS["fused"]
    name, healthy = layout.name(0, kind, role), layout.tensors()
    one = np.frombuffer(healthy[name].tobytes(), np.float32)[0]
    values = np.float32(one) * (1 + np.arange(EXPERTS, dtype=np.float32) / 50)
    report = audit(layout.open({**healthy, name: tensor(values)}))
    vector = [item for item in report.findings if item.text == "scale.shape.vector"]
    assert [(item.code, item.severity, item.role, item.tensors) for item in vector] == [
        ("scale.shape", "info", role, (name,))
    ]
    assert report.verdict == "info"
    for language in ("en", "zh"):
        assert name in describe(vector[0], language)[0]
    values[5] = np.nan
    report = audit(layout.open({**healthy, name: tensor(values)}))
    [bad] = [item for item in report.findings if item.code == "scale.nan"]
    assert (bad.layer, bad.projection, bad.experts, bad.count) == (0, kind, (5,), 1)
    if role == "input_scale":
        cutlass = next(item for item in report.backends if item.name == "vllm-cutlass")
        assert (cutlass.outcome, cutlass.scope) == ("nan", "experts")
    # One number for all, bad or not, is nobody's own.
    assert not any(item.text == "scale.shape.vector" for item in audit(layout.open()).findings)
    report = audit(layout.open({**healthy, name: layout.scalar(np.nan)}))
    [bad] = [item for item in report.findings if item.code == "scale.nan"]
    assert (bad.experts, bad.count) == (None, 1)


def test_rows_of_experts_without_a_gate_are_not_called_a_gates():
    for gated, text in ((True, "parallel.alignment"), (False, "parallel.alignment.up")):
        report = audit(of_width(64 if gated else 128, gated=gated), tp=2)
        [item] = [found for found in report.findings if found.code == "parallel.alignment"]
        assert (item.text, item.severity, item.params["rows"]) == (text, "info", 64)
        for language in ("en", "zh"):
            assert ("gate" in describe(item, language)[0]) == gated
    assert CONFIG["num_experts"] == EXPERTS


SHAPES = {
    "FP8": (), "MXFP8": (64, 2), "FP8_PB_WO": (1, 1, 1, 1), "FP8_PER_CHANNEL_PER_TOKEN": (64, 1), "FP8_PB": (1, 1),
}  # fmt: skip
VLLM = tuple(name for name, family in FAMILIES.items() if family.engine == "vllm")


def mixed(algo, *, flat=False, name=ATTENTION):
    """A list that calls a module of attention by that name, its scales in the shape that it means."""
    layout = LAYOUTS["MIXED_PRECISION"]
    allowed = {**ALLOWED, name: {"quant_algo": algo}}
    stored = np.full(SHAPES[algo], 1e-3, np.float32) if algo != "MXFP8" else np.full(SHAPES[algo], 120, np.uint8)
    bits = {f"{name}.weight": typed(np.full((64, 64), 0x38, np.uint8), "F8_E4M3")}
    bits[f"{name}.weight_scale"] = tensor(stored) if algo != "MXFP8" else typed(stored, "F8_E8M0")
    if algo == "FP8":
        bits[f"{name}.input_scale"] = tensor(np.float32(2e-3))
    changes = {"quant": {"quantization": {**section_of(layout), "quantized_layers": allowed}}}
    if flat:
        section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": allowed}
        changes = {"quant": None, "config": {**layout.config, "quantization_config": section}}
    return audit(layout.open({**layout.tensors(), **bits}, **changes))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("algo", SHAPES)
def test_a_name_that_a_mixed_list_may_not_know(algo, flat):
    report = mixed(algo, flat=flat)
    notes = [item for item in report.findings if item.text.startswith("loader.note.mixed")]
    outcomes = {item.name: item for item in report.backends}
    if algo in ("FP8", "MXFP8"):
        assert (notes, {item.outcome for item in report.backends}) == ([], {"safe"})
        return
    late = algo == "FP8_PB_WO"
    [note] = notes
    assert (note.code, note.severity, note.text) == ("loader.note", "info", f"loader.note.mixed{'.late' * late}")
    assert (note.count, note.tensors) == (1, (f"{ATTENTION}.weight",))
    doubtful = {name for name in outcomes if name.startswith("sglang") or (name in VLLM and not late)}
    for name, item in outcomes.items():
        # A forecast is no worse than what is found; it says what it rests on.
        assert (item.outcome, item.scope) == ("safe", "none")
        narrow = item.text == NARROW
        assert item.possible == (("safe", "unsupported") if narrow else ())
        for language in () if narrow else ("en", "zh"):
            assert (algo in describe(item, language)[0]) == (name in doubtful)
    assert report.verdict == "info"


def test_the_same_name_for_a_whole_file_is_known():
    """Outside a list vLLM builds all three."""
    body = {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]}
    name = "model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.weight": typed(np.full((64, 64), 0x38, np.uint8), "F8_E4M3"),
               f"{name}.weight_scale": tensor(np.full((1, 1, 1, 1), 1e-3, np.float32))}  # fmt: skip
    report = audit(memory_checkpoint(tensors, config={}, hf_quant_config={"quantization": body}))
    assert not [item for item in report.findings if item.code == "loader.note"]


@pytest.mark.parametrize("algo", ["FP8", "FP8_PB_WO"])
def test_experts_under_such_a_name_are_known_to_no_version_that_was_read(algo):
    layout, block = LAYOUTS["MIXED_PRECISION"], "model.layers.1.mlp.experts"
    tensors = layout.tensors()
    for expert in range(EXPERTS):
        for part, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
            name = f"{block}.{expert}.{part}_proj"
            tensors[f"{name}.weight"] = typed(np.full(shape, 0x38, np.uint8), "F8_E4M3")
            tensors[f"{name}.weight_scale"] = tensor(np.full(SHAPES[algo], 1e-3, np.float32))
            tensors |= {f"{name}.input_scale": tensor(np.float32(2e-3))} if algo == "FP8" else {}
    listed = {**section_of(layout), "quantized_layers": {**ALLOWED, block: {"quant_algo": algo}}}
    config = {**layout.config, "num_hidden_layers": 2}
    report = audit(layout.open(tensors, config=config, quant={"quantization": listed}))
    texts = [item.text for item in report.findings if item.text.startswith("loader.note.mixed")]
    assert texts == ([] if algo == "FP8" else ["loader.note.mixed"])
    assert any(algo in item.why for item in report.backends) == (algo != "FP8")
