"""What each recipe is known for, in numbers worked out by hand, and what `quantize` refuses."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import quant
from nvfp4viz.errors import FormatError
from nvfp4viz.quant.mxfp4 import blocks_modelopt_mxfp4
from tests.quant.recipe_cases import PATHS

BF16 = ml_dtypes.bfloat16
INF, NAN = np.inf, np.nan


def block(*values: float, size: int = 16) -> np.ndarray:
    """One row with these values and zeros."""
    x = np.zeros((1, size), np.float32)
    x[0, : len(values)] = values
    return x


# ------------------------------------------------------------------------------------------- global scales


@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("kind", ["mixed", "negative", "positive", "zeros", "subnormal", "nan", "negative nan", "inf"])
def test_the_maximum_is_that_of_the_magnitudes_without_a_copy_of_them(dtype, kind: str) -> None:
    x = np.random.default_rng(5).standard_normal((7, 33)).astype(dtype)
    x = {"negative": -np.abs(x), "positive": np.abs(x), "zeros": x * 0, "subnormal": x * dtype(2.0**-130)}.get(kind, x)
    if kind.endswith("nan") or kind == "inf":
        x[3, 4] = {"nan": NAN, "negative nan": -NAN, "inf": -INF}[kind]
    with np.errstate(invalid="ignore"):
        expected = np.abs(x.astype(np.float32)).max()
    found = quant.amax(x)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(quant.amax(-x), expected, equal_nan=True)
    assert np.array_equal(quant.amax(x[:, ::2]), np.abs(x[:, ::2].astype(np.float32)).max(), equal_nan=True)


@pytest.mark.parametrize(
    ("recipe", "stored"),
    [("ieee", 2688 / 3.0), ("vllm-cuda", 2688 / 3.0), ("modelopt", 3.0 / 2688), ("torchao", 3.0 / 2688)],
)
def test_a_global_scale_is_one_division(recipe: str, stored: float) -> None:
    assert quant.global_scale(3.0, recipe) == np.float32(stored)


def test_two_recipes_round_twice_on_the_way_to_the_global_scale() -> None:
    """``scalar / tensor`` in torch is reciprocal times scalar: 2688·RN(1/3) is not RN(2688/3) for every amax."""
    amaxes = np.arange(1, 500, dtype=np.float32) / np.float32(7)
    once = np.array([quant.global_scale(a, "ieee") for a in amaxes])
    for recipe in ("vllm-emulation", "compressed-tensors"):
        twice = np.array([quant.global_scale(a, recipe) for a in amaxes])
        assert np.array_equal(twice, np.float32(2688) * (np.float32(1) / amaxes))
        ulps = np.abs(once.view(np.int32) - twice.view(np.int32))
        assert 0 < ulps.max() <= 1


def test_compressed_tensors_takes_its_reciprocal_in_the_tensors_dtype() -> None:
    # 1/3 in BF16 is 0.333984375; times 2688 is 897.75, and in BF16 896 (a step of 4)
    assert quant.global_scale(3.0, "compressed-tensors", BF16) == 896.0
    assert quant.global_scale(3.1, "compressed-tensors", np.float32) != quant.global_scale(
        3.1, "compressed-tensors", BF16
    )  # fmt: skip
    q = quant.quantize(block(3.0).astype(BF16), recipe="compressed-tensors")
    assert q.global_scale == 896.0


@pytest.mark.parametrize(
    ("recipe", "of_zero", "of_nan", "of_inf"),
    [("ieee", INF, NAN, 0.0), ("vllm-cuda", INF, NAN, 0.0), ("modelopt", 0.0, NAN, INF), ("torchao", 0.0, NAN, INF),
     ("vllm-emulation", 2688 * np.float32(1e8), NAN, 0.0), ("compressed-tensors", 1.0, 1.0, 0.0)],
)  # fmt: skip
def test_global_scales_of_hopeless_tensors(recipe: str, of_zero: float, of_nan: float, of_inf: float) -> None:
    for amax, expected in ((0.0, of_zero), (NAN, of_nan), (INF, of_inf)):
        got = quant.global_scale(amax, recipe)
        assert (np.isnan(got) and np.isnan(expected)) or got == np.float32(expected), (recipe, amax, got)


def test_encode_and_decode_scales_are_reciprocal() -> None:
    x = block(3.0)
    for recipe in quant.NVFP4_RECIPES:
        q = quant.quantize(x, recipe=recipe)
        assert q.encode_scale == pytest.approx(896, rel=2e-7)  # two roundings of float32 at most
        assert q.decode_scale == pytest.approx(1 / 896, rel=2e-7)
        assert q.global_scale in (q.encode_scale, q.decode_scale)


def test_amax_sees_every_nan_and_ignores_signs() -> None:
    for dtype in (np.float32, BF16):
        assert quant.amax(np.array([[1, -5, 3]], dtype)) == 5
        assert np.isnan(quant.amax(np.array([[1, NAN, 3]], dtype)))
        assert quant.amax(np.array([-INF, 3], dtype)) == INF
    assert quant.amax(np.zeros((0, 16), np.float32)) == 0


# ------------------------------------------------------------------------------------- blocks that tell recipes apart


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("recipe", "byte"),
    [("ieee", 0x00), ("vllm-cuda", 0x00), ("vllm-emulation", 0x00), ("modelopt", 0x38), ("torchao", 0x08),
     ("compressed-tensors", 0x20)],
)  # fmt: skip
def test_scale_byte_of_a_zero_block(recipe: str, byte: int, path: str) -> None:
    """Beside a block that gives the tensor a scale: 0, ModelOpt's 1, torchao's floor 2^-6, compressed-tensors' 1/8."""
    x = np.concatenate([block(6.0), block()])
    q = quant.quantize(x, recipe=recipe, path=path)
    assert q.scales.ravel().tolist() == [0x7E, byte]
    assert not q.codes()[1].any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("recipe", "byte", "codes"),
    [("ieee", 0x7F, 7), ("vllm-cuda", 0x7F, 7), ("vllm-emulation", 0x00, 0), ("modelopt", 0xFF, 7),
     ("torchao", 0xFF, 0xC), ("compressed-tensors", 0x20, 0)],
)  # fmt: skip
def test_a_tensor_of_zeros(recipe: str, byte: int, codes: int, path: str) -> None:
    """The case behind the empty answer: 2688/0 is Inf, and Inf · 0 is NaN; packages divide 0 by 0."""
    q = quant.quantize(np.zeros((2, 32), np.float32), recipe=recipe, path=path)
    assert (q.scales == byte).all()
    assert (q.codes() == codes).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("recipe", "code"),
    [("ieee", 8), ("vllm-cuda", 8), ("torchao", 8), ("modelopt", 0), ("compressed-tensors", 0), ("vllm-emulation", 0)],
)
def test_minus_zero_keeps_its_sign_where_bits_are_read_and_loses_it_where_numbers_are_compared(
    recipe: str, code: int, path: str
) -> None:
    x = block(6.0, -0.0, -0.1)
    q = quant.quantize(x, recipe=recipe, global_scale=1, path=path)
    assert q.codes()[0, :3].tolist() == [7, code, 8]  # a negative number that rounds to zero keeps it everywhere


