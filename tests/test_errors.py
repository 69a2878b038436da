"""Every error that the code raises is described in both languages, with the same placeholders."""

import pickle
import re
import string
import tomllib
from pathlib import Path

import pytest

from nvfp4viz import errors

PACKAGE = Path(errors.__file__).parent
ROOT = PACKAGE.parent
RAISED = re.compile(
    r"(?:NvError|FormatError|CheckpointError|ModelError|ServingError|InputError|DeviceError)\(\s*\"([a-z0-9_.\-]+)\""
)


def raised_codes() -> set[str]:
    sources = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "pages").glob("*.py")]
    return {code for path in sources for code in RAISED.findall(path.read_text(encoding="utf-8"))}


def placeholders(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_every_raised_code_is_described():
    missing = raised_codes() - set(errors.error_texts("en"))
    assert not missing


@pytest.mark.parametrize("code", sorted(errors.error_texts("en")))
def test_languages_say_the_same(code):
    english, chinese = errors.error_texts("en")[code], errors.error_texts("zh")[code]
    assert set(english) == set(chinese) == {"what", "why", "next"}
    together = {
        lang: set().union(*map(placeholders, text.values())) for lang, text in (("en", english), ("zh", chinese))
    }
    assert together["en"] == together["zh"]
    assert re.search(r"[一-鿿]", "".join(chinese.values())), "the Chinese text is not Chinese"


def test_both_languages_have_the_same_codes():
    assert set(errors.error_texts("en")) == set(errors.error_texts("zh"))


def test_an_error_survives_pickling():
    """Errors cross process and cache borders."""
    for code, text in errors.error_texts("en").items():
        params = {name: 1 for part in text.values() for name in placeholders(part)}
        try:
            error = errors.NvError(code, **params)
        except (ValueError, TypeError):
            continue  # a placeholder with a string format
        again = pickle.loads(pickle.dumps(error))
        assert (again.code, again.params, str(again)) == (error.code, error.params, str(error))


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        ("{n} files, {m} tensors", {"n": 1, "m": 2}, "1 file, 2 tensors"),
        ("{n} files", {"n": 0}, "0 files"),
        ("{n} files", {"n": "1"}, "1 file"),
        ("{n} files", {"n": 11}, "11 files"),
        ("{n} scale slots are unusable", {"n": 1}, "1 scale slot is unusable"),
        ("{n} ordinary layers have no {role}", {"n": 1, "role": "scale"}, "1 ordinary layer has no scale"),
        ("{n} of {of} slots hold", {"n": 1, "of": 4}, "1 of 4 slots hold"),
        ("{layer} holds {n} entries", {"layer": 1, "n": 1}, "1 holds 1 entry"),
        ("Layer {layer} does", {"layer": 1}, "Layer 1 does"),
    ],
)
def test_one_of_a_thing_is_singular_in_english(template, values, text):
    assert errors.fill(template, values) == text


def test_every_english_text_that_counts_knows_its_singular():
    """A placeholder before a plural noun that the list lacks would read "1 files" one day."""
    names = ["nvfp4viz/content/en", "nvfp4viz/content/en/pages"]
    texts = [path.read_text(encoding="utf-8") for name in names for path in sorted((ROOT / name).glob("*.toml"))]
    counted = re.compile(
        r"\{(n|m|count|slots|files|tensors|layers|experts|peers|characters|tokens|pads)\} ((?!is|has|holds)[a-z]+s)\b"
    )
    plural = {found[2] for text in texts for found in counted.finditer(text)}
    unknown = {noun for noun in plural if errors.fill(f"{{n}} {noun}", {"n": 1}) == f"1 {noun}"}
    assert unknown == set()


COUNTS = ("count", "slots", "more", "others", "modules", "pairs", "shards", "gaps", "waiting")
# A plural noun or verb that a one governs; what follows "of the" or "of X" is another subject.
PLURAL = re.compile(
    rf"\b1(?: (?!of )[\w()/-]+){{0,2}}? (?:{'|'.join(errors.COUNTED.split())}|others)\b|"
    r"\b1 (?!of |(?:(?! of the)[^.,;:()])* up to )[^.,;:()]*?\b"
    r"(?:are|were|have|do|hold|store|give|get|stand|belong|look|show|need|lie)\b"
)
# Pairs of steps, and all slots of a role, are never one.
MANY = ("One instruction step multiplies exactly", "All {slots} slots")


def counting():
    """(file, text's place, English text, one count of it) of everything that the library says in sentences."""
    for file in ("findings*", "errors_*", "report", "cli", "coverage"):
        for path in sorted((errors.CONTENT / "en").glob(f"{file}.toml")):
            for place, text in leaves(tomllib.loads(path.read_text(encoding="utf-8"))):
                for name in COUNTS:
                    if f"{{{name}}}" in text and not text.startswith(MANY):
                        yield pytest.param(text, name, id=f"{path.stem}-{place}-{name}")


def leaves(node, place=""):
    for key, item in node.items():
        if isinstance(item, dict):
            yield from leaves(item, f"{place}{key}.")
        else:
            yield f"{place}{key}", str(item)


@pytest.mark.parametrize(("text", "name"), list(counting()))
def test_verbs_and_pronouns_agree_with_one_and_with_two(text, name):
    places = set(re.findall(r"{(\w+)[}:]", text))
    one, two = (errors.fill(text, {**dict.fromkeys(places, "X"), name: number}) for number in (1, 2))
    assert "<" not in one + two or "|" not in one + two
    for sentence in re.split(r"(?<=[.;:]) ", one):
        assert not PLURAL.search(sentence), sentence
        if sentence.startswith("1 "):
            assert not re.search(r"\b(?:they|(?<!of )them|their)\b", sentence), sentence
    assert not re.match(r"2 (?:[\w-]+ ){0,2}(?:is|was|has|does)\b", two), two
