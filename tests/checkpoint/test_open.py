"""Opening folders, files and indexes: what is read, what is reported, what stays inside the folder."""

import json
import os

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.checkpoint import (
    LocalSource,
    MemorySource,
    inspect,
    memory_checkpoint,
    open_checkpoint,
    read_quant_config,
    tensor,
    write_checkpoint,
)
from nvfp4viz.errors import CheckpointError
from tests.checkpoint.checkpoint_fixtures import CONFIG, CT_QUANT, FLAT, QUANT, base, ct_base

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path):
    """BASE in three shards with an index."""
    write_checkpoint(tmp_path / "base", base(), config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=1400)
    assert len(list((tmp_path / "base").glob("*.safetensors"))) == 3
    return tmp_path / "base"


def problems(checkpoint) -> list[tuple[str, str, str]]:
    return [(item.text, item.severity, item.file) for item in checkpoint.problems]


def test_a_healthy_folder_has_no_problem(sharded):
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.problems == []
    assert checkpoint.name == "base"
    assert set(checkpoint.tensors) == set(base())
    assert checkpoint.config == CONFIG
    assert checkpoint.hf_quant_config == QUANT
    assert checkpoint.quant_config.algo == "NVFP4"


def test_opening_reads_headers_and_nothing_else(sharded):
    checkpoint = open_checkpoint(sharded)
    headers = 0
    for path in sharded.glob("*.safetensors"):
        headers += 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert checkpoint.bytes_read == checkpoint.header_bytes == headers
    assert checkpoint.side_bytes == sum(path.stat().st_size for path in sharded.glob("*.json"))


def test_scalars_cost_their_own_bytes(sharded):
    """In writer order all F32 values of a shard lie together: one range each, no weight."""
    checkpoint = open_checkpoint(sharded)
    before = checkpoint.bytes_read
    names = [name for name, entry in checkpoint.tensors.items() if entry.dtype == "F32"]
    values = checkpoint.read_scalars(names)
    assert checkpoint.bytes_read - before == 4 * len(names)
    assert values == {name: item.data for name, item in base().items() if name in names}


def test_every_range_is_counted_as_it_was_fetched(sharded):
    """``bytes_read`` is what the source was really asked for, gaps included."""

    class Counting(LocalSource):
        fetched = 0

        def read_ranges(self, file, ranges):
            data = super().read_ranges(file, ranges)
            if file.endswith(".safetensors"):
                Counting.fetched += sum(map(len, data))
            return data

    checkpoint = open_checkpoint(Counting(sharded))
    checkpoint.read_scalars([name for name in checkpoint.tensors if name.endswith("input_scale")])
    checkpoint.read("model.layers.0.mlp.experts.0.gate_proj.weight")
    assert checkpoint.bytes_read == Counting.fetched


def test_scalars_far_apart_are_read_apart(tmp_path):
    """An interleaved writer puts weights between the scalars; those are not fetched."""
    header, body, at = {}, b"", 0
    for number in range(4):
        for name, size in ((f"w{number}", 10_000), (f"s{number}", 4)):
            dtype, shape = ("U8", [size]) if name[0] == "w" else ("F32", [])
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            body += bytes(size) if dtype == "U8" else np.float32(number).tobytes()
            at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    checkpoint = open_checkpoint(tmp_path / "x.safetensors")
    before = checkpoint.bytes_read
    assert checkpoint.read_scalars([f"s{k}" for k in range(4)]) == {f"s{k}": k for k in range(4)}
    assert checkpoint.bytes_read - before == 16


def test_tensors_come_in_their_own_type_and_read_only(sharded):
    checkpoint = open_checkpoint(sharded)
    at = "model.layers.0.mlp.experts.0.gate_proj"
    assert checkpoint.read(f"{at}.weight").dtype == np.uint8
    assert checkpoint.read(f"{at}.weight_scale").dtype == np.uint8
    assert checkpoint.read("model.layers.0.mlp.gate.weight").dtype == ml_dtypes.bfloat16
    assert checkpoint.read_scalar(f"{at}.input_scale") == np.float32(2e-3)
    for name, item in base().items():
        array = checkpoint.read(name)
        assert array.tobytes() == item.tobytes()
        assert array.shape == item.shape
        assert not array.flags.writeable
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read_scalar(f"{at}.weight")
    assert caught.value.code == "checkpoint.not-a-scalar"
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read("no.such.tensor")
    assert caught.value.code == "checkpoint.no-tensor"


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scalar_may_have_any_shape_of_one_element(tmp_path, shape):
    write_checkpoint(tmp_path / "out", base(scalar_shape=shape))
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.read_scalar("model.layers.0.mlp.experts.0.down_proj.input_scale") == np.float32(5e-3)


