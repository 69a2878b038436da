"""The Explorer's map and the slot beside it: they speak of one slot, and say only what was looked at."""

import json
import re

import pytest

from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import MemorySource, file_bytes, open_checkpoint, write_checkpoint
from nvfp4viz.figures.words import words
from nvfp4viz.ui import i18n
from sample_checkpoints import ensure
from tests.audit.families import gpt_oss
from tests.audit.layouts import LAYOUTS
from tests.checkpoint.checkpoint_fixtures import CONFIG, CT_QUANT, ct_base

from .conftest import clean, strips, tab, texts
from .test_explorer import HOLES, LANGUAGES, choose, upload

MXFP4 = "tiny-moe-mxfp4"


def pack(sample: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(ensure(sample).iterdir()) if path.is_file()}


def other(at, sample: str):
    """Open another checkpoint, as the chooser does."""
    at.session_state["checkpoint"] = sample
    return clean(at.run())


def headers_alone(data: bytes) -> bytes:
    """A shard that broke off where its tensors begin."""
    return data[: 8 + int.from_bytes(data[:8], "little")]


def cursor(at) -> tuple[int, int, str]:
    return tuple(at.session_state[name] for name in ("layer", "expert", "projection"))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(("sample", "role"), [(MXFP4, "weight_scale"), ("tiny-moe-nvfp4-full", "weight_scale")])
def test_nothing_is_said_of_bytes_that_nobody_read(open_page, lang, sample, role):
    at = open_page("explorer", lang=lang, checkpoint=sample, role=role)
    shown = texts(at)
    assert shown.count("audit --deep") == 2  # under the map, and where there is no finding
    assert {"en": "hold no usable number", "zh": "数值不可用"}[lang] not in shown
    assert {"en": "every scale.", "zh": "以及每个缩放因子"}[lang] not in shown
    scalars = texts(open_page("explorer", lang=lang, checkpoint="tiny-moe-nvfp4-full", role="weight_scale_2"))
    assert {"en": "hold no usable number", "zh": "数值不可用"}[lang] in scalars


@pytest.mark.parametrize("kind", ["", "_unreadable", "_beside"])
@pytest.mark.parametrize("what", ["finding", "blocks"])
def test_one_slot_is_missing_and_holds_nothing(what, kind):
    """The sentence under the map, for one of each and for two of each."""
    counts = ("missing", "invalid", "unreadable")
    one, two = (
        words("en", f"explorer.map.{what}{kind}", role="r", expected="24", **dict.fromkeys(counts, n)).split(" What ")[
            0
        ]
        for n in ("1", "2")
    )
    assert not re.search(r"\b(are|hold|lie|files)\b", one)
    assert "1 of 24 slots" in one
    assert not re.search(r"\b(is|holds|lies|a file)\b", two)
    assert "2 of 24 slots" in two


@pytest.mark.parametrize("lang", LANGUAGES)
def test_without_scales_none_was_looked_at(open_page, lang):
    shown = texts(open_page("explorer", lang=lang, checkpoint="tiny-moe-bf16"))
    assert {"en": "No finding.", "zh": "没有发现问题。"}[lang] in shown
    assert "--deep" not in shown


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_tensor_in_a_truncated_file_is_not_called_absent(open_page, lang, monkeypatch):
    monkeypatch.setattr(i18n, "lang", lambda: lang)  # AppTest formats the choices after the run, without a session
    files = pack("tiny-moe-nvfp4-full")
    lost = max(name for name in files if name.endswith(".safetensors"))
    at = upload(
        open_page("explorer", lang=lang, role="weight_scale"),
        *((name, headers_alone(data) if name == lost else data) for name, data in files.items()),
    )
    shown = texts(at)
    assert {"en": "`weight_scale` lies in a file that cannot be read", "zh": "`weight_scale` 所在的文件无法读取"}[
        lang
    ] in shown
    assert {"en": "is not stored", "zh": "没有存储"}[lang] not in shown
    shown = texts(tab(at, "explorer", 1))
    assert {"en": "stored, not read", "zh": "已存储，未能读取"}[lang] in shown
    assert {"en": "· missing", "zh": "· 缺失"}[lang] not in shown
    assert i18n.t("explorer.anatomy.state.absent") not in shown


