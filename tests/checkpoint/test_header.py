"""Every malformed class of a safetensors file, with the reference package's verdict as the oracle."""

import json
import re
import struct

import numpy as np
import pytest
import safetensors

from nvfp4viz import errors
from nvfp4viz.checkpoint import Tensor, columns, file_bytes, read_header, tensor
from nvfp4viz.checkpoint.header import HEADER_LIMIT
from tests.checkpoint.checkpoint_fixtures import base, entry, raw_file

FOUR = b"\0" * 4


def read(data: bytes):
    return read_header("model.safetensors", len(data), lambda begin, end: data[begin:end])


def reference_accepts(data: bytes) -> bool:
    try:
        safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return False
    return True


def nested(depth: int) -> bytes:
    plain = json.dumps(entry(), separators=(",", ":"))[:-1]
    return b'{"a":' + plain.encode() + b',"x":' + b"[" * depth + b"]" * depth + b"}}"


def a(text: str) -> bytes:
    """A header with one entry ``a`` written as given."""
    return b'{"a":' + text.encode() + b"}"


ACCEPTED = {
    "one tensor": raw_file({"a": entry()}, FOUR),
    "metadata": raw_file({"__metadata__": {"format": "pt"}, "a": entry()}, FOUR),
    "metadata at the end": raw_file({"a": entry(), "__metadata__": {"format": "pt"}}, FOUR),
    "no metadata value": raw_file({"__metadata__": None, "a": entry()}, FOUR),
    "metadata key twice": raw_file(b'{"__metadata__":{"k":"1","k":"2"}}'),
    "no tensors": raw_file({}),
    "scalar": raw_file({"a": entry(shape=())}, FOUR),
    "empty tensor": raw_file({"a": entry(shape=(0,), offsets=(0, 0))}),
    "empty tensor between": raw_file(
        {"a": entry(), "b": entry(shape=(0, 5), offsets=(4, 4)), "c": entry(offsets=(4, 8))}, FOUR * 2
    ),
    "another order": raw_file({"b": entry(offsets=(4, 8)), "a": entry()}, FOUR * 2),
    "extra field": raw_file({"a": entry(note={"dtype": [1, None]})}, FOUR),
    "entry as array": raw_file(a('["F32",[1],[0,4]]'), FOUR),
    "type as object": raw_file(a('{"dtype":{"F32":null},"shape":[1],"data_offsets":[0,4]}'), FOUR),
    "leading spaces": raw_file(b"  " + json.dumps({"a": entry()}).encode(), FOUR),
    "trailing line feed": raw_file(json.dumps({"a": entry()}).encode() + b"\n", FOUR),
    "same key twice": raw_file(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        FOUR,
    ),
    "same key twice, once escaped": raw_file(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"\\u0061":'
        b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        FOUR,
    ),
    "name with escapes": raw_file({'q"\\\n\x01é': entry()}, FOUR),
    "empty name": raw_file({"": entry()}, FOUR),
    "tensor named like a field": raw_file({"data_offsets": entry()}, FOUR),
    "F4": raw_file({"a": entry("F4", (2,), (0, 1))}, b"\0"),
    "F6": raw_file({"a": entry("F6_E2M3", (4,), (0, 3))}, b"\0" * 3),
    "misaligned": raw_file(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} ', FOUR),
    "misaligned by order": raw_file({"b": entry("U8", (1,), (0, 1)), "a": entry(offsets=(1, 5))}, b"\0" * 5),
    "deep extra field": raw_file(nested(125), FOUR),
    "wide empty": raw_file({"a": entry(shape=(2**63, 0), offsets=(0, 0))}),
}

