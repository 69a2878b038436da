"""A traced block: its steps multiply out to its bytes, and its bytes are those of `quantize`."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import quant
from nvfp4viz.formats import decode_e4m3, encode_e2m1, encode_e4m3
from tests.quant import recipe_cases as cases

BLOCK_A = np.float32([6, -6, 5, 4, 3.5, 3, 2.5, 2, 1.75, 1.5, 1.25, 1, 0.75, -0.5, 0.25, 0])


def test_the_kernels_seven_operations() -> None:
    """g = 2688/3.7 on a block whose maximum is 2.1: each step recomputed here with one NumPy operation."""
    x = (BLOCK_A * np.float32(0.35)).astype(np.float32)
    g = np.float32(2688 / 3.7)
    block = quant.trace_block(x, g, "vllm-cuda")
    assert [step.name for step in block.steps] == ["amax", "sixth", "scale", "byte", "factor"]
    amax, sixth, scale, byte, factor = (step.value for step in block.steps)
    assert amax == np.abs(x).max()
    assert sixth == amax * quant.rcp_approx_ftz(np.float32(6))
    assert scale == g * sixth
    assert block.scale_byte == encode_e4m3(scale)
    assert byte == block.scale == decode_e4m3(block.scale_byte)
    assert factor == block.factor == quant.rcp_approx_ftz(byte * quant.rcp_approx_ftz(g))
    assert not block.divides
    assert np.array_equal(block.products, x * factor)
    assert np.array_equal(block.codes, encode_e2m1(block.products))
    assert np.array_equal(block.packed, block.codes[0::2] | (block.codes[1::2] << 4))
    assert np.array_equal(block.decoded, block.element_values * (byte * (np.float32(1) / g)))
    assert np.array_equal(block.error, block.decoded - x)


@pytest.mark.parametrize("recipe", quant.NVFP4_RECIPES)
def test_a_trace_is_what_quantize_gives(recipe: str) -> None:
    edges = cases.edge_blocks()[:, :16]
    for name in ("usual", "one", "inf", "negative", "nan", "zero"):
        given = cases.scale_for(recipe, name)
        for x in (edges[::3], cases.to_bf16(edges[::3])):
            q = quant.quantize(x, recipe=recipe, global_scale=given)
            values = quant.dequantize(q)
            for row, (element, packed, scales) in enumerate(zip(x, q.packed, q.scales, strict=True)):
                block = quant.trace_block(element, given, recipe)
                assert np.array_equal(block.packed, packed)
                assert block.scale_byte == scales[0]
                assert block.decoded.tobytes() == values[row].tobytes()


@pytest.mark.parametrize("recipe", quant.NVFP4_RECIPES)
def test_every_recipe_names_the_steps_a_page_relies_on(recipe: str) -> None:
    block = quant.trace_block(BLOCK_A, quant.global_scale(6.0, recipe), recipe)
    names = [step.name for step in block.steps]
    assert len(set(names)) == len(names)
    assert names[0] == "amax"
    assert names[-1] == "factor"
    assert {"scale", "byte"} <= set(names)
    symbols = [step.symbol for step in block.steps]
    assert len(set(symbols)) == len(symbols)
    for step in block.steps:
        assert step.formula
        assert step.numbers
        assert int(step.bits, 16) == int(step.value.view(np.uint32))
    products = BLOCK_A / block.factor if block.divides else BLOCK_A * block.factor
    assert np.array_equal(products, block.products)


def test_a_nan_is_shown_with_its_canonical_bits() -> None:
    block = quant.trace_block(np.zeros(16, np.float32), np.inf, "vllm-cuda")
    assert {step.name: step.bits for step in block.steps}["scale"] == "0x7FFFFFFF"
    assert np.isnan(block.decoded).all()


def test_bf16_steps_say_where_they_round() -> None:
    x = BLOCK_A.astype(ml_dtypes.bfloat16)
    x[0] = ml_dtypes.bfloat16(6.125)
    block = quant.trace_block(x, 100, "compressed-tensors")
    sixth = next(step for step in block.steps if step.name == "sixth")
    assert sixth.formula == "BF16(m / 6)"
    assert sixth.value == np.float32(ml_dtypes.bfloat16(np.float32(6.125) / np.float32(6)))
    assert int(sixth.value.view(np.uint32)) & 0xFFFF == 0


def test_a_trace_is_frozen() -> None:
    block = quant.trace_block(BLOCK_A, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        block.scale_byte = 0  # type: ignore[misc]
    for field in dataclasses.fields(block):
        value = getattr(block, field.name)
        assert not isinstance(value, np.ndarray) or not value.flags.writeable


def test_recipes_side_by_side() -> None:
    """One block well inside the range, one below every floor."""
    x = np.float32([0.001, -0.0005] + [0.0] * 14)
    blocks = quant.compare_recipes(x, 6.0)
    assert set(blocks) == set(quant.NVFP4_RECIPES)
    # 0.001/6 · 448 = 0.0747, whose nearest E4M3 value is 1.25 · 2^-4
    assert {b.scale_byte for b in blocks.values()} == {0x1A}
    tiny = quant.compare_recipes(np.float32([1e-5] + [0.0] * 15), 6.0)
    assert {name: b.scale_byte for name, b in tiny.items()} == {
        "ieee": 0, "vllm-cuda": 0, "vllm-emulation": 0, "modelopt": 1, "torchao": 8, "compressed-tensors": 0x20,
    }  # fmt: skip
