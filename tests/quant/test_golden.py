"""Every recipe that a package computes on a CPU gives that package's bytes: zero mismatches, set by set, path by path.

The answers were recorded by running the packages (``tests/golden``).  NVFP4 recipes and MXFP4's ``modelopt-mxfp4``
must equal their namesake everywhere but in the documented exceptions, which ``test_golden_exceptions.py`` states byte
by byte.
"""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4viz import formats, quant
from tests.golden import answers
from tests.golden import golden_sets as sets
from tests.quant.golden_checks import PATHS, Answer, expect_same

# The sets in which a package meets NaN, infinity or a tensor of zeros, and leaves arithmetic for accident.
EXCEPTIONS = ("nan", "inf", "allzero")
FINITE = tuple(name for name in sets.NAMES if name not in EXCEPTIONS)
NVFP4 = ("modelopt", "torchao", "compressed-tensors", "vllm-emulation")
# The scalar reference computes a block in about a millisecond: these sets, and no more rows than this.
REFERENCE_SETS = {"mild": 2, "ties": 2, "zeroblocks": 2, "student2": 1}


def nvfp4_answer(recipe: str, name: str, dtype: str) -> Answer:
    # vLLM's quantiser takes the encode scale, which is what the recipe stores; 1/G is what a checkpoint keeps
    what = "encode" if recipe == "vllm-emulation" else "global"
    stored = answers.stored("nvfp4", recipe, name, dtype, what)
    packed, scales = (read("nvfp4", recipe, name, dtype) for read in (answers.packed, answers.scales))
    return Answer(packed, scales, stored)


