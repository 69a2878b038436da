"""Experts of another tower, whose layers have the numbers of the model's own: found, named, and in nobody's slots."""

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe, run_audit
from nvfp4viz.audit.repair import plan_repair
from nvfp4viz.checkpoint import memory_checkpoint, tensor
from nvfp4viz.errors import InputError
from nvfp4viz.figures.slots import STATUSES, slot_statuses
from tests.audit.families import config, experts, sidecar
from tests.audit.reading import found

MAIN, OTHER = "thinker.model", "talker.model"


def towers(changed=None, lost=()):
    """Two layers of the model, and one of another tower."""
    out = {**experts(f"{MAIN}.layers.0.mlp.experts"), **experts(f"{MAIN}.layers.1.mlp.experts")}
    out |= {**experts(f"{OTHER}.layers.0.mlp.experts"), **(changed or {})}
    return memory_checkpoint(
        {name: item for name, item in out.items() if name not in lost}, config=config(2),
        hf_quant_config=sidecar("NVFP4", ["lm_head"]),
    )  # fmt: skip


def name(family, expert=2, role="input_scale", layer=0):
    return f"{family}.layers.{layer}.mlp.experts.{expert}.up_proj.{role}"


# What a slot of that number in the model's own layer would be called, had the finding been its.
VALUES = {"scale.filled": 6 / 2688, "scale.outlier": 30.0, "scale.identity": 1.0}


@pytest.mark.parametrize("code", VALUES)
def test_a_remark_on_another_towers_slot_is_not_drawn_into_the_models(code):
    done = run_audit(towers({name(OTHER): tensor(np.float32(VALUES[code]))}))
    [item] = [one for one in done.report.findings if one.code == code]
    assert (item.layer, item.projection, item.experts, item.tower) == (0, "up", (2,), OTHER)
    assert {row.status for row in done.rows()} == {"ok"}
    assert done.report.coverage["input_scale"].filled == 0
    table = done.facts.tables["input_scale", 0, "up"]
    assert set(slot_statuses(done.facts, done.report, table).tolist()) == {STATUSES.index("present")}
    for language in ("en", "zh"):
        assert OTHER in describe(item, language)[0]
    # The same in the model's own layer is.
    own = run_audit(towers({name(MAIN): tensor(np.float32(VALUES[code]))}))
    [item] = [one for one in own.report.findings if one.code == code]
    assert (item.layer, item.tower) == (0, None)
    assert OTHER not in item.message + describe(item, "zh")[0]
    assert [(row.layer, row.expert, row.projection) for row in own.rows() if row.status != "ok"] == [(0, 2, "up")]


def test_a_tower_with_more_layers_than_the_configuration_counts_is_no_draft():
    tensors = {}
    for family, layers in ((MAIN, (0, 1, 2)), (OTHER, (5,))):
        for layer in layers:
            tensors |= experts(f"{family}.layers.{layer}.mlp.experts")
    tensors[name(OTHER, layer=5)] = tensor(np.float32(np.nan))
    report = audit(memory_checkpoint(tensors, config=config(3), hf_quant_config=sidecar("NVFP4", ["lm_head"])))
    [item] = [one for one in report.findings if one.code == "scale.nan"]
    assert (item.layer, item.tower, item.draft) == (5, OTHER, False)
    assert "raft" not in item.message


@pytest.mark.parametrize(("role", "code"), [("input_scale", "scale.missing"), ("weight_scale_2", "scale.missing")])
def test_what_it_lacks_is_no_slot_of_the_models(role, code):
    lost = name(OTHER, role=role)
    done = run_audit(towers(lost=[lost]))
    assert [each[0] for each in found(done.report)] == [code]
    assert {row.status for row in done.rows()} == {"ok"}
    assert done.report.coverage[role].missing == 0


def test_what_a_backend_makes_of_it():
    """It is said of the tower, and no layer of the model's is named."""
    for changed, lost, outcome in (
        ({name(OTHER): tensor(np.float32(np.nan))}, (), "nan"),
        ({}, [name(OTHER)], "undefined"),
        ({}, [name(OTHER, role="weight_scale")], "undefined"),
    ):
        report = audit(towers(changed, lost))
        [item] = [one for one in report.backends if one.name == "vllm-cutlass"]
        assert (item.outcome, item.scope, item.layers) == (outcome, "experts", ())
        for language in ("en", "zh"):
            assert OTHER in describe(item, language)[0]
        # The same in both towers is the model's, in its layer.
        both = audit(towers({each.replace(OTHER, MAIN): one for each, one in changed.items()} | changed,
                            [*lost, *(each.replace(OTHER, MAIN) for each in lost)]))  # fmt: skip
        [item] = [one for one in both.backends if one.name == "vllm-cutlass"]
        assert (item.outcome, item.scope, item.layers) == (outcome, "experts", (0,))
        assert OTHER not in item.why
    assert {item.outcome for item in audit(towers()).backends} == {"safe"}


def test_a_cause_in_one_tower_is_not_named_as_the_others():
    """Layer 0 of both: a NaN here, a hole there."""
    report = audit(towers({name(MAIN): tensor(np.float32(np.nan))}, [name(OTHER)]))
    [item] = [one for one in report.backends if one.name == "vllm-cutlass"]
    assert (item.outcome, item.layers) == ("nan", (0,))
    assert item.params["besides"] == ["scale.missing (input_scale)"]


def test_a_repair_gives_no_slot_of_the_model_another_towers_number():
    broken = towers(lost=[name(OTHER)])
    with pytest.raises(InputError) as caught:
        plan_repair(broken, "peer-max")
    assert name(OTHER) in str(caught.value)
    plan = plan_repair(towers(lost=[name(MAIN)]), "peer-max")
    assert [slot.tensor for slot in plan.record.slots] == [name(MAIN)]


def test_the_configuration_says_nothing_of_another_towers_experts():
    out = {name: item for family, layer in ((MAIN, 0), (MAIN, 1), (MAIN, 2), (OTHER, 0), (OTHER, 1))
           for name, item in experts(f"{family}.layers.{layer}.mlp.experts").items()}  # fmt: skip
    last = max(int(key.split(".experts.")[1].partition(".")[0]) for key in out)
    for family, text in ((MAIN, "expert.absent"), (OTHER, "expert.absent.other")):
        lost = f"{family}.layers.1.mlp.experts.{last}."
        short = {key: item for key, item in out.items() if not key.startswith(lost)}
        report = audit(memory_checkpoint(short, config=config(3), hf_quant_config=sidecar("NVFP4", ["lm_head"])))
        [item] = [one for one in report.findings if one.code == "expert.absent"]
        assert (item.text.removesuffix(".tower"), item.layer) == (text, 1)
