"""Experts of which one projection alone is left, in all layers, and pieces of files that hold hardly anything."""

import itertools

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES as BACKENDS
from nvfp4viz.checkpoint import memory_checkpoint, tensor
from tests.audit.families import FAMILIES
from tests.audit.layouts import CONFIG, LAYOUTS
from tests.audit.reading import found


def only(layout, kind):
    """What the other projections are called away; routers and all else stay."""
    tensors = layout.tensors()
    for other in layout.kinds:
        if other != kind:
            heads = {layout.name(expert, other, "weight").rpartition(layout.disk[other])[0] for expert in range(8)}
            parts = tuple(f"{head}{layout.disk[other]}{end}" for head in heads for end in "._")
            exact = {f"{head}{layout.disk[other]}" for head in heads}
            tensors = {name: item for name, item in tensors.items() if not name.startswith(parts) and name not in exact}
    return tensors


@pytest.mark.parametrize("id", LAYOUTS)
def test_down_alone_is_no_expert(id):
    """No architecture has it: a first projection is gone, whatever it was called."""
    layout = LAYOUTS[id]
    assert found(audit(layout.open())) == []
    report = audit(layout.open(only(layout, "down")))
    errors = [item for item in report.findings if item.severity == "error"]
    lost = {item.projection for item in errors if item.code in ("expert.absent", "scale.missing")}
    assert lost & {"up", "gate_up"}
    assert report.verdict == "error"
    assert "safe" not in {item.outcome for item in report.backends}
    assert {item.name for item in report.backends} == set(BACKENDS)
    for item in errors:
        assert describe(item, "zh")[0] != item.message


def test_a_first_projection_under_another_name():
    """What is not read here is not missed."""
    layout = LAYOUTS["modelopt"]
    tensors = only(layout, "down")
    tensors |= {name.replace("down_proj", "fc1"): item for name, item in tensors.items() if "down_proj" in name}
    assert not [item for item in audit(layout.open(tensors)).findings if item.code == "expert.absent"]


def test_one_number_is_a_file_too():
    for suffix, dtype in itertools.product(("weight_scale_2", "input_scale", "weight_scale"), (np.float32, np.uint8)):
        name = f"model.layers.0.experts.1.down_proj.{suffix}"
        report = audit(memory_checkpoint({name: tensor(dtype(1))}, config=CONFIG))
        assert report.verdict != "ok"


@pytest.mark.parametrize("id", [*LAYOUTS, *FAMILIES])
def test_any_piece_of_a_file_has_a_report(id):
    """A shard that is opened alone holds anything: a few tensors, or all of one kind."""
    whole = LAYOUTS[id].open() if id in LAYOUTS else FAMILIES[id]()
    tensors, config, quant = whole.read_tensors(), whole.config, whole.hf_quant_config
    names, random = sorted(tensors), np.random.default_rng(5)
    kinds = sorted({name.rpartition(".")[2] for name in names} | {name.rpartition("_")[2] for name in names})
    counts = [count for count in (1, 1, 2, 2, 3, 5, 8) if count <= len(names)]
    pieces = [[str(one) for one in random.choice(names, count, replace=False)] for count in counts]
    pieces += [[name for name in names if name.endswith(kind)] for kind in kinds]
    pieces += [[name for name in names if "down" in name or "w2" in name], [name for name in names if "up" in name]]
    for piece, known in itertools.product(filter(None, pieces), (True, False)):
        some = {name: tensors[name] for name in piece}
        about = {"config": config, "hf_quant_config": quant} if known else {}
        assert audit(memory_checkpoint(some, **about), tp=4, ep=3, gpu="sm_120").findings
