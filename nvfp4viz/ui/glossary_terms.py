"""The glossary's terms: by which names texts call them, and which pages use them.  Found in the texts and the sources.

A page *explains* a term where it calls ``page.glossary("term", …)``, in its script or in a module of ours that the
script draws with; it *uses* a term where an English text names it, its own or one that these sources ask for.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from nvfp4viz.figures.words import LANGUAGES, catalogue, words
from nvfp4viz.ui.registry import PAGES, ROOT

_UI = Path(__file__).parent
# Names in a term stand beside each other or in brackets: "gate and up (w1, w3, w13)".
_BETWEEN = re.compile(r"[(),（），、]")
_FIGURES = re.compile(r"^ *from nvfp4viz\.figures(?:\.(\w+) import| import (\w+))", re.MULTILINE)
_ROOT_OF_FIGURES = ROOT / "nvfp4viz" / "figures"
# Texts that several pages show, named in a source: "figures.loading.error", or how such a name begins in an f-string.
_KEY = re.compile(r'"((?:figures|peers|coverage|kernels|empty_answer)\.\w[\w.]*)')
_IMPORT = re.compile(r"^ *from nvfp4viz\.ui(?:\.(\w+))? import (\([^)]*\)|.*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Uses:
    """Pages of a term, in reading order: those that explain it where they use it, and those that only name it."""

    explained: tuple[str, ...]
    named: tuple[str, ...]

    @property
    def pages(self) -> tuple[str, ...]:
        """All of them, the explaining ones first."""
        return self.explained + self.named


def terms() -> tuple[str, ...]:
    """Ids of all terms, in the order of their file."""
    return tuple(key[9:-5] for key in catalogue("en") if key.startswith("glossary.") and key.endswith(".term"))


def names(term: str, language: str) -> tuple[str, ...]:
    """What a term is called in a language, without code marks.

    >>> names("weight_only", "en")
    ('weight-only', 'W4A16')
    """
    parts = _BETWEEN.split(words(language, f"glossary.{term}.term").replace("`", ""))
    return tuple(part.strip() for part in parts if part.strip())


@lru_cache(maxsize=64)
def explained_on(page: str) -> tuple[str, ...]:
    """Terms that a page explains, in the order of its sources."""
    return tuple(dict.fromkeys(term for source in _sources(page) for term in _read(source)[1]))


@lru_cache(maxsize=64)
def _sources(page: str) -> tuple[str, ...]:
    """A page's script and the modules of ours that it draws with."""
    sources = [f"pages/{page}.py"]
    for source in sources:  # grows while it is walked
        sources += [module for module in _read(source)[0] if module not in sources]
    return tuple(sources)


@lru_cache(maxsize=256)
def _read(source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sources of ours that a source imports, and the terms that it asks for."""
    text, known = (ROOT / source).read_text(encoding="utf-8"), frozenset(terms())
    modules = [f"nvfp4viz/ui/{name}.py" for found in _IMPORT.findall(text) for name in _parts_of_ours(*found)]
    # Parsing a hundred files takes half a second, and most of them name no term.
    asked: list[str] = []
    if not known.isdisjoint(re.findall(r'"(\w+)"', text)):
        asked = [term for node in ast.walk(ast.parse(text)) for term in _asked(node, known)]
    return tuple(dict.fromkeys(modules)), tuple(asked)


def _parts_of_ours(module: str, imported: str) -> list[str]:
    """Modules of ``nvfp4viz.ui`` that an import statement names: ``from`` one of them, or several of them."""
    named = [module] if module else re.findall(r"\w+", re.sub(r" as \w+|#.*", "", imported))
    return [name for name in named if (_UI / f"{name}.py").exists()]


def _asked(node: ast.AST, known: frozenset[str]) -> list[str]:
    """Terms of a call ``….glossary("a", "b")``, or of one that hands terms on: ``part(page, ("a", "b"))``."""
    if not isinstance(node, ast.Call):
        return []
    if isinstance(node.func, ast.Attribute) and node.func.attr == "glossary":
        return [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    tuples = [[getattr(part, "value", None) for part in a.elts] for a in node.args if isinstance(a, ast.Tuple)]
    return [term for values in tuples if all(value in known for value in values) for term in values]


def uses() -> dict[str, Uses]:
    """The pages of every term; the glossary itself is left out."""
    return _uses(tuple((term, names(term, "en")) for term in terms()), _texts())


def _texts() -> tuple[tuple[str, str], ...]:
    """All English texts of each page: its own, and those of others that its sources and figures ask for by a key
    written out.  Code, placeholders and sources are no prose."""
    own: dict[str, list[str]] = {entry.id: [] for entry in PAGES if entry.id != "glossary"}
    for key, text in catalogue("en").items():
        page = key.split(".")[0]
        if page in own and not key.endswith(".where"):
            own[page].append(text)
    return tuple((page, "\n".join([*found, *_lent(page)])) for page, found in own.items())


@lru_cache(maxsize=64)
def _lent(page: str) -> tuple[str, ...]:
    """Texts outside a page's own that its sources name: of figures, of the story's remedies on another page."""
    keys: set[str] = set()
    script = f"pages/{page}.py"
    others = tuple(entry.id for entry in PAGES if entry.id != page)
    # What these import in turn, or borrow from another page's module, is shown elsewhere as often as here.
    for source in (script, *(module for module in _read(script)[0] if not Path(module).name.startswith(others))):
        text = (ROOT / source).read_text(encoding="utf-8")
        drawn = [_ROOT_OF_FIGURES / f"{name}.py" for names in _FIGURES.findall(text) for name in names if name]
        keys.update(_KEY.findall("".join([text, *(path.read_text(encoding="utf-8") for path in drawn)])))
    begins = tuple(key for key in keys if not key.startswith(f"{page}."))
    return tuple(text for key, text in catalogue("en").items() if key.startswith(begins))


@lru_cache(maxsize=2)
def _uses(called: tuple[tuple[str, tuple[str, ...]], ...], texts: tuple[tuple[str, str], ...]) -> dict[str, Uses]:
    explained = {page: explained_on(page) for page, _ in texts}
    prose = {page: re.sub(r"\{[^}]*\}", " ", text) for page, text in texts}
    lowered = {page: text.lower() for page, text in prose.items()}
    found = {}
    for term, own in called:
        pattern = _pattern(own)
        # Looking for plain characters first is ten times as fast as the pattern alone.
        near = [page for page, text in lowered.items() if any(name.lower() in text for name in own)]
        named = [page for page in near if pattern.search(prose[page])]
        explaining = tuple(page for page in prose if term in explained[page])
        found[term] = Uses(explaining, tuple(page for page in named if page not in explaining))
    return found


def _pattern(own: tuple[str, ...]) -> re.Pattern[str]:
    """Whole words, also in the plural; a name in capitals only as it stands."""
    parts = [re.escape(name) if re.search(r"[A-Z].*[A-Z0-9]", name) else f"(?i:{re.escape(name)})" for name in own]
    return re.compile(rf"(?<![\w-])(?:{'|'.join(parts)})s?(?!\w)")


def rows() -> list[dict[str, str]]:
    """Every term in both languages with its pages, to download."""
    found = uses()
    return [
        {
            "term": term,
            **{
                f"{part}_{language}": words(language, f"glossary.{term}.{part}")
                for language in LANGUAGES
                for part in ("term", "text")
            },
            "explained_on": " ".join(found[term].explained),
            "named_on": " ".join(found[term].named),
        }
        for term in terms()
    ]