REFUSED = {
    "empty file": (b"", "container.not-safetensors.empty"),
    "five bytes": (b"\x05\0\0\0\0", "container.not-safetensors.too-short"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4963271\n",
        "container.not-safetensors.lfs-pointer",
    ),
    "HTML": (b"\n<!DOCTYPE html><html><body>404</body></html>", "container.not-safetensors.html"),
    "XML with BOM": (b"\xef\xbb\xbf<?xml version='1.0'?><Error/>", "container.not-safetensors.html"),
    "PyTorch zip": (b"PK\x03\x04\0\0\x08\x08\0\0archive/data.pkl", "container.not-safetensors.zip"),
    "pickle": (b"\x80\x02}q\0X\x04\0\0\0name", "container.not-safetensors.pickle"),
    "gzip": (b"\x1f\x8b\x08\0\0\0\0\0\0\x03abcdef", "container.not-safetensors.compressed"),
    "GGUF": (b"GGUF\x03\0\0\0" + b"\0" * 32, "container.not-safetensors.gguf"),
    "JSON": (b'{"weight_map": {"a": "b"}}', "container.not-safetensors.json"),
    "npy": (b"\x93NUMPY\x01\0v\0{'descr'", "container.not-safetensors.numpy"),
    "text": (b"Access to model is restricted", "container.not-safetensors.text"),
    "header above the limit": (raw_file(b"{}", length=132_095_296), "container.header-too-large"),
    "one above the limit": (raw_file(b"{}", length=HEADER_LIMIT + 1), "container.header-too-large"),
    "at the limit, cut": (raw_file(b"{}", length=HEADER_LIMIT), "container.truncated.header"),
    "wild length": (raw_file(b"{}", length=2**64 - 1), "container.header-too-large"),
    "length of no header": (raw_file(b"\x01\x02\x03", length=1000), "container.invalid-header.length"),
    "no header": (raw_file(b""), "container.invalid-header.json"),
    "cut in the header": (raw_file({"a": entry()}, FOUR)[:40], "container.truncated.header"),
    "cut in the data": (raw_file({"a": entry()}, FOUR)[:-1], "container.truncated"),
    "list": (raw_file([]), "container.invalid-header.object"),
    "two values": (raw_file(b"{} {}"), "container.invalid-header.json"),
    "trailing comma": (raw_file(b'{"__metadata__":{},}'), "container.invalid-header.json"),
    "NaN": (
        raw_file(a('{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":NaN}'), FOUR),
        "container.invalid-header.json",
    ),
    "number out of range": (
        raw_file(a('{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1e999}'), FOUR),
        "container.invalid-header.json",
    ),
    "too deep": (raw_file(nested(126), FOUR), "container.invalid-header.json"),
    "far too deep": (raw_file(nested(100_000), FOUR), "container.invalid-header.json"),
    "NUL padding": (raw_file(json.dumps({"a": entry()}).encode() + b"\0\0", FOUR), "container.invalid-header.json"),
    "byte order mark": (raw_file(b"\xef\xbb\xbf{}"), "container.invalid-header.bom"),
    "wrong UTF-8": (raw_file(b'{"\xff":{}}'), "container.invalid-header.utf8"),
    "half a surrogate": (raw_file(b'{"\\ud800":{}}'), "container.invalid-header.utf8"),
    "metadata of numbers": (raw_file({"__metadata__": {"a": 1}}), "container.invalid-header.metadata"),
    "metadata list": (raw_file({"__metadata__": []}), "container.invalid-header.metadata"),
    "metadata twice": (raw_file(b'{"__metadata__":{},"__metadata__":{}}'), "container.invalid-header.metadata"),
    "no dtype": (raw_file(a('{"shape":[1],"data_offsets":[0,4]}'), FOUR), "container.invalid-header.entry"),
    "dtype twice": (
        raw_file(a('{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}'), FOUR),
        "container.invalid-header.entry",
    ),
    "null entry": (raw_file({"a": None}), "container.invalid-header.entry"),
    "three offsets": (raw_file({"a": entry(offsets=(0, 4, 4))}, FOUR), "container.invalid-header.entry"),
    "unknown dtype": (raw_file({"a": entry("F128")}, FOUR), "container.invalid-header.dtype"),
    "unknown dtype, superseded": (
        raw_file(b'{"a":{"dtype":"Z","shape":[1],"data_offsets":[0,4]},' + a(json.dumps(entry()))[1:], FOUR),
        "container.invalid-header.dtype",
    ),
    "negative size": (raw_file({"a": entry(shape=(-1,))}, FOUR), "container.invalid-header.number"),
    "minus zero": (
        raw_file(a('{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}'), FOUR),
        "container.invalid-header.number",
    ),
    "float size": (raw_file({"a": entry(shape=(1.0,))}, FOUR), "container.invalid-header.number"),
    "true as size": (raw_file({"a": entry(shape=(True,))}, FOUR), "container.invalid-header.number"),
    "size above 64 bits": (raw_file({"a": entry(shape=(2**64, 0), offsets=(0, 0))}), "container.invalid-header.number"),
    "overflow": (raw_file({"a": entry(shape=(2**40, 2**40))}, FOUR), "container.invalid-header.overflow"),
    "overflow before a zero": (
        raw_file({"a": entry(shape=(2**40, 2**40, 0), offsets=(0, 0))}),
        "container.invalid-header.overflow",
    ),
    "half a byte": (raw_file({"a": entry("F4", (3,), (0, 2))}, b"\0\0"), "container.invalid-header.half-byte"),
    "backwards": (raw_file({"a": entry(shape=(0,), offsets=(4, 0))}, FOUR), "container.invalid-header.offsets"),
    "size against shape": (raw_file({"a": entry(shape=(2,))}, FOUR), "container.invalid-header.size"),
    "hole": (raw_file({"a": entry(), "b": entry(offsets=(8, 12))}, FOUR * 3), "container.hole"),
    "same key twice, leaving a hole": (
        raw_file(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            FOUR * 2,
        ),
        "container.hole",
    ),
    "offsets beyond any file": (
        raw_file({"a": entry(offsets=(2**63, 2**63 + 4))}, FOUR),
        "container.invalid-header.far",
    ),
    "hole at the start": (raw_file({"a": entry(offsets=(4, 8))}, FOUR * 2), "container.hole"),
    "overlap": (raw_file({"a": entry(), "b": entry(offsets=(2, 6))}, FOUR * 2), "container.overlap"),
    "same bytes": (raw_file({"a": entry(), "b": entry()}, FOUR), "container.overlap"),
    "empty inside another": (
        raw_file({"a": entry(), "b": entry(shape=(0,), offsets=(2, 2))}, FOUR),
        "container.overlap",
    ),
    "trailing bytes": (raw_file({"a": entry()}, FOUR + b"x"), "container.trailing-bytes"),
    "trailing bytes, no tensors": (raw_file({}, b"x"), "container.trailing-bytes"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_the_reference_accepts_is_read(name):
    data = ACCEPTED[name]
    assert reference_accepts(data)
    header = read(data)
    assert header.valid, header.problems
    theirs = {key: (item["dtype"], item["shape"]) for key, item in safetensors.deserialize(data)}
    assert {key: (item.dtype, list(item.shape)) for key, item in header.entries.items()} == theirs


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_reference_refuses_says_what_it_is(name):
    data, text = REFUSED[name]
    assert not reference_accepts(data)
    header = read(data)
    assert not header.valid
    errors_found = [problem for problem in header.problems if problem.severity == "error"]
    assert errors_found[0].text == text
    for language in ("en", "zh"):
        words = errors_found[0].error().text(language)
        assert "model.safetensors" in words["what"] + words["why"]
        assert "{" not in "".join(words.values())


def test_every_text_of_a_container_problem_has_its_test():
    """A message that no file here produces would be dead words."""
    tested = {text for _, text in REFUSED.values()} | {
        problem.text for data in ACCEPTED.values() for problem in read(data).problems
    }
    header_texts = {
        code
        for code in errors.error_texts("en")
        if code.startswith("container.")
        and not code.startswith(("container.index", "container.missing", "container.stale", "container.un"))
    } - {"container.duplicate-tensor", "container.not-safetensors.hdf5"}
    assert header_texts <= tested


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("same key twice", "container.duplicate-key"),
        ("same key twice, once escaped", "container.duplicate-key"),
        ("leading spaces", "container.invalid-header.leading-space"),
        ("trailing line feed", "container.invalid-header.unusual-json"),
        ("misaligned", "container.misaligned"),
        ("misaligned by order", "container.misaligned.order"),
        ("entry as array", "container.invalid-header.unusual-json"),
        ("type as object", "container.invalid-header.unusual-json"),
        ("no metadata value", "container.invalid-header.unusual-json"),
    ],
)
def test_what_the_format_forbids_and_the_reference_takes_is_reported(name, text):
    [problem] = [item for item in read(ACCEPTED[name]).problems if item.text == text]
    assert problem.severity == "warn"


