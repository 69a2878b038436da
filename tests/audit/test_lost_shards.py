"""Healthy checkpoints of which one shard is lost, or only one is given: nothing else is wrong, in any layout.

What the index places in a lost shard is unreadable, and never absent, whatever its format calls it.
"""

import json

import pytest

from nvfp4viz.audit import run_audit
from nvfp4viz.checkpoint import file_bytes
from tests.audit.families import FAMILIES
from tests.audit.layouts import LAYOUTS

# How tensors come to their shards: neighbours together, or the scales of a layer apart from its weights.
ORDERS = {
    "inserted": list,
    "sorted": lambda tensors: sorted(tensors),
    "by size": lambda tensors: sorted(tensors, key=lambda name: -len(tensors[name].tobytes())),
}


def healthy_sets():
    for name, layout in LAYOUTS.items():
        yield pytest.param(lambda layout=layout: (layout.tensors(), layout.config, layout.quant), id=f"layout {name}")
    for name, make in FAMILIES.items():

        def made(make=make):
            checkpoint = make()
            return checkpoint.read_tensors(), checkpoint.config, checkpoint.hf_quant_config

        yield pytest.param(made, id=f"family {name}")


def sharded(folder, tensors, config, quant, order, count):
    """A folder of so many shards with an index; their paths."""
    names = ORDERS[order](tensors)
    size = -(-len(names) // count)
    paths, index = [], {}
    for at in range(count):
        path = folder / f"model-{at + 1:05}-of-{count:05}.safetensors"
        part = names[at * size : (at + 1) * size]
        path.write_bytes(file_bytes({name: tensors[name] for name in part}))
        index |= dict.fromkeys(part, path.name)
        paths.append(path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for name, content in (("config.json", config), ("hf_quant_config.json", quant)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return paths


def worse_than_info(report):
    return [(item.code, item.text, item.tensors[:1]) for item in report.findings if item.severity != "info"]


def texts(report):
    return {item.text for item in report.findings if item.severity == "info"}


def check_each_lost(paths, folder, *, cut=False):
    """Each shard lost in turn, or cut to the half: that shard is what is wrong, and slots in it are unreadable."""
    healthy = run_audit(folder).report
    assert worse_than_info(healthy) == []
    for path in paths:
        kept = path.read_bytes()
        path.write_bytes(kept[: len(kept) * 3 // 4]) if cut else path.unlink()
        report = run_audit(folder).report
        path.write_bytes(kept)
        assert {code for code, *_ in worse_than_info(report)} == {
            "container.truncated" if cut else "container.missing-shard"
        }, worse_than_info(report)
        assert len(worse_than_info(report)) == 1
        more = texts(report) - texts(healthy)
        # Where nothing that is left tells the format, its experts are not looked into, and the report says so.
        told = "audit.partial.format" not in more
        assert more <= {"audit.partial.layers", "audit.partial.format"}
        # Nor does anybody know the format of a draft layer of which nothing is left.
        told &= report.model.draft_layers == healthy.model.draft_layers
        for role, row in report.coverage.items():
            assert row.missing == 0
            assert row.present + row.unreadable == row.expected
            assert not told or row.expected == healthy.coverage[role].expected, (path.name, role)
    return texts(healthy)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("made", healthy_sets())
def test_a_lost_shard_is_all_that_is_wrong(made, order, count, tmp_path):
    paths = sharded(tmp_path, *made(), order, count)
    whole = check_each_lost(paths, tmp_path)
    for path in paths:
        alone = run_audit(path).report
        assert worse_than_info(alone) == []
        assert alone.backends == ()
        more = texts(alone) - whole - {"audit.partial.layers", "audit.partial.format", "audit.partial.no-experts"}
        assert more == {"audit.partial.one-shard"}