@pytest.mark.parametrize("path", PATHS)
def test_floors_of_the_block_scale(path: str) -> None:
    """A block whose scale is 2^-8: ModelOpt keeps it, torchao raises it to 2^-6, and both lift 2^-11."""
    x = np.concatenate([block(6 * 2.0**-8), block(6 * 2.0**-11)])
    for recipe, bytes_ in (("modelopt", [0x02, 0x01]), ("torchao", [0x08, 0x08]), ("ieee", [0x02, 0x00])):
        q = quant.quantize(x, recipe=recipe, global_scale=1, path=path)
        assert q.scales.ravel().tolist() == bytes_
    lost = quant.quantize(x, recipe="ieee", global_scale=1, path=path)
    assert not lost.codes()[1].any()


@pytest.mark.parametrize("path", PATHS)
def test_compressed_tensors_divides_in_bf16(path: str) -> None:
    """The quotient m/6 has eight significant bits before it meets the global scale, so some scale bytes differ."""
    tops = (np.arange(0x3F80, 0x4000, dtype=np.uint16)).view(BF16)
    x = np.zeros((len(tops), 16), BF16)
    x[:, 0] = tops
    narrow = quant.quantize(x, recipe="compressed-tensors", global_scale=100, path=path)
    wide = quant.quantize(x.astype(np.float32), recipe="compressed-tensors", global_scale=100, path=path)
    sixth = (tops.astype(np.float32) / np.float32(6)).astype(BF16).astype(np.float32)
    from nvfp4viz.formats import encode_e4m3

    assert np.array_equal(narrow.scales[:, 0], encode_e4m3(np.float32(100) * sixth))
    assert (narrow.scales != wide.scales).any()


