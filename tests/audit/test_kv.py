"""Scales of a quantised KV cache of which some are absent or no numbers, and files that differ about the cache."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import tensor
from tests.audit.layouts import bf16
from tests.audit.reading import outcomes
from tests.checkpoint.checkpoint_fixtures import CONFIG, FLAT, QUANT, base, opened, scalar, without

FP8 = {"type": "float", "num_bits": 8, "dynamic": False}
LAYERS = 3
SPELLINGS = [("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale")]


def attention(layer):
    return f"model.layers.{layer}.self_attn"


def cached(spelling=SPELLINGS[0], weights=True):
    """Every layer with both scales, and with the projections that they are of."""
    tensors = base(layers=LAYERS)
    for layer in range(LAYERS):
        tensors |= {f"{attention(layer)}.{name}": scalar(0.02) for name in spelling}
        if weights:
            tensors |= {f"{attention(layer)}.{name}_proj.weight": bf16(32, 32) for name in "kv"}
    return tensors


def report_of(tensors, scheme=FP8, older=None, **more):
    """Where ``config.json`` asks for a cache (None: for none), and the older file too where it is there."""
    exclude = [*QUANT["quantization"]["exclude_modules"], "*self_attn*"]
    section = {**FLAT, "kv_cache_scheme": scheme, "exclude_modules": exclude}
    quant = None if older is None else {"quantization": {**QUANT["quantization"], "exclude_modules": exclude, **older}}
    config = {**CONFIG, "num_hidden_layers": LAYERS, "quantization_config": section, **more}
    return audit(opened(tensors, config, quant))


def seen(report):
    return [(item.code, item.severity, item.count) for item in report.findings]


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_of_some_layers_only(spelling, weights):
    every = cached(spelling, weights)
    assert seen(report_of(every)) == []
    k, v = spelling
    lost = [f"{attention(1)}.{v}"]
    for more in ([], [f"{attention(1)}.{k}"], [f"{attention(0)}.{k}", f"{attention(2)}.{v}"]):
        gone = lost + more
        report = report_of(without(every, *gone))
        assert seen(report) == [("kv.absent", "info", len(gone))]
        assert set(report.findings[0].tensors) == set(gone)
        # Where the configuration asks for none, one that stands alone is worth a word, and a layer without is not.
        alone = 0 if len(gone) == 2 or not weights else len(gone)
        assert seen(report_of(without(every, *gone), scheme=None)) == ([("kv.absent", "info", alone)] if alone else [])


def test_layers_that_have_no_keys_of_their_own():
    """Hybrid models, towers that keep no cache, and draft layers are asked for nothing."""
    every = cached()
    linear = without(every, f"{attention(1)}.")
    assert seen(report_of(linear)) == []
    bare = without(cached(weights=False), f"{attention(1)}.")
    assert seen(report_of(bare, layer_types=["full_attention", "linear_attention", "full_attention"])) == []
    tower = {f"vision_tower.encoder.layers.0.self_attn.{name}_proj.weight": bf16(32, 32) for name in "kv"}
    draft = {f"{attention(LAYERS)}.{name}_proj.weight": bf16(32, 32) for name in "kv"}
    assert seen(report_of({**every, **tower, **draft})) == []
    shared = without(every, f"{attention(2)}.k_proj.k_scale", f"{attention(2)}.v_proj.v_scale")
    assert seen(report_of(shared, num_kv_shared_layers=1)) == []
    assert seen(report_of(shared)) == [("kv.absent", "info", 2)]


def test_a_scale_that_is_no_number():
    name = f"{attention(1)}.v_proj.v_scale"
    wrong = {**cached(), name: tensor(np.float32([0.1, 0.2]))}
    report = report_of(wrong)
    assert seen(report) == [("kv.invalid", "error", 1)]
    for language in ("en", "zh"):
        assert all(word in describe(report.findings[0], language)[0] for word in (name, "F32[2]"))
    # compressed-tensors has one for each head, where it says so; and one number has many shapes.
    assert seen(report_of(wrong, scheme={**FP8, "strategy": "attn_head"})) == []
    for shape in ((1,), (1, 1)):
        assert seen(report_of({**cached(), name: tensor(np.full(shape, 0.02, np.float32))})) == []
    # A vector of that name in a model that has no such cache is the model's own.
    own = {**base(), f"{attention(0)}.k_scale": tensor(np.float32([0.1, 0.2]))}
    assert audit(opened(own)).findings == ()


@pytest.mark.parametrize(
    ("scheme", "older", "differ"),
    [
        (FP8, "FP8", False),
        (None, None, False),
        (None, "FP8", True),
        (FP8, None, True),
        (FP8, "NVFP4", True),
        ({**FP8, "num_bits": 4}, "NVFP4", False),
    ],
)
def test_two_files_that_differ_about_the_cache(scheme, older, differ):
    report = report_of(cached(), scheme, {"kv_cache_quant_algo": older})
    assert seen(report) == ([("config.conflict", "warn", 1)] if differ else [])
    if differ:
        for language in ("en", "zh"):
            message, _ = describe(report.findings[0], language)
            assert all(word in message for word in ("config.json", "hf_quant_config.json", "TensorRT-LLM", "vLLM"))
        # Each loads it.
        assert set(outcomes(report).values()) == {"safe"}
    # Without an algorithm the older file is asked nothing.
    assert seen(report_of(cached(), scheme, {"quant_algo": None, "kv_cache_quant_algo": older})) == []


@pytest.mark.parametrize("bits", [[8], {"a": 8}, None, "8", 8.0, True])
def test_a_number_of_bits_that_is_none_is_no_crash(bits):
    """Any file on the hub may hold one."""
    report = report_of(cached(), {"type": "float", "num_bits": bits})
    assert report.backends
