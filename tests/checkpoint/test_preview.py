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
    data = layout.tensors()[layout.name(0, kind, "weight")].tobytes()[:8]
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
