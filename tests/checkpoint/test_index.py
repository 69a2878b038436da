"""The index: known shards, unknown ones, other content, and whether the headers agree."""

import json
import random

import pytest

from nvfp4viz.checkpoint import index as module
from nvfp4viz.checkpoint import open_checkpoint, write_checkpoint
from nvfp4viz.checkpoint.index import Index, is_numbered, missing_by_number
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base

MAP = {f"model.layers.{k}.weight": f"model-{k // 5 + 1:05d}-of-00004.safetensors" for k in range(20)}


@pytest.mark.parametrize("shards", [sorted(set(MAP.values())), ["model-00001-of-00004.safetensors"], []])
@pytest.mark.parametrize("content", [{"weight_map": MAP}, {"metadata": {"total_size": 1}, "weight_map": MAP, "x": [1]}])
def test_the_map_is_the_same_whichever_shards_are_here(shards, content):
    assert module._decode(json.dumps(content).encode(), shards, {})["weight_map"] == MAP


@pytest.mark.parametrize("weight_map", [None, 1, [], {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_other_content_comes_as_it_is(weight_map):
    content = {"weight_map": weight_map}
    assert module._decode(json.dumps(content).encode(), ["a"], {}) == content


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


def sharded(folder):
    write_checkpoint(folder, base(layers=2), config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=3000)
    checkpoint = open_checkpoint(folder)
    return {header.file: header.entries for header in checkpoint.files}, dict(checkpoint.index)


SPELLINGS = {
    "compact": {"separators": (",", ":")},
    "usual": {},
    "indented": {"indent": 2},
    "sorted": {"indent": 2, "sort_keys": True},
}


@pytest.mark.parametrize("piece", [1, 100, 1 << 16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_index_that_says_the_same_needs_no_map(spelling, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", piece)
    tables, index = sharded(tmp_path / "m")
    options = SPELLINGS[spelling]
    for content in (
        {"weight_map": index},
        {"metadata": {"total_size": 1}, "weight_map": index, "z": {"weight_map": 1}},
    ):
        assert module.says_the_same(json.dumps(content, **options).encode(), tables)
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps({"weight_map": index}, **options))
    monkeypatch.setattr(module.Index, "agrees_with", None)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert dict(checkpoint.index) == index
    assert len(checkpoint.index) == len(index)
    assert list(checkpoint.index) == list(checkpoint.tensors)
    assert not checkpoint.problems


def test_what_is_not_this_map_is_not_taken_for_it(tmp_path):
    tables, index = sharded(tmp_path / "m")
    good = json.dumps({"weight_map": index})
    entries = good[len('{"weight_map": {') : -2]
    first = entries.partition(", ")[0]
    assert module.says_the_same(good.encode(), tables)
    assert module.says_the_same(f'{{"weight_map" :\n{{ {entries} }} }}'.encode(), tables)
    assert module.says_the_same(good.replace("model.layers", "model\\u002elayers", 1).encode(), tables)
    refused = {
        "an escape that means another name": good.replace("model.layers", "model\\tlayers", 1),
        "another map wins": good[:-1] + ', "weight_map": {}}',
        "a map further down": f'{{"metadata": {good}, "weight_map": {{}}}}',
        "only further down": f'{{"metadata": {good}}}',
        "a comma too many": f'{{"weight_map": {{{entries},}}}}',
        "two commas": good.replace(", ", ",, ", 1),
        "no comma": good.replace(", ", " ", 1),
        "no end": good[:-2],
        "more after the end": good + "}",
        "empty": '{"weight_map": {}}',
        "not JSON": good[1:],
    }
    for what, text in refused.items():
        assert not module.says_the_same(text.encode(), tables), what
    assert not module.says_the_same(b'{"weight_map": {}}', {})
    # Of a name that is written twice the last counts, as for every reader.
    wrong_first = first.replace(next(iter(index.values())), "model-00002-of-00099.safetensors")
    assert wrong_first != first
    assert not module.says_the_same(f'{{"weight_map": {{{wrong_first}, {entries}}}}}'.encode(), tables)
    empty = {**tables, "model-x.safetensors": type(next(iter(tables.values()))).empty()}
    assert not module.says_the_same(good.encode(), empty)


def test_whatever_happens_to_an_index_both_ways_find_the_same(tmp_path, monkeypatch):
    """The short way and the long one, on some hundred indices with one to three changes each."""
    tables, index = sharded(tmp_path / "m")
    path, rng, agreed = tmp_path / "m/model.safetensors.index.json", random.Random(4), 0
    quick = module.says_the_same
    monkeypatch.setattr(module, "_PIECE", 300)
    for _ in range(300):
        changed = dict(index)
        for _ in range(rng.randrange(3)):
            name, shard = rng.choice(list(changed)), rng.choice([*tables, "model-00099-of-00099.safetensors", "../x"])
            match rng.randrange(4):
                case 0:
                    del changed[name]
                case 1:
                    changed[name] = shard
                case 2:
                    changed[name + rng.choice(["x", "}", '"', "é", "\\"])] = shard
                case _:
                    changed = dict(rng.sample(list(changed.items()), len(changed)))
        text = json.dumps({"weight_map": changed}, indent=rng.choice([None, 2]), ensure_ascii=rng.random() < 0.5)
        if rng.random() < 0.2:
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice(list('",:{} \\x')) + text[at + rng.randrange(2) :]
        path.write_text(text, encoding="utf-8")
        agreed += quick(text.encode(), tables)
        found = []
        for way in (quick, lambda data, tables: False):
            monkeypatch.setattr(module, "says_the_same", way)
            checkpoint = open_checkpoint(tmp_path / "m")
            places = {name: (entry.file, entry.begin) for name, entry in checkpoint.tensors.items()}
            found.append((checkpoint.problems, checkpoint.unreadable, places, dict(checkpoint.index)))
            found[-1] += (checkpoint.bytes_read, checkpoint.side_bytes)
        assert found[0] == found[1], text
    assert 20 < agreed < 280


@pytest.mark.parametrize(
    ("spelling", "first"),
    [("model-{:05d}-of-00003", 1), ("model_{:05d}_of_00003", 1), ("model-{}-of-3", 1), ("shard{}of3", 1),
     ("consolidated.{}.of.3", 1), ("{}-of-3", 1), ("part-{}-OF-3", 1), ("model_{}_of_3", 0)],
)  # fmt: skip
def test_a_name_that_says_how_many_there_are_promises_the_others(spelling, first):
    every = [f"{spelling.format(k)}.safetensors" for k in range(first, first + 3)]
    assert all(map(is_numbered, every))
    assert missing_by_number(every) == []
    # Which of two ways of counting it is the first file says.
    for lost in range(0 if first else 1, 3):
        assert missing_by_number([name for name in every if name != every[lost]]) == [every[lost]]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model-00001.safetensors", "off-3.safetensors", "of-3.safetensors"]
)
def test_a_name_that_does_not_promises_none(name):
    assert not is_numbered(name)
    assert missing_by_number([name]) == []