@pytest.mark.parametrize("height", range(4))
def test_snapshots_of_the_hubs_cache_are_named(tmp_path, height):
    """At any height above them, with the links and the nameless blobs of a real cache."""
    for model in range(2):
        cached = tmp_path / "huggingface" / "hub" / f"models--o--m{model}"
        write_checkpoint(tmp_path / f"x{model}", base(), config=CONFIG)
        (cached / "refs").mkdir(parents=True)
        (cached / "blobs").mkdir()
        (cached / "snapshots" / "abc").mkdir(parents=True)
        for k, path in enumerate(sorted((tmp_path / f"x{model}").iterdir())):
            path.rename(cached / "blobs" / f"{k:064x}")
            (cached / "snapshots" / "abc" / path.name).symlink_to(f"../../blobs/{k:064x}")
        # More than are looked at.
        for k in range(600):
            (cached / "blobs" / f"{k + 9:064x}").touch()
    steps = ["hub", "models--o--m1", "snapshots", "abc"]
    with pytest.raises(CheckpointError) as caught:
        inspect(tmp_path.joinpath("huggingface", *steps[:height]))
    assert caught.value.code == "source.in-subfolder"
    below = "/".join(steps[height:])
    both = f"{below.replace('m1', 'm0')}, {below}" if height < 2 else below
    assert caught.value.params["folders"] == both


@pytest.mark.parametrize("half", [ml_dtypes.bfloat16, np.float16])
def test_a_scalar_in_half_precision_keeps_every_bit_of_its_value(half):
    """Every seventh alone and all in a vector, beside numbers in F32; the first and the last of a file too."""
    every = np.arange(1 << 16, dtype=np.uint16).view(half)
    names = [f"s{k}" for k in range(0, 1 << 16, 7)]
    tensors = {name: tensor(every[7 * k]) for k, name in enumerate(names)}
    numbers = {f"t{k}": tensor(np.float32(k) / 3) for k in range(5)}
    checkpoint = memory_checkpoint({**numbers, **tensors, "v": tensor(every)})
    got = checkpoint.scalars([*names, *numbers])
    with np.errstate(invalid="ignore"):
        wanted = np.concatenate([every[::7].astype(np.float32), np.arange(5, dtype=np.float32) / np.float32(3)])
        assert got.tobytes() == wanted.tobytes()
        [vector, two] = checkpoint.vectors(["v", "t1"])
        assert vector.tobytes() == every.astype(np.float32).tobytes()
    assert two.tolist() == [float(np.float32(1) / 3)]


def test_an_index_or_a_file_can_be_opened_by_itself(sharded):
    assert set(open_checkpoint(sharded / INDEX).tensors) == set(base())
    one = open_checkpoint(str(sharded / "model-00002-of-00003.safetensors"))
    assert 0 < len(one.tensors) < len(base())
    assert one.name == "model-00002-of-00003.safetensors"
    assert one.config == CONFIG
    assert one.problems == []


@pytest.mark.parametrize("name", ["dir.index.json", "x.safetensors.index.json"])
def test_the_index_that_was_asked_for_is_the_one_that_is_read(sharded, name):
    """Whatever its name, and beside another one: its shards make the checkpoint, and it is the one reported about."""
    kept = json.loads((sharded / INDEX).read_text())
    one = "model-00002-of-00003.safetensors"
    kept["weight_map"] = {tensor: shard for tensor, shard in kept["weight_map"].items() if shard == one}
    (sharded / name).write_text(json.dumps(kept))
    checkpoint = open_checkpoint(sharded / name)
    assert set(checkpoint.tensors) == set(kept["weight_map"])
    assert checkpoint.index_file == name
    assert checkpoint.problems == []
    (sharded / name).write_text("{")
    problems = inspect(sharded / name).problems
    assert [(item.code, item.file) for item in problems] == [("container.index-invalid", name)]


