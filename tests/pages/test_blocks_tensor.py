"""Any matrix of a reader's own checkpoint on the page of blocks: every layout, parts of large ones, what cannot be."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.checkpoint import canonical, open_checkpoint, tensor, write_checkpoint
from nvfp4viz.errors import error_texts
from nvfp4viz.figures.words import catalogue
from nvfp4viz.serving import matrix
from nvfp4viz.ui import explorer_open
from nvfp4viz.ui.errors import escape
from nvfp4viz.ui.snippets import run
from tests.audit.layouts import LAYOUTS, ct_linear, fp8, linear, typed

from .conftest import clean, shown_code_output, skipped, texts

PAGE = "blocks"
BEST = f"{PAGE}.predict.best"
RANDOM = np.random.default_rng(3)


@pytest.fixture
def look(open_page, tmp_path):
    """The page with a checkpoint of ours open in the Explorer: the question is passed, the figure asked for."""

    def go(tensors, config=None, quant=None, lang="en", **query):
        write_checkpoint(tmp_path / "own", tensors, config=config, hf_quant_config=quant)
        at = open_page(PAGE, lang=lang, part="error", data="checkpoint")
        at.session_state["explorer.now"] = explorer_open.open_folder(tmp_path / "own", "upload")
        for name, value in query.items():
            key = name if name in ("layer", "expert", "projection") else f"{PAGE}.{name}"
            at.session_state[key] = value
        return skipped(at, BEST)

    return go


def pictures(at):
    return len(at.get("plotly_chart"))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.id)
def test_an_expert_of_every_layout_is_compared(look, layout):
    at = look(layout.tensors(), layout.config, layout.quant, expert=7, projection=layout.kinds[-1])
    assert pictures(at) == 1
    assert f", {layout.block}, 64 × 32." in texts(at)
    assert "All of it was measured." in texts(at)


def floats(*shape):
    return tensor(RANDOM.normal(size=shape).astype(ml_dtypes.bfloat16))


MODULES = {
    "attention in NVFP4": (linear("model.layers.0.self_attn.q_proj"), "weight", ("NVFP4", 64, 64)),
    "dense MLP of compressed-tensors": (ct_linear("model.layers.0.mlp.up_proj"), "weight_packed", ("NVFP4", 64, 64)),
    "shared expert": (linear("model.layers.0.mlp.shared_experts.down_proj"), "weight", ("NVFP4", 64, 64)),
    "attention in FP8": (fp8("model.layers.0.self_attn.o_proj"), "weight", ("F8_E4M3, 64 × 64", 64, 64)),
    "FP8 tiles of DeepSeek V4": (fp8("layers.0.attn.wq_a", "scale", "F8_E8M0"), "weight", ("F8_E4M3, 64 × 64", 64, 64)),
    "router": ({"model.layers.0.mlp.gate.weight": floats(16, 64)}, "weight", ("BF16", 16, 64)),
    "embedding": ({"model.embed_tokens.weight": floats(80, 64)}, "weight", ("BF16", 80, 64)),
    "stack": ({"model.layers.0.mixer.many.weight": floats(3, 32, 64)}, "weight", ("BF16", 32, 64)),
}
"""Tensors, the last part of the name, and what is said: how it is stored, with a scale for how much, and its size."""


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("case", MODULES)
def test_other_matrices_are_listed_and_compared(look, lang, case):
    tensors, suffix, (stored, n, k) = MODULES[case]
    (name,) = [name for name in tensors if name.endswith(f".{suffix}")]
    if case.startswith("FP8") or case.endswith("FP8"):  # ones alone would lose nothing in any direction
        values = RANDOM.normal(size=(64, 64)).astype(ml_dtypes.float8_e4m3fn)
        tensors = {**tensors, name: typed(values, "F8_E4M3")}
    at = look(tensors, lang=lang, of="other", tensor=name)
    assert name in at.selectbox(key=f"{PAGE}.tensor").options
    assert pictures(at) == 1
    called = f"{name}[0]" if case == "stack" else name
    assert catalogue(lang)[f"{PAGE}.tensor.is"].format(name=called, stored=stored, n=n, k=k) in texts(at)


def test_a_matrix_of_a_stack_is_chosen_by_number(look):
    tensors = MODULES["stack"][0]
    at = look(tensors, of="other", tensor="model.layers.0.mixer.many.weight", stack=2)
    assert "many.weight[2]`, BF16, 32 × 64." in texts(at)
    assert at.number_input(key=f"{PAGE}.stack").max == 2


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(
    ("code", "item"),
    [
        ("matrix.dimensions", tensor(np.ones(64, np.float32))),
        ("matrix.integer", tensor(np.ones((32, 32), np.int32))),
        ("matrix.packing", tensor(np.ones((32, 32), np.uint8))),
        ("matrix.small", floats(8, 64)),
        ("matrix.zero", tensor(np.zeros((32, 32), np.float32))),
    ],
)
def test_what_cannot_be_compared_is_said(look, lang, code, item):
    at = look({"b.weight": floats(32, 32), "a.weight": item}, lang=lang, of="other", tensor="a.weight")
    assert pictures(at) == 0
    why = error_texts(lang)[code]["why"].split("{")[0]
    assert why in texts(at)


def test_a_part_of_a_large_matrix_is_chosen(look, monkeypatch):
    monkeypatch.setattr(matrix, "MOST", 64 * 64)
    monkeypatch.setattr(matrix, "MOST_COLUMNS", 64)
    own = {"model.embed_tokens.weight": floats(200, 96)}
    at = look(own, of="other", tensor="model.embed_tokens.weight", row=50, column=20)
    assert "Measured: rows 48–111 and columns 16–79, 64 × 64 values" in texts(at)
    at.session_state[f"{PAGE}.take"] = "spread"
    clean(at.run())
    assert "4 bands of 16 neighbouring rows, spread evenly over rows 0–191, with columns 0–63: 64 × 64" in texts(at)
    at.session_state[f"{PAGE}.take"] = "whole"
    clean(at.run())
    assert pictures(at) == 0
    clean(at.button(key=f"{PAGE}.measure").click().run())
    assert pictures(at) == 1
    assert "Measured: rows 0–191 and columns 0–95, 192 × 96 values" in texts(at)
    clean(at.run())
    assert pictures(at) == 1  # kept


def test_a_part_is_no_question_where_the_whole_is_measured_at_once(look):
    at = look({"model.embed_tokens.weight": floats(80, 64)}, of="other", tensor="model.embed_tokens.weight")
    assert not [box for box in at.button_group if box.key == f"{PAGE}.take"]


def test_scales_and_experts_are_not_in_the_list(tmp_path):
    layout = LAYOUTS["modelopt, shared expert"]
    opened = layout.open()
    names = matrix.matrix_names(opened, canonical(opened))
    assert names
    assert not [name for name in names if "scale" in name or ".experts." in name]


def opened_next(at, folder):
    """Another checkpoint opened in the Explorer, and back to the page."""
    at.session_state["explorer.now"] = explorer_open.open_folder(folder, "upload")
    at.session_state["_view_page"] = "explorer"
    return clean(at.run())


def test_what_the_page_chose_for_one_checkpoint_is_not_asked_of_the_next(look, tmp_path):
    """Dense, then experts and a router of eight rows, then experts alone: each opens on its expert."""
    at = look({"lm_head.weight": floats(64, 64)})
    assert "`lm_head.weight`, BF16, 64 × 64." in texts(at)
    first = LAYOUTS["modelopt"]
    gate = {"model.layers.0.mlp.gate.weight": floats(8, 64), "lm_head.weight": floats(64, 64)}
    for number, tensors in enumerate((first.tensors() | gate, first.tensors())):
        write_checkpoint(tmp_path / str(number), tensors, config=first.config, hf_quant_config=first.quant)
        at = opened_next(at, tmp_path / str(number))
        assert pictures(at) == 1
        assert f", {first.block}, " in texts(at)
        assert not {"of", "tensor"} & set(at.query_params)
    assert not [box for box in at.button_group if box.key == f"{PAGE}.of"], "there is nothing else to choose"
    at.session_state[f"{PAGE}.data"] = "outliers"
    assert not {"of", "tensor"} & set(clean(at.run()).query_params)


def test_starting_over_leaves_no_name_in_the_link(look):
    at = look({"lm_head.weight": floats(64, 64), "a.weight": floats(64, 64)}, of="other", tensor="lm_head.weight")
    clean(at.button(key=f"{PAGE}.reset").click().run())
    assert set(at.query_params) <= {"lang"}


def test_a_router_of_eight_rows_is_not_in_the_list(look):
    at = look({"a.weight": floats(8, 64), "b.weight": floats(16, 64)}, of="other")
    assert at.selectbox(key=f"{PAGE}.tensor").options == ["b.weight"]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_checkpoint_without_any_matrix_says_so(look, lang):
    at = look({"norm.weight": tensor(np.ones(64, np.float32))}, lang=lang)
    assert error_texts(lang)["matrix.none"]["what"].format(name="own") in texts(at)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_weight_in_a_file_cut_short_is_not_called_absent(look, tmp_path, lang):
    layout = LAYOUTS["modelopt"]
    at = look(layout.tensors(), layout.config, layout.quant, lang=lang, expert=7)
    entry = open_checkpoint(tmp_path / "own").entry(layout.name(7, "gate", "weight"))
    file = tmp_path / "own" / entry.file
    file.write_bytes(file.read_bytes()[: entry.end - 1])
    at = opened_next(at, tmp_path / "own")
    assert error_texts(lang)["checkpoint.unreadable"]["what"].format(tensor=escape(entry.name)) in texts(at)


def own_code(at):
    """The foot's code with its output: what is open in the Explorer is shown as a folder."""
    at.session_state[f"{PAGE}.open.code"] = True
    clean(at.run())
    *_, source, output = (block.value for block in at.code)
    return source, output


