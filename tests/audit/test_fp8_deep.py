"""``--deep`` reads the scales of FP8: vectors and blocks of ordinary layers, and everything of experts."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.audit import describe, run_audit
from nvfp4viz.audit.bytescan import PIECE, Scanner
from nvfp4viz.audit.deep import READ
from nvfp4viz.audit.deep_findings import deepen
from nvfp4viz.checkpoint import memory_checkpoint, write_checkpoint
from nvfp4viz.checkpoint.numbers import CLASSES, classify
from tests.audit.config_faults import section_of
from tests.audit.layouts import ALLOWED, LAYOUTS, typed
from tests.audit.reading import found, outcomes
from tests.audit.test_fp8 import DUE, NAMED, ROWS, WIDE, experts_in_fp8, fp8, section

MODULE = "model.layers.0.self_attn.kv_a_proj"
VALUES = {"nan": np.nan, "inf": -np.inf, "negative": -0.5, "zero": 0.0, "subnormal": 1e-40}
VIEWS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F64": np.float64}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def deep(checkpoint):
    """The report with and without ``--deep``."""
    plain = run_audit(checkpoint)
    return plain.report, deepen(plain).report


# ---------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("dtype", VIEWS)
@pytest.mark.parametrize("size", [1, 2, 3, 1000, PIECE // 4 + 1, PIECE])
def test_numbers_are_counted_as_each_is(dtype, size):
    """Of random bits of each type, cut anywhere: as `classify` of the whole has it."""
    rng = np.random.default_rng(size)
    width = np.dtype(VIEWS[dtype]).itemsize
    data = rng.integers(0, 256, size * width, np.uint8)
    with np.errstate(all="ignore"):
        values = data.view(VIEWS[dtype]).astype(np.float32)
    values = values.copy()
    for cut in (8 * PIECE, 8, 8 * 77):
        scanner = Scanner(dtype)
        for at in range(0, len(data), cut):
            scanner.add(data[at : at + cut])
        seen = scanner.done()
        assert (seen.numbers, seen.nbytes) == (size, len(data))
        kinds = classify(values)
        assert seen.wrong.keys() == {CLASSES[kind] for kind in set(kinds.tolist()) if kind}
        for name, (count, places) in seen.wrong.items():
            where = np.flatnonzero(kinds == CLASSES.index(name))
            assert (count, places) == (len(where), tuple(where[:4].tolist()))


# ---------------------------------------------------------------------------------------- ordinary layers


def beside(scale, dtype="F32", id="modelopt"):
    layout = LAYOUTS[id]
    tensors = fp8(MODULE, (256, 384), scale.shape)
    return layout.open({**layout.tensors(), **tensors, f"{MODULE}.weight_scale": typed(scale, dtype)})


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(
    ("shape", "at"), [((256,), (17,)), ((256, 1), (17, 0)), ((2, 3), (1, 2)), ((256, 12), (255, 3))]
)
def test_one_number_of_a_vector_or_of_blocks(kind, shape, at):
    scale = np.full(shape, 0.01, np.float32)
    plain, whole = deep(beside(scale))
    assert found(plain) == found(whole) == []
    assert outcomes(whole) == outcomes(plain)
    scale[at] = VALUES[kind]
    plain, whole = deep(beside(scale))
    # Without --deep nobody has looked.
    assert found(plain) == []
    severity = "warn" if kind in ("zero", "subnormal") else "error"
    assert found(whole) == [(f"scale.{kind}", severity, 0, None, None)]
    [item] = [one for one in whole.findings if one.code == f"scale.{kind}"]
    assert (item.role, item.count, item.tensors) == ("weight_scale", 1, (f"{MODULE}.weight_scale",))
    place = (0, *at) if len(shape) == 1 else at if len(shape) == 2 else at[::2]
    for language in ("en", "zh"):
        assert "({}, {})".format(*place) in describe(item, language)[0]
    expected = {"nan": "nan", "inf": "nan"}.get(kind, "degraded")
    assert set(outcomes(whole).values()) == {expected}
    assert {one.scope for one in whole.backends} == {"model"}


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_scales_of_half_the_width(dtype):
    scale = np.full((256, 1), 0.01, VIEWS[dtype])
    assert found(deep(beside(scale, dtype))[1]) == []
    scale[3] = np.nan
    assert found(deep(beside(scale, dtype))[1]) == [("scale.nan", "error", 0, None, None)]


def test_a_tensor_of_nothing_but_zeros_is_no_scale():
    for value, kind in ((0.0, "zero"), (1e-42, "subnormal")):
        plain, whole = deep(beside(np.full((256, 1), value, np.float32)))
        assert found(plain) == []
        assert found(whole) == [(f"scale.{kind}", "error", 0, None, None)]
        assert set(outcomes(whole).values()) == {"zero"}


def test_exponents_of_fp8_are_block_scales():
    layout, name = LAYOUTS["DeepSeek V4"], "layers.0.attn.wo_a"
    scale = np.full((2, 3), 120, np.uint8)
    for bad in (False, True):
        scale[1, 2] = 255 if bad else 120
        tensors = {**layout.tensors(), **fp8(name, (256, 384), (2, 3), "scale", "F8_E8M0")}
        tensors[f"{name}.scale"] = typed(scale, "F8_E8M0")
        plain, whole = deep(layout.open(tensors))
        assert found(plain) == []
        assert found(whole) == ([("block-scale.nan", "error", 0, None, None)] if bad else [])


# ---------------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("prefix", NAMED)
def test_blocks_of_experts(prefix, kind):
    suffix, disk = NAMED[prefix]
    sound = experts_in_fp8(prefix, suffix, disk, DUE)
    plain, whole = deep(memory_checkpoint(sound, config=section(prefix)))
    assert found(plain) == found(whole) == []
    # What is read is said.
    assert {item.text for item in plain.findings} == {"audit.partial.fp8"}
    assert {item.text for item in whole.findings} == {"audit.partial.fp8.deep"}
    names = [f"{prefix}.{expert}.{disk['up']}.{suffix}" for expert in (1, 3)]
    scale = np.ones(DUE["up"], np.float32)
    scale[1, 2] = VALUES[kind]
    report = deep(memory_checkpoint({**sound, **dict.fromkeys(names, typed(scale, "F32"))}, config=section(prefix)))[1]
    severity = "warn" if kind in ("zero", "subnormal") else "error"
    assert found(report) == [(f"scale.{kind}", severity, 0, "up", (1, 3))]
    [item] = [one for one in report.findings if one.code == f"scale.{kind}"]
    assert (item.count, item.tensors) == (2, tuple(names))
    assert "1: (1, 2); 3: (1, 2)" in item.message


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("role", ["weight_scale", "input_scale"])
def test_one_number_an_expert(kind, role):
    prefix = "model.layers.0.mlp.experts"
    disk = NAMED[prefix][1]
    sound = experts_in_fp8(prefix, "weight_scale", disk, dict.fromkeys(ROWS, ()))
    sound |= {f"{name.removesuffix('weight')}input_scale": typed(np.float32(0.02).reshape(()), "F32")
              for name in sound if name.endswith(".weight")}  # fmt: skip
    config = {**WIDE, "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}}
    assert found(deep(memory_checkpoint(sound, config=config))[1]) == []
    name = f"{prefix}.2.{disk['down']}.{role}"
    bad = {**sound, name: typed(np.float32(VALUES[kind]).reshape(()), "F32")}
    # It lies among the scalars, which are read in any case; --deep says it once as well.
    for report in deep(memory_checkpoint(bad, config=config)):
        assert found(report) == [(f"scale.{kind}", "error" if role == "weight_scale" else "backend", 0, "down", (2,))]
        [item] = [one for one in report.findings if one.code == f"scale.{kind}"]
        assert (item.role, item.tensors) == (role, (name,))
        assert {one.text for one in report.findings if one.code == "audit.partial"} == {"audit.partial.fp8.deep"}


@pytest.mark.parametrize("shape", [(4,), (4, 3, 2), (4, 1, 256)])
def test_experts_that_share_a_tensor(shape):
    prefix = "model.layers.0.mlp.experts"
    weight = typed(np.full((4, 384, 256), 0x38, np.uint8), "F8_E4M3")
    config = section(prefix)
    if shape != (4, 3, 2):
        del config["quantization_config"]["weight_block_size"]
    for bad in (False, True):
        scale = np.ones(shape, np.float32)
        if bad:
            scale.reshape(-1)[-1] = np.nan
        tensors = {f"{prefix}.gate_up_proj": weight, f"{prefix}.gate_up_proj_scale_inv": typed(scale, "F32")}
        plain, report = deep(memory_checkpoint(tensors, config=config))
        # A vector of one an expert lies among the scalars.
        vector = shape == (4,)
        wrong = [("scale.nan", "error", 0, "gate_up", (3,) if vector else None)] if bad else []
        assert found(plain) == (wrong if vector else [])
        assert found(report) == wrong


@pytest.mark.parametrize(("role", "value", "expected"), [
    ("weight_scale", np.nan, ("nan", "experts")), ("weight_scale", 0.0, ("zero", "experts")),
    ("weight_scale", -1.0, ("degraded", "experts")), ("input_scale", np.nan, ("nan", "layer")),
    ("input_scale", 0.0, ("degraded", "layer")),
])  # fmt: skip
def test_fp8_experts_beside_four_bit_ones_are_forecast(role, value, expected):
    layout = LAYOUTS["MIXED_PRECISION"]
    prefix = "model.layers.1.mlp.experts"
    quant = {"quantization": {**section_of(layout), "quantized_layers": {**ALLOWED, prefix: {"quant_algo": "FP8"}}}}
    shapes = {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}
    tensors = layout.tensors()
    for expert in range(8):
        for kind, disk in NAMED["model.layers.0.mlp.experts"][1].items():
            name = f"{prefix}.{expert}.{disk}"
            tensors |= fp8(name, shapes[kind], ()) | {f"{name}.input_scale": typed(np.float32(0.1).reshape(()), "F32")}
    changes = {"quant": quant, "config": {**layout.config, "num_hidden_layers": 2}}
    sound = deep(layout.open(tensors, **changes))[1]
    assert found(sound) == []
    tensors[f"{prefix}.5.down_proj.{role}"] = typed(np.float32(value).reshape(()), "F32")
    before = outcomes(sound)
    for report in deep(layout.open(tensors, **changes)):
        assert [row[2:] for row in found(report)] == [(1, "down", (5,))]
        for one in report.backends:
            if before[one.name] == "safe":
                ignored = role == "input_scale" and one.name == "transformers"
                assert (one.outcome, one.scope) == (("ignored", "none") if ignored else expected)


# ---------------------------------------------------------------------------------------- memory


def test_large_scales_are_read_in_bounded_memory(tmp_path):
    """64 MiB of them: no more than a few reads at a time, and the place of the last is known."""
    rows, columns = 4096, 4096
    scale = np.full((rows, columns), 0.01, np.float32)
    scale[-1, -1] = np.nan
    name = "model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.weight": typed(np.full((rows, 16), 0x38, np.uint8), "F8_E4M3")}
    tensors[f"{name}.weight_scale"] = typed(scale, "F32")
    write_checkpoint(tmp_path / "x", tensors, config={})
    plain = run_audit(tmp_path / "x")
    del scale, tensors
    tracemalloc.start()
    report = deepen(plain).report
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * READ
    [item] = [one for one in report.findings if one.code == "scale.nan"]
    assert f"({rows - 1}, {columns - 1})" in item.message