def mxfp4_answer(package: str, name: str, dtype: str) -> Answer:
    return Answer(answers.packed("mxfp4", package, name, dtype), answers.scales("mxfp4", package, name, dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("recipe", NVFP4)
def test_nvfp4_is_the_packages(recipe: str, name: str, dtype: str, path: str) -> None:
    """Packed bytes, scale bytes and the stored global scale, each package with its own global scale."""
    expect_same(answers.tensor(name, dtype), recipe, nvfp4_answer(recipe, name, dtype), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize("recipe", NVFP4)
def test_nvfp4_is_the_packages_under_a_given_global_scale(recipe: str, dtype: str, path: str) -> None:
    """A scale from calibration does not fit the tensor: blocks saturate at 448 or fall to the floor."""
    for name in sets.GIVEN_SETS:
        for i in range(len(sets.GIVEN_SCALES)):
            answer = nvfp4_answer(recipe, f"{name}@{i}", dtype)
            expect_same(answers.tensor(name, dtype), recipe, answer, path, given=answer.stored)


@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize("recipe", NVFP4)
def test_the_scalar_reference_is_the_packages_too(recipe: str, dtype: str) -> None:
    for name, rows in REFERENCE_SETS.items():
        full = nvfp4_answer(recipe, name, dtype)
        answer = Answer(full.packed[:rows], full.scales[:rows], full.stored)
        expect_same(answers.tensor(name, dtype)[:rows], recipe, answer, "reference", given=full.stored)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize("name", sets.NAMES)
def test_mxfp4_modelopt_is_modelopts(name: str, dtype: str, path: str) -> None:
    """No exception at all: NaN, Inf and zeros included.  ModelOpt writes code 8 for every exact zero, and so do we."""
    expect_same(answers.tensor(name, dtype), "modelopt-mxfp4", mxfp4_answer("modelopt", name, dtype), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize("name", sets.NAMES)
def test_mxfp4_deepgemm_is_flashinfers_copy_of_it(name: str, dtype: str, path: str) -> None:
    """No exception at all: NaN, Inf and zeros included.  FlashInfer carries DeepGEMM's cast as a CPU reference."""
    expect_same(answers.tensor(name, dtype), "deepgemm-ceil", mxfp4_answer("flashinfer-deepgemm", name, dtype), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize("name", [name for name in sets.NAMES if name != "allbf16"])
def test_mxfp4_ocp_floor_is_torchaos_floor(name: str, dtype: str, path: str) -> None:
    """NaN, Inf and zeros included; all of BF16 has a test of its own below."""
    expect_same(answers.tensor(name, dtype), "ocp-floor", mxfp4_answer("torchao-floor", name, dtype), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize("name", [*(n for n in FINITE if n not in ("allbf16", "sixes")), "allzero"])
@pytest.mark.parametrize(("recipe", "package"), [("vllm-even", "torchao-even"), ("flashinfer-ceil", "torchao-rceil")])
def test_mxfp4_kernels_scale_rules_are_torchaos(recipe: str, package: str, name: str, dtype: str, path: str) -> None:
    """A cross-check and no namesake: these two recipes are CUDA kernels, EVEN and RCEIL are torchao's."""
    expect_same(answers.tensor(name, dtype), recipe, mxfp4_answer(package, name, dtype), path)


# ------------------------------------------------------------------------- differences that have a known reason


@pytest.mark.parametrize("dtype", sets.DTYPES)
def test_ieee_is_torchao_without_a_global_scale_where_torchao_does_not_clamp(dtype: str) -> None:
    """At g = 1 the two differ in one thing: torchao raises every block scale to at least 2^-6 (byte 0x08)."""
    clamped_blocks = 0
    for name in FINITE:
        q = quant.quantize(answers.tensor(name, dtype), recipe="ieee", global_scale=np.float32(1))
        theirs = Answer(
            answers.packed("nvfp4", "torchao-g1", name, dtype), answers.scales("nvfp4", "torchao-g1", name, dtype)
        )
        low = q.scales < 0x08
        assert np.array_equal(theirs.scales, np.where(low, 0x08, q.scales))
        same = (q.packed == theirs.packed).reshape(*q.scales.shape, 8).all(axis=-1)
        assert same[~low].all()
        clamped_blocks += int(low.sum())
    assert clamped_blocks > 0, "no set reaches the clamp, so the difference is not shown"


@pytest.mark.parametrize("dtype", sets.DTYPES)
@pytest.mark.parametrize(
    ("recipe", "package", "count"),
    [("ocp-floor", "torchao-floor", 354), ("vllm-even", "torchao-even", 320), ("flashinfer-ceil", "torchao-rceil", 0)],
)
def test_torchao_differs_on_all_bf16_in_blocks_with_scale_byte_zero(
    recipe: str, package: str, count: int, dtype: str
) -> None:
    """Scale bytes are equal.  Of 32,768 packed bytes about 1 % differ, all in blocks with scale byte 0.

    torchao divides those by 2^-126 although byte 0 says 2^-127 (FLOOR and EVEN); the OCP rule divides by 2^-127, and
    vLLM's kernel takes byte 0 for a scale of 0.  RCEIL has the multiplier 1 there, and every code is a zero again.
    """
    theirs = mxfp4_answer(package, "allbf16", dtype)
    q = quant.quantize(answers.tensor("allbf16", dtype), recipe=recipe)
    assert np.array_equal(q.scales, theirs.scales)
    wrong = q.packed != theirs.packed
    assert int(wrong.sum()) == count
    assert (q.scales[wrong.reshape(*q.scales.shape, 16).any(axis=-1)] == 0).all()


def test_a_rounded_logarithm_takes_the_smaller_scale_just_above_a_power_of_two() -> None:
    """ModelOpt and torchao's RCEIL take ``ceil(log2(amax/6))`` with the logarithm rounded to float32.

    A few ulps above 6 x 2^k it rounds to k: 143 of 528 blocks get the smaller scale and saturate.  FlashInfer's kernel
    rounds up exactly.  BF16 has no such maxima.
    """
    x = answers.tensor("sixes", "f32")
    exact = quant.quantize(x, recipe="flashinfer-ceil").scales.astype(int)
    for package in ("modelopt", "torchao-rceil"):
        theirs = answers.scales("mxfp4", package, "sixes", "f32")
        assert np.unique(exact - theirs).tolist() == [0, 1]
        assert int((exact != theirs).sum()) == 143
    coarse = quant.quantize(answers.tensor("sixes", "bf16"), recipe="flashinfer-ceil").scales
    assert np.array_equal(coarse, answers.scales("mxfp4", "torchao-rceil", "sixes", "bf16"))


@pytest.mark.parametrize("dtype", sets.DTYPES)
def test_compressed_tensors_mxfp4_is_the_even_rule_but_for_minus_zero_and_the_largest_blocks(dtype: str) -> None:
    """No recipe of ours bears this name; the recorded bytes keep the spec's statement about it true."""
    for name in FINITE:
        theirs = mxfp4_answer("compressed-tensors", name, dtype)
        even = mxfp4_answer("torchao-even", name, dtype)
        overflowed = theirs.scales != even.scales
        assert int(overflowed.sum()) == (2 if name == "allbf16" else 0)
        assert (theirs.scales[overflowed] == 127).all()
        assert (even.scales[overflowed] == 253).all()
        # torchao divides blocks with scale byte 0 by 2^-126 (see above), compressed-tensors by the 2^-127 it means
        smallest = theirs.scales == 0
        keep = np.repeat(~(overflowed | smallest), 16, axis=-1)
        ours, reference = without_minus_zero(theirs.packed), without_minus_zero(even.packed)
        assert np.array_equal(ours[keep], reference[keep])
        exact = answers.tensor(name, dtype).astype(np.float64).reshape(*smallest.shape, 32) * 2.0**127
        with np.errstate(over="ignore"):
            narrow = exact.astype(np.float32)
        codes = formats.pack_nibbles(formats.encode_e2m1(narrow))
        mean = without_minus_zero(codes)[smallest]
        assert np.array_equal(ours.reshape(codes.shape)[smallest], mean)


def without_minus_zero(packed: np.ndarray) -> np.ndarray:
    low, high = packed & 15, packed >> 4
    return np.where(low == 8, 0, low) | (np.where(high == 8, 0, high) << 4)
