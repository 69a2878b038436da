"""The index: known shards, unknown ones, other content, and whether the headers agree."""

import json

import pytest

from nvfp4viz.checkpoint import index as module
from nvfp4viz.checkpoint import open_checkpoint, write_checkpoint
from nvfp4viz.checkpoint.index import Index
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base

MAP = {f"model.layers.{k}.weight": f"model-{k // 5 + 1:05d}-of-00004.safetensors" for k in range(20)}


@pytest.mark.parametrize("shards", [sorted(set(MAP.values())), ["model-00001-of-00004.safetensors"], []])
@pytest.mark.parametrize("content", [{"weight_map": MAP}, {"metadata": {"total_size": 1}, "weight_map": MAP, "x": [1]}])
def test_the_map_is_the_same_whichever_shards_are_here(shards, content):
    assert module._decode(json.dumps(content).encode(), shards)["weight_map"] == MAP


@pytest.mark.parametrize("weight_map", [None, 1, [], {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_other_content_comes_as_it_is(weight_map):
    content = {"weight_map": weight_map}
    assert module._decode(json.dumps(content).encode(), ["a"]) == content


def test_agreement_is_of_every_name_with_its_shard(tmp_path):
    write_checkpoint(tmp_path / "m", base(layers=2), config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=3000)
    checkpoint = open_checkpoint(tmp_path / "m")
    tables = {header.file: header.entries for header in checkpoint.files}
    plain = dict(checkpoint.index)
    name, other = next(iter(plain)), "model.extra.weight"
    moved = {**plain, name: next(shard for shard in tables if shard != plain[name])}
    renamed = {other if key == name else key: shard for key, shard in plain.items()}
    less = {key: shard for key, shard in plain.items() if key != name}
    assert Index("i", 0, plain).agrees_with(tables)
    for weight_map in (moved, renamed, less, {**plain, other: plain[name]}, {}):
        assert not Index("i", 0, weight_map).agrees_with(tables)
