"""Public reports about files, index and transport (cases 41 to 47), and the same kinds in every layout."""

import json
import re

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import MemorySource, file_bytes, write_checkpoint
from tests.audit.layouts import LAYOUTS, bf16, ct_linear
from tests.audit.reading import codes, found, outcomes
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, opened

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 4560236\n"


def two_shards(tensors=None, config=CONFIG, quant=QUANT):
    """A folder in memory: the tensors in two shards, scalars in the first."""
    tensors = base() if tensors is None else tensors
    names = sorted(tensors, key=lambda name: (len(tensors[name].tobytes()) > 16, name))
    cut = len(names) * 2 // 3
    parts = {FIRST: names[:cut], SECOND: names[cut:]}
    files = {file: file_bytes({name: tensors[name] for name in part}) for file, part in parts.items()}
    weight_map = {name: file for file, part in parts.items() for name in part}
    files[INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    for name, content in (("config.json", config), ("hf_quant_config.json", quant)):
        if content is not None:
            files[name] = json.dumps(content).encode()
    return files


def report_of(files):
    return audit(MemorySource(files))


def test_the_folder_is_sound():
    assert codes(report_of(two_shards())) == []


# 41. sglang#32279, vllm#34859: the index lists a shard that is not there.


@pytest.mark.parametrize("name", LAYOUTS)
def test_41_a_lost_shard_is_one_finding_in_every_layout(name):
    layout = LAYOUTS[name]
    files = two_shards(layout.tensors(), layout.config, layout.quant)
    del files[SECOND]
    report = report_of(files)
    assert found(report) == [("container.missing-shard", "error", None, None, None)]
    assert report.findings[0].count > 1
    for row in report.coverage.values():
        assert row.missing == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_41_without_an_index_the_number_in_the_name_tells(name):
    layout = LAYOUTS[name]
    files = two_shards(layout.tensors(), layout.config, layout.quant)
    del files[SECOND], files[INDEX]
    report = report_of(files)
    assert found(report) == [("container.missing-shard", "error", None, None, None)]


def dealt(layout, tensors, shards=3):
    """The same in several shards, dealt out so that one expert's slots, and a role's, lie apart; with the index."""
    names = [f"model-{k + 1:05d}-of-{shards:05d}.safetensors" for k in range(shards)]
    weight_map = {name: names[k % shards] for k, name in enumerate(sorted(tensors))}
    files = {file: file_bytes({name: tensors[name] for name, at in weight_map.items() if at == file}) for file in names}
    files |= {"config.json": json.dumps(layout.config).encode()} if layout.config else {}
    files |= {"hf_quant_config.json": json.dumps(layout.quant).encode()} if layout.quant else {}
    return files | {INDEX: json.dumps({"weight_map": weight_map}).encode()}, names


@pytest.mark.parametrize("how", ["missing", "far", "zero", "nan", "inf"])
@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.with_input])
def test_41_a_slot_of_a_lost_shard_is_no_nan(name, how):
    """It goes into no maximum: forecasts are those of the lost shard, whatever one slot of the others is."""
    layout = LAYOUTS[name]
    healthy, slot = layout.tensors(), layout.name(3, "down", "input_scale")
    tensors = dict(healthy)
    if how != "missing":
        value = {"far": 3.0, "zero": 0.0, "nan": np.nan, "inf": np.inf}[how]
        layout.put(tensors, 3, "down", "input_scale", layout.stored(value))
    files, shards = dealt(layout, tensors)
    twin, _ = dealt(layout, healthy)
    home = _home(files, slot)
    if how == "missing":
        files[home] = file_bytes({key: tensors[key] for key in tensors if key != slot and _home(files, key) == home})
        index = {key: file for key, file in json.loads(files[INDEX])["weight_map"].items() if key != slot}
        files[INDEX] = json.dumps({"weight_map": index}).encode()
    for lost in shards:
        report = report_of({file: data for file, data in files.items() if file != lost})
        bare = report_of({file: data for file, data in twin.items() if file != lost})
        assert "nan" not in outcomes(bare).values()
        stored_nan = how in ("nan", "inf") and lost != home
        for item, other in zip(report.backends, bare.backends, strict=True):
            message = describe(item)[0]
            if stored_nan and item.outcome == "nan":
                # And says which value it is.
                assert layout.block == "MXFP4" or re.search(r"(\(|holds )(nan|inf)", message), message
                continue
            assert (item.outcome, item.scope) == (other.outcome, other.scope), (lost, message)
        if stored_nan and layout.block == "NVFP4" and outcomes(bare)["vllm-cutlass"] == "undefined":
            # Healthy twin of the rule: a NaN that is really there wins.
            assert outcomes(report)["vllm-cutlass"] == "nan"


