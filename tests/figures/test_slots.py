"""From a checkpoint's scales to what map and strip of peers show of each: every kind of slot, and the counts."""

import json
import re

import numpy as np
import pytest

from nvfp4viz.audit import run_audit
from nvfp4viz.checkpoint import MemorySource, file_bytes, tensor
from nvfp4viz.figures.coverage import HOLES, STATUSES, coverage_figure, coverage_rows, describe_coverage, pack
from nvfp4viz.figures.peers import describe_peers, peers_drawing, peers_rows
from nvfp4viz.figures.slots import coverage_grid, peers_of, roles_shown
from nvfp4viz.figures.words import words
from tests.audit.layouts import LAYOUTS
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, opened, scalar, without

ROW = "model.layers.0.mlp.experts"
# What is stored for `down` of each expert; the first eight are ordinary.
STORED = {
    8: ("missing", None),
    9: ("zero", 0.0),
    10: ("nan", np.nan),
    11: ("inf", np.inf),
    12: ("neginf", -np.inf),
    13: ("negative", -2e-3),
    14: ("subnormal", 1e-41),
    15: ("outlier", 9.0),
    16: ("identity", 1.0),
    17: ("filled", 0.5 / 2688),
    18: ("unreadable", np.float32([1e-3, 2e-3])),
}
EXPERTS = 20


@pytest.fixture(scope="module")
def audited():
    tensors = base(experts=EXPERTS)
    for expert, (_, value) in STORED.items():
        name = f"{ROW}.{expert}.down_proj.input_scale"
        if value is None:
            del tensors[name]
        else:
            tensors[name] = tensor(value) if isinstance(value, np.ndarray) else scalar(np.float32(value))
    # Of the last expert nothing at all is stored for `down`.
    tensors = {name: item for name, item in tensors.items() if f"experts.{EXPERTS - 1}.down_proj" not in name}
    return run_audit(opened(tensors, {**CONFIG, "num_experts": EXPERTS}))


@pytest.fixture(scope="module")
def grid(audited):
    return coverage_grid(audited.facts, audited.report, "input_scale")


def names(grid, projection="down", row=0):
    return [STATUSES[code] for code in grid.status[grid.roles.index(projection), row]]


def test_every_kind_of_slot_has_its_status(grid):
    assert names(grid)[:8] == ["present"] * 8
    assert {expert: names(grid)[expert] for expert in STORED} == {e: name for e, (name, _) in STORED.items()}
    assert names(grid)[EXPERTS - 1] == "missing"
    assert names(grid, "gate") == ["present"] * EXPERTS


def test_the_map_counts_as_the_report_does(audited, grid):
    count = audited.report.coverage["input_scale"]
    shown = [STATUSES[code] for code in grid.status.ravel()]
    assert shown.count("missing") == count.missing == 2
    assert len(shown) - shown.count("absent") == count.expected == 3 * EXPERTS
    bad = ("zero", "nan", "inf", "neginf", "negative", "subnormal", "unreadable")
    assert sum(shown.count(name) for name in bad) == count.invalid == 7
    assert shown.count("filled") == count.filled


def test_the_map_knows_which_scale_it_shows(audited, grid):
    assert grid.scale == "input_scale"
    assert coverage_grid(audited.facts, audited.report, "weight_scale_2").scale == "weight_scale_2"


def test_values_are_those_stored(grid):
    down = grid.values[grid.roles.index("down"), 0]
    assert down[13] == np.float32(-2e-3)
    assert np.isnan(down[8])
    assert down[15] == 9


