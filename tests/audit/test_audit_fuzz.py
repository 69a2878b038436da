"""Random damage: the audit never breaks, counts what was done, and names exactly the experts that were hit."""

import warnings
from contextlib import suppress

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe, naive_check, run_audit, to_json, to_text
from nvfp4viz.checkpoint import FAULTS, Tensor, inject_tensors, memory_checkpoint, preview_tensor
from nvfp4viz.checkpoint.dtypes import byte_count
from nvfp4viz.errors import InputError
from tests.audit.layouts import LAYOUTS
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, opened, scalar, without

BASE = base(2, experts=8)
TWO = {**CONFIG, "num_hidden_layers": 2, "num_experts": 8}
CLASSES = {"zero": 0.0, "nan": np.nan, "inf": np.inf, "negative": -1e-3, "subnormal": 1e-40}
VALUES = [
    None, 0, -1, 1.5, "x", [], {}, [1], {"a": 1}, True, 1e308, 10**30, "NVFP4", {"group_0": None}, {"group_0": []},
    {"g": {"weights": None}}, {"g": {"weights": {"num_bits": "4"}}}, {"model.layers.0": None},
]  # fmt: skip
CONFIG_KEYS = (
    "num_experts", "num_hidden_layers", "quantization_config", "text_config", "architectures", "hidden_size",
    "moe_intermediate_size", "num_experts_per_tok", "hidden_act",
)  # fmt: skip
QUANT_KEYS = (
    "quant_algo", "group_size", "config_groups", "ignore", "exclude_modules", "quantization", "quant_method",
    "quantized_layers", "kv_cache_scheme", "kv_cache_quant_algo",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(25))
def test_exactly_the_slots_that_were_hit_are_reported(seed):
    """Any mixture of missing and bad scales over layers, experts, projections and roles, against a ledger."""
    rng = np.random.default_rng(seed)
    tensors, ledger = dict(BASE), {}
    names = [name for name in BASE if name.endswith(("input_scale", "weight_scale_2"))]
    for name in rng.choice(names, int(rng.integers(1, 40)), replace=False):
        kind = rng.choice(["missing", *CLASSES])
        ledger[str(name)] = f"scale.{kind}"
        if kind == "missing":
            del tensors[name]
        else:
            tensors[name] = scalar(CLASSES[kind])
    done = run_audit(opened(tensors, TWO))
    seen = {}
    for item in done.report.findings:
        # Among so few experts, lost ones can form a rank; that is the same slots in one finding.
        code = "scale.missing" if item.code == "expert.rank-hole" else item.code
        for expert in item.experts:
            for projection in [item.projection] if item.projection else done.view.projections:
                seen[done.view.slot(item.layer, expert, projection, item.role).name] = code
    assert seen == ledger
    for role in ("input_scale", "weight_scale_2"):
        mine = [code for name, code in ledger.items() if name.endswith(role)]
        row = done.report.coverage[role]
        assert row.missing == mine.count("scale.missing")
        assert row.invalid == len(mine) - row.missing
        assert row.present == row.expected - row.missing


def broken_tensors(rng):
    """BASE with tensors dropped, replaced by others of any type and shape, renamed, or with random bits."""
    small, names = base(), list(base())
    for _ in range(int(rng.integers(1, 6))):
        name = names[int(rng.integers(len(names)))]
        kind = rng.integers(0, 4)
        if kind == 0:
            small.pop(name, None)
        elif kind == 1:
            dtype = ("F32", "BF16", "U8", "I8", "F8_E4M3", "F8_E8M0", "I64", "F4")[int(rng.integers(8))]
            shape = tuple(int(size) for size in rng.integers(0, 4, int(rng.integers(0, 4))))
            size = byte_count(dtype, shape)
            if size is not None:
                small[name] = Tensor(dtype, shape, rng.bytes(size))
        elif kind == 2 and name in small:
            moved = name.replace("layers.0", f"layers.{rng.integers(3)}")
            small[moved.replace("experts.1", f"experts.{rng.integers(12)}")] = small.pop(name)
        elif name.endswith(("input_scale", "weight_scale_2")):
            small[name] = Tensor("F32", (), rng.bytes(4))
    return small


