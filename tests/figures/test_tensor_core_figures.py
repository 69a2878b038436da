"""Records and figures about the tensor core's product."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from nvfp4viz.figures import tensor_core as tc
from nvfp4viz.figures import tensor_core_plots as plots
from nvfp4viz.quant import mma_step_reference

THEMES = ["light", "dark"]
LANGUAGES = ["en", "zh"]


@pytest.fixture(scope="module")
def usual():
    return tc.explain(tc.DEFAULT)


@pytest.fixture(scope="module")
def compared():
    return tc.sample_product(1024, 8, "signed")


@pytest.mark.parametrize("kind", tc.KINDS)
@pytest.mark.parametrize("name", tc.PRESETS)
def test_a_preset_is_a_step_of_the_reference(name, kind):
    settings = replace(tc.PRESETS[name], kind=kind)
    seen = tc.explain(settings)
    expected = mma_step_reference(seen.a_codes, seen.b_codes, seen.a_scales, seen.b_scales, seen.c, kind)
    assert seen.result.view(np.uint32) == expected.view(np.uint32)
    assert len(seen.a_scales) == (4 if kind == "nvfp4" else 2)


@pytest.mark.parametrize(
    ("name", "outcome", "cut"),
    [("usual", "nearer", [3]), ("even", "exact", []), ("huge", "farther", [0, 1, 2, 3]), ("negative", "nearer", [3])],
)
def test_presets_show_what_they_are_for(name, outcome, cut):
    seen = tc.explain(tc.PRESETS[name])
    assert tc.outcome(seen) == outcome
    assert tc.cut_terms(seen) == cut


def test_the_usual_step_differs_from_float32(usual):
    assert usual.ulps == -1


def test_other_outcomes():
    assert tc.outcome(tc.explain(tc.PRESETS["nan"])) == "nan"
    assert tc.outcome(tc.explain(replace(tc.DEFAULT, c=float("-inf")))) == "inf"
    assert tc.outcome(tc.explain(replace(tc.DEFAULT, c=1e300))) == "inf"
    assert tc.outcome(tc.explain(replace(tc.DEFAULT, kind="mxfp4", ua="fefe", ub="fefe"))) == "inf"  # it overflows


def test_a_negative_scale_is_ignored_by_the_step_but_not_by_float32():
    seen = tc.negative_scale()
    assert seen.fate == "ignored"
    assert seen.negative.a_scales[seen.group] == seen.positive.a_scales[seen.group] | 0x80
    assert seen.negative.dequantized != seen.positive.dequantized


# ------------------------------------------------------------------ bits


def _value(row, digits: str) -> Fraction:
    return row.sign * sum((Fraction(2) ** (row.high - i) for i, d in enumerate(digits) if d == "1"), Fraction(0))


@pytest.mark.parametrize("kind", tc.KINDS)
@pytest.mark.parametrize("name", ["usual", "even", "huge", "negative"])
def test_rows_of_bits_are_the_terms(name, kind):
    """What is drawn as kept is what enters the sum, what is drawn as dropped is what is lost."""
    seen = tc.explain(replace(tc.PRESETS[name], kind=kind))
    chart = tc.bit_chart(seen.trace)
    for row, term in zip(chart.rows, seen.trace.terms, strict=False):
        assert _value(row, row.digits) == term.value
        if row.high >= row.cut:
            assert _value(row, row.kept) == tc.kept(seen.trace, term)
        else:
            assert row.kept == ""
            assert term.aligned == 0
        assert chart.exponent - row.exponent == term.shift
    total, result = chart.rows[-2:]
    assert total.dropped == ""
    assert _value(result, result.kept) == Fraction(float(seen.result))
    assert len(result.kept) <= 24
    assert chart.first > max(row.high for row in chart.rows if row.sign) - 1
    assert chart.last <= chart.cut


def test_a_special_value_has_no_bits():
    assert tc.bit_chart(tc.explain(tc.PRESETS["nan"]).trace) is None
    assert tc.term_rows(tc.explain(tc.PRESETS["nan"])) == []


def test_bits_of_all_zeros_and_of_tiny_results():
    zero = tc.bit_chart(tc.explain(replace(tc.DEFAULT, a="0" * 64, c=0.0)).trace)
    assert [row.sign for row in zero.rows] == [0] * 7
    # A zero dot keeps its scales' exponents, so only zero scales leave a tiny accumulator alone.
    lost = tc.explain(replace(tc.DEFAULT, a="0" * 64, c=2.0**-149))
    assert lost.result == 0
    assert tc.outcome(lost) == "nearer"
    tiny = tc.bit_chart(tc.explain(replace(tc.DEFAULT, sa="00000000", sb="00000000", c=2.0**-149)).trace)
    assert tiny.rows[-1].kept == "1"
    assert tiny.rows[-1].cut == -149


def test_rows_to_download(usual):
    rows = tc.term_rows(usual)
    assert [row["term"] for row in rows] == ["0", "1", "2", "3", "c"]
    assert all(row["kept"] + row["dropped"] == row["significand"] * 2.0 ** row["exponent"] for row in rows)
    elements = tc.element_rows(usual)
    for group in range(4):
        assert sum(row["product"] for row in elements if row["group"] == group) == rows[group]["dot"]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", tc.PRESETS)
def test_a_step_is_described(name, lang):
    seen = tc.explain(tc.PRESETS[name])
    said = tc.describe_step(seen, lang)
    if tc.outcome(seen) in ("nearer", "farther"):
        off = abs(Fraction(float(seen.result)) - seen.trace.exact)
        assert tc.three(float(off)) in said
    if name == "nan":
        assert "0x7FFFFFFF" in said


# ------------------------------------------------------------------ the histogram


@pytest.mark.parametrize("against", plots.AGAINST)
def test_every_output_is_counted_once(compared, against):
    record = plots.difference_histogram(compared, against)
    assert sum(record.counts) == record.outputs == tc.ROWS * tc.COLUMNS
    assert record.counts[plots.REACH] == record.equal
    assert sum(record.counts[: plots.REACH]) == record.toward
    off = compared.against_float32() if against == "float32" else compared.against_exact(compared.tensor_core)
    assert record.counts[plots.REACH - 1] == ((off < 0) & (off >= -1)).sum()


def test_the_page_s_claim_about_direction(compared):
    """Signed data: most outputs lie nearer zero, not all.  Without negative products, against the exact sum: all."""
    for against in plots.AGAINST:
        assert plots.direction(plots.difference_histogram(compared, against)) == "mostly"
    positive = tc.sample_product(1024, 8, "positive")
    assert plots.direction(plots.difference_histogram(positive, "exact")) == "always"
    assert plots.difference_histogram(positive, "float32").away > 0


def test_even_scales_lose_nothing():
    """With scales of one size a thousand products still fit float32: nothing to cut, nothing to round."""
    record = plots.difference_histogram(tc.sample_product(1024, 0, "signed"), "exact")
    assert plots.direction(record) == "equal"


def test_the_sample_is_seeded(compared):
    again = tc.sample_product(1024, 8, "signed")
    assert np.array_equal(again.tensor_core.view(np.uint32), compared.tensor_core.view(np.uint32))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("against", plots.AGAINST)
def test_the_histogram_is_drawn_and_described(compared, theme, lang, against):
    record = plots.difference_histogram(compared, against)
    toward, equal, away = plots.difference_figure(record, theme=theme, lang=lang).to_dict()["data"]
    assert (*toward["y"], *equal["y"], *away["y"]) == record.counts
    assert away["marker"]["pattern"]["shape"] != toward["marker"]["pattern"]["shape"]  # never told by colour alone
    said = plots.describe_difference(record, lang)
    assert all(f"{number:,}" in said for number in (record.toward, record.equal, record.away))
    assert sum(row["outputs"] for row in plots.histogram_rows(record)) == record.outputs