def test_a_damaged_file_s_slots_are_unreadable_and_none_is_called_missing():
    """The index promises them; half of the file is not there."""
    from nvfp4viz.checkpoint.writer import split_shards

    tensors = base()
    halves = split_shards(((name, len(item.tobytes())) for name, item in tensors.items()), 1400)
    files, where = {}, {}
    for k, shard in enumerate(halves):
        file = f"model-{k + 1:05d}-of-{len(halves):05d}.safetensors"
        files[file] = file_bytes({name: tensors[name] for name in shard})
        where |= dict.fromkeys(shard, file)
    lost = f"model-00002-of-{len(halves):05d}.safetensors"
    del files[lost]
    side = {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": where},
        "config.json": CONFIG,
        "hf_quant_config.json": QUANT,
    }
    files |= {name: json.dumps(content).encode() for name, content in side.items()}
    done = run_audit(MemorySource(files, "half"))
    grid = coverage_grid(done.facts, done.report, "input_scale")
    shown = [STATUSES[code] for code in grid.status.ravel()]
    assert shown.count("missing") == 0
    assert shown.count("unreadable") == done.report.coverage["input_scale"].unreadable > 0
    promised = [name for name, file in where.items() if file == lost and name.endswith("input_scale")]
    assert len(promised) == shown.count("unreadable")


def test_a_role_without_slots_has_no_map():
    """A weight-only scheme has no input scales to miss: no map full of holes."""
    done = run_audit(opened(without(base(), "input_scale"), CONFIG, None))
    assert done.report.coverage["input_scale"].expected == 0
    assert coverage_grid(done.facts, done.report, "input_scale") is None
    assert peers_of(done.facts, done.report, "input_scale", 0, "down", 0) is None
    assert coverage_grid(done.facts, done.report, "weight_scale_2") is not None
    assert roles_shown(done.report) == ("weight_scale_2", "weight_scale")
    empty = run_audit(opened({"x.weight": tensor(np.float32(1))}, CONFIG, None))
    assert coverage_grid(empty.facts, empty.report, "input_scale") is None
    assert roles_shown(empty.report) == ()


def test_a_block_scale_is_there_or_not_and_has_no_number():
    name = "model.layers.0.mlp.experts.2.up_proj.weight_scale"
    done = run_audit(opened(without(base(), name), CONFIG, QUANT))
    assert roles_shown(done.report) == ("input_scale", "weight_scale_2", "weight_scale")
    grid = coverage_grid(done.facts, done.report, "weight_scale")
    assert grid.values is None
    assert [kind for kind in grid.roles if grid.holes(kind).any()] == ["up"]
    assert np.argwhere(grid.holes("up")).tolist() == [[0, 2]]
    count = done.report.coverage["weight_scale"]
    assert (count.missing, count.expected) == (1, grid.status.size)
    assert peers_of(done.facts, done.report, "weight_scale", 0, "up", 2) is None


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("expert", [0, *STORED, EXPERTS - 1])
def test_every_slot_has_a_sentence_among_its_peers(audited, lang, expert):
    strip = peers_of(audited.facts, audited.report, "input_scale", 0, "down", expert)
    said = describe_peers(strip, lang)
    assert str(expert) in said
    assert "nan" not in said.replace("`nan`", "")
    if lang == "en":
        assert f"expert {expert}" in said


def test_the_strip_draws_numbers_above_and_marks_below(audited):
    strip = peers_of(audited.facts, audited.report, "input_scale", 0, "down", 8)
    markup = peers_drawing(strip, alt="", lang="en")
    stored = re.findall(r'class="dot" style="left:[\d.]+%;top:([\d.]+)px" title="(\d+):', markup)
    assert [int(expert) for _, expert in stored] == [*range(8), 15, 16, 17]
    below = re.findall(r'<b style="left:[\d.]+%;top:([\d.]+)px" title="(\d+)">([^<]+)<', markup)
    assert {int(expert): mark for _, expert, mark in below} == {
        8: "∅", 9: "0", 10: "N", 11: "∞", 12: "−∞", 13: "−", 14: "s", 18: "?", 19: "∅",
    }  # fmt: skip
    assert min(float(top) for top, *_ in below) > max(float(top) for top, _ in stored)


