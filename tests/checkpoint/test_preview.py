"""The first block of a tensor, decoded, in every layout."""

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.checkpoint import canonical, memory_checkpoint, preview_tensor, tensor
from tests.audit.layouts import LAYOUTS

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_first_weights_are_codes_times_scales(layout):
    """Against the bytes of the fixture, decoded here with ml_dtypes."""
    checkpoint = layout.open()
    kind = layout.kinds[0]
    preview = preview_tensor(checkpoint, layout.name(0, kind, "weight"))
    assert (preview.slot.layer, preview.slot.expert, preview.slot.projection) == (0, 0, kind)
    rows = dict(preview.rows)
    size = 16 if layout.block == "MXFP4" else 8
    data = layout.tensors()[layout.name(0, kind, "weight")].tobytes()[:size]
    codes = np.array([code for byte in data for code in (byte & 15, byte >> 4)])
    scale = np.frombuffer(layout.tensors()[layout.name(0, kind, "weight_scale")].tobytes()[:1], np.uint8)
    if layout.block == "MXFP4":
        expected = E2M1[codes] * scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    else:
        second = layout.get(layout.tensors(), 0, kind, "weight_scale_2")
        level = np.float32(1) / second if layout.divisors else second
        expected = E2M1[codes] * scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * level
    shown = np.array(rows["weights"].split(), np.float64)
    np.testing.assert_allclose(shown, expected, rtol=1e-5)  # six digits are shown


@pytest.mark.parametrize("axes", [(0, 1, 2), (0, 2, 1)], ids=["[E, in/16, out]", "[E, out, in/16]"])
def test_a_block_of_a_transposed_weight_runs_down_a_column(axes):
    """Llama 4: two codes of the input a byte, [E, in/2, out]; neighbours in the file belong to other outputs."""
    layout, rng = LAYOUTS["fused"], np.random.default_rng(5)
    tensors, weight, scales = layout.tensors(), {}, {}
    for kind, (rows, columns) in {"gate_up": (64, 64), "down": (64, 32)}.items():
        weight[kind] = rng.integers(0, 256, (4, columns // 2, rows), np.uint8)
        scales[kind] = rng.integers(0x30, 0x40, (4, columns // 16, rows), np.uint8)
        tensors[layout.name(0, kind, "weight")] = tensor(weight[kind])
        stored = np.ascontiguousarray(scales[kind].transpose(axes))
        tensors[layout.name(0, kind, "weight_scale")] = tensor(stored.view(ml_dtypes.float8_e4m3fn))
    rows = dict(preview_tensor(layout.open(tensors), layout.name(0, "down", "weight")).rows)
    column = weight["down"][0, :8, 0]
    assert rows["bytes"] == " ".join(f"{byte:02x}" for byte in column)
    second = layout.get(tensors, 0, "down", "weight_scale_2")
    block = scales["down"][0, :1, 0].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = E2M1[np.stack([column & 15, column >> 4], axis=1).ravel()] * block * second
    np.testing.assert_allclose(np.array(rows["weights"].split(), np.float64), expected, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.block == "MXFP4"])
def test_power_of_two_scales_are_decoded_whatever_their_type_is_called(name):
    layout = LAYOUTS[name]
    name, tensors = layout.name(0, layout.kinds[0], "weight_scale"), layout.tensors()
    shown = dict(preview_tensor(layout.open(), name).rows)
    stored = np.frombuffer(tensors[name].tobytes()[:16], np.uint8)
    expected = stored.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_allclose(np.float32(shown["values"].split()), expected, rtol=1e-5)  # six digits are shown


def test_a_weight_of_the_four_bit_type_is_decoded_as_one_of_bytes():
    layout = LAYOUTS["modelopt"]
    tensors, name = layout.tensors(), layout.name(0, "gate", "weight")
    packed = tensors[name]
    of_bytes = preview_tensor(layout.open(tensors), name).rows
    tensors[name] = type(packed)("F4", (packed.shape[0], packed.shape[1] * 2), packed.data)
    assert preview_tensor(layout.open(tensors), name).rows == of_bytes


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_tensor_of_an_expert_is_found_by_its_name(layout):
    view = canonical(layout.open())
    for kind in layout.kinds:
        for role in layout.roles:
            slot = view.locate(layout.name(3, kind, role))
            assert slot is not None
            assert (slot.layer, slot.projection, slot.role) == (0, kind, role)
            assert slot.expert == (3 if layout.arrangement == "expert" else 0)
            assert view.slot(0, 3, kind, role).index == (
                3 if slot.entry.shape and layout.arrangement != "expert" and slot.entry.nbytes > 4 else None
            )


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.gate.weight", "x", ""])
def test_what_is_no_experts_tensor_is_nowhere(name):
    assert canonical(LAYOUTS["modelopt"].open()).locate(name) is None


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8])
def test_numbers_of_every_width_are_shown(kind):
    checkpoint = memory_checkpoint({"one": tensor(np.array(3, kind)), "few": tensor(np.array([1, 2, 3], kind))})
    assert float(dict(preview_tensor(checkpoint, "one").rows)["value"]) == 3
    assert [float(value) for value in dict(preview_tensor(checkpoint, "few").rows)["values"].split()] == [1, 2, 3]
