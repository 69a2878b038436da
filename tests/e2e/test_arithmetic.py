"""What the components compute in the browser, held against the library bit by bit."""

import base64
import json
import math

import numpy as np
import pytest

from nvfp4viz import formats
from nvfp4viz.ui.bit_editor import cards, plain
from nvfp4viz.ui.components import read
from nvfp4viz.ui.numbers import four, hex_f32

SCALARS = {
    "e2m1": formats.e2m1_code_scalar,
    "e4m3": formats.e4m3_byte_scalar,
    "ue8m0": formats.ue8m0_byte_scalar,
    "bf16": formats.bf16_bits_scalar,
}


@pytest.fixture(scope="module")
def script(browser):
    """An empty page with the two arithmetic files loaded."""
    page = browser.new_page()
    page.add_script_tag(content=read("bit_editor", "arithmetic.js"))
    page.add_script_tag(content=read("packer", "arithmetic.js"))
    page.add_script_tag(content=read("dataflow", "arithmetic.js"))
    page.evaluate("cards => { window.cards = Object.fromEntries(cards.map(card => [card.id, card])); }", cards())
    yield page
    page.close()


def _numbers(info: formats.FormatInfo) -> list[float]:
    """Every value of the format, every midpoint, both neighbours of each as float32, and what lies outside."""
    codes = range(0, 1 << info.bits, 37 if info.bits == 16 else 1)
    values = [formats.explain(info, code).value for code in codes]
    finite = np.unique(np.array([v for v in values if math.isfinite(v)], np.float32))
    if info is formats.BF16:
        following = [formats.explain(info, code + 1).value for code in codes if code + 1 < 1 << 16]
        pairs = np.array(list(zip(values, following, strict=False)), np.float64)
        middle = pairs[np.isfinite(pairs).all(axis=1)].mean(axis=1)
    else:
        middle = (finite[1:].astype(np.float64) + finite[:-1]) / 2
    exact = np.concatenate([finite, middle.astype(np.float32)])
    with np.errstate(over="ignore", under="ignore"):
        near = [np.nextafter(exact, np.float32(side)) for side in (np.inf, -np.inf)]
    outside = np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-45, 2.6, 0.1])
    return [float(x) for x in np.concatenate([exact, *near, outside])]


@pytest.mark.parametrize("name", SCALARS)
def test_encoding_in_the_browser_is_the_library_s(script, name):
    numbers = _numbers(formats.FORMATS[name])
    found = script.evaluate(
        "([name, numbers]) => numbers.map(x => encode(cards[name], toNumber(x)))", [name, [plain(x) for x in numbers]]
    )
    expected = [SCALARS[name](x) for x in numbers]
    wrong = [(x, hex(f), hex(e)) for x, f, e in zip(numbers, found, expected, strict=True) if f != e]
    assert wrong == []


@pytest.mark.parametrize("name", SCALARS)
def test_decoding_in_the_browser_is_the_library_s(script, name):
    info = formats.FORMATS[name]
    found = script.evaluate(
        """name => Array.from({ length: 2 ** cards[name].width }, (_, code) => {
             const value = decode(cards[name], code);
             return Number.isNaN(value) ? "nan" : Object.is(value, -0) ? "-0" : String(value);
           })""",
        name,
    )
    for code, text in enumerate(found):
        value = formats.explain(info, code).value
        if math.isnan(value):
            assert text == "nan"
        else:
            assert float(text) == value
            assert math.copysign(1, float(text)) == math.copysign(1, value)


@pytest.mark.parametrize("name", SCALARS)
def test_fields_in_the_browser_are_the_library_s(script, name):
    info = formats.FORMATS[name]
    found = json.loads(
        script.evaluate(
            """name => JSON.stringify(Array.from({ length: 2 ** cards[name].width }, (_, code) =>
                 Object.fromEntries(fieldsOf(cards[name], code).map(field => [field.role, field.value]))))""",
            name,
        )
    )
    for code, fields in enumerate(found):
        record = formats.explain(info, code)
        assert fields["E"] == record.exponent_field
        assert fields.get("S", 0) == record.sign
        assert fields.get("M", 0) == record.mantissa_field


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "ue8m0"])
def test_a_bin_on_the_number_line_holds_exactly_what_rounds_to_its_value(script, name):
    """The drawn ends, filled or hollow, against the library at each end and on both sides of it."""
    info = formats.FORMATS[name]
    last = next(card["maxCode"] for card in cards() if card["id"] == name)
    bins = script.evaluate(
        """([name, last]) => Array.from({ length: last + 1 }, (_, m) => {
             const bin = binOf(cards[name], m);
             return [bin.low, bin.lowClosed, bin.high === Infinity ? null : bin.high, bin.highClosed];
           })""",
        [name, last],
    )
    to_code = SCALARS[name]
    for code, (low, low_closed, high, high_closed) in enumerate(bins):
        if code:
            assert (to_code(low) == code) is low_closed
            assert to_code(float(np.nextafter(np.float32(low), np.float32(np.inf)))) == code
        if high is not None:
            assert (to_code(high) == code) is high_closed
            assert to_code(float(np.nextafter(np.float32(high), np.float32(0)))) == code
        else:
            assert to_code(3e38) == code
            assert info.max_value == formats.explain(info, code).value


