"""A matrix of any checkpoint: the piece, its decoding in every layout, and what cannot be read."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.checkpoint import Tensor, canonical, memory_checkpoint, open_checkpoint
from nvfp4viz.errors import CheckpointError
from nvfp4viz.quant import dequantize, quantize
from nvfp4viz.quant.grouping import compare_tensor
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


def by_name(opened, name, how="window", top=0, left=0):
    found = matrix.find_matrix(opened, canonical(opened), name)
    return found, matrix.choose_part(found, how, top, left)


def test_a_packed_weight_decodes_as_the_library_decodes_it():
    opened, view, quantised = with_tensors()
    found = matrix.find_expert(opened, view, 0, 0, "down")
    part = matrix.choose_part(found)
    assert (found.stored, found.shape, part.is_whole) == ("NVFP4", (32, 64), True)
    assert matrix.read_part(found, part).tobytes() == dequantize(quantised).tobytes()


@pytest.mark.parametrize("name", ["tiny-moe-nvfp4-full", "tiny-moe-compressed-tensors", "tiny-moe-mxfp4"])
def test_every_layout_decodes_near_the_trained_weight(name):
    opened, view = sample(name)
    trained, whole = sample("tiny-moe-bf16")
    for expert in (0, 63):
        found, true = (
            matrix.find_expert(*one, 2, expert, "down").rectangle(0, 128, 0, 64).astype(np.float32)
            for one in ((opened, view), (trained, whole))
        )
        # Four bits leave about a fiftieth of the power at least; a wrong scale or another expert leaves more than all.
        assert np.mean((found - true) ** 2) < 0.02 * np.mean(true**2)


def test_an_expert_of_a_stack_is_its_own_slice():
    opened, view = sample("tiny-moe-bf16")
    found = matrix.find_expert(opened, view, 3, 41, "gate_up")
    values = matrix.read_part(found, matrix.choose_part(found))
    assert values.tobytes() == opened.read("model.layers.3.experts.gate_up_proj")[41].tobytes()
    assert values.dtype == ml_dtypes.bfloat16


def test_rows_beyond_the_last_group_are_left_out():
    opened, view = sample("tiny-moe-bf16")
    names = matrix.matrix_names(opened, view)
    assert "model.layers.0.self_attn.o_proj.weight" in names
    found, part = by_name(opened, "model.embed_tokens.weight")
    assert (found.shape, part.rows, part.columns, part.is_whole) == ((99, 128), 96, 128, False)
    assert matrix.read_part(found, part).tobytes() == opened.read("model.embed_tokens.weight")[:96].tobytes()


def large(monkeypatch, shape=(200, 96)):
    """A matrix that is larger than what is compared at once."""
    monkeypatch.setattr(matrix, "MOST", 64 * 64)
    monkeypatch.setattr(matrix, "MOST_COLUMNS", 64)
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return floats(shape, values), values


@pytest.mark.parametrize(
    ("top", "left", "rows", "columns"),
    [
        (0, 0, (0, 64), (0, 64)),
        (50, 20, (48, 112), (16, 80)),
        (10**6, 10**6, (128, 192), (32, 96)),
        (-5, -(10**6), (0, 64), (0, 64)),
    ],
)
def test_a_window_begins_where_it_is_asked_to(monkeypatch, top, left, rows, columns):
    opened, values = large(monkeypatch)
    found, part = by_name(opened, "a.weight", "window", top, left)
    assert (part.bands, (part.left, part.right), part.is_whole) == ((rows,), columns, False)
    before = opened.bytes_read
    read = matrix.read_part(found, part)
    assert opened.bytes_read - before == 64 * 96 * 4  # the window's rows and no other
    assert read.tobytes() == np.ascontiguousarray(values[slice(*rows), slice(*columns)]).tobytes()


def test_rows_are_spread_over_all_of_it(monkeypatch):
    opened, values = large(monkeypatch)
    found, part = by_name(opened, "a.weight", "spread")
    assert part.bands == ((0, 16), (64, 80), (112, 128), (176, 192))
    assert (part.left, part.right) == (0, 64)
    rows = np.concatenate([values[top:bottom, : part.right] for top, bottom in part.bands])
    assert matrix.read_part(found, part).tobytes() == rows.tobytes()


def test_the_whole_in_pieces_is_the_whole_at_once(monkeypatch):
    opened, values = large(monkeypatch)
    found, part = by_name(opened, "a.weight", "whole")
    assert (part.bands, part.columns) == (((0, 192),), 96)
    told = []
    pieces = matrix.compare_part(found, part, lambda done, total: told.append((done, total)))
    assert told == [(count, 12) for count in range(1, 13)]  # six pieces of 32 rows, twice
    for piece, whole in zip(pieces, compare_tensor(values[:192]), strict=True):
        assert (piece.along, piece.error.zeroed, piece.error.max_abs) == (
            whole.along,
            whole.error.zeroed,
            whole.error.max_abs,
        )
        # Sums of float64 in another order.
        assert piece.error.mse == pytest.approx(whole.error.mse, rel=1e-12)
        assert piece.error.sqnr_db == pytest.approx(whole.error.sqnr_db, rel=1e-12)


def test_a_bad_value_anywhere_in_the_whole_is_found(monkeypatch):
    _, values = large(monkeypatch)
    values[190, 95] = np.nan
    found, part = by_name(floats(values.shape, values), "a.weight", "whole")
    with pytest.raises(CheckpointError) as raised:
        matrix.compare_part(found, part)
    assert raised.value.code == "matrix.not-finite"


def test_a_part_of_a_packed_weight_is_the_part_of_the_whole(monkeypatch):
    opened, view, quantised = with_tensors()
    monkeypatch.setattr(matrix, "MOST", 16 * 32)
    monkeypatch.setattr(matrix, "MOST_COLUMNS", 32)
    found = matrix.find_expert(opened, view, 0, 0, "up")
    read = matrix.read_part(found, matrix.choose_part(found, "window", 16, 32))
    assert read.tobytes() == np.ascontiguousarray(dequantize(quantised)[16:32, 32:64]).tobytes()


def read_down(opened, view):
    found = matrix.find_expert(opened, view, 0, 0, "down")
    return matrix.read_part(found, matrix.choose_part(found))


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
        read_down(opened, view)
    assert raised.value.code == code


def test_a_weight_that_there_is_not():
    opened, view = sample("tiny-moe-nvfp4-full")
    with pytest.raises(CheckpointError, match="Layer 0, expert 64") as raised:
        matrix.find_expert(opened, view, 0, 64, "down")
    assert raised.value.code == "matrix.absent"


@pytest.mark.parametrize(
    ("code", "opened"),
    [
        ("matrix.small", floats((8, 64))),
        ("matrix.zero", floats((16, 16))),
        ("matrix.not-finite", floats((16, 16), np.full((16, 16), np.inf))),
    ],
)
def test_other_matrices_that_cannot_be_compared(code, opened):
    with pytest.raises(CheckpointError) as raised:
        matrix.compare_part(*by_name(opened, "a.weight"))
    assert raised.value.code == code