def test_a_checkpoint_in_memory_reads_like_one_on_disk(sharded):
    files = {path.name: path.read_bytes() for path in sharded.iterdir()}
    uploaded, local = open_checkpoint(MemorySource(files)), open_checkpoint(sharded)
    assert uploaded.tensors == local.tensors
    assert uploaded.bytes_read == local.bytes_read


# What the files and the index say of each other.


def test_a_missing_shard_is_one_problem_and_its_tensors_are_known(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    checkpoint = open_checkpoint(sharded)
    [problem] = checkpoint.problems
    assert (problem.code, problem.file) == ("container.missing-shard", "model-00002-of-00003.safetensors")
    assert set(problem.tensors) | set(checkpoint.tensors) == set(base())
    assert set(checkpoint.unreadable) == set(problem.tensors)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(problem.tensors[0])
    assert caught.value.code == "checkpoint.unreadable"


def test_a_missing_shard_shows_without_an_index(sharded):
    (sharded / "model-00003-of-00003.safetensors").unlink()
    (sharded / INDEX).unlink()
    checkpoint = open_checkpoint(sharded)
    assert problems(checkpoint) == [("container.missing-shard.by-number", "error", "model-00003-of-00003.safetensors")]
    assert checkpoint.blind_files == ("model-00003-of-00003.safetensors",)


def test_a_stale_index_is_told_from_missing_shards(sharded):
    """All tensors are there; only the names in the index belong to another split."""
    for path in sorted(sharded.glob("*.safetensors")):
        path.rename(path.with_name("part-" + path.name[6:11] + ".safetensors"))
    checkpoint = open_checkpoint(sharded)
    assert [item.code for item in checkpoint.problems] == ["container.stale-index"]
    assert set(checkpoint.tensors) == set(base())


def test_an_index_of_four_shards_over_two_complete_ones(tmp_path):
    write_checkpoint(tmp_path / "two", base(), max_shard_bytes=2300)
    write_checkpoint(tmp_path / "four", base(), max_shard_bytes=1250)
    assert len(list((tmp_path / "four").glob("*.safetensors"))) == 4
    (tmp_path / "two" / INDEX).write_bytes((tmp_path / "four" / INDEX).read_bytes())
    checkpoint = open_checkpoint(tmp_path / "two")
    assert [item.code for item in checkpoint.problems] == ["container.stale-index"]
    assert set(checkpoint.tensors) == set(base())


def test_index_and_headers_that_disagree(sharded):
    index = json.loads((sharded / INDEX).read_text())
    some = list(index["weight_map"])
    index["weight_map"][some[0]] = "model-00003-of-00003.safetensors"  # it is in the first
    index["weight_map"]["model.nowhere"] = "model-00001-of-00003.safetensors"
    del index["weight_map"][some[5]]
    (sharded / INDEX).write_text(json.dumps(index))
    checkpoint = open_checkpoint(sharded)
    assert problems(checkpoint) == [
        ("container.index-mismatch.absent", "error", "model-00001-of-00003.safetensors"),
        ("container.index-mismatch.absent", "warn", "model-00003-of-00003.safetensors"),
        ("container.index-mismatch.unlisted", "warn", "model-00001-of-00003.safetensors"),
    ]
    assert checkpoint.unreadable == {"model.nowhere": "model-00001-of-00003.safetensors"}


def test_a_tensor_in_two_shards_is_reported_and_the_index_decides(sharded):
    name = "model.layers.0.mlp.experts.0.gate_proj.input_scale"
    write_checkpoint(sharded.parent / "more", {name: tensor(np.float32(7)), "z": tensor(np.float32(1))})
    index = json.loads((sharded / INDEX).read_text())
    os.rename(sharded.parent / "more/model.safetensors", sharded / "zzz.safetensors")
    index["weight_map"]["z"] = "zzz.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    checkpoint = open_checkpoint(sharded)
    assert [item.text for item in checkpoint.problems] == ["container.duplicate-tensor"]
    assert checkpoint.read_scalar(name) == np.float32(2e-3)


@pytest.mark.parametrize(("copy", "severity"), [(True, "info"), (False, "warn")])
def test_a_shard_outside_the_index_is_not_mixed_in(sharded, copy, severity):
    name = "model.layers.0.mlp.experts.0.gate_proj.input_scale" if copy else "consolidated.w1"
    write_checkpoint(sharded.parent / "more", {name: tensor(np.float32(7))})
    os.rename(sharded.parent / "more/model.safetensors", sharded / "consolidated.safetensors")
    checkpoint = open_checkpoint(sharded)
    assert problems(checkpoint) == [("container.unindexed-shard", severity, "consolidated.safetensors")]
    assert set(checkpoint.tensors) == set(base())


@pytest.mark.parametrize("single", [False, True])
def test_an_index_that_names_nothing(sharded, single):
    """Every loader that follows it loads nothing; of a single file Transformers asks no index."""
    if single:
        for file in sharded.glob("*"):
            file.unlink()
        write_checkpoint(sharded / "one", base(), config=CONFIG, hf_quant_config=QUANT)
        sharded = sharded / "one"
    (sharded / INDEX).write_text('{"weight_map": {}}')
    checkpoint = open_checkpoint(sharded)
    assert problems(checkpoint) == [("container.index-mismatch.empty", "warn" if single else "error", INDEX)]
    assert set(checkpoint.tensors) == set(base())
    for language in ("en", "zh"):
        assert str(len(base())) in checkpoint.problems[0].error().text(language)["what"]


def test_a_damaged_shard_among_good_ones(sharded):
    (sharded / "model-00002-of-00003.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    checkpoint = open_checkpoint(sharded)
    assert problems(checkpoint) == [
        ("container.not-safetensors.lfs-pointer", "error", "model-00002-of-00003.safetensors")
    ]
    assert len(checkpoint.unreadable) + len(checkpoint.tensors) == len(base())


def test_only_an_index_tells_of_every_missing_shard(sharded):
    for path in sharded.glob("*.safetensors"):
        path.unlink()
    assert {item.code for item in inspect(sharded).problems} == {"container.missing-shard"}
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(sharded)
    assert caught.value.code == "container.missing-shard"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "container.not-safetensors.empty"),
        (b"\x80\x02}q\0X\x04\0\0\0name", "container.not-safetensors.pickle"),
        (b"<html>503</html>", "container.not-safetensors.html"),
        ((200_000_000).to_bytes(8, "little") + b"{}", "container.header-too-large"),
        ((50).to_bytes(8, "little") + b"{}", "container.truncated.header"),
    ],
)
def test_a_file_of_which_nothing_can_be_read_raises_its_own_error(tmp_path, content, text):
    (tmp_path / "model.safetensors").write_bytes(content)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(source)
        assert caught.value.code == text
        assert str(tmp_path) not in str(caught.value)
    assert inspect(tmp_path).problems[0].text == text


