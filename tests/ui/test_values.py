"""Numbers that a reader pastes."""

import math

import numpy as np
import pytest

from nvfp4viz.errors import InputError
from nvfp4viz.ui.values import parse_accumulator, parse_bytes, parse_codes, parse_scale, parse_values, to_bf16


@pytest.mark.parametrize("text", ["1 2 3", "1,2,3", "[1, 2, 3]", "1;2\n3", "1，2、3", "(1.0  2.0\t3.0)"])
def test_any_usual_way_of_writing_a_list_is_read(text):
    assert parse_values(text, 3) == (1.0, 2.0, 3.0)


def test_what_is_not_finite_is_a_number_too():
    assert math.isnan(parse_scale("NaN"))
    assert parse_values("inf -inf −∞", 3) == (math.inf, -math.inf, -math.inf)


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "values.none"), ("[]", "values.none"), ("a b", "values.not-a-number"), ("1 2", "values.count")],
)
def test_what_cannot_be_read_is_named(text, code):
    with pytest.raises(InputError) as error:
        parse_values(text, 3)
    assert error.value.code == code


def test_python_s_own_number_spellings_are_not_taken():
    with pytest.raises(InputError):
        parse_values("1_000", 1)
    with pytest.raises(InputError):
        parse_values("0x10", 1)


def test_long_garbage_is_shortened():
    with pytest.raises(InputError) as error:
        parse_values("x" * 10_000, 16)
    assert len(str(error.value)) < 500


def test_beyond_bf16_is_infinite_without_a_warning():
    with np.errstate(all="raise"):
        assert to_bf16((1e300, -1e300)).astype(np.float32).tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("0123", "0123"),
        ("01 23", "0123"),
        ("AbCd", "abcd"),
        ("0 1 2 3", "0245"),
        ("0, -0.5, 6; 7", "0977"),
        ("[nan -6 0 0]", "7f00"),
    ],
)
def test_elements_are_codes_or_numbers(text, codes):
    assert parse_codes(text, 4) == codes


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "codes.count"),
        ("012", "codes.count"),
        ("1 2 3", "codes.count"),
        ("01g3", "codes.not-a-code"),
        ("1 2 x 4", "codes.not-a-code"),
    ],
)
def test_elements_that_cannot_be_read_are_named(text, code):
    with pytest.raises(InputError) as error:
        parse_codes(text, 4)
    assert error.value.code == code


@pytest.mark.parametrize("text", ["387f", "38 7F", "0x38,0X7f", "[38;7f]"])
def test_bytes_are_read(text):
    assert parse_bytes(text, 2) == "387f"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "bytes.count"),
        ("38", "bytes.count"),
        ("38 7", "bytes.not-a-byte"),
        ("38 xy", "bytes.not-a-byte"),
        ("1.5 2", "bytes.not-a-byte"),
    ],
)
def test_bytes_that_cannot_be_read_are_named(text, code):
    with pytest.raises(InputError) as error:
        parse_bytes(text, 2)
    assert error.value.code == code


@pytest.mark.parametrize(("text", "value"), [("1e300", math.inf), ("−2.5", -2.5), (" [0.1] ", 0.10000000149011612)])
def test_an_accumulator_is_a_float32(text, value):
    assert parse_accumulator(text) == value


@pytest.mark.parametrize("text", ["", "1 2", "one", "0x10"])
def test_what_is_no_accumulator_is_named(text):
    with pytest.raises(InputError) as error:
        parse_accumulator(text)
    assert error.value.code == "accumulator.not-a-number"


@pytest.mark.parametrize(
    ("read", "text", "point"),
    [
        (parse_scale, "1,5", "1.5"),
        (parse_scale, " −0,25e-3 ", "−0.25e-3"),
        (parse_scale, "1，5", "1.5"),
        (parse_accumulator, "1234,5", "1234.5"),
        (lambda text: parse_values(text, 3), "0,5 1 -2,25", "0.5"),
        (lambda text: parse_values(text, 3), "0,5; 1,0; 2,25", "0.5"),
        (lambda text: parse_codes(text, 3), "0,5 1,5 -2,0", "0.5"),
    ],
)
def test_a_decimal_comma_is_told_what_to_write(read, text, point):
    with pytest.raises(InputError) as error:
        read(text)
    assert error.value.code == "number.decimal-comma"
    assert all(point in error.value.text(language)["next"] for language in ("en", "zh"))


def test_commas_between_numbers_are_no_decimal_commas():
    assert parse_values("1,5 2,5", 4) == (1.0, 5.0, 2.0, 5.0)
    with pytest.raises(InputError) as error:
        parse_values("1, 2, 3, 4", 3)
    assert error.value.code == "values.count"


@pytest.mark.parametrize("text", ["abc", "1 2", "0x10", "1,2,3"])
def test_a_scale_is_one_number(text):
    """Nothing here is a piece of a block."""
    with pytest.raises(InputError) as error:
        parse_scale(text)
    assert error.value.code == "scale.not-a-number"