@pytest.mark.parametrize("role", ["weight_global_scale", "input_global_scale"])
@pytest.mark.parametrize("indexed", [True, False])
def test_41_siblings_in_a_lost_shard_may_hide_a_divisor_of_zero(role, indexed):
    layout, at = LAYOUTS["compressed-tensors"], "model.layers.0.self_attn"
    tensors = {key: item for kind in "qkv" for key, item in ct_linear(f"{at}.{kind}_proj").items()}
    tensors |= {**layout.tensors(), f"{at}.q_proj.{role}": layout.scalar(0.0)}
    whole, shards = dealt(layout, tensors)
    # Transformers fuses nothing.
    alone = {"transformers"} if role == "weight_global_scale" else set()
    assert {name for name, outcome in outcomes(report_of(whole)).items() if outcome == "nan"} == alone
    apart = {name: shards[-1 if "k_proj" in name or "v_proj" in name else 0] for name in tensors}
    files = {file: whole[file] for file in ("config.json", INDEX, "hf_quant_config.json") if file in whole}
    files[INDEX] = json.dumps({"weight_map": apart}).encode()
    parts = {file: {name: tensors[name] for name in apart if apart[name] == file} for file in set(apart.values())}
    files |= {file: file_bytes(part) for file, part in parts.items()}
    if not indexed:
        del files[INDEX]
    del files[shards[-1]]
    assert set(outcomes(report_of(files)).values()) == {"undefined", "load-error"}
    # What no shard can hide is told.
    files[shards[0]] = file_bytes(parts[shards[0]] | {f"{at}.q_proj.{role}": layout.scalar(np.nan)})
    assert outcomes(report_of(files))["vllm-cutlass"] == "nan"


def _home(files, name):
    return json.loads(files[INDEX])["weight_map"][name]


def test_41_a_layer_that_lies_wholly_in_the_lost_shard_is_counted():
    files = two_shards(base(2), {**CONFIG, "num_hidden_layers": 2})
    names = [name for name in base(2) if "layers.1." in name]
    parts = {FIRST: [name for name in base(2) if name not in names], SECOND: names}
    files |= {file: file_bytes({name: base(2)[name] for name in part}) for file, part in parts.items()}
    files[INDEX] = json.dumps({"weight_map": {name: file for file, part in parts.items() for name in part}}).encode()
    assert codes(report_of(files)) == []
    del files[SECOND]
    report = report_of(files)
    assert codes(report) == [("container.missing-shard", "error"), ("audit.partial", "info")]
    assert report.model.moe_layers == (0, 1)
    for row in report.coverage.values():
        assert (row.expected, row.present, row.missing, row.unreadable) == (24, 12, 0, 12)


# 42. safetensors#668: a header of 132 MB.


@pytest.mark.parametrize(
    ("length", "code"),
    [
        (132_095_296, "container.header-too-large"),
        (100_000_001, "container.header-too-large"),
        (100_000_000, "container.truncated"),  # allowed, and longer than the file
        (2**63 - 1, "container.header-too-large"),
    ],
)
def test_42_wild_headers(length, code):
    files = two_shards()
    files[SECOND] = length.to_bytes(8, "little") + b"{}" + b" " * 64
    report = report_of(files)
    assert codes(report) == [(code, "error")]
    assert report.container.bytes_read < 100_000


# 43. PersuGPT#2, airllm#137: a shard that was cut.