@pytest.mark.parametrize("lang", LANGUAGES)
def test_an_expert_in_a_lost_shard_is_not_called_unstored(open_page, lang, monkeypatch):
    """Its index has the names, and nothing of it is here; of an expert that no file has it is said."""
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    files = pack("tiny-moe-nvfp4-full")
    index = json.loads(files["model.safetensors.index.json"])
    gone = [name for name in index["weight_map"] if ".layers.1." in name and ".experts.5." in name]
    parts = {
        name: open_checkpoint(MemorySource({"x.safetensors": data})).read_tensors()
        for name, data in files.items()
        if name.endswith(".safetensors")
    }
    kept = {name: {key: item for key, item in part.items() if key not in gone} for name, part in parts.items()}
    given = files | {name: file_bytes(part) for name, part in kept.items()}
    at = {"layer": "1", "expert": "5", "projection": "up", "lang": lang}
    lost = json.dumps({**index, "weight_map": index["weight_map"] | dict.fromkeys(gone, "lost.safetensors")})
    bare = json.dumps({**index, "weight_map": {k: v for k, v in index["weight_map"].items() if k not in gone}})
    there = i18n.t("explorer.anatomy.status.lost", file="`lost.safetensors`")
    for text, stored in ((lost, False), (bare, True)):
        found = given | {"model.safetensors.index.json": text.encode()}
        said = texts(tab(upload(open_page("explorer", **at), *found.items()), "explorer", 1))
        assert (i18n.t("explorer.anatomy.state.absent") in said) == stored
        # The expert, and each of its four tensors.
        assert said.count(there) == (0 if stored else 5)
        assert i18n.t("explorer.anatomy.status.unread") not in said


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_strip_s_table_speaks_as_the_map_does(open_page, lang, monkeypatch):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    at = open_page("explorer", lang=lang, layer="0", expert="9", projection="gate")
    key = next(box.proto.id for box in at.get("expander") if box.label == words(lang, "ui.table"))
    at.session_state[key.rpartition("-")[2]] = True
    table = clean(at.run()).dataframe[0]
    assert table.value["status"][9] == words(lang, "coverage.status.missing")
    assert table.value["status"][0] == words(lang, "coverage.status.present")
    columns = json.loads(table.proto.columns)
    for name in ("expert", "status", "value"):
        assert columns[name]["label"] == words(lang, f"ui.column.{name}")
    assert table.proto.placeholder == "–"


def test_the_page_s_own_choice_of_scale_ends_with_its_checkpoint(open_page):
    at = open_page("explorer", checkpoint=MXFP4)
    assert at.session_state["explorer.role"] == "weight_scale"
    assert cursor(at) == (0, 0, "gate")
    at = other(at, HOLES)
    assert at.session_state["explorer.role"] == "input_scale"
    assert "has no usable number" in texts(at)  # the slot shown is a hole
    fresh = open_page("explorer", checkpoint=HOLES)
    assert cursor(at) == cursor(fresh)


def test_after_other_projections_the_first_hole_is_shown(open_page):
    """gpt-oss stores gate_up: nobody chose the slot there, so the next checkpoint opens on its own first hole."""
    stored = gpt_oss().source
    files = [(name, stored.read_range(name, 0, stored.size(name))) for name in stored.files()]
    at = upload(open_page("explorer"), *files)
    assert cursor(at) == (0, 0, "gate_up")
    assert cursor(other(choose(at, "sample"), HOLES)) == cursor(open_page("explorer", checkpoint=HOLES))