@pytest.mark.parametrize(
    ("tensors", "data", "wrong"),
    [
        ({}, b"", False),
        ({"a": entry("U8", (3,), (0, 3))}, b"\0" * 3, False),
        ({"a": entry("F32", (0,), (0, 0))}, b"", False),
        ({"a": entry()}, FOUR, True),
    ],
)
def test_only_tensors_can_lie_badly(tensors, data, wrong):
    """A header of any length is followed by them; padded to 8 bytes it puts none of them astray."""
    text = json.dumps(tensors).encode()
    for spaces in range(8):
        raw = struct.pack("<Q", len(text) + spaces) + text + b" " * spaces + data
        found = {item.text for item in read(raw).problems}
        size = 4 if wrong else 1
        assert ("container.misaligned" in found) == bool((len(text) + spaces) % size)


def test_a_healthy_file_has_no_problem_at_all():
    header = read(file_bytes(base(), {"format": "pt"}))
    assert header.problems == ()
    assert header.metadata == {"format": "pt"}
    assert len(header.entries) == 4 * 3 * 4 + 1


def test_places_are_absolute():
    values = np.arange(6, dtype=np.float32)
    data = file_bytes({"a": tensor(values[:2]), "b": tensor(values[2:])})
    header = read(data)
    assert data[header.entries["b"].begin : header.entries["b"].end] == values[2:].tobytes()
    assert header.header_bytes % 8 == 0