def test_a_folder_without_safetensors_names_what_it_found(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == "source.no-safetensors"
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == "source.no-weights"


@pytest.mark.parametrize("name", ["nothing", "nothing\0here", "x/../../nothing", "n" * 5000])
def test_what_is_not_there(tmp_path, name):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{tmp_path}/{name}")
    assert caught.value.code == "source.not-found"
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("address", ["s3://bucket/x", "gs://bucket/x", "ftp://host/x", "file:///etc/x"])
def test_addresses_of_other_kinds_are_named(address):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(address)
    assert caught.value.code == "source.remote"


@pytest.mark.parametrize("file", ["model-00002-of-00003.safetensors", "config.json", INDEX])
def test_a_file_that_the_system_refuses(sharded, monkeypatch, file):
    """No permission to read: one problem, without the path that the system's message names."""
    real = os.open

    def refuse(path, *rest, **more):
        if os.path.basename(path) == file:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    checkpoint = open_checkpoint(sharded)
    assert [(item.file, item.severity) for item in checkpoint.problems] == [(file, "error")]
    words = str(checkpoint.problems[0].error())
    assert "Permission denied" in words
    assert str(sharded.parent) not in words


def test_a_folder_that_the_system_refuses(sharded, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(sharded), "iterdir", refuse)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(sharded)
    assert caught.value.code == "source.unreadable"
    assert str(sharded.parent) not in str(caught.value)


# Nothing outside the folder.


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/hostname", "a/../../secret", "C:\\secret", "..\\secret", "", ".", "x\0y"]
)
def test_an_index_cannot_name_files_outside_the_folder(sharded, shard):
    write_checkpoint(sharded.parent / "other", {"secret": tensor(np.float32(42))})
    os.rename(sharded.parent / "other/model.safetensors", sharded.parent / "secret.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["secret"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    checkpoint = open_checkpoint(sharded)
    assert [item.text for item in checkpoint.problems] == ["container.index-invalid.outside-folder"]
    # A tensor that is in a shard all the same is in the index: its place is wrong, and that is said.
    stored = next(iter(checkpoint.tensors))
    index["weight_map"][stored] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    again = open_checkpoint(sharded)
    assert [item.text for item in again.problems] == ["container.index-invalid.outside-folder"]
    assert again.problems[0].params["count"] == 1
    assert stored in again.tensors
    del index["weight_map"][stored]
    (sharded / INDEX).write_text(json.dumps(index))
    assert "container.index-mismatch.unlisted" in [item.text for item in open_checkpoint(sharded).problems]
    assert "secret" not in checkpoint.tensors
    assert str(sharded.parent) not in str(checkpoint.problems[0].error())


def test_a_link_out_of_the_folder_is_followed_for_its_user_only(sharded):
    write_checkpoint(sharded.parent / "other", {"secret": tensor(np.float32(42))})
    (sharded / "linked.safetensors").symlink_to(sharded.parent / "other/model.safetensors")
    [linked] = [header for header in open_checkpoint(sharded).files if header.file == "linked.safetensors"]
    assert list(linked.entries) == ["secret"]
    # A folder that somebody else chose: the Explorer's roots.
    checkpoint = open_checkpoint(LocalSource(sharded, links="inside"))
    assert "secret" not in checkpoint.tensors
    texts = {item.text: str(item.error()) for item in checkpoint.problems}
    assert "source.outside-folder" in texts
    assert str(sharded.parent) not in "".join(texts.values())


def test_a_farm_of_links_is_the_checkpoint(sharded, tmp_path):
    """git-annex, DVC: every file is a link to where its content is kept under another name."""
    farm, store = tmp_path / "farm", tmp_path / "store" / "objects"
    farm.mkdir()
    store.mkdir(parents=True)
    for k, path in enumerate(sorted(sharded.iterdir())):
        os.rename(path, store / f"{k:08x}")
        path.symlink_to(store / f"{k:08x}")
        (farm / path.name).symlink_to(f"../{path.relative_to(tmp_path)}")
    for place in (sharded, farm, farm / INDEX):
        checkpoint = open_checkpoint(place)
        assert checkpoint.problems == []
        assert len(checkpoint.tensors) == len(checkpoint.index)
    # A link that leads nowhere is an absent file, and says no path.
    (farm / "config.json").unlink(missing_ok=True)
    (farm / "more.safetensors").symlink_to(tmp_path / "gone")
    problems = open_checkpoint(farm).problems
    assert [item.text for item in problems if "more" in item.file]
    assert str(tmp_path) not in str([str(item.error()) for item in problems])


def test_the_hub_cache_with_its_links_opens(tmp_path):
    write_checkpoint(tmp_path / "plain", base())
    repo = tmp_path / "models--owner--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "snapshots/abc").mkdir(parents=True)
    os.rename(tmp_path / "plain/model.safetensors", repo / "blobs/0123")
    (repo / "snapshots/abc/model.safetensors").symlink_to("../../blobs/0123")
    assert len(open_checkpoint(repo / "snapshots/abc").tensors) == len(base())


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == "source.not-a-file"
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "model.safetensors")
    assert caught.value.code == "source.not-a-file"