@pytest.mark.parametrize("name", ["modelopt", "fused", "stacked", "gpt-oss", "DeepSeek V4, three formats"])
def test_the_code_for_the_reader_s_own_files_gives_the_page_s_numbers(look, tmp_path, name):
    layout = LAYOUTS[name]
    at = look(layout.tensors(), layout.config, layout.quant, expert=5, projection="down")
    source, output = own_code(at)
    assert 'open_checkpoint("FOLDER")' in source
    assert output == run(source.replace("FOLDER", (tmp_path / "own").as_posix()))
    for line in output.splitlines()[1:]:
        assert line.split(": ")[1].split(",")[0] in texts(at).replace(output, "")


def test_the_code_for_a_matrix_of_a_stack_names_it(look):
    at = look(MODULES["stack"][0], of="other", tensor="model.layers.0.mixer.many.weight", stack=2)
    source, output = own_code(at)
    assert "find_matrix(opened, view, 'model.layers.0.mixer.many.weight', 2)" in source
    assert output.startswith("model.layers.0.mixer.many.weight BF16 (32, 64)")


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_code_of_what_cannot_be_compared_says_why(look, lang):
    """Also under a name that ends a Python literal, if it can."""
    name = "a'); 1/0; ('{b}.weight"
    source, output = own_code(look({name: tensor(np.zeros((32, 32), np.float32))}, lang=lang, of="other", tensor=name))
    assert repr(name) in source
    assert output == error_texts(lang)["matrix.zero"]["what"].format(tensor=name)


def test_the_code_of_nothing_says_so(look):
    source, output = own_code(look({"norm.weight": tensor(np.ones(64, np.float32))}))
    assert "'TENSOR'" in source
    assert output == error_texts("en")["matrix.none"]["what"].format(name="own")


def test_the_code_of_a_large_matrix_waits_until_it_is_measured(look, monkeypatch):
    monkeypatch.setattr(matrix, "MOST", 64 * 64)
    at = look({"model.embed_tokens.weight": floats(200, 96)}, of="other", take="whole")
    assert own_code(at)[1] == "Not measured yet: 18,432 values."
    clean(at.button(key=f"{PAGE}.measure").click().run())
    assert own_code(at)[1].splitlines()[1].startswith("k: ")


def test_a_sample_s_code_has_no_branch_that_is_not_taken(open_page):
    at = skipped(open_page(PAGE, part="error", data="checkpoint"), BEST)
    output = shown_code_output(at, PAGE)
    assert " if " not in at.code[-2].value
    assert "\nif " not in at.code[-2].value
    assert output.startswith("model.layers.0.")
