"""Layers of one file in different layouts: each is measured by what its own layout stores."""

import pytest

from nvfp4viz.audit import audit, run_audit
from nvfp4viz.checkpoint import memory_checkpoint
from tests.audit.layouts import CONFIG, EXPERTS, HIDDEN, LAYOUTS, WIDTH, bf16, modelopt

# Layouts that ModelOpt writes with the same numbers in them; a layer's experts keep their place.
NAMES = ("modelopt", "projection-major", "w1/w2/w3", "fused", "stacked")
PAIRS = [(one, two) for one in NAMES for two in NAMES if one != two]
DRAFT, ALL = "mtp.layers.0.mlp.experts", tuple(range(EXPERTS))
QUANT = modelopt(exclude=("lm_head", "*gate", "mtp.plain*"))


def layer(id, block):
    """One layer's experts and router, in a layout and at a place of the test's choice."""
    layout = LAYOUTS[id]
    own = {name: item for name, item in layout.tensors().items() if name.startswith(f"{layout.prefix}.")}
    router = f"{block.removesuffix('.experts')}.gate.weight"
    return {name.replace(layout.prefix, block, 1): item for name, item in own.items()} | {router: bf16(EXPERTS, HIDDEN)}


def block_of(id, parent):
    return f"{parent}.moe" if id == "stacked" else f"{parent}.mlp.experts"


def of_two(one, two):
    return {
        **layer(one, block_of(one, "model.layers.0")),
        **layer(two, block_of(two, "model.layers.1")),
    }


def done(tensors, layers=2, quant=QUANT):
    return run_audit(memory_checkpoint(tensors, config={**CONFIG, "num_hidden_layers": layers}, hf_quant_config=quant))


def alarms(report):
    return [
        (item.code, item.severity, item.layer, item.projection, item.experts)
        for item in report.findings
        if item.severity != "info"
    ]


def lose(tensors, id, block, kind):
    """A layer without one projection of all its experts."""
    disk = LAYOUTS[id].disk[kind]
    return {
        name: item
        for name, item in tensors.items()
        if not (name.startswith(f"{block}.") and (f".{disk}." in name or f".{disk}_" in name or name.endswith(disk)))
    }


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_two_sound_layouts_of_the_model_are_sound(one, two):
    audited = done(of_two(one, two))
    assert alarms(audited.report) == []
    for count in audited.report.coverage.values():
        assert count.missing == 0
        assert count.present == count.expected == EXPERTS * (len(LAYOUTS[one].kinds) + len(LAYOUTS[two].kinds))
    assert {row.status for row in audited.rows()} == {"ok"}


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_a_lost_projection_is_still_missed_in_its_own_layer(one, two):
    block = block_of(two, "model.layers.1")
    for kind in LAYOUTS[two].kinds:
        tensors = lose(of_two(one, two), two, block, kind)
        # Fused gate and up are all that says which of the two a layer's down belongs to.
        if LAYOUTS[two].kinds == LAYOUTS[one].kinds or kind != "gate_up":
            audited = done(tensors)
            assert alarms(audited.report) == [("expert.absent", "error", 1, kind, ALL)]
            [item] = [found for found in audited.report.findings if found.code == "expert.absent"]
            # It is called as its sisters of that layer are.
            assert all(name.startswith(f"{block}.") and LAYOUTS[two].disk[kind] in name for name in item.tensors)


@pytest.mark.parametrize("two", [id for id in NAMES if id not in ("stacked",)])
@pytest.mark.parametrize("one", [*NAMES, "non-gated"])
def test_a_draft_layer_may_have_another_layout(one, two):
    own = layer(one, block_of(one, "model.layers.0"))
    healthy = {**own, **layer(two, DRAFT)}
    assert alarms(done(healthy, 1).report) == []
    for kind in LAYOUTS[two].kinds:
        if kind != "gate_up" and not (one == "non-gated" and kind == "gate"):
            report = done(lose(healthy, two, DRAFT, kind), 1).report
            assert alarms(report) == [("expert.absent", "error", 1, kind, ALL)], kind
    # The model's own layer is not excused by the draft.
    for kind in LAYOUTS[one].kinds:
        if LAYOUTS[one].arrangement == "expert" and kind != "gate":
            report = done(lose(healthy, one, "model.layers.0.mlp.experts", kind), 1).report
            assert ("expert.absent", "error", 0, kind, ALL) in alarms(report) or kind == "up"


@pytest.mark.parametrize("excluded", [True, False])
@pytest.mark.parametrize("one", [*NAMES, "non-gated"])
def test_a_plain_draft_of_fused_experts_is_as_its_exporter_left_it(one, excluded):
    """Qwen3-Next and its like: the draft stays what Transformers made of it, BF16 with experts along the first axis."""
    fused = {
        f"{DRAFT}.gate_up_proj": bf16(EXPERTS, 2 * WIDTH, HIDDEN), f"{DRAFT}.down_proj": bf16(EXPERTS, HIDDEN, WIDTH),
        f"{DRAFT.removesuffix('.experts')}.gate.weight": bf16(EXPERTS, HIDDEN),
    }  # fmt: skip
    quant = modelopt(exclude=("lm_head", "*gate", *(["mtp*"] if excluded else [])))
    report = done({**layer(one, block_of(one, "model.layers.0")), **fused}, 1, quant).report
    found = [("config.unquantised-not-excluded", "warn", None, None, None)]
    assert alarms(report) == ([] if excluded else found)
    assert "draft.unquantised" in {item.code for item in report.findings}
    # Nothing of the draft is among the slots.
    assert report.model.projections == LAYOUTS[one].kinds
    assert report.coverage["weight_scale"].expected == EXPERTS * len(LAYOUTS[one].kinds)


def test_a_projection_that_no_layer_has_is_proved_by_its_partners():
    """Gate without up, and gate and up without down, are no layout: nobody else has to have them."""
    for kind, others in (("up", ("gate", "down")), ("down", ("gate", "up"))):
        tensors = LAYOUTS["modelopt"].tensors()
        report = audit(LAYOUTS["modelopt"].open(lose(tensors, "modelopt", LAYOUTS["modelopt"].prefix, kind)))
        assert alarms(report) == [("expert.absent", "error", 0, kind, ALL)]
        assert set(others) < set(report.model.projections)
    # Up and down without a gate are one.
    assert alarms(audit(LAYOUTS["non-gated"].open())) == []