def test_there_is_no_strip_where_there_is_no_such_slot(audited):
    assert peers_of(audited.facts, audited.report, "input_scale", 0, "down", EXPERTS) is None
    assert peers_of(audited.facts, audited.report, "input_scale", 5, "down", 0) is None
    assert peers_of(audited.facts, audited.report, "weight", 0, "down", 0) is None


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_map_marks_every_odd_slot(audited, grid, theme, lang):
    figure = coverage_figure(grid, role_name="down", theme=theme, lang=lang)
    texts = [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "text"]
    marked = {int(x): text for trace in texts for x, text in zip(trace.x, trace.text, strict=True)}
    assert sorted(marked) == [*STORED, EXPERTS - 1]
    assert (marked[10], marked[12], marked[18]) == ("N", "−∞", "?")
    holes = sum(name in HOLES for name in names(grid))
    assert str(holes) in describe_coverage(grid, "down", lang)
    assert "`down`" in describe_coverage(grid, "down", lang)


def test_the_tables_carry_the_status(audited, grid):
    rows = [row for row in coverage_rows(grid) if row["role"] == "down"]
    assert [row["status"] for row in rows] == names(grid)
    strip = peers_of(audited.facts, audited.report, "input_scale", 0, "down", 0)
    assert [row["status"] for row in peers_rows(strip)] == names(grid)
    assert peers_rows(strip)[8]["value"] is None


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("stored", [None, 0.005, np.nan])
def test_a_number_of_all_experts_is_not_compared_with_itself(stored, language):
    """checkpoints.md 2.3: one scalar of a fused layer is no expert's."""
    layout = LAYOUTS["fused"]
    tensors = layout.tensors()
    name = layout.name(3, layout.kinds[0], "input_scale")
    if stored is None:
        del tensors[name]
    else:
        tensors[name] = layout.scalar(np.float32(stored))
    done = run_audit(layout.open(tensors))
    strip = peers_of(done.facts, done.report, "input_scale", 0, layout.kinds[0], 3)
    status = "missing" if stored is None else "nan" if np.isnan(stored) else ""
    value = words(language, f"coverage.status.{status}") if status else "**0.005**"
    place = {"layer": 0, "projection": layout.kinds[0], "role": "input_scale", "experts": len(strip.values)}
    assert describe_peers(strip, language) == words(language, "peers.shared", **place, value=value)


def test_an_expert_s_place_in_a_vector_is_its_own():
    layout = LAYOUTS["stacked"]
    done = run_audit(layout.open())
    assert not peers_of(done.facts, done.report, "input_scale", 0, layout.kinds[0], 3).shared


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize(("stored", "status"), [(np.inf, "zero"), (0.0, "inf"), (-0.0, "neginf")])
def test_a_stored_divisor_is_not_called_what_it_amounts_to(stored, status, language):
    """An infinite divisor acts as zero, and the file holds no zero (audit.md: and says so)."""
    layout = LAYOUTS["compressed-tensors"]
    tensors = layout.tensors()
    layout.put(tensors, 3, "down", "input_scale", np.float32(stored))
    done = run_audit(layout.open(tensors))
    grid = coverage_grid(done.facts, done.report, "input_scale")
    assert STATUSES[grid.status[grid.roles.index("down"), 0, 3]] == status
    packed = pack(grid, lang=language, role_name="down")
    plain = words(language, f"coverage.status.{status}")
    # Beside the value and its bits, which are of one over the stored number.
    assert packed["scale"] == "1/input_global_scale"
    assert packed["names"][status] == words(language, f"coverage.status_divisor.{status}") != plain
    for expert in (3, 4):
        said = describe_peers(peers_of(done.facts, done.report, "input_scale", 0, "down", expert), language)
        assert "1/input_global_scale" in said
        assert plain not in said
    names = [trace.name for trace in coverage_figure(grid, role_name="down", theme="light", lang=language).data]
    assert packed["names"][status] in names
    # A multiplier is what it is.
    healthy = run_audit(LAYOUTS["modelopt"].open())
    multiplier = pack(coverage_grid(healthy.facts, healthy.report, "input_scale"), lang=language, role_name="down")
    assert (multiplier["scale"], multiplier["names"][status]) == ("input_scale", plain)