@pytest.mark.parametrize(
    ("keep", "code"),
    [
        (lambda data: data[:-10], "container.truncated"),
        (lambda data: data[:60], "container.truncated"),
        (lambda data: data[:5], "container.not-safetensors"),
        (lambda data: b"", "container.not-safetensors"),
    ],
)
@pytest.mark.parametrize("name", ["modelopt", "stacked", "fused", "gpt-oss", "DeepSeek V4", "compressed-tensors"])
def test_43_what_lies_inside_is_audited(name, keep, code):
    layout = LAYOUTS[name]
    files = two_shards(layout.tensors(), layout.config, layout.quant)
    files[SECOND] = keep(files[SECOND])
    report = report_of(files)
    assert found(report) == [(code, "error", None, None, None)]
    assert set(outcomes(report).values()) == {"load-error"}


def test_43_holes_beside_a_cut_shard_are_still_found():
    tensors = base()
    del tensors["model.layers.0.mlp.experts.2.up_proj.input_scale"]
    files = two_shards(tensors)
    files[SECOND] = files[SECOND][:-10]
    assert codes(report_of(files)) == [("container.truncated", "error"), ("scale.missing", "backend")]


# 44. gpt-2-simple#263, ollama#8726, mlx-lm#708: side files that are something else.


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        (INDEX, b"\xef\xbb\xbf", [("container.index-invalid", "warn")]),  # a BOM in front of a good one
        ("config.json", b"\xef\xbb\xbf", [("config.invalid", "warn")]),
        ("config.json", LFS, [("config.invalid", "error")]),
        ("config.json", b'{"num_experts": 4,}', [("config.invalid", "error")]),
        ("config.json", b"<html><body>404</body></html>", [("config.invalid", "error")]),
        ("config.json", b'<?xml version="1.0"?><Error/>', [("config.invalid", "error")]),
        (SECOND, LFS, [("container.not-safetensors", "error")]),
        (SECOND, b"<!DOCTYPE html><html></html>", [("container.not-safetensors", "error")]),
    ],
)
def test_44_something_else_under_the_name(file, content, expected):
    files = two_shards()
    files[file] = content + files[file] if content == b"\xef\xbb\xbf" else content
    assert codes(report_of(files)) == expected


def test_44_a_bom_inside_a_header_is_no_header():
    files = two_shards()
    data = files[SECOND]
    length = int.from_bytes(data[:8], "little") + 3
    files[SECOND] = length.to_bytes(8, "little") + b"\xef\xbb\xbf" + data[8:]
    assert codes(report_of(files)) == [("container.invalid-header", "error")]


# 45. CoSER#3, mlx-vlm#1827: an index that names twice as many shards as there are.


def test_45_a_stale_index():
    files = two_shards()
    index = json.loads(files[INDEX])
    names = list(index["weight_map"])
    index["weight_map"] = {name: f"model-{k % 4 + 1:05d}-of-00004.safetensors" for k, name in enumerate(names)}
    files[INDEX] = json.dumps(index).encode()
    report = report_of(files)
    assert [code for code, *_ in found(report)] == ["container.stale-index"]
    assert report.coverage["input_scale"].present == 12


# 47. FreeToken#425: scalars of any shape are `test_47` of test_cases; here through files.


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_47_scalars_through_files(tmp_path, shape):
    write_checkpoint(tmp_path / "x", base(scalar_shape=shape), config=CONFIG, hf_quant_config=QUANT)
    report = audit(tmp_path / "x")
    assert found(report) == []
    assert codes(report) == ([] if shape == () else [("scale.shape", "info")])