def test_the_reader_s_choice_of_scale_and_slot_goes_with_them(open_page):
    at = open_page("explorer", checkpoint="tiny-moe-nvfp4-full")
    at.radio(key="explorer.role").set_value("weight_scale_2").run()
    at.number_input(key="expert").set_value(7).run()
    at = other(at, HOLES)
    assert at.session_state["explorer.role"] == "weight_scale_2"
    assert at.session_state["expert"] == 7
    # And comes back after a checkpoint that has no such scale.
    at = other(at, MXFP4)
    assert at.session_state["explorer.role"] == "weight_scale"
    at = other(at, HOLES)
    assert at.session_state["explorer.role"] == "weight_scale_2"


@pytest.mark.parametrize(
    "said",
    [{"layer": 2}, {"expert": 5}, {"projection": "down"}, {"layer": 3, "projection": "up"}, {"expert": 63, "layer": 1}],
    ids=str,
)
def test_a_link_to_part_of_a_slot_keeps_to_it(open_page, said):
    """What it leaves open is the first hole there."""
    at = open_page("explorer", checkpoint=HOLES, **{name: str(value) for name, value in said.items()})
    found = dict(zip(("layer", "expert", "projection"), cursor(at), strict=True))
    assert {name: found[name] for name in said} == said
    layer, expert, projection = found.values()
    holes = [item for item in audit(ensure(HOLES)).findings if item.code == "scale.missing"]
    assert "expert" in said or any(
        (item.layer, item.projection) == (layer, projection) and expert == item.experts[0] for item in holes
    )


def test_a_link_to_a_slot_that_is_in_order_opens_it(open_page):
    at = open_page("explorer", checkpoint="tiny-moe-nvfp4-full")
    first = cursor(at)
    at = open_page("explorer", checkpoint=HOLES, layer=str(first[0]), expert=str(first[1]), projection=first[2])
    assert cursor(at) == first


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_anatomy_of_mxfp4_speaks_of_mxfp4(open_page, lang, monkeypatch):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    said = texts(tab(open_page("explorer", lang=lang, checkpoint=MXFP4), "explorer", 1))
    assert "E8M0" in said
    assert "E4M3" not in said
    assert "32" in said
    # Neither a second level nor activation scales exist there: nothing is wrong without them.
    assert said.count({"en": "it is not missing", "zh": "它并不缺失"}[lang]) == 2
    assert {"en": "arbitrary scale", "zh": "尺度是任意的"}[lang] not in said
    assert {"en": "old memory", "zh": "旧内存"}[lang] not in said.partition("input_scale")[2]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(("id", "shared"), [("fused", True), ("modelopt", False)])
def test_a_card_counts_tensors_where_one_is_of_all_experts(open_page, tmp_path, monkeypatch, id, shared, lang):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    of = LAYOUTS[id]
    tensors = {name.replace("layers.0.", f"layers.{k}."): item for k in (0, 1) for name, item in of.tensors().items()}
    for kind in of.kinds:
        tensors.pop(of.name(0, kind, "input_scale"))
    config = {**of.config, "num_hidden_layers": 2}
    write_checkpoint(tmp_path / "own", tensors, config=config, hf_quant_config=of.quant)
    files = [(path.name, path.read_bytes()) for path in sorted((tmp_path / "own").iterdir())]
    shown = texts(upload(open_page("explorer", lang=lang), *files))
    assert ({"en": "2 tensors, each for all experts", "zh": "共 2 个张量"}[lang] in shown) == shared
    assert ({"en": "3 slots in 3 findings", "zh": "共 3 个槽位"}[lang] in shown) != shared


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize(("id", "gated"), [("non-gated", False), ("modelopt", True), ("compressed-tensors", True)])
def test_only_where_there_is_a_gate_its_scale_serves_up(open_page, tmp_path, monkeypatch, id, gated, lost, lang):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    of = LAYOUTS[id]
    tensors = of.tensors()
    if lost:
        del tensors[of.name(0, "up", "weight_scale_2")]
    write_checkpoint(tmp_path / "own", tensors, config=of.config, hf_quant_config=of.quant)
    files = [(path.name, path.read_bytes()) for path in sorted((tmp_path / "own").iterdir())]
    at = tab(upload(open_page("explorer", lang=lang, layer="0", expert="0", projection="up"), *files), "explorer", 1)
    said = texts(at)
    assert ("gate" in said.partition("weight_scale_2")[2]) == gated
    assert (i18n.t("explorer.roles.weight_scale_2.absent") in said) != gated


