"""The glossary's terms: by which names texts call them, and which pages use them.  Found in the texts and the sources.

A page *explains* a term where it calls ``page.glossary("term", …)``, in its script or in a module of ours that the
script draws with; it *uses* a term where its English texts name it.
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
    return tuple(key.split(".")[1] for key in catalogue("en") if re.fullmatch(r"glossary\.\w+\.term", key))


def names(term: str, language: str) -> tuple[str, ...]:
    """What a term is called in a language, without code marks.

    >>> names("weight_only", "en")
    ('Weight-only', 'W4A16')
    """
    parts = _BETWEEN.split(words(language, f"glossary.{term}.term").replace("`", ""))
    return tuple(part.strip() for part in parts if part.strip())


@lru_cache(maxsize=64)
def explained_on(page: str) -> tuple[str, ...]:
    """Terms that a page explains, in the order of its sources."""
    found: dict[str, None] = {}
    sources = [f"pages/{page}.py"]
    for source in sources:  # grows while it is walked
        modules, asked = _read(source)
        sources += [module for module in modules if module not in sources]
        found.update(dict.fromkeys(asked))
    return tuple(found)


@lru_cache(maxsize=256)
def _read(source: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Sources of ours that a source imports, and the terms that it asks for."""
    nodes = list(ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))))
    known = terms()
    modules = [f"nvfp4viz/ui/{name}.py" for node in nodes for name in _parts_of_ours(node)]
    return tuple(dict.fromkeys(modules)), tuple(term for node in nodes for term in _asked(node, known))


def _parts_of_ours(node: ast.AST) -> list[str]:
    """Modules of ``nvfp4viz.ui`` that an import statement names."""
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return []
    if node.module == "nvfp4viz.ui":
        named = [alias.name for alias in node.names]
    else:
        named = [node.module.removeprefix("nvfp4viz.ui.")] if node.module.startswith("nvfp4viz.ui.") else []
    return [name for name in named if (_UI / f"{name}.py").exists()]


def _asked(node: ast.AST, known: tuple[str, ...]) -> list[str]:
    """Terms of a call ``….glossary("a", "b")``, or of one that hands terms on: ``part(page, ("a", "b"))``."""
    if not isinstance(node, ast.Call):
        return []
    if isinstance(node.func, ast.Attribute) and node.func.attr == "glossary":
        return [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    tuples = [[getattr(part, "value", None) for part in a.elts] for a in node.args if isinstance(a, ast.Tuple)]
    return [term for values in tuples if all(value in known for value in values) for term in values]


def uses() -> dict[str, Uses]:
    """The pages of every term; the glossary itself is left out."""
    return _uses(tuple((term, names(term, "en")) for term in terms()), tuple(sorted(_texts().items())))


def _texts() -> dict[str, str]:
    """All English texts of each page; code, placeholders and sources are no prose."""
    lines: dict[str, list[str]] = {entry.id: [] for entry in PAGES if entry.id != "glossary"}
    for key, text in catalogue("en").items():
        page = key.split(".")[0]
        if page in lines and not key.endswith(".where"):
            lines[page].append(re.sub(r"\{[^}]*\}", " ", text))
    return {page: "\n".join(found) for page, found in lines.items()}


@lru_cache(maxsize=2)
def _uses(called: tuple[tuple[str, tuple[str, ...]], ...], texts: tuple[tuple[str, str], ...]) -> dict[str, Uses]:
    order = [entry.id for entry in PAGES]
    explained = {page: explained_on(page) for page, _ in texts}
    return {
        term: Uses(
            tuple(page for page in order if term in explained.get(page, ())),
            tuple(
                page
                for page in order
                if term not in explained.get(page, ())
                and any(pattern.search(text) for name, text in texts if name == page)
            ),
        )
        for term, pattern in ((term, _pattern(own)) for term, own in called)
    }


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