def damaged(layout, rng):
    """A layout with tensors dropped, replaced by others of any type and shape, renamed, or with random bits."""
    tensors = layout.tensors()
    names = list(tensors)
    for _ in range(int(rng.integers(1, 8))):
        name = names[int(rng.integers(len(names)))]
        kind = int(rng.integers(0, 5))
        if kind == 0:
            tensors.pop(name, None)
        elif kind == 1:
            dtype = ("F32", "BF16", "U8", "I8", "F8_E4M3", "F8_E8M0", "I64", "F4")[int(rng.integers(8))]
            shape = tuple(int(size) for size in rng.integers(0, 9, int(rng.integers(0, 5))))
            size = byte_count(dtype, shape)
            if size is not None:
                tensors[name] = Tensor(dtype, shape, rng.bytes(size))
        elif kind == 2 and name in tensors:
            moved = name.replace("layers.0", f"layers.{rng.integers(3)}").replace(".3.", f".{rng.integers(12)}.")
            tensors[moved] = tensors.pop(name)
        elif kind == 3 and name in tensors:
            other = LAYOUTS[list(LAYOUTS)[int(rng.integers(len(LAYOUTS)))]]
            head = name.rpartition(".")[0]
            suffix = list(other.suffixes.values())[int(rng.integers(len(other.suffixes)))] or "weight"
            tensors[f"{head}.{suffix}"] = tensors.pop(name)
        elif name in tensors and tensors[name].dtype == "F32":
            tensors[name] = Tensor("F32", tensors[name].shape, rng.bytes(len(tensors[name].tobytes())))
    return tensors


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_damaged_at_random(name):
    """No error, counts that add up, words for everything, and nothing outside the vocabulary."""
    layout = LAYOUTS[name]
    rng = np.random.default_rng(len(name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(len(FAULTS)):
            done = run_audit(layout.open(damaged(layout, rng)), gpu="sm_100", tp=2, ep=2)
            to_json(done.report)
            done.rows()
            naive_check(done.checkpoint)
            for row in done.report.coverage.values():
                assert row.expected == row.present + row.missing + row.unreadable
                assert 0 <= row.invalid <= row.present
            for item in (*done.report.findings, *done.report.backends):
                for language in ("en", "zh"):
                    assert "{" not in "".join(describe(item, language))
            if number == 0:
                to_text(done.report, "zh")
            for tensor in list(done.checkpoint.tensors)[::7]:
                preview_tensor(done.checkpoint, tensor)
            fault = list(FAULTS)[number % len(FAULTS)]
            # A fault that does not fit says so, in words.
            with suppress(InputError):
                inject_tensors(
                    done.checkpoint.read_tensors(), fault, layer=0, expert=3, projection="down", config=layout.config,
                    hf_quant_config=layout.quant,
                )  # fmt: skip


def broken_configs(rng):
    def pick(keys):
        return {key: VALUES[int(rng.integers(len(VALUES)))] for key in keys if rng.random() < 0.5}

    config, quant = pick(CONFIG_KEYS), pick(QUANT_KEYS)
    if rng.random() < 0.5:
        config["quantization_config"] = quant
    side = [None, quant, {"quantization": quant}][int(rng.integers(3))]
    return config, side


def check(count, seed):
    rng = np.random.default_rng(seed)
    for number in range(count):
        if number % 2:
            checkpoint = memory_checkpoint(broken_tensors(rng), config=CONFIG, hf_quant_config=QUANT)
        else:
            tensors = base() if rng.random() < 0.5 else without(base(), "input_scale")
            config, side = broken_configs(rng)
            checkpoint = memory_checkpoint(tensors, config=config, hf_quant_config=side)
        done = run_audit(checkpoint)
        to_json(done.report)
        done.rows()
        naive_check(checkpoint)
        for row in done.report.coverage.values():
            assert row.expected == row.present + row.missing + row.unreadable
        if number % 20 == 0:
            to_text(done.report, "zh")


def test_a_hundred_broken_checkpoints():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(100, seed=1)


@pytest.mark.slow
def test_two_thousand_broken_checkpoints():
    check(2_000, seed=2)


def test_a_second_audit_of_an_open_checkpoint_reports_the_same():
    checkpoint = opened(BASE, TWO)
    assert audit(checkpoint) == audit(checkpoint)
