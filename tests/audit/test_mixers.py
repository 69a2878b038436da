"""Several layers without anything that mixes their tokens, and single parts of attention or of a recurrence."""

import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.layer_kinds import all_attend, kinds_of, mixes_tokens
from nvfp4viz.checkpoint import memory_checkpoint
from tests.audit.families import H, bf16, f32, mlp, plain
from tests.audit.reading import outcomes
from tests.audit.test_families import changed
from tests.audit.test_sisters import ATTENTION, FULL, LINEAR, LOST, hybrid, model, normed, said

PATTERN = [LINEAR, LINEAR, LINEAR, FULL] * 2
TOLD = [
    {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2},
    {"full_attention_interval": 4},
    {"attn_layer_period": 4, "attn_layer_offset": 3},
    {"text_config": {"layers_block_type": ["linear", "linear", "linear", "attention"] * 2}},
]
QWEN3 = {"model_type": "qwen3_moe"}


def without(checkpoint, *starts):
    gone = tuple(f"model.layers.{start}" for start in starts)
    return changed(checkpoint, drop=[name for name in checkpoint.tensors if name.startswith(gone)])


def lost(report):
    [item] = [one for one in report.findings if one.severity == "error"]
    assert (item.code, item.role) == ("scale.missing", "weight")
    assert "safe" not in outcomes(report).values()
    return item


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("layers", [(1, 2), (0, 1, 2, 4), (3, 7), (0, 1, 2, 4, 5, 6)])
def test_several_layers_whose_kind_the_configuration_says(told, layers):
    checkpoint = hybrid(PATTERN, **told)
    assert said(audit(checkpoint)) == []
    report = audit(without(checkpoint, *(f"{layer}.{PATTERN[layer]}." for layer in layers)))
    assert said(report) == LOST
    item = lost(report)
    every = {layer for layer in range(8) if PATTERN[layer] == PATTERN[layers[0]]}
    named = every - set(layers)
    assert item.text == ("scale.missing.linear.weight" if named else "scale.missing.mixer.kind")
    assert item.params["numbers"] == list(layers)
    for language in ("en", "zh"):
        message = describe(item, language)[0]
        assert "{" not in message
        if not named:
            assert (
                str(kinds_of(told, 8)[layers[0]] if "text_config" in told or "layer_types" in told else "") in message
            )


def test_a_model_that_has_lost_all_of_both_kinds():
    checkpoint = hybrid(PATTERN, **TOLD[0])
    item = lost(audit(without(checkpoint, *(f"{layer}.{kind}." for layer, kind in enumerate(PATTERN)))))
    assert (item.text, item.layer, item.params["numbers"]) == ("scale.missing.mixer.kind", None, list(range(8)))
    assert item.params["kinds"] == "full_attention, linear_attention"


@pytest.mark.parametrize("layers", [(1, 2), (0, 1), (0, 1, 2)])
def test_a_family_whose_layers_all_attend(layers):
    """One layer of three tells the names, and where none is left the family does."""
    checkpoint = normed(model(ATTENTION, ATTENTION, ATTENTION, **QWEN3))
    assert said(audit(checkpoint)) == []
    report = audit(without(checkpoint, *(f"{layer}.self_attn." for layer in layers)))
    item = lost(report)
    assert item.text == ("scale.missing.mixer.family" if len(layers) == 3 else "scale.missing.linear.weight")
    assert (item.params["numbers"], item.count) == (list(layers), 3 if len(layers) == 3 else 4 * len(layers))
    for language in ("en", "zh"):
        assert "{" not in describe(item, language)[0]