@pytest.mark.parametrize("path", PATHS)
def test_emulation_turns_dead_blocks_into_huge_multipliers(path: str) -> None:
    """R(0) = 1e-8 twice: a block with scale 0 is multiplied by 1e-8, or by 1/(s·1e-8) where G is 0."""
    dead = quant.quantize(block(1e9, -2e8), recipe="vllm-emulation", global_scale=1e-20, path=path)
    assert dead.scales.item() == 0
    assert dead.codes()[0, :2].tolist() == [7, 0xC]  # 10 and −2
    kernel = quant.quantize(block(1e9, -2e8), recipe="vllm-cuda", global_scale=1e-20, path=path)
    assert kernel.codes()[0, :2].tolist() == [0, 8]


@pytest.mark.parametrize("path", PATHS)
def test_one_nan_poisons_a_block_in_packages_and_not_in_kernels(path: str) -> None:
    x = np.concatenate([block(6.0, NAN, -1.0), block(3.0)])
    for recipe, byte, codes in (
        ("ieee", 0x38, [7, 7, 0xA]), ("vllm-cuda", 0x38, [7, 7, 0xA]), ("modelopt", 0x7F, [7, 7, 7]),
        ("torchao", 0x7F, [4, 4, 4]), ("compressed-tensors", 0x7F, [0, 0, 0]), ("vllm-emulation", 0x7F, [0, 0, 0]),
    ):  # fmt: skip
        q = quant.quantize(x, recipe=recipe, global_scale=1, path=path)
        assert q.scales[0, 0] == byte, recipe
        assert q.codes()[0, :3].tolist() == codes, recipe
        assert q.scales[1, 0] == 0x30  # the neighbour is untouched: 3/6 = 0.5
    narrow = quant.quantize(x.astype(BF16), recipe="compressed-tensors", global_scale=1, path=path)
    assert narrow.codes()[0, :3].tolist() == [8, 8, 8]  # torch's NaN in BF16 has its sign bit set


# ---------------------------------------------------------------------------------------------------- MXFP4


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("recipe", "bytes_"),
    [  # maxima 4, 6, 6.9, 7, 7.9, 8: exponent bytes where 127 is 1.0
        ("ocp-floor", [127, 127, 127, 127, 127, 128]),
        ("vllm-even", [127, 127, 127, 128, 128, 128]),
        ("flashinfer-ceil", [127, 127, 128, 128, 128, 128]),
        ("deepgemm-ceil", [127, 127, 128, 128, 128, 128]),
        ("modelopt-mxfp4", [127, 127, 128, 128, 128, 128]),
    ],
)
def test_scale_rules_part_between_six_and_eight(recipe: str, bytes_: list[int], path: str) -> None:
    x = np.concatenate([block(v, size=32) for v in (4.0, 6.0, 6.9, 7.0, 7.9, 8.0)])
    assert quant.quantize(x, recipe=recipe, path=path).scales.ravel().tolist() == bytes_


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("recipe", "codes"),
    [("ocp-floor", [7, 2, 4, 6, 0, 0, 8, 8]), ("vllm-even", [7, 2, 4, 6, 0, 0, 8, 8]),
     ("flashinfer-ceil", [7, 2, 4, 6, 0, 0, 8, 8]),
     ("deepgemm-ceil", [7, 1, 3, 5, 0, 0, 0, 0]), ("modelopt-mxfp4", [7, 1, 3, 5, 0, 8, 8, 8])],
)  # fmt: skip
def test_ties_and_zeros_of_mxfp4(recipe: str, codes: list[int], path: str) -> None:
    """6, the three ties that are not even, +0.1, +0, −0, −0.1: two recipes round ties toward zero."""
    x = block(6.0, 0.75, 1.75, 3.5, 0.1, 0.0, -0.0, -0.1, size=32)
    assert quant.quantize(x, recipe=recipe, path=path).codes()[0, :8].tolist() == codes


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("recipe", "zero", "tiny", "nan", "all_nan", "inf"),
    [("ocp-floor", 0, 0, 255, 255, 253), ("vllm-even", 0, 0, 127, 0, 253), ("flashinfer-ceil", 0, 0, 127, 255, 254),
     ("deepgemm-ceil", 0x70, 0x70, 254, 254, 254), ("modelopt-mxfp4", 0, 0, 0, 0, 0)],
)  # fmt: skip
def test_scale_bytes_at_the_ends(
    recipe: str, zero: int, tiny: int, nan: int, all_nan: int, inf: int, path: str
) -> None:
    rows = [block(size=32), block(1e-45, size=32), block(6.0, NAN, size=32), np.full((1, 32), NAN, np.float32),
            block(INF, size=32)]  # fmt: skip
    q = quant.quantize(np.concatenate(rows), recipe=recipe, path=path)
    assert q.scales.ravel().tolist() == [zero, tiny, nan, all_nan, inf]


