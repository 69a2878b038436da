"""A written file is the reference package's file, byte for byte where that package can write the type."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from nvfp4viz.checkpoint import Tensor, file_bytes, tensor, write_checkpoint
from nvfp4viz.checkpoint.dtypes import DTYPES, byte_count
from nvfp4viz.checkpoint.writer import atomic_folder, split_shards
from nvfp4viz.errors import CheckpointError

TORCH = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "C64": torch.complex64,
}


def mixed(seed: int) -> dict[str, Tensor]:
    """One or two tensors of each type that torch can hold, names in an order that sorting must change."""
    rng = np.random.default_rng(seed)
    out = {}
    for k, dtype in enumerate(TORCH):
        for shape in ((), (3, 5), (0, 4)):
            size = byte_count(dtype, shape)
            data = rng.integers(0, 2 if dtype == "BOOL" else 256, size, dtype=np.uint8).tobytes()
            out[f"layer.{rng.integers(0, 1000)}.é{k}.{len(shape)}.{shape and shape[0]}"] = Tensor(dtype, shape, data)
    return out


def as_torch(item: Tensor) -> torch.Tensor:
    data = bytearray(item.tobytes())
    if not data:
        return torch.zeros(item.shape, dtype=TORCH[item.dtype])
    return torch.frombuffer(data, dtype=TORCH[item.dtype]).reshape(item.shape)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"made by": 'a "quote" \\ and é'}])
def test_bytes_are_the_reference_packages(seed, metadata):
    tensors = mixed(seed)
    theirs = safetensors.torch.save({name: as_torch(item) for name, item in tensors.items()}, metadata)
    assert file_bytes(tensors, metadata) == theirs


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_reference_reads_every_type(dtype):
    """Also those that no binding can write: F4, F6 and the FNUZ kinds."""
    item = Tensor(dtype, (4, 8), bytes(byte_count(dtype, (4, 8))))
    [(name, read)] = safetensors.deserialize(file_bytes({"x": item}))
    assert (name, read["dtype"], read["shape"], bytes(read["data"])) == ("x", dtype, [4, 8], item.data)


def test_scalars_come_first_in_the_data():
    """The audit's one ranged read depends on it: F32 before BF16 before E4M3 before U8."""
    tensors = {
        "a.weight": tensor(np.zeros((16, 16), np.uint8)),
        "a.weight_scale": tensor(np.zeros((16, 2), np.uint8), "F8_E4M3"),
        "a.norm": tensor(np.zeros(16, ml_dtypes.bfloat16)),
        "a.weight_scale_2": tensor(np.float32(1e-4)),
    }
    header = json.loads(file_bytes(tensors)[8:].split(b"}}")[0] + b"}}")
    assert list(header) == ["a.weight_scale_2", "a.norm", "a.weight_scale", "a.weight"]


def test_equal_input_gives_equal_bytes_whatever_the_order():
    tensors = mixed(7)
    backwards = dict(reversed(tensors.items()))
    assert file_bytes(tensors, {"a": "1", "b": "2"}) == file_bytes(backwards, {"b": "2", "a": "1"})


def test_a_sharded_folder_loads_with_the_reference_package(tmp_path):
    tensors = {f"model.layers.{k}.weight": tensor(np.full((8, 8), k, np.float32)) for k in range(5)}
    files = write_checkpoint(
        tmp_path / "out",
        tensors,
        config={"num_hidden_layers": 5},
        hf_quant_config={"quantization": {"quant_algo": "NVFP4"}},
        max_shard_bytes=600,
        metadata={"format": "pt"},
        extra_files={"notes.txt": b"hello"},
    )
    assert [file.name for file in files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "hf_quant_config.json",
        "notes.txt",
    ]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 256
    for name, item in tensors.items():
        with safetensors.safe_open(tmp_path / "out" / index["weight_map"][name], "numpy") as shard:
            np.testing.assert_array_equal(shard.get_tensor(name), item.data)
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_a_small_checkpoint_is_one_file_without_index(tmp_path):
    write_checkpoint(tmp_path / "out", {"x": tensor(np.float32(1))})
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def test_shards_close_before_they_overflow():
    assert split_shards([("a", 6), ("b", 5), ("c", 4)], 10) == [["a"], ["b", "c"]]
    assert split_shards([("a", 60), ("b", 5)], 10) == [["a"], ["b"]]
    assert split_shards([], 10) == [[]]


def test_nothing_is_overwritten_unasked(tmp_path):
    write_checkpoint(tmp_path / "out", {"x": tensor(np.float32(1))})
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "out", {"x": tensor(np.float32(2))})
    assert caught.value.code == "checkpoint.exists"
    assert str(tmp_path) not in str(caught.value)
    write_checkpoint(tmp_path / "out", {"x": tensor(np.float32(3))}, overwrite=True)
    assert safetensors.numpy.load_file(tmp_path / "out/model.safetensors")["x"] == 3
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_interrupted_write_leaves_what_was_there(tmp_path, error, overwrite):
    if overwrite:
        write_checkpoint(tmp_path / "out", {"x": tensor(np.float32(1))})
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(error), atomic_folder(tmp_path / "out", overwrite=overwrite) as target:  # noqa: PT012
        (target / "model.safetensors").write_bytes(b"half")
        raise error
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("item", "code"),
    [
        (Tensor("F32", (2,), b"1234"), "checkpoint.size-mismatch"),
        (Tensor("F4", (3,), b"12"), "checkpoint.size-mismatch"),
        (Tensor("F128", (1,), b"1234"), "checkpoint.unwritable-dtype"),
    ],
)
def test_a_tensor_that_cannot_be_written_says_why(tmp_path, item, code):
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "out", {"x": item})
    assert caught.value.code == code
    assert not (tmp_path / "out").exists()


def test_an_array_without_a_safetensors_type_is_refused():
    with pytest.raises(CheckpointError, match="object"):
        tensor(np.array([None]))