def test_several_layers_without_a_mixer_of_which_nothing_is_said():
    """They may do without on purpose, or share another layer's: a note, and a forecast with a condition."""
    whole = normed(model(ATTENTION, ATTENTION, ATTENTION, ATTENTION))
    healthy = audit(whole)
    for layers in ((1, 3), (0, 1, 2), (0, 1, 2, 3)):
        report = audit(without(whole, *(f"{layer}.self_attn." for layer in layers)))
        assert said(report) == []
        [item] = [one for one in report.findings if one.code == "scale.missing"]
        assert (item.text, item.severity) == ("scale.missing.mixer.perhaps", "info")
        assert item.params["numbers"] == list(layers)
        for one, before in zip(report.backends, healthy.backends, strict=True):
            assert one.outcome == before.outcome
            if one.outcome == "safe":
                assert "safe" in one.possible
                assert len(one.possible) > 1
        for language in ("en", "zh"):
            assert "{" not in describe(item, language)[0]


def test_layers_that_do_without_on_purpose_are_silent():
    """Searched or pruned layers, kinds that mix nothing, experts in layers of their own, and a piece of a model."""
    whole = normed(model(ATTENTION, ATTENTION, ATTENTION, ATTENTION, **QWEN3))
    bare = without(whole, "1.self_attn.", "2.self_attn.")
    assert said(audit(bare)) == LOST

    def configured(checkpoint, **more):
        config = {**checkpoint.config, **more}
        return memory_checkpoint(checkpoint.read_tensors(), config=config, hf_quant_config=checkpoint.hf_quant_config)

    for key, value in (("block_configs", [{}] * 4), ("drop_attn_list", [1, 2]), ("attn_skip_list", [1, 2])):
        assert [one.code for one in audit(configured(bare, **{key: value})).findings] == []
    # The norms of attention went with it.
    pruned = without(bare, "1.input_layernorm.", "2.input_layernorm.")
    assert [one.code for one in audit(pruned).findings] == []
    # A part of a name that is not known here may be the mixer.
    for name in ("model.layers.{}.retention.in_proj", "model.layers.{}.kda.in_proj"):
        renamed = {f"{name.format(layer)}.weight": bf16(H, H) for layer in (1, 2)}
        assert said(audit(changed(bare, replace=renamed))) == []
    # Mixers elsewhere, such as in a tower of their own beside that of the experts.
    none = without(whole, *(f"{layer}.self_attn." for layer in range(4)))
    assert said(audit(none)) == LOST
    tower = {f"model.mixers.layers.{layer}.self_attn.q_proj.weight": bf16(H, H) for layer in range(4)}
    assert [one.code for one in audit(changed(none, replace=tower)).findings] == []
    # Without an embedding it is a piece.
    piece = changed(none, drop=["model.embed_tokens.weight"])
    assert [one.code for one in audit(piece).findings] == []


def test_kinds_that_mix_nothing():
    told = {"layer_types": ["full_attention", "no_attention", "full_attention", "no_attention"]}
    whole = normed(model(ATTENTION, ATTENTION, ATTENTION, ATTENTION, **told))
    assert said(audit(without(whole, "1.self_attn.", "3.self_attn."))) == []
    assert said(audit(without(whole, "0.self_attn.", "1.self_attn."))) == LOST
    assert not mixes_tokens("moe")
    assert kinds_of({"layer_types": ["full_attention"]}, 2) == ()
    assert kinds_of({"hybrid_override_pattern": "ME?"}, 3) == ()
    assert not all_attend({"model_type": "qwen3_next"})
    # A wild number costs nothing.
    assert kinds_of({"full_attention_interval": 2, "num_hidden_layers": 10**15}, 1) == ("linear_attention",)


# Single parts.


def recurrent(layers=6, mixers=("linear_attn",), **more):
    """Layers with everything that Qwen3-Next keeps in its linear attention."""
    whole = normed(model(*[()] * layers, **more))
    tensors = dict(whole.read_tensors())
    for layer in range(layers):
        at = f"model.layers.{layer}.{mixers[layer % len(mixers)]}"
        tensors |= plain(f"{at}.in_proj_qkvz", f"{at}.in_proj_ba", f"{at}.out_proj")
        tensors |= {f"{at}.A_log": f32(8), f"{at}.dt_bias": f32(8), f"{at}.norm.weight": bf16(8)}
        tensors |= {f"{at}.conv1d.weight": bf16(8, 1, 4), f"{at}.conv1d.bias": bf16(8)}
    return memory_checkpoint(tensors, config=whole.config, hf_quant_config=whole.hf_quant_config)