def test_a_truncated_file_keeps_what_lies_inside():
    data = file_bytes({"a": tensor(np.zeros(4, np.float32)), "b": tensor(np.zeros(4, np.uint8))})
    header = read(data[:-3])
    assert list(header.entries) == ["a"]
    assert list(header.unreadable) == ["b"]
    [problem] = header.problems
    assert (problem.code, problem.params["missing"], problem.tensors) == ("container.truncated", 3, ("b",))


@pytest.mark.parametrize("brought", [0, 7, 8, 20])
def test_a_source_that_brings_less_than_it_promised_is_not_the_file_s_fault(brought):
    data = file_bytes(base())
    with pytest.raises(errors.CheckpointError) as caught:
        read_header("a", len(data), lambda begin, end: data[begin : min(end, brought)])
    assert caught.value.code == "source.changed"


def test_no_wild_length_is_read_or_allocated():
    """100 MB and above are refused on sight; below, never more than the file has."""
    asked = []

    def reader(begin: int, end: int) -> bytes:
        asked.append(end - begin)
        return data[begin:end]

    for length in (HEADER_LIMIT, HEADER_LIMIT + 1, 132_095_296, 2**63, 2**64 - 1):
        data = raw_file(b"{}", length=length)
        read_header("f", len(data), reader)
    assert max(asked) <= 512


@pytest.mark.parametrize("length", [123, 640, 640 + 2**16])
def test_a_damaged_safetensors_file_is_not_taken_for_something_else(length):
    """123 is the code of ``{`` and 640 begins as a pickle does."""
    data = struct.pack("<Q", length) + b"?" * length
    assert read(data).problems[0].text == "container.invalid-header.json"


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\u202eb", "line\nbreak", "x" * 5000])
def test_names_out_of_a_file_are_made_printable(name):
    [problem] = [item for item in read(raw_file({name: entry("BAD")}, FOUR)).problems if item.severity == "error"]
    shown = str(problem.params["tensor"])
    assert shown.isprintable()
    assert len(shown) <= 200


