"""Numbers of a matrix from every layout that the project reads, against a decoding of our own; and what is refused."""

import json

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.checkpoint import Tensor, canonical, memory_checkpoint, open_checkpoint, tensor, write_checkpoint
from nvfp4viz.errors import CheckpointError
from nvfp4viz.serving.stored import find_expert, find_matrix, matrix_names
from sample_checkpoints import ensure
from tests.audit.layouts import EXPERTS, HIDDEN, LAYOUTS, SIZES, ct_linear, fp8, linear, typed

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def everything(found):
    return found.rectangle(0, found.shape[0], 0, found.shape[1])


def codes(data, shape):
    packed = np.frombuffer(data, np.uint8).reshape(*shape, -1)
    return E2M1[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(*shape, -1)


def by_hand(layout, tensors, expert, kind):
    """Code × block scale × the scale above, in float64."""
    n, k = SIZES[kind]

    def own(role, width):
        item = tensors[layout.name(expert, kind, role)].tobytes()
        each = n * width
        return item if layout.arrangement == "expert" else item[expert * each : (expert + 1) * each]

    values = codes(own("weight", k // 2), (n,)).astype(np.float64)
    bytes_ = np.frombuffer(own("weight_scale", k // layout.group), np.uint8).reshape(n, -1)
    if layout.block == "MXFP4":
        blocks = 2.0 ** (bytes_.astype(np.float64) - 127)
        above = 1.0
    else:
        blocks = bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        stored = float(layout.get(tensors, expert, kind, "weight_scale_2"))
        above = 1 / stored if layout.divisors else stored
    return values * np.repeat(blocks, layout.group, axis=1) * above


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.id)
def test_an_expert_of_every_layout_decodes(layout):
    tensors, opened = layout.tensors(), layout.open()
    view = canonical(opened)
    for kind in layout.kinds:
        for expert in (0, EXPERTS - 1):
            found = find_expert(opened, view, 0, expert, kind)
            assert (found.shape, found.stored) == (SIZES[kind], layout.block)
            true = by_hand(layout, tensors, expert, kind)
            # Products of three rounded twice in float32.
            np.testing.assert_allclose(everything(found), true, rtol=3e-7, atol=0)
            named = find_matrix(opened, view, layout.name(expert, kind, "weight"), expert)
            assert everything(named).tobytes() == everything(found).tobytes()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.id)
def test_a_rectangle_is_that_part_of_the_whole(layout):
    opened = layout.open()
    for kind in layout.kinds:
        found = find_expert(opened, canonical(opened), 0, 3, kind)
        whole = everything(found)
        right = whole.shape[1]
        part = found.rectangle(16, 32, right - 32, right)
        assert part.tobytes() == np.ascontiguousarray(whole[16:32, right - 32 :]).tobytes()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.id)
def test_everything_that_is_listed_can_be_read(layout):
    opened = layout.open()
    view = canonical(opened)
    for name in matrix_names(opened, view):
        assert everything(find_matrix(opened, view, name)).size


def test_the_shared_expert_of_modelopt_is_read_by_name():
    opened = LAYOUTS["modelopt, shared expert"].open()
    names = matrix_names(opened, canonical(opened))
    assert "model.layers.0.mlp.shared_experts.gate_proj.weight" in names
    assert not [name for name in names if ".experts." in name or "scale" in name]


@pytest.mark.parametrize(("make", "suffix"), [(linear, "weight"), (ct_linear, "weight_packed")])
def test_an_attention_matrix_in_nvfp4_decodes(make, suffix):
    name = "model.layers.0.self_attn.q_proj"
    tensors = make(name, 48) if make is linear else make(name)
    opened = memory_checkpoint(tensors)
    found = find_matrix(opened, canonical(opened), f"{name}.{suffix}")
    rows = 48 if make is linear else HIDDEN
    assert (found.shape, found.stored) == ((rows, HIDDEN), "NVFP4")
    blocks = np.frombuffer(tensors[f"{name}.weight_scale"].tobytes(), ml_dtypes.float8_e4m3fn).reshape(rows, -1)
    true = codes(tensors[f"{name}.{suffix}"].tobytes(), (rows,)) * np.repeat(blocks.astype(np.float64), 16, axis=1)
    np.testing.assert_allclose(everything(found), true * np.float64(np.float32(1e-4)), rtol=3e-7)


@pytest.mark.parametrize(
    ("dtype", "scale", "suffix"), [("I8", "F8_E8M0", "scale"), ("U8", "U8", "weight_scale")], ids=["deepseek", "quark"]
)
def test_a_dense_matrix_in_mxfp4_decodes(dtype, scale, suffix):
    rng = np.random.default_rng(2)
    packed, bytes_ = rng.integers(0, 256, (32, 32), np.uint8), rng.integers(116, 124, (32, 2), np.uint8)
    opened = memory_checkpoint({"a.weight": typed(packed, dtype), f"a.{suffix}": typed(bytes_, scale)})
    found = find_matrix(opened, canonical(opened), "a.weight")
    assert found.stored == "MXFP4"
    true = codes(packed.tobytes(), (32,)) * np.repeat(2.0 ** (bytes_.astype(np.float64) - 127), 32, axis=1)
    assert np.array_equal(everything(found), true)  # powers of two round nothing


def test_float64_is_rounded_to_float32():
    values = np.random.default_rng(3).standard_normal((32, 48))
    values[0, :2] = 1 + 2.0**-24, 1e300  # a tie, which goes to even, and what float32 has no number for
    opened = memory_checkpoint({"a.weight": tensor(values)})
    found = find_matrix(opened, canonical(opened), "a.weight")
    assert found.stored == "F64"
    assert "a.weight" in matrix_names(opened, canonical(opened))
    with np.errstate(over="ignore"):
        assert everything(found).tobytes() == values.astype(np.float32).tobytes()
    assert everything(found)[0, :2].tolist() == [1, np.inf]


N, K = 200, 320
TILES = {
    "tensor": ((), (N, K), "F32", "weight_scale"),
    "one number in a vector": ((1,), (N, K), "F32", "weight_scale"),
    "row": ((N, 1), (1, K), "F32", "weight_scale"),
    "row, flat": ((N,), (1, K), "BF16", "weight_scale"),
    "128 × 128": ((2, 3), (128, 128), "F32", "weight_scale_inv"),
    "128 × 128, UE8M0": ((2, 3), (128, 128), "F8_E8M0", "scale"),
    "1 × 128": ((N, 3), (1, 128), "F32", "weight_scale"),
    "MXFP8": ((N, 10), (1, 32), "U8", "weight_scale"),
    "of the configuration": ((4, 5), (64, 64), "F32", "weight_scale_inv"),
}


@pytest.mark.parametrize("codes_of", ["F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("case", TILES)
def test_fp8_is_multiplied_by_its_own_scale(case, codes_of):
    shape, (tall, wide), dtype, suffix = TILES[case]
    rng = np.random.default_rng(7)
    kind = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}[codes_of]
    values = rng.standard_normal((N, K)).astype(kind)
    if dtype in ("F8_E8M0", "U8"):
        bytes_ = rng.integers(110, 130, shape, np.uint8)
        scale, item = 2.0 ** (bytes_.astype(np.float64) - 127), typed(bytes_, dtype)
    else:
        number = rng.uniform(0.001, 0.1, shape).astype(np.float32 if dtype == "F32" else ml_dtypes.bfloat16)
        scale, item = number.astype(np.float64), tensor(np.asarray(number))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}
    opened = memory_checkpoint(
        {"a.weight": typed(values, codes_of), f"a.{suffix}": item},
        config=config if case == "of the configuration" else None,
    )
    found = find_matrix(opened, canonical(opened), "a.weight")
    grid = np.repeat(np.repeat(scale.reshape((*shape, 1, 1)[:2]), tall, axis=0)[:N], wide, axis=1)[:, :K]
    true = (values.astype(np.float64) * grid).astype(np.float32)  # 4 + 24 bits are exact in float64: rounded once
    assert everything(found).tobytes() == true.tobytes()
    part = found.rectangle(112, 144, 96, 224)
    assert part.tobytes() == np.ascontiguousarray(true[112:144, 96:224]).tobytes()


def test_fp8_of_a_stack_takes_its_own_scale():
    values = np.random.default_rng(1).standard_normal((3, 32, 64)).astype(ml_dtypes.float8_e4m3fn)
    scales = np.float32([0.5, 2, 8])
    opened = memory_checkpoint({"a.weight": typed(values, "F8_E4M3"), "a.weight_scale": tensor(scales)})
    found = find_matrix(opened, canonical(opened), "a.weight", 2)
    assert everything(found).tobytes() == (values[2].astype(np.float32) * np.float32(8)).tobytes()


def test_fp8_without_a_scale_stands_for_itself():
    values = np.random.default_rng(1).standard_normal((32, 64)).astype(ml_dtypes.float8_e4m3fn)
    opened = memory_checkpoint({"a.weight": typed(values, "F8_E4M3")})
    found = find_matrix(opened, canonical(opened), "a.weight")
    assert (everything(found).tobytes(), found.stored) == (values.astype(np.float32).tobytes(), "F8_E4M3")


def turned(second):
    """Llama 4: ``(E, in, out)``, two values of the input axis in a byte; ``second`` is the scale above the blocks."""
    rng, experts, n, k = np.random.default_rng(4), 4, 48, 64
    packed = rng.integers(0, 256, (experts, k // 2, n), np.uint8)
    blocks = rng.integers(0x30, 0x78, (experts, k // 16, n), np.uint8)
    at = "model.layers.0.feed_forward.experts.down_proj"
    tensors = {
        at: typed(packed, "U8"),
        f"{at}_weight_scale": typed(blocks, "F8_E4M3"),
        f"{at}_weight_scale_2": tensor(np.float32(second)),
        f"{at}_input_scale": tensor(np.float32(1)),
    }
    opened = memory_checkpoint(tensors, config={"num_hidden_layers": 1, "num_experts": experts})
    return find_matrix(opened, canonical(opened), at, 3), packed, blocks, n, k


@pytest.mark.parametrize("second", [0.25, [1, 2, 4, 0.25]])
def test_a_fused_weight_that_is_stored_turned_is_turned_back(second):
    found, packed, blocks, n, k = turned(second)
    assert found.shape == (n, k)
    scale = np.repeat(blocks[3].T.copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=1)
    true = codes(np.ascontiguousarray(packed[3].T).tobytes(), (n,)) * scale * 0.25
    np.testing.assert_allclose(everything(found), true, rtol=3e-7)
    whole = everything(found)
    assert found.rectangle(16, 32, 32, 64).tobytes() == np.ascontiguousarray(whole[16:32, 32:]).tobytes()


def test_scales_above_the_blocks_that_are_not_one_an_expert_are_refused():
    """Two an expert, say of gate and up: the fourth expert's are not the fourth."""
    with pytest.raises(CheckpointError) as raised:
        turned(np.ones((4, 2)))
    assert raised.value.code == "matrix.layout"


def test_a_stack_of_floats_is_read_by_place():
    opened = open_checkpoint(ensure("tiny-moe-bf16"))
    name = "model.layers.3.experts.gate_up_proj"
    found = find_matrix(opened, canonical(opened), name, 41)
    assert everything(found).tobytes() == opened.read(name)[41].tobytes()


def test_a_dense_layer_has_no_expert():
    opened = memory_checkpoint(linear("model.layers.0.mlp.up_proj"))
    with pytest.raises(CheckpointError) as raised:
        find_expert(opened, canonical(opened), 0, 0, "up")
    assert raised.value.code == "matrix.absent"


def refused(tensors, name, index=0):
    opened = memory_checkpoint(tensors)
    with pytest.raises(CheckpointError) as raised:
        everything(find_matrix(opened, canonical(opened), name, index))
    return raised.value.code


STACK = tensor(np.ones((2, 16, 16), np.float32))


@pytest.mark.parametrize(
    ("code", "tensors", "index"),
    [
        ("checkpoint.no-tensor", {}, 0),
        ("matrix.dimensions", {"a.weight": tensor(np.ones(64, np.float32))}, 0),
        ("matrix.dimensions", {"a.weight": tensor(np.ones((2, 2, 16, 16), np.float32))}, 0),
        ("matrix.index", {"a.weight": STACK}, 2),
        ("matrix.index", {"a.weight": STACK}, -1),
        ("matrix.integer", {"a.weight": tensor(np.ones((16, 16), np.int32))}, 0),
        ("matrix.packing", {"a.weight": tensor(np.ones((16, 16), np.uint8))}, 0),
        ("matrix.packing", {"a.weight": typed(np.ones((16, 16), np.uint8), "F8_E8M0")}, 0),
        ("matrix.layout", fp8("a") | {"a.weight_scale": tensor(np.ones((7, 3), np.float32))}, 0),
        ("matrix.layout", fp8("a") | {"a.weight_scale": tensor(np.ones((1, 1), np.int32))}, 0),
        ("matrix.no-scale", {k: v for k, v in linear("a").items() if not k.endswith("_2")}, 0),
        ("matrix.layout", linear("a") | {"a.weight_scale": typed(np.ones((64, 3), np.uint8), "F8_E4M3")}, 0),
        ("matrix.layout", linear("a") | {"a.weight_scale_2": tensor(np.ones(3, np.float32))}, 0),
    ],
)
def test_what_cannot_be_read_is_said(code, tensors, index):
    assert refused({"b": Tensor("F32", (1,), bytes(4)), **tensors}, "a.weight", index) == code


@pytest.mark.parametrize(
    ("make", "without"),
    [(linear, "weight"), (linear, "weight_scale"), (linear, "weight_scale_2"), (fp8, "weight"), (fp8, "weight_scale")],
    ids=lambda of: of if isinstance(of, str) else of.__name__,
)
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.1.gate_proj"])
def test_what_lies_in_a_lost_shard_is_not_missing(tmp_path, name, make, without):
    """Never a matrix decoded without a scale that the files have, and never the word that there is none."""
    tensors = make(name) | make("model.layers.0.mlp.experts.0.gate_proj")
    lost = f"{name}.{without}"
    del tensors[lost]
    write_checkpoint(tmp_path / "own", tensors)
    places = dict.fromkeys(tensors, "model.safetensors") | {lost: "b.safetensors"}
    (tmp_path / "own" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    opened = open_checkpoint(tmp_path / "own")
    view = canonical(opened)
    finds = [lambda: find_matrix(opened, view, f"{name}.weight")]
    if ".experts." in name:
        finds.append(lambda: find_expert(opened, view, 0, 1, "gate"))
    for find in finds:
        with pytest.raises(CheckpointError) as raised:
            find()
        assert (raised.value.code, raised.value.params["tensor"]) == ("checkpoint.unreadable", lost)


def test_what_a_file_without_a_header_may_have_is_not_called_absent(tmp_path):
    write_checkpoint(tmp_path / "own", linear("model.layers.0.mlp.experts.0.gate_proj"))
    (tmp_path / "own" / "rest.safetensors").write_bytes(b"version https://git-lfs")
    opened = open_checkpoint(tmp_path / "own")
    for layer in (0, 1):
        with pytest.raises(CheckpointError) as raised:
            find_expert(opened, canonical(opened), layer, 0, "up")
        assert (raised.value.code, raised.value.params["file"]) == ("matrix.unseen", "rest.safetensors")
