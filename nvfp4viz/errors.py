"""One family of errors for everything that can be wrong with what a user gave us.

Every error has a ``code`` and says *what* happened, *why*, and the *next* step.  The words live in
``content/<language>/errors*.toml`` (one table per code with the keys ``what``, ``why`` and ``next``), so a page can
show the same error in the reader's language and the English text has one home.  Use ``assert`` for internal truths and
these for anything that came from outside: files, values, URLs, link parameters, prompts, sizes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

CONTENT = Path(__file__).parent / "content"


def _toml(path: Path) -> dict[str, Any]:
    # Only who has something to say needs the parser.
    import tomllib

    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def error_texts(language: str) -> dict[str, dict[str, str]]:
    """All error texts of one language: ``{code: {"what": …, "why": …, "next": …}}``."""
    texts: dict[str, dict[str, str]] = {}
    for path in sorted((CONTENT / language).glob("errors*.toml")):
        for code, text in _toml(path).items():
            if code in texts:
                raise RuntimeError(f"error code {code!r} is described twice for {language!r}")
            texts[code] = text
    return texts


# What is counted somewhere in the texts, and the verbs that follow.
COUNTED = (
    "articles backends bits blocks bytes cells characters checks choices codes columns copies digits documents "
    "elements entries experts factors fields files findings gaps groups implementations instructions "
    "keys layers linears lines logits maps modules names numbers outputs overlaps pairs parts paths "
    "patterns peers places points positions products projections prompts ranks registers remedies "
    "replies roles rounds routers routes rows runs scalars scales seconds settings shards slots steps targets "
    "tensors texts threads times tokens towers values vectors weights"
)
_IRREGULAR = {"copies": "copy", "entries": "entry", "remedies": "remedy", "replies": "reply"}
_VERBS = {"are": "is", "have": "has", "were": "was", "do": "does"} | {
    verb: f"{verb}s"
    for verb in ("belong", "differ", "fit", "get", "hold", "lie", "need", "read", "show", "stand", "store", "visit")
}
_COUNT = rf"\{{(\w+)\}}((?: [A-Za-z(][A-Za-z)-]*){{0,2}}?) ({'|'.join(COUNTED.split())})\b(?: ({'|'.join(_VERBS)})\b)?"

# What else a number governs is written out for both: <count:its header|their headers>.
_BOTH = r"<(\w+):([^<>|]*)\|([^<>|]*)>"


def fill(template: str, values: Mapping[str, object], language: str = "en") -> str:
    """A text with its placeholders filled; in English one file is ``1 file``, not ``1 files``.

    >>> fill("{n} files have {m} tensors", {"n": 1, "m": 2})
    '1 file has 2 tensors'
    >>> fill("{n} files with <n:its tensors|their tensors>", {"n": 1}), fill("<n:it is|they are> here", {"n": 2})
    ('1 file with its tensors', 'they are here')
    >>> fill("{n} 个文件", {"n": 1}, "zh")
    '1 个文件'
    """
    if language == "en" and any(str(value) == "1" for value in values.values()):
        template = re.sub(_COUNT, lambda found: _one(found) if str(values.get(found[1])) == "1" else found[0], template)
    if language == "en":
        template = re.sub(_BOTH, lambda found: found[2 if str(values.get(found[1])) == "1" else 3], template)
    return template.format(**values)


@cache
def content_texts(file: str, language: str) -> dict[str, Any]:
    """Everything in ``content/<language>/<file>``."""
    return _toml(CONTENT / language / file)


def content_words(file: str, language: str, key: str, /, **values: object) -> str:
    """One text of ``content/<language>/<file>``, by key such as ``"columns.slots"``, filled in.

    For words of the command line and of reports; an error's are its own (`NvError.text`), a page's are `figures.words`.
    """
    text: Any = content_texts(file, language)
    for part in key.split("."):
        text = text[part]
    return fill(str(text), values, language)


def _one(found: re.Match[str]) -> str:
    name, between, noun, verb = found.groups()
    single = _IRREGULAR.get(noun, noun.removesuffix("s"))
    return f"{{{name}}}{between} {single}" + (f" {_VERBS[verb]}" if verb else "")


class NvError(Exception):
    """Something a user gave us cannot be used.

    Parameters
    ----------
    code
        Stable id such as ``"container.truncated"``; the key of the text in ``content/<language>/errors*.toml``.
    **params
        Values for the placeholders of the text.  Never an absolute local path: pass the file's name.

    Attributes
    ----------
    code, params, what, why, next_step
    """

    def __init__(self, code: str, /, **params: object) -> None:
        self.code = code
        self.params = params
        text = self.text("en")
        self.what, self.why, self.next_step = text["what"], text["why"], text["next"]
        super().__init__(f"{self.what} {self.why} {self.next_step}")

    def text(self, language: str) -> dict[str, str]:
        """The three sentences in ``language``: keys ``what``, ``why``, ``next``."""
        templates = error_texts(language)[self.code]
        return {part: fill(templates[part], self.params, language) for part in ("what", "why", "next")}

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.code, self.params))


def _rebuild(cls: type[NvError], code: str, params: dict[str, object]) -> NvError:
    """Errors cross process borders (caches, pools): rebuild from code and params, not from the message."""
    return cls(code, **params)


class FormatError(NvError):
    """A value, shape or size that a number format or a recipe cannot take."""


class CheckpointError(NvError):
    """A file or folder that cannot be read as a checkpoint."""


class ModelError(NvError):
    """A prompt or a model that cannot be run."""


class ServingError(NvError):
    """What a server would refuse, or what our load guard refuses."""


class InputError(NvError):
    """A link parameter, a form value or a command line that makes no sense."""


class DeviceError(NvError):
    """A GPU, a driver or a kernel that cannot be used; the CPU path goes on."""