STATIC = [name for name, layout in LAYOUTS.items() if layout.block == "MXFP4" and layout.with_input]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("id", STATIC)
def test_the_anatomy_says_no_more_of_fp8_inputs_than_was_read(open_page, tmp_path, monkeypatch, id, lost, lang):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    of = LAYOUTS[id]
    tensors = of.tensors()
    if lost:
        del tensors[of.name(0, of.kinds[0], "input_scale")]
    write_checkpoint(tmp_path / "own", tensors, config=of.config, hf_quant_config=of.quant)
    files = [(path.name, path.read_bytes()) for path in sorted((tmp_path / "own").iterdir())]
    at = upload(open_page("explorer", lang=lang, layer="0", expert="0", projection=of.kinds[0]), *files)
    said = texts(tab(at, "explorer", 1)).rpartition("**input_scale**")[2]
    assert said.count({"en": "we have not read", "zh": "我们没有读到"}[lang]) == 2
    assert "KeyError" not in said
    assert "TensorRT-LLM" not in said


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_anatomy_of_divisors_speaks_of_divisors(open_page, lang, monkeypatch):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    files = {
        "model.safetensors": file_bytes(ct_base()),
        "config.json": json.dumps(CONFIG | {"quantization_config": CT_QUANT}).encode(),
    }
    said = texts(tab(upload(open_page("explorer", lang=lang), *files.items()), "explorer", 1))
    assert "weight_global_scale" in said
    assert said.count({"en": "a number to divide by", "zh": "是一个除数"}[lang]) == 2
    plain = texts(tab(open_page("explorer", lang=lang, checkpoint=HOLES), "explorer", 1))
    assert {"en": "a number to divide by", "zh": "是一个除数"}[lang] not in plain
    assert "E4M3" in plain
    assert "TensorRT-LLM" in plain


@pytest.mark.parametrize("lang", LANGUAGES)
def test_experts_without_scales_can_be_looked_at_tensor_by_tensor(open_page, lang, monkeypatch):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    at = open_page("explorer", lang=lang, checkpoint="tiny-moe-bf16")
    at.number_input(key="expert").set_value(5).run()
    said = texts(tab(at, "explorer", 1))
    assert {"en": "no routed experts that this version", "zh": "没有本版本能按层和专家排列"}[lang] not in said
    assert {"en": "Expert 5 of layer 0", "zh": "第 0 层专家 5"}[lang] in said
    assert "BF16 [" in said
    assert said.count({"en": "it is not missing", "zh": "它并不缺失"}[lang]) == 3


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(("layout", "whole", "shared"), [("fused", 1, 1), ("stacked", 1, 0), ("modelopt", 0, 0)])
def test_sentences_of_one_expert_do_not_stand_on_tensors_of_all(
    open_page, tmp_path, monkeypatch, lang, layout, whole, shared
):
    """One scalar of a fused layer is nobody's own; a vector's numbers are, and all experts lose them together."""
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    of = LAYOUTS[layout]
    write_checkpoint(tmp_path / "own", of.tensors(), config=of.config, hf_quant_config=of.quant)
    files = [(path.name, path.read_bytes()) for path in sorted((tmp_path / "own").iterdir())]
    at = tab(upload(open_page("explorer", lang=lang), *files), "explorer", 1)
    charts, said = len(strips(at)), texts(at)
    assert charts == 1 - shared
    for key, count in (
        ("whole.weight", whole),
        ("whole.weight_scale_2", whole),
        ("whole.input_scale", whole),
        ("weight.absent", 1 - whole),
        ("weight_scale_2.absent", 1 - whole),
        ("input_scale.absent", 1 - whole),
        ("shared.input_scale", shared),
        ("input_scale.who", 1 - shared),
    ):
        assert said.count(i18n.t(f"explorer.roles.{key}")) == count, key
