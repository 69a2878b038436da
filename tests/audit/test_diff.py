"""Two checkpoints: what differs is named to the slot, and nothing else is."""

import json
import math

import numpy as np
import pytest

from nvfp4viz import cli
from nvfp4viz.audit import audit
from nvfp4viz.audit.diff import SCALARS, diff, diff_to_json
from nvfp4viz.audit.report import json_value, json_values
from nvfp4viz.audit.terminal import diff_to_text
from nvfp4viz.checkpoint import FAULTS, inject_tensors, inspect, tensor, write_checkpoint
from nvfp4viz.checkpoint.dtypes import SCALE_BYTES
from nvfp4viz.ui.explorer_diff import said
from tests.audit.layouts import LAYOUTS, bf16
from tests.audit.test_drafts import TWO, drafted
from tests.audit.test_lost import cut
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, opened, scalar, without
from tests.checkpoint.web_server import Site, apart, serve

E = "model.layers.0.mlp.experts"
NUMBERS = [fault.id for fault in FAULTS.values() if "input_scale" in fault.roles and fault.id != "missing"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_the_same_as_itself(name):
    found = diff(LAYOUTS[name].open(), LAYOUTS[name].open())
    assert found.same
    assert (found.only_a, found.only_b, found.types, found.values, found.config) == ((), (), (), (), ())


@pytest.mark.parametrize("fault", NUMBERS)
@pytest.mark.parametrize("role", ["input_scale", "weight_scale_2"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_fault_is_the_difference(name, role, fault):
    """Of every injected number the diff says which slot, and both values as stored."""
    layout = LAYOUTS[name]
    if role not in layout.roles or role not in FAULTS[fault].roles or (layout.arrangement, fault) == (
        "fused", "neighbour",
    ):  # fmt: skip
        return
    broken = inject_tensors(
        layout.tensors(), fault, layer=0, expert=3, projection="down", role=role, seed=1, config=layout.config,
        hf_quant_config=layout.quant,
    )  # fmt: skip
    found = diff(layout.open(), layout.open(broken))
    assert (found.same, found.only_a, found.only_b, found.types, found.config) == (False, (), (), (), ())
    [value] = found.values
    expert = None if layout.arrangement == "fused" else 3
    assert (value.layer, value.expert, value.projection, value.role) == (0, expert, "down", role)
    assert value.tensor == layout.name(3, "down", role)
    old, new = (layout.get(t, 3, "down", role) for t in (layout.tensors(), broken))
    assert np.float32(value.a).tobytes() == old.tobytes()
    if np.isnan(new):
        assert (value.b, value.ratio) == ("nan", None)
    else:
        assert np.float32(value.b).tobytes() == new.tobytes()
    if value.ratio is not None:
        assert np.float32(value.ratio) == new / old


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_compared_is_counted(name):
    """A number, or a vector of one an expert, is compared by its value; another tensor by its header alone."""
    layout = LAYOUTS[name]
    checkpoint = layout.open()
    whole = set() if layout.arrangement == "expert" else {
        layout.name(0, kind, role) for kind in layout.kinds for role in SCALARS if role in layout.roles
    }  # fmt: skip
    numbers = {
        key for key, item in checkpoint.tensors.items() if item.dtype in SCALE_BYTES and math.prod(item.shape) == 1
    }
    found = diff(checkpoint, layout.open())
    assert (found.by_value, found.by_value + found.by_header) == (len(whole | numbers), len(checkpoint.tensors))
    assert found.not_compared == ("weights", "block-scales", "vectors")
    # Where numbers are all there is, all was compared.
    bare = diff(opened({"a": scalar(1), "b": scalar(2)}), opened({"a": scalar(1), "c": scalar(2)}))
    assert (bare.by_value, bare.by_header, bare.not_compared) == (1, 0, ())
    assert "compared by value" in diff_to_text(found)
    assert "compared by value" not in diff_to_text(bare)


def test_bits_count():
    name = f"{E}.0.up_proj.input_scale"
    zero, minus, nan = ({**base(), name: scalar(value)} for value in (0.0, -0.0, np.nan))
    assert [item.tensor for item in diff(opened(zero), opened(minus)).values] == [name]
    assert diff(opened(nan), opened(nan)).same


def test_keys_types_and_settings():
    a = {**base(), "extra.weight": bf16(2, 2), "x": bf16(2, 3)}
    b = {**without(base(), f"{E}.2.up_proj.input_scale"), "x": tensor(np.zeros((3, 2), np.float32))}
    quant = json.loads(json.dumps(QUANT))
    quant["quantization"]["quant_algo"] = "W4A16_NVFP4"
    del quant["quantization"]["group_size"]
    config = {**CONFIG, "hidden_size": 7, "quantization_config": {"quant_method": "modelopt"}}
    found = diff(opened(a, CONFIG, QUANT), opened(b, config, quant))
    assert sorted(found.only_a) == ["extra.weight", f"{E}.2.up_proj.input_scale"]
    assert found.only_b == found.values == ()
    assert [(item.tensor, item.a, item.b) for item in found.types] == [("x", ("BF16", (2, 3)), ("F32", (3, 2)))]
    # What is not about quantisation is no difference here.
    assert [(item.file, item.field, item.a, item.b) for item in found.config] == [
        ("config.json", "quantization_config.quant_method", None, "modelopt"),
        ("hf_quant_config.json", "quantization.quant_algo", "NVFP4", "W4A16_NVFP4"),
        ("hf_quant_config.json", "quantization.group_size", 16, None),
    ]
    assert found.a.fingerprint != found.b.fingerprint
    assert json.loads(diff_to_json(found))["schema"] == "nvfp4viz.diff/1"
    english, chinese = diff_to_text(found), diff_to_text(found, "zh")
    for text in (english, chinese):
        assert "extra.weight" in text
        assert "BF16 [2, 3] → F32 [3, 2]" in text
        assert "{" not in text
    assert "2 tensors only in a" in english
    assert 'absent → "modelopt"' in english
    assert "只在 a 里的张量有 2 个" in chinese


def test_long_lists_are_cut_in_text_and_whole_in_json():
    many = {f"t{number}": scalar(number) for number in range(100)}
    found = diff(opened({**base(), **many}), opened(base()))
    assert len(found.only_a) == 100
    assert "and 60 more" in diff_to_text(found)


def test_the_command(tmp_path, capsys):
    from nvfp4viz.checkpoint import inject, write_checkpoint

    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    write_checkpoint(good, base(), config=CONFIG, hf_quant_config=QUANT)
    inject(good, bad, "nan", layer=0, expert=1, projection="down")
    assert cli.main(["diff", good, good]) == 0
    out = capsys.readouterr().out
    assert "no difference" in out
    # A byte among the block scales is not looked at, and nobody says that it is.
    inject(good, tmp_path / "deep", "block-nan", layer=0, expert=0, projection="up")
    numbers = sum(item.dtype == "F32" for item in base().values())
    seen = f"compared by value: {numbers}; of {len(base()) - numbers} more (weights, block scales, vectors) only name"
    assert seen in out
    assert cli.main(["diff", good, str(tmp_path / "deep"), "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["same"], said["by_value"], said["by_header"]) == (True, numbers, len(base()) - numbers)
    assert said["not_compared"] == ["weights", "block-scales", "vectors"]
    assert cli.main(["diff", good, good, "--language", "zh"]) == 0
    assert f"{numbers} 个；另有 {len(base()) - numbers} 个（权重、块缩放因子、向量）只比较了" in capsys.readouterr().out
    assert cli.main(["diff", good, bad]) == 1
    out = capsys.readouterr().out
    assert "layer 0, expert 1, down, input_scale: 0.00" in out
    assert "→ nan" in out
    assert cli.main(["diff", good, bad, "--language", "zh"]) == 1
    assert "第 0 层，专家 1，down" in capsys.readouterr().out
    assert cli.main(["diff", good, bad, "--format", "json", "--output", str(tmp_path / "d.json")]) == 1
    text = (tmp_path / "d.json").read_text()
    assert str(tmp_path) not in text
    assert [item["b"] for item in json.loads(text)["values"]] == ["nan"]
    assert cli.main(["diff", good, str(tmp_path / "void")]) == 2


def test_many_numbers_are_said_as_each_is():
    """Every kind of float32 by its bits: the vector's words are the single one's."""
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x00800000], np.uint32)
    values = np.concatenate([bits, edges]).view(np.float32)
    assert json_values(values) == [json_value(value) for value in values]
    assert json_values(values[:0]) == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_setting_is_said_as_its_file_has_it(language):
    """A text is no number, and true is no word: what looks alike without quotes would differ in nothing."""
    pairs = {"group_size": ("16", 16), "kv_cache_quant_algo": ("null", None), "exclude_modules": (["a"], "['a']")}
    one, two = ({**QUANT["quantization"], **{key: pair[side] for key, pair in pairs.items()}} for side in (0, 1))
    found = diff(opened(base(), CONFIG, {"quantization": one}), opened(base(), CONFIG, {"quantization": two}))
    text = diff_to_text(found, language)
    assert 'group_size: "16" → 16' in text
    assert 'exclude_modules: ["a"] → "[\'a\']"' in text
    assert {said(item.a) for item in found.config} >= {'"16"', '["a"]', '"null"'}


@pytest.mark.parametrize("value", ["8", True, 8.5, {"a": 1}, -1])
def test_a_number_of_experts_that_is_none_is_quoted_as_it_stands(value):
    config = CONFIG | {"num_experts": value}
    found = [item for item in audit(opened(base(), config, QUANT)).findings if item.text == "config.invalid.experts"]
    assert [item.params["value"] for item in found] == [json.dumps(value, separators=(",", ":"))]
    assert f"num_experts {json.dumps(value, separators=(',', ':'))}," in found[0].message


def halves(tmp_path, layout, **more):
    """The same checkpoint twice, in several shards."""
    sides = []
    for name in ("a", "b"):
        folder = tmp_path / name
        write_checkpoint(
            folder, layout.tensors(), config=layout.config, hf_quant_config=layout.quant, max_shard_bytes=6000, **more
        )
        sides.append(folder)
    return sides


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("id", ["modelopt", "stacked", "compressed-tensors"])
def test_a_file_that_fails_after_its_header_is_not_compared(tmp_path, id, side):
    """The rest is; nothing that only the lost file has is called a difference, and neither is the pair called same."""
    layout = LAYOUTS[id]
    folders = halves(tmp_path, layout)
    compared = 0
    for file in [header.file for header in inspect(folders[side]).files]:
        # Once the same, and once with a number changed in every shard.
        for value in (None, 0.125):
            pair = [inspect(folder) for folder in folders]
            names = {name: pair[side].tensors[name].file for name in layout.tensors()
                     if pair[side].tensors[name].dtype == "F32"}  # fmt: skip
            kept = (folders[side] / file).read_bytes()
            other = folders[1 - side]
            before = {path: path.read_bytes() for path in other.glob("*.safetensors")}
            for name in names if value is not None else ():
                entry = pair[1 - side].tensors[name]
                data = bytearray((other / entry.file).read_bytes())
                data[entry.begin : entry.begin + 4] = np.float32(value).tobytes()
                (other / entry.file).write_bytes(bytes(data))
            cut(folders[side], file)
            found = diff(*pair)
            (folders[side] / file).write_bytes(kept)
            for path, data in before.items():
                path.write_bytes(data)
            expected = {name for name, at in names.items() if at != file} if value is not None else set()
            assert {item.tensor for item in found.values} == expected
            assert (found.only_a, found.only_b, found.types, found.config) == ((), (), (), ())
            lost = file in names.values()
            assert (found.unread_a, found.unread_b)[side] == ((file,) if lost else ())
            assert (found.unread_a, found.unread_b)[1 - side] == ()
            assert found.same == (not lost and value is None)
            compared += len(expected)
            # It is no news to the checkpoint itself, which others go on reading.
            assert not pair[side].lost
    assert compared


def test_a_shard_that_is_not_given_has_no_only(tmp_path, capsys):
    """A server that gives one header too few: its tensors are in neither list."""
    layout = LAYOUTS["modelopt"]
    folders = halves(tmp_path, layout)
    files, _ = apart(folders[1])
    with serve(Site(files, lists=True, tagged=True)) as site:
        site.status = {next(name for name in files if name.startswith("model-00002-of")): 403}
        assert cli.main(["diff", str(folders[0]), site.address, "--format", "json"]) == 2
        found = json.loads(capsys.readouterr().out)
        assert found["only_a"] == found["only_b"] == found["values"] == []
        assert [name.partition("-of")[0] for name in found["unread_b"]] == ["model-00002"]
        assert found["same"] is False
        for language, words in (("en", "no difference in what could be read"), ("zh", "在读到的内容里没有差别")):
            assert cli.main(["diff", str(folders[0]), site.address, "--language", language]) == 2
            out = capsys.readouterr().out
            assert words in out
            assert "model-00002-of" in out


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_draft_layer_is_called_one(language):
    name = "mtp.0.mlp.experts.2.up_proj.input_scale"
    old = drafted("mtp.0.mlp.experts", lost=())
    new = {**old, name: scalar(0.5), f"{E}.1.up_proj.input_scale": scalar(0.25)}
    found = diff(*(opened(each, TWO, QUANT) for each in (old, new)))
    assert [(item.layer, item.draft) for item in sorted(found.values, key=lambda item: item.layer)] == [
        (0, False), (1, True),
    ]  # fmt: skip
    text = diff_to_text(found, language)
    assert {"en": "draft layer 1, expert 2, up", "zh": "草稿层 1，专家 2，up"}[language] in text
    assert {"en": "\n  layer 0, expert 1", "zh": "第 0 层，专家 1"}[language] in text
    assert text.count({"en": "draft", "zh": "草稿"}[language]) == 1


@pytest.mark.parametrize("lacking", ["kv_cache_quant_algo", None])
def test_a_field_that_says_null_says_nothing(lacking):
    """A file without the field, or no file at all, and one whose field is null."""
    layout = LAYOUTS["modelopt"]
    section = {key: value for key, value in layout.quant["quantization"].items() if key != lacking}
    null = {"quantization": {**section, "kv_cache_quant_algo": None}}
    found = diff(layout.open(quant={"quantization": section} if lacking else None), layout.open(quant=null))
    assert "kv_cache_quant_algo" not in " ".join(item.field for item in found.config)
    assert all(item.a != item.b for item in found.config)
    other = {"quantization": {**section, "kv_cache_quant_algo": "FP8"}}
    [item] = diff(layout.open(quant=null), layout.open(quant=other)).config
    assert (item.a, item.b) == (None, "FP8")
