"""Every error that the code raises is described in both languages, with the same placeholders."""

import pickle
import re
import string
from pathlib import Path

import pytest

from nvfp4viz import errors

PACKAGE = Path(errors.__file__).parent
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