def mutate(rng: np.random.Generator, data: bytes) -> bytes:
    """One random damage: bytes changed, cut, inserted or doubled, mostly in the header; or a number replaced."""
    header_end = 8 + struct.unpack("<Q", data[:8])[0]
    kind = rng.integers(0, 7)
    at = int(rng.integers(0, min(len(data), header_end + 4)))
    if kind == 0:
        return data[:at] + bytes([int(rng.integers(0, 256))]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[: int(rng.integers(0, len(data)))]
    if kind == 3:
        return data + bytes(int(rng.integers(1, 9)))
    # The rest keeps the length right, so that the damage reaches the JSON.
    text = data[8:header_end]
    at = int(rng.integers(0, len(text)))
    if kind == 4:
        piece = [b",", b'"', b"{", b"}", b"[", b"]", b"0", b"-", b" ", b"\\", b"1.0", b"null", b"\xff"][
            rng.integers(0, 13)
        ]
        text = text[:at] + piece + text[at + int(rng.integers(0, 2)) :]
    elif kind == 5:
        other = int(rng.integers(0, len(text)))
        low, high = min(at, other), max(at, other)
        text = text[:high] + text[low:high] + text[high:]
    else:
        # Any number becomes a small one: sometimes still a legal header, as with another dtype's digit in a name.
        numbers = list(re.finditer(rb"\d+", text))
        if numbers:
            number = numbers[int(rng.integers(0, len(numbers)))]
            wild = [b"00", b"07", b"9" * 15, b"9" * 16, b"1" * 17, b"9" * 19, b"%d" % 2**64, b"1e2", b":", b"/"]
            new = wild[rng.integers(0, 10)] if rng.integers(0, 4) == 0 else str(rng.integers(0, 9)).encode()
            text = text[: number.start()] + new + text[number.end() :]
    return struct.pack("<Q", len(text)) + text + data[header_end:]


def assert_both_ways_agree(text: bytes) -> None:
    """What the fast way takes, the strict way takes and reads the same."""
    found = columns._fast(text)
    if found is not None:
        strict = columns._strict(text)
        assert (found.names, found.metadata) == (strict.names, strict.metadata)
        assert [found.kinds[k] for k in found.kind] == [strict.kinds[k] for k in strict.kind]
        assert found.begin.tolist() == strict.begin.tolist()
        assert found.end.tolist() == strict.end.tolist()
        assert not strict.duplicates
        assert not strict.oddities


def test_the_fast_way_takes_what_writers_write():
    """Both spellings, with and without metadata; else every checkpoint would be read the slow way unnoticed."""
    plain = file_bytes(base(), {"format": "pt"})
    headers = [plain[8 : 8 + struct.unpack("<Q", plain[:8])[0]]]
    headers += [json.dumps(json.loads(headers[0])).encode(), b"{}", b'{"__metadata__":{"k":"v"}}']
    headers.append(b'{"a":{"dtype":"F32","shape":[],"data_offsets":[1234567890123452,1234567890123456]}}')
    for text in headers:
        assert columns._fast(text) is not None, text[:80]
        assert_both_ways_agree(text)


def fuzz(count: int, seed: int) -> int:
    """Compare verdicts over mutated files; returns how many were accepted."""
    rng = np.random.default_rng(seed)
    sources = [
        file_bytes(
            {"a": tensor(np.zeros((2, 3), np.float32)), "b": Tensor("F8_E4M3", (4,), b"\0" * 4)}, {"format": "pt"}
        ),
        file_bytes(
            {"x": Tensor("U8", (3,), b"abc"), "y": Tensor("I64", (), b"\0" * 8), "z": Tensor("BF16", (0,), b"")}
        ),
        raw_file({"a": entry(), "__metadata__": {"k": "v"}, "b": entry(offsets=(4, 8), extra=[1, "é"])}, FOUR * 2),
        raw_file({"a": entry(), "b": entry("U8", (1, 2, 2), offsets=(4, 8))}, FOUR * 2),
        file_bytes({f"layers.{k}": Tensor("F32", (k, 5), bytes(20 * k)) for k in range(12)}),
    ]
    accepted = 0
    for number in range(count):
        data = sources[number % len(sources)]
        for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
            data = (
                mutate(rng, data) if len(data) > 10 and 0 < struct.unpack("<Q", data[:8])[0] <= len(data) - 8 else data
            )
        ours, theirs = read(data), reference_accepts(data)
        if ours.readable:
            assert_both_ways_agree(data[8 : ours.header_bytes])
        assert ours.valid == theirs, (data, ours.problems)
        if theirs:
            accepted += 1
            reference = {key: item["shape"] for key, item in safetensors.deserialize(data)}
            assert {key: list(item.shape) for key, item in ours.entries.items()} == reference, data
    return accepted


def test_two_thousand_mutated_files_get_the_reference_verdict():
    """No exceptions are needed: accept and refuse agree on every one."""
    assert 30 < fuzz(2_000, seed=1) < 1_500


@pytest.mark.slow
def test_twenty_thousand_mutated_files_get_the_reference_verdict():
    assert 300 < fuzz(20_000, seed=2) < 15_000


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ('{"é":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', b"NaN]"),
        ('{"NaN, 1e999":{"dtype":"F32","shape":[-Infinity],"data_offsets":[0,4]}}', b"-Infinity]"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,' + "9" * 5000 + "]}}", b"999"),
        ('{"a":{"x":12,"dtype":-1e999}}', b"-1e999"),
        ('{"\\\\ud800 \\ud83d\\ude00 \\ud800":{}}', b'\\ud800":'),
        ('{"a":{"x":"\\udc00"}}', b"\\udc00"),
        ('{"a":' + "[" * 200 + "]" * 200 + "}", b"[" * 74 + b"]"),
        ('{"ééé" 1}', b"1}"),
    ],
    ids=["constant", "minus", "digits", "range", "half a pair", "the other half", "depth", "syntax"],
)
def test_a_broken_header_is_told_with_its_place(text, at):
    """Somebody will look there with a hex editor, so that the place is one of bytes."""
    data = text.encode()
    file = struct.pack("<Q", len(data)) + data + FOUR
    assert not reference_accepts(file)
    [found] = read(file).problems
    assert found.text in ("container.invalid-header.json", "container.invalid-header.utf8")
    assert data[found.params["position"] :].startswith(at)
