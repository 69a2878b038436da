"""A matrix of any checkpoint: the piece, its decoding in every layout, and what cannot be read."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.checkpoint import Tensor, canonical, memory_checkpoint, open_checkpoint
from nvfp4viz.errors import CheckpointError
from nvfp4viz.quant import QuantizedTensor, dequantize, quantize
from nvfp4viz.serving import matrix
from sample_checkpoints import ensure


def sample(name):
    opened = open_checkpoint(ensure(name))
    return opened, canonical(opened)


def with_tensors(**changed):
    """A checkpoint of one expert in memory; ``None`` leaves a tensor out."""
    weight = np.random.default_rng(5).standard_normal((32, 64)).astype(np.float32)
    found = quantize(weight, recipe="modelopt")
    tensors = {
        "weight": Tensor("U8", (32, 32), found.packed.tobytes()),
        "weight_scale": Tensor("F8_E4M3", (32, 4), found.scales.tobytes()),
        "weight_scale_2": Tensor("F32", (), found.global_scale.tobytes()),
        "input_scale": Tensor("F32", (), np.float32(0.01).tobytes()),
    } | changed
    named = {
        f"model.layers.0.mlp.experts.0.{projection}_proj.{role}": tensor
        for projection in ("gate", "up", "down")
        for role, tensor in tensors.items()
        if tensor is not None
    }
    config = {
        "num_hidden_layers": 1,
        "num_experts": 1,
        "quantization_config": {"quant_algo": "NVFP4", "group_size": 16},
    }
    opened = memory_checkpoint(named, config=config)
    return opened, canonical(opened), found


def floats(shape, values=None):
    array = np.zeros(shape, np.float32) if values is None else values
    opened = memory_checkpoint({"a.weight": Tensor("F32", shape, array.astype("<f4").tobytes())})
    return opened


def test_a_packed_weight_decodes_as_the_library_decodes_it():
    opened, view, found = with_tensors()
    read = matrix.read_expert(opened, view, 0, 0, "down")
    assert (read.stored, read.shape, read.is_whole) == ("NVFP4", (32, 64), True)
    assert read.values.tobytes() == dequantize(found).tobytes()


@pytest.mark.parametrize("name", ["tiny-moe-nvfp4-full", "tiny-moe-compressed-tensors", "tiny-moe-mxfp4"])
def test_every_layout_decodes_near_the_trained_weight(name):
    opened, view = sample(name)
    trained, whole = sample("tiny-moe-bf16")
    for expert in (0, 63):
        read = matrix.read_expert(opened, view, 2, expert, "down")
        true = matrix.read_expert(trained, whole, 2, expert, "down")
        assert read.shape == true.shape == (128, 64)
        error = read.values - true.values.astype(np.float32)
        # Four bits leave about a fiftieth of the power at least; a wrong scale or another expert leaves more than all.
        assert np.mean(error**2) < 0.02 * np.mean(true.values.astype(np.float32) ** 2)


def test_an_expert_of_a_stack_is_its_own_slice():
    opened, view = sample("tiny-moe-bf16")
    read = matrix.read_expert(opened, view, 3, 41, "gate_up")
    assert read.values.tobytes() == opened.read("model.layers.3.experts.gate_up_proj")[41].tobytes()
    assert read.values.dtype == ml_dtypes.bfloat16


def test_another_matrix_is_read_by_name():
    opened, _ = sample("tiny-moe-bf16")
    names = matrix.matrix_names(opened)
    assert "model.layers.0.self_attn.o_proj.weight" in names
    assert not [name for name in names if ".experts." in name]
    read = matrix.read_matrix(opened, "model.embed_tokens.weight")
    assert (read.shape, read.values.shape) == ((99, 128), (96, 128))
    assert read.values.tobytes() == opened.read("model.embed_tokens.weight")[:96].tobytes()


def test_of_a_large_matrix_no_more_is_read_than_the_piece():
    shape = (matrix.MOST_ROWS + 40, matrix.MOST_COLUMNS + 24)
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    opened = floats(shape, values)
    before = opened.bytes_read
    read = matrix.read_matrix(opened, "a.weight")
    assert opened.bytes_read - before == matrix.MOST_ROWS * shape[1] * 4
    assert read.values.tobytes() == values[: matrix.MOST_ROWS, : matrix.MOST_COLUMNS].tobytes()
    assert not read.is_whole


def test_a_piece_of_a_packed_weight_is_the_piece_of_the_whole(monkeypatch):
    opened, view, found = with_tensors()
    monkeypatch.setattr(matrix, "MOST_ROWS", 16)
    monkeypatch.setattr(matrix, "MOST_COLUMNS", 32)
    read = matrix.read_expert(opened, view, 0, 0, "up")
    assert read.values.tobytes() == np.ascontiguousarray(dequantize(found)[:16, :32]).tobytes()
    assert isinstance(found, QuantizedTensor)


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("matrix.no-scale", {"weight_scale": None}),
        ("matrix.no-scale", {"weight_scale_2": None}),
        ("matrix.not-finite", {"weight_scale_2": Tensor("F32", (), np.float32(np.nan).tobytes())}),
        ("matrix.not-finite", {"weight_scale": Tensor("F8_E4M3", (32, 4), b"\x7f" * 128)}),
        ("matrix.zero", {"weight": Tensor("U8", (32, 32), bytes(1024))}),
        ("matrix.layout", {"weight_scale": Tensor("F8_E4M3", (32, 2), b"\x38" * 64)}),
    ],
)
def test_what_cannot_be_decoded_is_said(code, changed):
    opened, view, _ = with_tensors(**changed)
    with pytest.raises(CheckpointError) as raised:
        matrix.read_expert(opened, view, 0, 0, "down")
    assert raised.value.code == code


def test_a_weight_that_there_is_not():
    opened, view = sample("tiny-moe-nvfp4-full")
    with pytest.raises(CheckpointError, match="Layer 0, expert 64") as raised:
        matrix.read_expert(opened, view, 0, 64, "down")
    assert raised.value.code == "matrix.absent"


@pytest.mark.parametrize(
    ("code", "opened"),
    [
        ("matrix.small", floats((8, 64))),
        ("matrix.zero", floats((16, 16))),
        ("matrix.layout", floats((256,))),
        ("matrix.not-finite", floats((16, 16), np.full((16, 16), np.inf))),
    ],
)
def test_other_matrices_that_cannot_be_compared(code, opened):
    with pytest.raises(CheckpointError) as raised:
        matrix.read_matrix(opened, "a.weight")
    assert raised.value.code == code


def test_a_name_that_there_is_not():
    with pytest.raises(CheckpointError) as raised:
        matrix.read_matrix(floats((16, 16)), "b.weight")
    assert raised.value.code == "checkpoint.no-tensor"
