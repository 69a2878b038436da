"""The glossary has what pages ask for and what their texts name, in both languages, and knows where."""

import ast
import re

import pytest

from nvfp4viz.figures.words import LANGUAGES, catalogue
from nvfp4viz.ui import glossary_terms
from nvfp4viz.ui.registry import PAGES, ROOT


def words_of(text: str) -> list[str]:
    return text.split()


# Written in Latin letters in both languages, and no terms of this field.
EVERYDAY = words_of("CPU GPU JSON CSV HTML ZIP HTTP ASCII GB TB ETag NumPy PyTorch")
# Makers, models, chips, data sets, and implementations that a table on their page explains.
PROPER = words_of(
    "NVIDIA AMD DeepSeek Qwen3 RTX DGX B200 H100 H200 A100 CNN DailyMail V1 V2 V3 V4 TRT CuteDSL SiTU DeltaNet"
)
# Bit patterns and units, written out where they stand; E8M0 is what safetensors calls UE8M0.
PATTERNS = words_of("EEEE EE MMM TFLOP E8M0")
# What headings and claims speak of in small letters; each must be found under one of the glossary's names.
SPOKEN = (
    *words_of("nibble mantissa exponent subnormal saturation swizzle calibration router expert token logits softmax"),
    *words_of("slot shard rank replica accumulator significand register target backend epilogue reciprocal"),
    *("block scale", "global scale", "residual stream", "grouped GEMM", "all-to-all", "load guard", "weight-only"),
)


def acronyms(language: str) -> set[str]:
    """Words of two capitals or of a capital and a digit in the texts of pages, code left out."""
    pages = {entry.id for entry in PAGES}
    found: set[str] = set()
    for key, text in catalogue(language).items():
        page = key.split(".")[0]
        if page in pages and not key.startswith("glossary.") and not key.endswith(".where"):
            prose = re.sub(r"`[^`]*`|\{[^}]*\}", " ", text)
            found |= set(re.findall(r"(?<![\w-])[A-Z][A-Za-z]*[A-Z0-9][A-Za-z0-9]*(?!\w)", prose))
    return found


def called(language: str) -> set[str]:
    return {name for term in glossary_terms.terms() for name in glossary_terms.names(term, language)}


@pytest.mark.parametrize("language", LANGUAGES)
def test_acronyms_of_both_languages_stand_in_the_glossary(language):
    spelled = acronyms("en") & acronyms("zh")
    known = {word for name in called(language) for word in re.split(r"[\s-]", name)}
    assert spelled - known - {*EVERYDAY, *PROPER, *PATTERNS} == set()


def test_what_is_exempt_occurs():
    """An exemption that nothing needs any more would hide a new word of that name."""
    assert {*EVERYDAY, *PROPER, *PATTERNS} - (acronyms("en") | acronyms("zh")) == set()


@pytest.mark.parametrize("word", SPOKEN)
def test_spoken_terms_stand_in_the_glossary(word):
    names = {name.lower() for name in called("en")}
    assert word.lower() in names
    assert any(word.lower() in text.lower() for key, text in catalogue("en").items() if not key.startswith("glossary."))


def asked_for() -> set[str]:
    """Every term that a source of ours asks for, wherever it stands; one that a variable names is a mistake here."""
    found: set[str] = set()
    for path in (*(ROOT / "pages").glob("*.py"), *(ROOT / "nvfp4viz/ui").glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        given = [argument for call in calls for argument in call.args if isinstance(argument, ast.Tuple)]
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "glossary":
                for argument in call.args:
                    handed_on = isinstance(argument, ast.Starred)
                    assert handed_on or isinstance(argument, ast.Constant), path
                    named = [ast.literal_eval(one) for one in given if handed_on and is_terms(one)]
                    assert named or not handed_on, path
                    found |= {term for terms in named for term in terms} if handed_on else {argument.value}
    return found


def is_terms(node: ast.Tuple) -> bool:
    known = glossary_terms.terms()
    return all(isinstance(part, ast.Constant) and part.value in known for part in node.elts)


def test_each_term_that_a_page_names_stands_there_in_both_languages():
    asked = asked_for()
    assert len(asked) > 30
    for language in LANGUAGES:
        for term in asked:
            assert catalogue(language)[f"glossary.{term}.term"].strip()
            assert catalogue(language)[f"glossary.{term}.text"].strip()


def test_each_term_that_a_source_asks_for_is_found_on_a_page():
    """None is lost by following imports from the pages."""
    assert {term for entry in PAGES for term in glossary_terms.explained_on(entry.id)} == asked_for()


def test_terms_are_followed_into_the_parts_of_a_page():
    assert glossary_terms.explained_on("e2m1") == ("e2m1", "tie", "saturation", "subnormal")
    assert {"swizzle", "partial_sum", "sqnr"} <= set(glossary_terms.explained_on("blocks"))
    assert "swizzle" not in glossary_terms.explained_on("mxfp4")


def test_a_term_knows_its_pages_in_reading_order():
    uses = glossary_terms.uses()
    assert list(uses) == list(glossary_terms.terms())
    assert uses["swizzle"].explained == ("blocks",)
    assert "mega_kernel" in uses["swizzle"].named
    order = [entry.id for entry in PAGES]
    for found in uses.values():
        assert list(found.explained) == sorted(found.explained, key=order.index)
        assert list(found.named) == sorted(found.named, key=order.index)
        assert not set(found.explained) & set(found.named)
        assert found.pages, "a term that no page uses"
        assert "glossary" not in found.pages


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ("two ranks wait", True),
        ("Rank by rank", True),
        ("frank words", False),
        ("rank-local", True),
        ("two-rank", False),
    ],
)
def test_whole_words_count(text, hit):
    assert bool(glossary_terms._pattern(("rank",)).search(text)) == hit


def test_names_are_told_apart():
    assert glossary_terms.names("gate_up", "en") == ("gate and up", "w1", "w3", "w13")
    assert glossary_terms.names("weight_only", "zh") == ("仅权重", "W4A16")
    assert glossary_terms.names("input_scale", "en") == ("input_scale",)


def test_rows_hold_both_languages():
    rows = {row["term"]: row for row in glossary_terms.rows()}
    assert rows["swizzle"]["term_zh"] == "重排（swizzle）"
    assert rows["swizzle"]["explained_on"] == "blocks"
