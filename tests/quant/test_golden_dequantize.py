"""Dequantised values against the packages: all 16 codes x all 256 scale bytes, and whole tensors by their digest."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import quant
from tests.golden import answers
from tests.golden import golden_sets as sets
from tests.quant.golden_checks import PATHS

ELEMENTS = answers.arrays("elements")
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
ALL_PATHS = (*PATHS, "reference")
FINITE = tuple(name for name in sets.NAMES if name not in ("nan", "inf", "allzero"))


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32 if values.dtype == np.float32 else np.uint16)


def as_float(pattern: np.ndarray) -> np.ndarray:
    return pattern.view(np.float32) if pattern.itemsize == 4 else sets.bf16_values(pattern)


def table(recipe: str, stored: np.float32) -> quant.QuantizedTensor:
    """Row ``b`` holds all 16 codes (twice for MXFP4) under scale byte ``b``."""
    block = quant.RECIPES[recipe].block_size
    packed, scales = sets.table_codes_and_scales(block)
    return quant.QuantizedTensor(packed, scales, stored, recipe, block, (256, block))


def expect_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Every bit, the sign of zero included; a NaN equals any NaN, its sign and payload being an accident."""
    nan = np.isnan(as_float(theirs))
    assert np.array_equal(np.isnan(ours.astype(np.float32)), nan)
    wrong = np.argwhere((bits(ours) != theirs) & ~nan)
    assert not len(wrong), f"{len(wrong)} differ; first (scale byte, element) {wrong[0]}"


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", ["modelopt", "torchao"])
def test_decode_table_is_the_packages(recipe: str, dtype: str, path: str) -> None:
    """Both store a decode scale: code x (block scale x g), each product rounded; ModelOpt reads code 8 as +0."""
    for which, stored in enumerate(sets.DEQUANT_SCALES):
        ours = quant.dequantize(table(recipe, stored), dtype=DTYPES[dtype], path=path)
        expect_same_bits(ours, ELEMENTS[f"decode/nvfp4/{recipe}/{which}/{dtype}"])
    eight = quant.dequantize(table(recipe, np.float32(1)), path=path)[0x38, 8]
    assert eight == 0
    assert np.signbit(eight) == (recipe == "torchao")


@pytest.mark.parametrize("path", ALL_PATHS)
def test_decode_table_is_compressed_tensors(path: str) -> None:
    """It stores an encode scale, divides by it, and answers BF16 only."""
    for which, stored in enumerate(sets.DEQUANT_SCALES):
        ours = quant.dequantize(table("compressed-tensors", stored), dtype=ml_dtypes.bfloat16, path=path)
        expect_same_bits(ours, ELEMENTS[f"decode/nvfp4/compressed-tensors/{which}/bf16"])


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_table_is_vllms(dtype: str, path: str) -> None:
    """vLLM multiplies by the stored ``1/G``; our tensor keeps G: scales that survive two reciprocals are used."""
    used = 0
    for which, decode in enumerate(sets.DEQUANT_SCALES):
        encode = np.float32(1) / decode
        if np.float32(1) / encode != decode:
            continue
        used += 1
        ours = quant.dequantize(table("vllm-emulation", encode), dtype=DTYPES[dtype], path=path)
        expect_same_bits(ours, ELEMENTS[f"decode/nvfp4/vllm-emulation/{which}/{dtype}"])
    assert used >= 2


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_decode_table_is_modelopts(dtype: str, path: str) -> None:
    """Byte 255 too: ModelOpt computes exp2(128), which is infinite, and 0 times that is NaN."""
    ours = quant.dequantize(table("modelopt-mxfp4", np.float32(1)), dtype=DTYPES[dtype], path=path)
    expect_same_bits(ours, ELEMENTS[f"decode/mxfp4/modelopt/{dtype}"])


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_decode_table_is_torchaos(dtype: str, path: str) -> None:
    ours = quant.dequantize(table("ocp-floor", np.float32(1)), dtype=DTYPES[dtype], path=path)
    expect_same_bits(ours, ELEMENTS[f"decode/mxfp4/torchao/{dtype}"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tensor", sets.DTYPES)
@pytest.mark.parametrize("recipe", ["modelopt", "torchao", "vllm-emulation", "compressed-tensors"])
def test_whole_tensors_dequantise_to_the_packages_values(recipe: str, tensor: str, path: str) -> None:
    """Quantised by us, dequantised by us, and every bit of float32 and BF16 is what the package made of its own."""
    outputs = ("bf16",) if recipe == "compressed-tensors" else ("f32", "bf16")
    for name in FINITE:
        q = quant.quantize(answers.tensor(name, tensor), recipe=recipe, path=path)
        ours = [sets.sha256(bits(quant.dequantize(q, dtype=DTYPES[dtype], path=path))) for dtype in outputs]
        assert ours == answers.digests("nvfp4", recipe, name, tensor), name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("tensor", sets.DTYPES)
@pytest.mark.parametrize(("recipe", "package"), [("modelopt-mxfp4", "modelopt"), ("ocp-floor", "torchao-floor")])
def test_whole_mxfp4_tensors_dequantise_to_the_packages_values(
    recipe: str, package: str, tensor: str, path: str
) -> None:
    for name in FINITE:
        if recipe == "ocp-floor" and name == "allbf16":
            continue  # torchao's codes differ there: test_golden.py counts them
        q = quant.quantize(answers.tensor(name, tensor), recipe=recipe, path=path)
        ours = [sets.sha256(bits(quant.dequantize(q, dtype=dtype, path=path))) for dtype in DTYPES.values()]
        assert ours == answers.digests("mxfp4", package, name, tensor), name