def test_what_the_editor_says_about_a_number_is_true(script):
    """Tie, nearest, saturated, exact: the word in the sentence against the library's scalar reference."""
    numbers = [-7.0, -6.0, -5.0, -2.5, -0.2, 0.25, 0.75, 1.3, 2.5, 3.5, 4.999, 5.0, 6.0, 6.5]
    found = script.evaluate(
        """numbers => numbers.map(x => {
             const rounding = roundingOf(cards.e2m1, x);
             return [rounding.kind, rounding.lower, rounding.upper, rounding.value];
           })""",
        numbers,
    )
    values = sorted({formats.explain(formats.E2M1, code).value for code in range(16)})
    for x, (kind, lower, upper, value) in zip(numbers, found, strict=True):
        assert value == formats.explain(formats.E2M1, formats.e2m1_code_scalar(x)).value
        if x in values:
            assert kind == "exact"
        elif abs(x) > 6:
            assert kind == "saturated"
        else:
            assert lower == max(v for v in values if v < x)
            assert upper == min(v for v in values if v > x)
            halfway = (lower + upper) / 2 == x
            assert (kind == "tie") is halfway
            assert halfway or kind == ("tozero" if value == 0 else "nearest")


def test_packing_in_the_browser_is_the_library_s(script):
    rng = np.random.default_rng(0)
    for _ in range(50):
        codes = rng.integers(0, 16, 8, dtype=np.uint8)
        text = codes.tolist()
        packed = script.evaluate("codes => [packBytes(codes), packWord(codes)]", text)
        assert packed[0] == formats.pack_nibbles(codes).tolist()
        assert packed[1] == int(formats.pack_u32(codes)[0])
        assert script.evaluate("bytes => unpackBytes(bytes)", packed[0]) == text
        assert script.evaluate("word => unpackWord(word)", packed[1]) == text


@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_recorded_bits_are_written_as_the_library_writes_them(script, kind):
    """Every BF16, and float32 bits of all sizes with the numbers around powers of ten; four digits, ties to even."""
    if kind == "bf16":
        bits = np.arange(1 << 16, dtype=np.uint32)
        values = (bits << 16).view(np.float32)
    else:
        rng = np.random.default_rng(0)
        tens = np.float32([sign * 10.0**power for power in range(-12, 13) for sign in (1, -1)])
        near = [np.nextafter(tens, np.float32(side)) for side in (0, np.inf, -np.inf)]
        ties = np.float32([1.0625, 0.10625, 12344.5, 12345.5, 2097.5, 9999.5, 99995.0, 1000.5])
        random = rng.integers(0, 1 << 32, 20_000, dtype=np.uint32)
        bits = np.concatenate([random, *(part.view(np.uint32) for part in (tens, *near, ties))])
        values = bits.view(np.float32)
    found = script.evaluate(
        """([kind, bits]) => bits.map(word => [four(floatOf(word, kind)), hex(word, 8)])""", [kind, bits.tolist()]
    )
    wrong = [
        (hex(word), text, four(value)) for word, value, (text, _) in zip(bits, values, found, strict=True)
        if text != four(value)
    ]  # fmt: skip
    assert wrong == []
    if kind == "f32":
        assert all(text == f"0x{word:08X}" for word, (_, text) in zip(bits, found, strict=True))
        assert found[-1][1] == hex_f32(values[-1])


def test_recorded_codes_are_unpacked_as_the_library_unpacks_them(script):
    packed = np.random.default_rng(1).integers(0, 256, 64, dtype=np.uint8)
    codes = formats.unpack_nibbles(packed)
    for block in range(8):
        found = script.evaluate("([packed, first]) => codesOf(packed, first, 16)", [packed.tolist(), 16 * block])
        assert found == codes[16 * block : 16 * block + 16].tolist()


@pytest.mark.parametrize(("kind", "dtype"), [("u8", np.uint8), ("bf16", np.uint16), ("f32", np.uint32)])
def test_recorded_words_arrive_as_they_were_sent(script, kind, dtype):
    sent = np.random.default_rng(2).integers(0, np.iinfo(dtype).max, 300, dtype=dtype, endpoint=True)
    text = base64.b64encode(sent.tobytes()).decode("ascii")
    assert script.evaluate("([text, kind]) => Array.from(words(text, kind))", [text, kind]) == sent.tolist()