# A lost shard that neither an index nor a number in a name betrays: the router says that there were experts.


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_of_which_only_the_router_is_left(layer):
    tensors = {name: item for name, item in base(3).items() if f"layers.{layer}.mlp.experts" not in name}
    report = audit(opened(tensors, {**CONFIG, "num_hidden_layers": 3}))
    assert found(report) == [("expert.absent", "error", layer, None, (0, 1, 2, 3))]
    # A dense layer has no router of experts, and its own gate projection is none.
    dense = {name: item for name, item in tensors.items() if f"layers.{layer}." not in name}
    dense[f"model.layers.{layer}.mlp.gate_proj.weight"] = bf16(16, 32)
    quant = {"quantization": {**QUANT["quantization"], "exclude_modules": ["*mlp.gate", "*gate_proj"]}}
    report = audit(opened(dense, {**CONFIG, "num_hidden_layers": 3}, quant))
    assert [code for code, *_ in found(report) if code.startswith("expert")] == []


@pytest.mark.parametrize("name", ["modelopt", "compressed-tensors", "w1/w2/w3", "fused", "stacked", "gpt-oss"])
@pytest.mark.parametrize("place", ["../other.safetensors", "/etc/passwd", "sub\\other.safetensors"])
def test_what_an_index_places_outside_the_folder_is_one_finding(name, place):
    """Its tensors are elsewhere, like a lost shard's: nobody misses experts besides."""
    layout = LAYOUTS[name]
    files, shards = dealt(layout, layout.tensors())
    weight_map = json.loads(files[INDEX])["weight_map"]
    for lost in shards:
        moved = {key: place if file == lost else file for key, file in weight_map.items()}
        kept = {file: data for file, data in files.items() if file != lost}
        report = report_of({**kept, INDEX: json.dumps({"weight_map": moved}).encode()})
        assert found(report) == [("container.index-invalid", "error", None, None, None)], lost


# ------------------------------------------------------------------------------------------- files outside the index

HTML = b"<!doctype html><html>404</html>"
BROKEN = {
    "a page": HTML,
    "a pointer": LFS,
    "cut": file_bytes({"x": bf16(64, 64)})[:-100],
    "cut in its header": file_bytes(base())[:99],
    "empty": b"",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("name", ["extra.safetensors", "model.safetensors", "consolidated.safetensors"])
def test_a_broken_file_that_the_index_does_not_name(name, content):
    """vLLM and SGLang never open it: a warning, and a stop only of those who do."""
    report = report_of({**two_shards(), name: content})
    severities = {item.code: item.severity for item in report.findings}
    assert severities.pop("container.unindexed-shard") in ("info", "warn")
    assert list(severities.values()) == ["warn"]
    assert report.verdict == "warn"
    stopped = {item.name: item.possible for item in report.backends if item.outcome == "load-error"}
    perhaps = ["load-error", "safe"] if name == "consolidated.safetensors" else []
    wanted = {"tensorrt-llm": perhaps, **({"transformers": []} if name == "model.safetensors" else {})}
    assert {key: list(value) for key, value in stopped.items()} == wanted
    assert all(item.outcome == "safe" for item in report.backends if item.name not in stopped)
    for language in ("en", "zh"):
        assert all(name in describe(item, language)[0] for item in report.findings)


@pytest.mark.parametrize("index", ["none", "names it", "another name", "foreign"])
def test_a_broken_file_without_an_index_that_leaves_it_out(index):
    """Then it belongs to the checkpoint as far as any loader can know."""
    files = {**two_shards(), "extra.safetensors": HTML}
    content = json.loads(files[INDEX])
    if index == "names it":
        content["weight_map"]["x"] = "extra.safetensors"
    if index == "foreign":
        content["weight_map"] = dict.fromkeys(content["weight_map"], "gone.safetensors")
    files[INDEX] = json.dumps(content).encode()
    if index in ("none", "another name"):
        del files[INDEX]
    if index == "another name":
        files["other.safetensors.index.json"] = json.dumps(content).encode()
    report = report_of(files)
    assert ("container.not-safetensors", "error") in {(item.code, item.severity) for item in report.findings}
    assert {item.outcome for item in report.backends} == {"load-error"}


def test_a_broken_shard_that_the_index_names_beside_a_sound_one_that_it_does_not():
    files = two_shards()
    report = report_of({**files, "extra.safetensors": files[SECOND], SECOND: HTML})
    assert report.verdict == "error"
    assert {item.outcome for item in report.backends} == {"load-error"}
