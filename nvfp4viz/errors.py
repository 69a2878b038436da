"""One family of errors for everything that can be wrong with what a user gave us.

Every error has a ``code`` and says *what* happened, *why*, and the *next* step.  The words live in
``content/<language>/errors*.toml`` (one table per code with the keys ``what``, ``why`` and ``next``), so a page can
show the same error in the reader's language and the English text has one home.  Use ``assert`` for internal truths and
these for anything that came from outside: files, values, URLs, link parameters, prompts, sizes.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

CONTENT = Path(__file__).parent / "content"


@cache
def error_texts(language: str) -> dict[str, dict[str, str]]:
    """All error texts of one language: ``{code: {"what": …, "why": …, "next": …}}``."""
    texts: dict[str, dict[str, str]] = {}
    for path in sorted((CONTENT / language).glob("errors*.toml")):
        for code, text in tomllib.loads(path.read_text(encoding="utf-8")).items():
            if code in texts:
                raise RuntimeError(f"error code {code!r} is described twice for {language!r}")
            texts[code] = text
    return texts


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
        return {part: templates[part].format(**self.params) for part in ("what", "why", "next")}

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
