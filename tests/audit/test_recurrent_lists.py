"""Linear attention and Mamba in BF16, which servers build by the list as they do attention."""

import pytest

from nvfp4viz.audit import audit, describe
from tests.audit.layouts import ALLOWED, HIDDEN, LAYOUTS, bf16, ct_linear, linear
from tests.audit.reading import found, outcomes

WARNED = [("config.unquantised-not-excluded", "warn", None, None, None)]
DELTA, MAMBA = "model.layers.0.linear_attn", "backbone.layers.0.mixer"
MATRICES = [
    *(f"{DELTA}.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "out_proj", "in_proj")),
    f"{DELTA}.in_proj_b", f"{DELTA}.in_proj_a", "model.layers.0.mamba.in_proj", "model.layers.0.mamba.out_proj",
    f"{MAMBA}.in_proj", f"{MAMBA}.out_proj", "model.language_model.layers.0.linear_attn.out_proj",
]  # fmt: skip
# What no list needs to name: no linear layer, or of a tower that is left as it is.
SMALL = {
    **{f"{at}.conv1d.weight": bf16(8, 1, 4) for at in (DELTA, MAMBA)},
    **{f"{at}.conv1d.bias": bf16(8) for at in (DELTA, MAMBA)},
    **{f"{at}.{name}": bf16(8) for at in (DELTA, MAMBA) for name in ("A_log", "D", "dt_bias", "norm.weight")},
    "model.visual.blocks.0.linear_attn.out_proj.weight": bf16(HIDDEN, HIDDEN),
    "model.audio_tower.layers.0.mixer.in_proj.weight": bf16(HIDDEN, HIDDEN),
    "model.layers.0.self_attn.out_norm.weight": bf16(HIDDEN),
}


# Of the others the method speaks of something else, or names what it quantises.
PLAIN = [id for id in LAYOUTS if not id.startswith(("DeepSeek", "MIXED", "gpt-oss"))]


@pytest.mark.parametrize("id", PLAIN)
def test_a_recurrence_in_bf16_that_no_list_leaves_out(id):
    layout = LAYOUTS[id]
    healthy = layout.tensors() | SMALL
    assert found(audit(layout.open(healthy))) == []
    weights = {f"{name}.weight": bf16(HIDDEN, HIDDEN) for name in MATRICES}
    report = audit(layout.open(healthy | weights))
    assert found(report) == WARNED
    [item] = [one for one in report.findings if one.severity == "warn"]
    assert item.count == len(MATRICES)
    before = outcomes(audit(layout.open(healthy)))
    # As of attention: vLLM is read to build them by the list.
    for name, outcome in outcomes(report).items():
        read = name.startswith("vllm") and before[name] == "safe"
        assert outcome == ("load-error" if read else before[name]), name
    for language in ("en", "zh"):
        assert "{" not in "".join(describe(item, language))
    for name, weight in weights.items():
        assert found(audit(layout.open(healthy | {name: weight}))) == WARNED, name


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "Quark", "W4A16", "ModelOpt MXFP4"])
def test_a_recurrence_that_a_list_leaves_out_in_any_spelling(id):
    layout = LAYOUTS[id]
    tensors = layout.tensors() | SMALL | {f"{name}.weight": bf16(HIDDEN, HIDDEN) for name in MATRICES}
    parents = ("linear_attn", "mamba", "mixer")
    stars = [f"*{parent}*" for parent in parents]
    expressions = [f"re:.*{parent}.*" for parent in parents]
    # Parts by the name of what servers build of them.
    built = [name for name in MATRICES if name[-2:] not in ("kv", "_z", "_b", "_a")]
    for names in (MATRICES, built, expressions if id in ("compressed-tensors", "Quark") else stars):
        assert found(audit(excluding(layout, names, tensors))) == []


def excluding(layout, names, tensors):
    """The layout with these names in its exclude list."""
    if layout.quant is not None:
        body = layout.quant["quantization"]
        more = {**body, "exclude_modules": [*body["exclude_modules"], *names]}
        return layout.open(tensors, quant={**layout.quant, "quantization": more})
    section = layout.config["quantization_config"]
    key = "exclude" if "exclude" in section else "ignore"
    more = {**section, key: [*section[key], *names]}
    return layout.open(tensors, config={**layout.config, "quantization_config": more})


def test_quantised_ones_are_as_they_should_be():
    for id, make in (("modelopt", linear), ("compressed-tensors", ct_linear)):
        tensors = LAYOUTS[id].tensors() | SMALL
        for name in (f"{DELTA}.in_proj_qkvz", f"{DELTA}.out_proj"):
            tensors |= make(name)
        assert found(audit(LAYOUTS[id].open(tensors))) == []


def mixed(tensors, **listed):
    """The allow-list of the layout, and more."""
    layout = LAYOUTS["MIXED_PRECISION"]
    own = {**ALLOWED, **{f"{DELTA}.{name}": {"quant_algo": algo} for name, algo in listed.items()}}
    body = {**layout.quant["quantization"], "quantized_layers": own}
    return audit(layout.open(layout.tensors() | tensors, quant={**layout.quant, "quantization": body}))


def test_an_allow_list_names_them_or_not():
    """Unlisted is unquantised (vllm#55367); listed and in BF16 is neither."""
    weights = {
        f"{name}.weight": bf16(HIDDEN, HIDDEN) for name in MATRICES if not name.endswith(".linear_attn.out_proj")
    }
    assert found(mixed(SMALL | weights)) == []
    report = mixed(SMALL | weights, in_proj_qkvz="FP8", in_proj_z="NVFP4")
    assert found(report) == WARNED
    [item] = [one for one in report.findings if one.severity == "warn"]
    assert (item.text, item.count) == ("config.unquantised-not-excluded.listed", 2)
    [item] = [one for one in mixed(SMALL | weights, in_proj_a="FP8").findings if one.severity == "warn"]
    assert item.tensors == (f"{DELTA}.in_proj_a.weight",)
