"""The glossary has what pages ask for and what their texts name, in both languages, and knows where."""

import ast
import re
from pathlib import Path

import pytest

from nvfp4viz.figures.words import LANGUAGES, catalogue
from nvfp4viz.ui import glossary_terms
from nvfp4viz.ui.registry import PAGES, ROOT


def words_of(text: str) -> list[str]:
    return text.split()


# Written in Latin letters in both languages, and no terms of this field.
EVERYDAY = words_of("CPU GPU JSON CSV HTML ZIP HTTP ASCII KiB GB TB ETag NumPy PyTorch KeyError")
# Makers, models, chips, data sets, and implementations that a table on their page explains.
PROPER = words_of(
    "NVIDIA AMD DeepSeek Qwen3 RTX DGX B200 H100 H200 A100 CNN DailyMail TensorRT V1 V2 V3 V4 TRT CuteDSL SiTU DeltaNet"
)
# Bit patterns and units, written out where they stand; E8M0 is what safetensors calls UE8M0.
PATTERNS = words_of("EEEE EE MMM TFLOP E8M0")
# Terms of the field that the pages speak of; each must be found under one of the glossary's names.  One that a text
# brings in anew is added here; `test_words_that_recur_are_ordinary_or_explained` asks for it.
SPOKEN = (
    *words_of("nibble mantissa exponent subnormal saturation swizzle calibration router expert token logits softmax"),
    *words_of("slot shard rank replica accumulator significand register target backend epilogue reciprocal"),
    *words_of("dispatch combine all-reduce all-gather interleave padding Marlin Humming emulation sentinel sidecar"),
    *words_of("warp lane nat rotary convolution recurrence checkpoint quantisation code tensor kernel launch thread"),
    *words_of("multiprocessor allocator tile permute clamp weight activation layer export prompt vocabulary norm"),
    *words_of("attention hole route hash sigmoid softplus batch latency throughput gloo cuBLAS recipe loss rounding"),
    *words_of("overflow infinity twin block peer-max projection cast packing operand header compressed-tensors"),
    *words_of("mega-kernel transformer driver instruction CuteDSL seed magnitude redundant Hopper Blackwell"),
    *words_of("clipping head draft bandwidth float configuration dot doubling atomics quantiser held-out"),
    *("cut off", "thread block", "natural routing"),
    *("block scale", "global scale", "residual stream", "grouped GEMM", "all-to-all", "load guard", "weight-only"),
    *("tensor core", "tensor memory", "shared memory", "outlier channel", "partial sum", "correction bias"),
    *("encode scale", "decode scale", "stochastic rounding", "state-space layer", "rotary embedding"),
)
# Everyday words of the pages' texts, and names that need no entry; a word in neither place has to be put into one.
ORDINARY = frozenset((Path(__file__).parent / "ordinary_words.txt").read_text(encoding="utf-8").split())
OFTEN = 3
"""A word that stands so often in the texts of one page, or on two pages, is part of their language."""


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


def recurring() -> dict[str, set[str]]:
    """Words in small letters that recur in the English texts, with their pages; code and placeholders left out."""
    pages = {entry.id for entry in PAGES} - {"glossary"}
    where: dict[str, list[str]] = {}
    for key, text in catalogue("en").items():
        page = key.split(".")[0]
        if page in pages and not key.endswith(".where"):
            prose = re.sub(r"`[^`]*`|\{[^}]*\}|https?://\S+", " ", text)
            for word in re.findall(r"(?<![\w-])[A-Za-z][A-Za-z-]*[A-Za-z](?!\w)", prose):
                where.setdefault(word.lower(), []).append(page)
    return {word: set(found) for word, found in where.items() if len(found) >= OFTEN or len(set(found)) > 1}


def roots(word: str) -> set[str]:
    """A word, and what it may be a form of: plural, past, participle."""
    found = {word}
    for ending in ("s", "es", "d", "ed", "ing"):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            found.add(word.removesuffix(ending))
    return found | {root + "e" for root in set(found) if word.endswith("ing")}


def explained_words() -> set[str]:
    names = {name.lower() for name in called("en")}
    return names | {word for name in names for word in re.split(r"[\s-]", name)}