# Side files.


@pytest.mark.parametrize(
    ("content", "reason", "severity", "usable"),
    [
        (b"\xef\xbb\xbf" + json.dumps(CONFIG).encode(), "bom", "warn", True),
        (b'{"num_experts": 4,}', "not-json", "error", False),
        (b'{"num_experts": ', "not-json", "error", False),
        (b"", "not-json", "error", False),
        (b"\xff\xfe{}", "not-json", "error", False),
        (b"[1]", "not-an-object", "error", False),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "lfs-pointer", "error", False),
        (b"<?xml version='1.0'?><Error/>", "html", "error", False),
        (b"Access denied to this model", "not-json", "error", False),
        (b"[" * 100_000, "not-json", "error", False),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", INDEX])
def test_side_files_say_what_they_are(sharded, file, content, reason, severity, usable):
    (sharded / file).write_bytes(content)
    checkpoint = open_checkpoint(sharded)
    code = "container.index-invalid" if file == INDEX else "config.invalid"
    assert (f"{code}.{reason}", severity, file) in problems(checkpoint)
    if file == "config.json":
        assert (checkpoint.config is not None) == usable


def test_a_side_file_above_the_limit_is_not_read(sharded):
    with (sharded / "config.json").open("wb") as stream:
        stream.truncate(64 * 1024 * 1024 + 1)
    checkpoint = open_checkpoint(sharded)
    assert problems(checkpoint) == [("config.invalid.too-large", "error", "config.json")]
    assert checkpoint.side_bytes < 100_000


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, "x"])
def test_an_index_without_a_usable_map(sharded, weight_map):
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(sharded)
    assert problems(checkpoint)[0][0] == "container.index-invalid.weight-map"
    assert set(checkpoint.tensors) == set(base())