PARTS = [
    "in_proj_qkvz.weight",
    "in_proj_ba.weight",
    "out_proj.weight",
    "conv1d.weight",
    "A_log",
    "dt_bias",
    "norm.weight",
]


@pytest.mark.parametrize("part", [*PARTS, "norm.weight"])
@pytest.mark.parametrize("layers", [(2,), (2, 3), (0,)])
def test_a_part_of_a_recurrence_that_the_sisters_have(part, layers):
    """Of several layers only where the configuration says that they are of one kind."""
    checkpoint = recurrent(**({"layer_types": ["linear_attention"] * 6} if len(layers) > 1 else {}))
    assert said(audit(checkpoint)) == []
    names = [f"model.layers.{layer}.linear_attn.{part}" for layer in layers]
    report = audit(changed(checkpoint, drop=names))
    assert said(report) == LOST
    assert lost(report).tensors == tuple(names)


def test_recurrences_that_differ_on_purpose():
    """Of two kinds, under two names, and with codes under another name."""
    assert said(audit(recurrent(mixers=("linear_attn", "mamba")))) == []
    for told in ({}, {"layer_types": ["linear_attention", "mamba"] * 3}):
        two = recurrent(**told)
        for layer in (1, 3, 5):
            two = changed(two, drop=[f"model.layers.{layer}.linear_attn.{part}" for part in ("A_log", "dt_bias")])
        assert said(audit(two)) == []
    # One of its kind that lacks what its kind has.
    report = audit(changed(two, drop=["model.layers.4.linear_attn.A_log"]))
    assert lost(report).tensors == ("model.layers.4.linear_attn.A_log",)
    whole = recurrent()
    name = "model.layers.2.linear_attn.out_proj."
    coded = changed(whole, drop=[f"{name}weight"], replace={f"{name}qweight": bf16(H, H)})
    assert said(audit(coded)) == []


def test_the_query_or_the_output_of_several_layers():
    """Keys and values may be another layer's, and these are nobody's."""
    for part in ("q_proj", "o_proj"):
        rest = tuple(name for name in ATTENTION if name != part)
        report = audit(model(ATTENTION, rest, ATTENTION, rest, ATTENTION))
        assert lost(report).tensors == tuple(f"model.layers.{k}.self_attn.{part}.weight" for k in (1, 3))
        assert said(audit(model(rest, rest, rest))) == []


def beside(*layers, **more):
    """Gemma 4: an MLP beside the experts of these layers; one in four of full attention, whose values are its keys."""
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    own = [ATTENTION if kind != "full_attention" else ("q_proj", "k_proj", "o_proj") for kind in kinds]
    whole = normed(model(*own, layer_types=kinds, attention_k_eq_v=True, **more))
    # Where a layer's experts lie is not where its MLP does.
    tensors = {
        name.replace(".mlp.experts.", ".experts.").replace(".mlp.gate.", ".router.proj."): item
        for name, item in whole.read_tensors().items()
    }
    for layer in layers:
        tensors |= mlp(f"model.layers.{layer}.mlp")
    return memory_checkpoint(tensors, config=whole.config, hf_quant_config=whole.hf_quant_config)


def test_gemma_4_without_a_part_that_all_other_layers_have():
    whole = beside(0, 1, 2, 3)
    assert said(audit(whole)) == []
    assert lost(audit(without(whole, "2.mlp."))).count == 3
    for part in ("q_proj", "k_proj", "o_proj"):
        for layer in (1, 3):
            item = lost(audit(without(whole, f"{layer}.self_attn.{part}.")))
            assert item.tensors == (f"model.layers.{layer}.self_attn.{part}.weight",)
    item = lost(audit(without(whole, "1.self_attn.", "2.self_attn.")))
    assert (item.params["numbers"], item.count) == ([1, 2], 8)
    # Half of the layers without are a pattern, and none has one where there is none.
    for layers in ((0, 2), ()):
        assert said(audit(beside(*layers))) == []