def test_words_that_recur_are_ordinary_or_explained():
    """A new technical word fails here until it has an entry; a new everyday one until `ordinary_words.txt` has it."""
    known = explained_words() | ORDINARY

    def is_known(word: str) -> bool:
        return bool(roots(word) & known) or ("-" in word and all(map(is_known, word.split("-"))))

    unknown = {word: pages for word, pages in recurring().items() if not is_known(word)}
    assert unknown == {}, "new words: a term needs an entry in the glossary, others a line in ordinary_words.txt"


def test_no_term_is_called_an_ordinary_word():
    """Such a line would keep the test above from noticing that the term's entry is gone."""
    assert {term for term in SPOKEN if term.lower() in ORDINARY} == set()
    assert sorted(ORDINARY) == list((Path(__file__).parent / "ordinary_words.txt").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("term", ["sentinel", "dispatch", "padding", "nat"])
def test_a_term_without_its_entry_is_noticed(term, monkeypatch):
    """The two tests above really fail: here with the entry of a term taken away."""
    entry = next(one for one in glossary_terms.terms() if term in glossary_terms.names(one, "en")[0].lower().split())
    others = tuple(one for one in glossary_terms.terms() if one != entry)
    monkeypatch.setattr(glossary_terms, "terms", lambda: others)
    with pytest.raises(AssertionError):
        test_spoken_terms_stand_in_the_glossary(term)
    with pytest.raises(AssertionError):
        test_words_that_recur_are_ordinary_or_explained()


def called(language: str) -> set[str]:
    return {name for term in glossary_terms.terms() for name in glossary_terms.names(term, language)}


@pytest.mark.parametrize("language", LANGUAGES)
def test_acronyms_of_both_languages_stand_in_the_glossary(language):
    spelled = acronyms("en") & acronyms("zh")
    known = {word for name in called(language) for word in re.split(r"[\s-]", name)}
    # A backend of vLLM's is named after its kernels, in capitals throughout.
    shouted = {word for word in spelled if word.isupper() and word.lower() in {name.lower() for name in known}}
    assert spelled - known - shouted - {*EVERYDAY, *PROPER, *PATTERNS} == set()


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
    calls_of = {
        path: [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        for path in (*(ROOT / "pages").glob("*.py"), *(ROOT / "nvfp4viz/ui").glob("*.py"))
    }
    # A part may be handed its terms by another source than the one that shows them.
    given = [argument for calls in calls_of.values() for call in calls for argument in call.args
             if isinstance(argument, ast.Tuple)]  # fmt: skip
    for path, calls in calls_of.items():
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


def test_a_page_also_uses_what_its_figures_and_borrowed_texts_say():
    uses = glossary_terms.uses()
    assert {"backends", "loading"} <= set(uses["load_guard"].named)  # Backends takes the remedies' names from the story
    assert "backends" in uses["modelopt"].named
    assert "online_quantisation" not in uses["sentinel"].named  # it borrows a control of Loading, not its texts


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


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_name_stands_for_two_terms(language):
    names = [name.lower() for term in glossary_terms.terms() for name in glossary_terms.names(term, language)]
    assert sorted(names) == sorted(set(names))


def test_what_is_cut_off_is_neither_clipped_nor_clamped():
    """Three things that one Chinese word would do for; a file that ends too early is none of them."""
    names = [glossary_terms.names(term, "zh")[0] for term in ("cut_off", "clipping", "clamp")]
    assert names == ["截断", "裁剪", "限幅"]
    said = {key: text for key, text in catalogue("zh").items() if "截断" in text and not key.startswith("glossary.")}
    assert {key.split(".")[0] for key in said} == {"tensor_core", "mega_kernel"}


def test_an_expert_is_not_called_wider_than_its_layer():
    """tiny-moe's is half as wide; so the text says what most models do."""
    assert "narrower" in catalogue("en")["glossary.expert.text"]
    assert "窄" in catalogue("zh")["glossary.expert.text"]


def test_shards_are_files_everywhere():
    """vLLM calls the parts of a fused matrix shards too; here only files are."""
    assert glossary_terms.uses()["shard"].named == ("explorer",)


def test_rows_hold_both_languages():
    rows = {row["term"]: row for row in glossary_terms.rows()}
    assert rows["swizzle"]["term_zh"] == "重排（swizzle）"
    assert rows["swizzle"]["explained_on"] == "blocks"