# What the configuration says.


def test_both_places_of_the_quantisation_config_are_kept():
    both = read_quant_config({"quantization_config": FLAT}, QUANT)
    assert both.files == ("config.json", "hf_quant_config.json")
    assert [section.layout for section in both.sections] == ["flat", "nested"]
    assert both.algo == "NVFP4"
    assert both.group_size == 16
    assert read_quant_config({"text_config": {"quantization_config": FLAT}}, None).algo == "NVFP4"
    assert read_quant_config({}, None).used is None
    assert read_quant_config(CONFIG, {"quantization": {"quant_algo": "nvfp4"}}).used.missing == (
        "kv_cache_quant_algo",
        "group_size",
        "exclude_modules",
    )


def test_compressed_tensors_derives_its_algorithm_from_the_groups():
    assert read_quant_config({"quantization_config": CT_QUANT}, None).algo == "NVFP4"
    group = {**CT_QUANT["config_groups"]["group_0"], "input_activations": None}
    weight_only = {**CT_QUANT, "config_groups": {"group_0": group}}
    assert read_quant_config({"quantization_config": weight_only}, None).algo == "W4A16_NVFP4"


@pytest.mark.parametrize(
    ("pattern", "module", "excluded"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head*", "lm_head", True),
        ("*mlp.gate", "model.layers.0.mlp.gate", True),
        ("*mlp.gate.*", "model.layers.0.mlp.experts.0.gate_proj", False),
        ("*mlp.gate", "model.layers.0.mlp.experts.0.gate_proj", False),
        ("model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.1*", "model.layers.0.self_attn.q_proj", False),
        ("re:.*mlp.gate$", "model.layers.3.mlp.gate", True),
        ("re:[", "model.layers.3.mlp.gate", False),
        # vLLM looks again without `language_model.`
        ("model.layers.0.mlp.experts", "model.language_model.layers.0.mlp.experts.1.up_proj", True),
    ],
)
def test_exclusion_patterns(pattern, module, excluded):
    quant = read_quant_config(None, {"quantization": {"quant_algo": "NVFP4", "exclude_modules": [pattern]}})
    assert quant.is_excluded(module) is excluded


def test_a_mixed_file_is_an_allow_list():
    layers = {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    quant = read_quant_config(None, {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}})
    assert quant.algo_of("model.layers.0.mlp.experts.1.up_proj") == "NVFP4"
    assert not quant.is_excluded("model.layers.0.mlp.experts.1.up_proj")
    assert quant.is_excluded("model.layers.0.linear_attn.in_proj_a")


def test_wild_values_in_a_configuration_are_ignored():
    wild = {"quant_algo": 7, "group_size": "many", "ignore": "all", "config_groups": [1], "quantized_layers": []}
    quant = read_quant_config({"quantization_config": wild, "text_config": []}, {"quantization": []})
    assert quant.algo is None
    assert quant.group_size is None
    assert not quant.is_excluded("x")
    assert open_checkpoint(MemorySource({"a.safetensors": b"\x02" + b"\0" * 7 + b"{}"})).tensors == {}
    assert len(ct_base()) == len(base())
