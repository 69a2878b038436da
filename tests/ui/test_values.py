"""Numbers that a reader pastes."""

import math

import numpy as np
import pytest

from nvfp4viz.errors import InputError
from nvfp4viz.ui.values import parse_scale, parse_values, to_bf16


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
