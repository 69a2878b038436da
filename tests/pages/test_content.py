"""Rules for what a reader reads: both languages complete, numbers computed and never typed, Chinese really Chinese."""

import re

import pytest

from nvfp4viz.figures.words import CONTENT, LANGUAGES, catalogue, placeholders
from nvfp4viz.ui.registry import PAGES, ROOT

EN, ZH = catalogue("en"), catalogue("zh")

# Names that contain digits.  Anything else with a digit in it is a number, and numbers are computed.
IDENTIFIERS = re.compile(
    r"""\b(
      U?E\dM\d(FN)? | NVFP4 | MXFP4 | MXFP8 | FP(4|8|16|32) | BF16 | F(16|32) | W\d+A\d+(_NVFP4)? | U?INT\d+ | u?int\d+
    | [Ff]loat(16|32|64) | f32 | nvfp4viz | byte\ 0x00
    | B200 | H200 | H100 | A100 | RTX\ \d+ | sm_\d+\w? | CUDA\ \d+(\.\d+)* | Gemma\ 4 | Qwen\d+(\.\d+)?(-Next)?
    | DeepSeek[\ -](V|R)\d+
    | V1 | V2 | v1\.0 | Blackwell | w13 | w[123] | a[12] | SHA-?256 | UTF-8 | HTTP\ 200 | id\ 0
    | [a-z]+_[a-z0-9_]+ | [A-Z]+_[A-Z0-9_]+ | \#\d+ | \d+-bit | \d-D | \d+×\d+
    )\b | [−-]0(?!\.?\d) | (?<=\s)\#\d+ | \d+\ 位(?=浮点|编码) | 第\d | (?<=字节)\ 0x00""",
    re.VERBOSE,
)
CODE = re.compile(r"`[^`]*`")
TARGET = re.compile(r"(?<=\])\(https://[^)\s]+\)")
"""Where a link leads, which nobody reads."""
# Values that are names here: the marks of a slot that holds exactly this number, and examples in an empty input.
# Findings name the constants of the conventions they check (1.0, 2688, a group of 16): they define, they do not report.
# So does the command line's help: exit codes, defaults, the numbers of a command's inputs.
NAMED_VALUES = re.compile(
    r"^findings(_deep)?\.|^cli\.|\.where$|_placeholder$|^(coverage|report)\.status\.(identity|zero)$|^coverage\.status_divisor\."
)


def _prose(text: str) -> str:
    """A text without its placeholders, code spans, link targets and names."""
    text = re.sub(r"\{[^}]*\}", " ", text)
    return IDENTIFIERS.sub(" ", TARGET.sub("", CODE.sub(" ", text)))


def test_both_languages_have_the_same_texts():
    assert EN.keys() - ZH.keys() == set()
    # What argparse says itself is English already.
    assert {key for key in ZH.keys() - EN.keys() if not key.startswith("cli.argparse.")} == set()


@pytest.mark.parametrize("key", sorted(EN.keys() & ZH.keys()))
def test_both_languages_have_the_same_placeholders(key):
    assert placeholders(EN[key]) == placeholders(ZH[key])


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_number_is_typed_into_prose(language):
    typed = {
        key: found
        for key, text in catalogue(language).items()
        if not NAMED_VALUES.search(key) and (found := re.findall(r"\S*\d\S*", _prose(text)))
    }
    assert typed == {}


def test_chinese_is_chinese():
    """A Chinese text with words in it has Chinese characters in it."""
    untranslated = {
        key: text
        for key, text in ZH.items()
        if not re.search(r"\.where$|^glossary\..*\.term$", key)  # names stay Latin
        and len(re.findall(r"[A-Za-z]{3,}", _prose(text))) >= 2
        and not re.search(r"[\u4e00-\u9fff]", text)
    }
    assert untranslated == {}


def test_chinese_uses_chinese_punctuation():
    wrong = {
        key: text
        for key, text in ZH.items()
        if re.search(r"[\u4e00-\u9fff][,;:?!]|[\u4e00-\u9fff]\.(\s|$)", _prose(text))
    }
    assert wrong == {}


@pytest.mark.parametrize("language", LANGUAGES)
def test_bold_ends_where_markdown_sees_its_end(language):
    """CommonMark closes no ``**`` between a full stop and a letter: a reader would see the asterisks."""
    unseen = {}
    for key, text in catalogue(language).items():
        for bold in re.finditer(r"\*\*(.+?)\*\*(?=(.?))", text):
            if re.fullmatch(r"[^\w\s}]", bold[1][-1]) and re.fullmatch(r"[\w{]", bold[2]):
                unseen[key] = bold[0]
    assert unseen == {}


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_exclamation_marks(language):
    assert {key for key, text in catalogue(language).items() if re.search(r"[!！]", CODE.sub("", text))} == set()


@pytest.mark.parametrize("entry", PAGES, ids=lambda entry: entry.id)
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_page_has_its_texts(entry, language):
    texts = catalogue(language)
    for name in ("title", "aim", "claim", "sources.0.what", "sources.0.where"):
        assert texts[f"{entry.id}.{name}"].strip()


@pytest.mark.parametrize("entry", PAGES, ids=lambda entry: entry.id)
def test_every_page_has_its_script_and_snippet(entry):
    script = (ROOT / entry.script).read_text(encoding="utf-8")
    assert "ensure_shell()" in script
    assert (CONTENT / "code" / f"{entry.id}.py").exists()


def test_every_text_in_a_page_s_file_belongs_to_a_page():
    for language in LANGUAGES:
        files = {path.stem for path in (CONTENT / language / "pages").glob("*.toml")}
        assert files == {entry.id for entry in PAGES}


def test_glossary_terms_have_both_parts():
    terms = {key.split(".")[1] for key in EN if re.fullmatch(r"glossary\.\w+\.(term|text)", key)}
    assert terms
    for term in terms:
        assert EN[f"glossary.{term}.term"]
        assert EN[f"glossary.{term}.text"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_files_that_a_page_names_are_there(language):
    """A source of this repository that a page cites can be opened."""
    named = {
        (key, path)
        for key, text in catalogue(language).items()
        for path in re.findall(r"\b(?:nvfp4viz|tests|kernels|benchmarks|sample_checkpoints)/[\w/.-]+\.\w+", text)
    }
    assert len(named) > 20
    assert {(key, path) for key, path in named if not (ROOT / path).exists()} == set()


def test_pages_join_names_with_the_comma_of_the_reader_s_language():
    """`i18n.listed` in pages, `figures.words.listed` in figures.  What is code, or read as code, keeps its own."""
    own = re.compile(r"state\.Param\(|return Param\(|^_ANYWHERE = |map\(literal, value\)|exponents = ")
    files = [*(ROOT / "nvfp4viz/ui").glob("*.py"), *(ROOT / "nvfp4viz/figures").glob("*.py"), *ROOT.glob("pages/*.py")]
    joined = [
        f"{file.name}: {line.strip()}"
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"""["'], ["']\.join\(""", line) and not own.search(line)
    ]
    assert len(files) > 50
    assert joined == []


@pytest.mark.parametrize("word", ["词元", "mega-kernel"])
def test_a_term_has_one_word_in_chinese(word):
    """token and 巨型内核; the other word stands once, in brackets, where the term is explained or is a title."""
    uses = {
        f"{path.name}: {line.strip()}"
        for path in sorted((CONTENT / "zh").rglob("*.toml"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if word in line.replace(f"（{word}）", "")
    }
    assert not uses
