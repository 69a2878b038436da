"""Whole layers that are not there: which ones, and whose fault it is."""

import json

import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import MemorySource, file_bytes
from tests.audit.layouts import bf16
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base

LAYERS, INDEX = 6, "model.safetensors.index.json"
SHARD = "model-{:05d}-of-00003.safetensors"


def of_layer(name):
    return int(name.split(".")[2])


def model(*, without=(), index=True, lost=(), config=LAYERS, cut=2, dense=()):
    """Three shards of two layers each, so that a lost one takes whole layers along."""
    tensors = {name: item for name, item in base(layers=LAYERS).items() if of_layer(name) not in {*without, *dense}}
    tensors |= {f"model.layers.{layer}.input_layernorm.weight": bf16(32) for layer in dense}
    parts = {}
    for name, item in tensors.items():
        parts.setdefault(SHARD.format(of_layer(name) // cut + 1), {})[name] = item
    files = {file: file_bytes(part) for file, part in parts.items() if file not in lost}
    files["config.json"] = json.dumps({**CONFIG, "num_hidden_layers": config}).encode()
    files["hf_quant_config.json"] = json.dumps(QUANT).encode()
    if index:
        files[INDEX] = json.dumps({"weight_map": {name: f for f, part in parts.items() for name in part}}).encode()
    return MemorySource(files)


def said(report):
    return {item.text: item for item in report.findings}


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_lost_shard_says_which_layers_went_with_it(number, index):
    report = audit(model(lost=[SHARD.format(number)], index=index))
    first = 2 * number - 2
    note = said(report)["audit.partial.layers"]
    assert (note.severity, note.count, note.params["numbers"]) == ("info", 2, (first, first + 1))
    assert {item.code for item in report.findings} == {"container.missing-shard", "audit.partial"}
    assert report.model.layers == LAYERS
    for language in ("en", "zh"):
        message, advice = describe(note, language)
        assert f"{first}, {first + 1}" in message
        assert str(LAYERS) in message
        assert advice


@pytest.mark.parametrize("index", [True, False])
def test_layers_that_are_partly_here_are_not_called_unseen(index):
    """Each shard has a piece of every layer."""
    tensors = base(layers=2)
    parts = {SHARD.format(k + 1): dict(list(tensors.items())[k::3]) for k in range(3)}
    files = {file: file_bytes(part) for file, part in parts.items()}
    files["config.json"] = json.dumps({**CONFIG, "num_hidden_layers": 2}).encode()
    files["hf_quant_config.json"] = json.dumps(QUANT).encode()
    if index:
        files[INDEX] = json.dumps({"weight_map": {name: f for f, part in parts.items() for name in part}}).encode()
    del files[SHARD.format(2)]
    assert "audit.partial.layers" not in said(audit(MemorySource(files)))


@pytest.mark.parametrize(("without", "layer"), [([5], 5), ([2], 2), ([2, 5], None)])
@pytest.mark.parametrize("index", [True, False])
def test_a_layer_that_no_shard_has_is_an_error(without, layer, index):
    report = audit(model(without=without, index=index))
    [item] = report.findings
    assert (item.code, item.text, item.severity) == ("expert.absent", "expert.absent.unseen", "error")
    assert (item.layer, item.count, item.params["numbers"]) == (layer, len(without), tuple(without))
    outcomes = {each.name: (each.outcome, each.scope, each.layers) for each in report.backends}
    assert outcomes.pop("tensorrt-llm") == ("load-error", "model", tuple(without))
    assert set(outcomes.values()) == {("undefined", "layer", tuple(without))}


def test_a_lost_shard_and_a_layer_that_none_has():
    """With an index it is known what the shard held; without one it may have been anything."""
    lost = [SHARD.format(1)]
    known = said(audit(model(without=[5], lost=lost)))
    assert known["expert.absent.unseen"].params["numbers"] == (5,)
    assert known["audit.partial.layers"].params["numbers"] == (0, 1)
    guessed = said(audit(model(without=[5], lost=lost, index=False)))
    assert "expert.absent.unseen" not in guessed
    assert guessed["audit.partial.layers"].params["numbers"] == (0, 1, 5)


@pytest.mark.parametrize(
    "options",
    [{}, {"index": False}, {"config": None}, {"dense": [0]}, {"dense": [0, 3], "index": False}, {"config": 4}],
    ids=str,
)
def test_healthy_models_are_silent(options):
    """Dense layers have no experts, a draft layer comes after the last one, and a configuration may not say."""
    report = audit(model(**options))
    assert not {"expert.absent.unseen", "audit.partial.layers"} & set(said(report))
    assert report.verdict in ("ok", "info")


def test_one_shard_that_was_asked_for_is_not_the_model(tmp_path):
    for name, data in model().__dict__["_files"].items():
        (tmp_path / name).write_bytes(data)
    assert "expert.absent.unseen" not in said(audit(tmp_path / SHARD.format(1)))