def test_modelopt_cannot_tell_a_power_of_two_from_its_float32_neighbours() -> None:
    """Its logarithm is rounded to float32, so far from 1 a few maxima above 6·2^k still get the scale 2^k."""
    swallowed = {}
    for k in (0, 1, 10, 100, -100):
        tops = (np.array([6 * 2.0**k], np.float32).view(np.int32) + np.arange(0, 60, dtype=np.int32)).view(np.float32)
        x = np.zeros((1, 60, 32), np.float32)
        x[0, :, 0] = tops
        bytes_, _ = blocks_modelopt_mxfp4(x)
        exact = np.where(tops / np.float32(6) > np.float32(2.0**k), k + 1, k) + 127
        swallowed[k] = int((bytes_[0] != exact).sum())
    assert swallowed[0] == 0
    assert swallowed[10] > 0
    assert swallowed[100] > swallowed[10]
    for path in PATHS:
        q = quant.quantize(block(float(np.nextafter(np.float32(6 * 2.0**100), np.float32(INF))), size=32),
                           recipe="modelopt-mxfp4", path=path)  # fmt: skip
        assert q.scales.item() == 227


@pytest.mark.parametrize("path", ["reference", "numpy", "numba"])
@pytest.mark.parametrize("recipe", sorted(set(quant.RECIPES) - {"compressed-tensors"}))
def test_fp16_gives_the_bits_of_its_float32_values(recipe: str, path: str) -> None:
    """Every FP16 pattern, and the maximum of the tensor where the recipe takes it from there."""
    patterns = np.random.default_rng(12).permutation(1 << 16).astype(np.uint16)
    x = patterns.view(np.float16).reshape(-1, 32)[: 64 if path == "reference" else None]
    given = None if quant.RECIPES[recipe].scheme == "mxfp4" else np.float32(0.37)
    half = quant.quantize(x, recipe=recipe, global_scale=given, path=path)
    wide = quant.quantize(x.astype(np.float32), recipe=recipe, global_scale=given, path="numpy")
    assert np.array_equal(half.scales, wide.scales)
    assert np.array_equal(half.packed, wide.packed)
    assert quant.amax(x).view(np.uint32) == quant.amax(x.astype(np.float32)).view(np.uint32)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("code", "call"),
    [
        ("recipe.unknown", lambda: quant.quantize(np.ones((1, 16), np.float32), recipe="nvfp4")),
        ("quantize.block", lambda: quant.quantize(np.ones((1, 24), np.float32), recipe="ieee")),
        ("quantize.block", lambda: quant.quantize(np.ones((1, 48), np.float32), recipe="ocp-floor")),
        ("quantize.empty", lambda: quant.quantize(np.ones((0, 16), np.float32), recipe="ieee")),
        ("quantize.empty", lambda: quant.quantize(np.ones((4, 0), np.float32), recipe="ieee")),
        ("quantize.empty", lambda: quant.quantize(np.float32(3), recipe="ieee")),
        ("quantize.dtype", lambda: quant.quantize(np.ones((1, 16), np.float64), recipe="ieee")),
        ("quantize.dtype", lambda: quant.quantize(np.ones((1, 16), np.int32), recipe="ieee")),
        ("quantize.f16", lambda: quant.quantize(np.ones((1, 16), np.float16), recipe="compressed-tensors")),
        ("path.unknown", lambda: quant.quantize(np.ones((1, 16), np.float32), recipe="ieee", path="cuda")),
        ("recipe.no-global-scale", lambda: quant.quantize(np.ones((1, 32), np.float32), recipe="vllm-even",
                                                          global_scale=1)),
        ("recipe.no-global-scale", lambda: quant.global_scale(1.0, "ocp-floor")),
        ("recipe.unknown", lambda: quant.global_scale(1.0, "mxfp4")),
        ("quantize.global-scale", lambda: quant.quantize(np.ones((2, 16), np.float32), recipe="ieee",
                                                         global_scale=[1.0, 2.0])),
        ("trace.shape", lambda: quant.trace_block(np.ones(32, np.float32), 1.0, "ieee")),
        ("quantize.dtype", lambda: quant.trace_block(np.ones(16), 1.0, "ieee")),
        ("recipe.no-global-scale", lambda: quant.trace_block(np.ones(16, np.float32), 1.0, "ocp-floor")),
        ("compare.shape", lambda: quant.compare_scaling(np.ones((2, 24), np.float32))),
        ("compare.shape", lambda: quant.compare_scaling(np.full((2, 16), NAN, np.float32))),
        ("compare.group", lambda: quant.granularity_ladder(np.ones((2, 32), np.float32), group=24)),
    ],
)  # fmt: skip
def test_bad_input_is_named(code: str, call) -> None:
    with pytest.raises(FormatError) as error:
        call()
    assert error.value.code == code
    for language in ("en", "zh"):
        words = error.value.text(language)
        assert all(words.values())
        assert "{" not in "".join(words.values())
    assert error.value.text("en") != error.value.text("zh")


