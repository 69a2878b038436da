"""One expert with a filled-in number in all projections of several layers, beside maxima that are as coarse."""

import numpy as np
import pytest

from nvfp4viz.audit import audit
from nvfp4viz.audit.fineness import least_by_chance
from tests.audit.config_faults import section_of, with_section
from tests.audit.layouts import EXPERTS, LAYOUTS
from tests.audit.test_fills import SINGLE, SIX, STATIC, gates, measured, over, put


def told(id, filled, layers=4, fine=False):
    """(layer, projection, experts) of what is called filled in; ``filled``: (experts, kinds) of a layer."""
    layout, out = LAYOUTS[id], {}
    for k in range(layers):
        tensors = measured(layout, fine=fine)
        for who, kinds in filled(k):
            put(layout, tensors, who, kinds, SIX[over(id)])
        out |= {name.replace("layers.0", f"layers.{k}"): item for name, item in tensors.items()}
    report = audit(layout.open(out, **with_section(layout, section_of(layout), num_hidden_layers=layers)))
    return {(item.layer, item.projection, item.experts) for item in report.findings if item.code == "scale.filled"}


@pytest.mark.parametrize("id", SINGLE)
def test_an_expert_that_nobody_measured_in_any_layer(id):
    kinds = LAYOUTS[id].kinds
    slots = {(k, kind, (3,)) for k in range(4) for kind in kinds}
    assert told(id, lambda k: [((3,), kinds)]) == slots
    # Any expert in any layer, or one in most; and none where calibration may have hit it, in few layers or projections.
    assert told(id, lambda k: [((k,), kinds)]) == {(k, kind, (k,)) for k in range(4) for kind in kinds}
    assert told(id, lambda k: [((3,), kinds)], layers=3) == {slot for slot in slots if slot[0] < 3}
    assert told(id, lambda k: [((3,), kinds)] if k else []) == {slot for slot in slots if slot[0]}
    assert told(id, lambda k: [((3,), kinds)] if k < 2 else []) == set()
    assert told(id, lambda k: [((k,), kinds)] if k else []) == set()
    assert told(id, lambda k: [((3,), gates(LAYOUTS[id]))]) == set()
    assert told(id, lambda k: [((3,), ("down",))]) == set()
    # Where maxima are fine one is enough, and proves nothing of others.
    assert told(id, lambda k: [((3,), kinds)], fine=True) == slots


@pytest.mark.parametrize("id", ["modelopt", "non-gated", "compressed-tensors", "stacked"])
def test_where_many_have_it_in_gate_and_up_some_have_it_in_down(id):
    """A loud channel may give it to all of them in some layers, and to down chance then does once in 128 times."""
    layout = LAYOUTS[id]
    many = [(range(EXPERTS), gates(layout)), ((3,), ("down",))]
    assert told(id, lambda k: many if k < 2 else []) == set()
    # That which is too much for one layer is so in it alone.
    most = {(1, kind, (2, 3, 4)) for kind in layout.kinds}
    assert told(id, lambda k: [((2, 3, 4), layout.kinds)] if k == 1 else []) == most


@pytest.mark.parametrize("id", STATIC)
def test_a_projection_that_nobody_measured_in_any_layer(id):
    """One layer may have one maximum that is this number; all layers have not.  In fused layouts each layer has one."""
    layout = LAYOUTS[id]
    everyone = (0,) if layout.arrangement == "fused" else range(EXPERTS)
    for kinds in (gates(layout), gates(layout)[:1], *([("down",)] if layout.arrangement == "fused" else [])):
        slots = {(k, kind) for k in range(5) for kind in kinds}
        assert {slot[:2] for slot in told(id, lambda k, kinds=kinds: [(everyone, kinds)], layers=5)} == slots
        assert told(id, lambda k, kinds=kinds: [(everyone, kinds)] if k > 1 else [], layers=5) == set()
        assert told(id, lambda k, kinds=kinds: [(everyone, kinds)], layers=3) == set()
        # Of twelve layers half are enough, and are told alone.
        half = told(id, lambda k, kinds=kinds: [(everyone, kinds)] if k % 2 else [], layers=12)
        assert {slot[:2] for slot in half} == {(k, kind) for k in range(1, 12, 2) for kind in kinds}


@pytest.mark.parametrize("id", SINGLE)
def test_a_layer_of_one_measurement_is_judged_by_the_others(id):
    """Every expert sees every token: one maximum a layer, of BF16, is 6 in some layer of every few files."""
    layout, layers = LAYOUTS[id], 6
    for coarse, expected in ((True, set()), (False, set(gates(layout)))):
        out = {}
        for k in range(layers):
            tensors = measured(layout, fine=True)
            amax = SIX[over(id)] if k == 2 else (140 + 9 * k) / 32 + (0 if coarse else 0.01137)
            put(layout, tensors, range(EXPERTS), gates(layout), amax)
            out |= {name.replace("layers.0", f"layers.{k}"): item for name, item in tensors.items()}
        report = audit(layout.open(out, **with_section(layout, section_of(layout), num_hidden_layers=layers)))
        fills = {(item.layer, item.projection) for item in report.findings if item.code == "scale.filled"}
        assert fills == {(2, kind) for kind in expected}


@pytest.mark.parametrize("id", STATIC)
def test_what_all_experts_of_a_synchronised_file_share_is_one_measurement(id):
    """One maximum a layer in gate and up, and one in down: both are 6 in one layer of 16,000."""
    layout, layers = LAYOUTS[id], 24
    for some in ((), (2,), (2, 5, 9)):
        out = {}
        for k in range(layers):
            tensors = measured(layout, fine=False)
            put(layout, tensors, range(EXPERTS), gates(layout), SIX[over(id)] if k in some else (140 + 5 * k) / 32)
            put(layout, tensors, range(EXPERTS), ("down",), SIX[over(id)] if k in some else (131 + 4 * k) / 32)
            out |= {name.replace("layers.0", f"layers.{k}"): item for name, item in tensors.items()}
        report = audit(layout.open(out, **with_section(layout, section_of(layout), num_hidden_layers=layers)))
        fills = {(item.layer, item.projection) for item in report.findings if item.code == "scale.filled"}
        assert fills == ({(k, kind) for k in some for kind in layout.kinds} if len(some) > 1 else set())


def test_of_ten_thousands_as_of_a_few():
    assert [least_by_chance(among, 1e-8) for among in (3, 4, 40)] == [4, 4, 8]
    # 180 of 23,040 are what to expect, and six standard deviations are 80.
    assert 250 < least_by_chance(23_040, 1e-8) < 280


@pytest.mark.parametrize("seed", range(10))
def test_coarse_maxima_of_many_experts_have_some_by_chance(seed):
    """Amax of eight bits between 4 and 8 in 12 layers of 8 experts: each number once in 128 times."""
    rng = np.random.default_rng(seed)
    layout, out = LAYOUTS["modelopt"], {}
    for k in range(12):
        tensors = layout.tensors()
        for e in range(EXPERTS):
            for kinds in (("gate", "up"), ("down",)):
                put(layout, tensors, (e,), kinds, rng.integers(128, 256) / 32)
        out |= {name.replace("layers.0", f"layers.{k}"): item for name, item in tensors.items()}
    report = audit(layout.open(out, **with_section(layout, section_of(layout), num_hidden_layers=12)))
    assert not [item for item in report.findings if item.code == "scale.filled"]