def test_the_unknown_recipe_message_lists_the_known_ones() -> None:
    with pytest.raises(FormatError, match="modelopt-mxfp4"):
        quant.quantize(np.ones((1, 16), np.float32), recipe="nvfp4")


# --------------------------------------------------------------------------- orders of operations that show in bits


@pytest.mark.parametrize("path", PATHS)
def test_the_kernel_multiplies_the_maximum_by_a_sixth_before_the_global_scale(path: str) -> None:
    """``G · (m · rcp(6))``: the other association rounds elsewhere and gives other bytes for some maxima."""
    from nvfp4viz.formats import encode_e4m3

    rng = np.random.default_rng(5)
    g = np.float32(2688 / 3.7)
    sixth = quant.rcp_approx_ftz(np.float32(6))
    # maxima whose scale falls within an ulp or two of a midpoint between E4M3 values
    values = np.arange(8, 126, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2
    near = (middles[:, None] * 6 / float(g)).astype(np.float32).view(np.int32) + rng.integers(-3, 4, (117, 40))
    tops = near.astype(np.int32).view(np.float32).ravel()
    right, wrong = encode_e4m3(g * (tops * sixth)), encode_e4m3((g * tops) * sixth)
    assert (right != wrong).any(), "the maxima no longer tell the two orders apart"
    x = np.zeros((len(tops), 16), np.float32)
    x[:, 3] = tops
    q = quant.quantize(x[right != wrong], recipe="vllm-cuda", global_scale=g, path=path)
    assert np.array_equal(q.scales[:, 0], right[right != wrong])


@pytest.mark.parametrize("path", PATHS)
def test_compressed_tensors_divides_by_its_encode_scale_when_decoding(path: str) -> None:
    from nvfp4viz.formats import decode_e2m1, decode_e4m3

    x = np.random.default_rng(6).standard_normal((16, 64)).astype(np.float32)
    q = quant.quantize(x, recipe="compressed-tensors", global_scale=np.float32(716.9137))
    codes, s = decode_e2m1(q.codes()), np.repeat(decode_e4m3(q.scales), 16, axis=1)
    divided, multiplied = codes * (s / q.global_scale), codes * (s * q.decode_scale)
    assert (divided != multiplied).any()
    assert np.array_equal(quant.dequantize(q, path=path), divided)
