"""Words of findings and forecasts, by key and language.

``content/<language>/findings*.toml`` have one table per text with ``message`` and ``advice``; forecasts stand there as
``["why.…"]`` with a ``message`` alone.  Container and configuration findings share their words with the errors of
`nvfp4viz.checkpoint` (``what`` and ``why`` are the message, ``next`` the advice).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from nvfp4viz.checkpoint.numbers import CLASSES
from nvfp4viz.errors import CONTENT, content_words, error_texts, fill

# A forecast names so many findings beside its own.
BESIDES = 3


@cache
def finding_texts(language: str) -> dict[str, dict[str, str]]:
    """All texts of one language: ``{key: {"message": …, "advice": …}}``."""
    texts: dict[str, dict[str, str]] = {}
    for path in sorted((CONTENT / language).glob("findings*.toml")):
        texts |= tomllib.loads(path.read_text(encoding="utf-8"))
    return texts


def report_words(language: str, key: str, **values: object) -> str:
    """One of the report's own words, by key in ``content/<language>/report.toml``, such as ``"columns.slots"``."""
    return content_words("report.toml", language, key, **values)


def words(text: str, params: Mapping[str, Any], language: str = "en") -> tuple[str, str]:
    """Message and advice of a text key, filled in."""
    own, params = finding_texts(language).get(text), _classes_in_words(params, language)
    if own is not None:
        message, advice = (_inflected(own.get(part, ""), params, language) for part in ("message", "advice"))
        # A sentence of one layer, of which the same holds in others.
        alike = params.get("alike") and "{layers}" not in own["message"] and "{layer}" in own["message"]
        also = report_words(language, "alike", count=params["alike"]) if alike else ""
        ends = _readers(params, language) + also + _tower(params, language) + _besides(params, language)
        return fill(message, params, language) + ends, fill(advice, params, language)
    shared = error_texts(language)[text]
    message = f"{shared['what']} {shared['why']}" if language == "en" else shared["what"] + shared["why"]
    return fill(message, params, language) + _readers(params, language), fill(shared["next"], params, language)


def _classes_in_words(params: Mapping[str, Any], language: str) -> Mapping[str, Any]:
    """Classes of numbers in Chinese; in English their codes are words.

    >>> dict(_classes_in_words({"classes": "nan, zero", "kind": "weight"}, "zh"))
    {'classes': 'NaN、零', 'kind': 'weight'}
    """
    if language == "en":
        return params
    out = dict(params)
    for key in ("classes", "kind"):
        found = str(params.get(key) or "").split(", ")
        if set(found) <= set(CLASSES[1:]):
            out[key] = report_words(language, "between").join(report_words(language, f"status.{one}") for one in found)
    return out


def _readers(params: Mapping[str, Any], language: str) -> str:
    """What ends the words of a finding about one of two files."""
    if not params.get("one_file"):
        return ""
    return report_words(language, "one_file", **{key: params[key] for key in ("file", "other", "readers")})


def _tower(params: Mapping[str, Any], language: str) -> str:
    """What ends the words about experts of another tower."""
    return report_words(language, "tower", tower=params["tower"]) if params.get("tower") else ""


def _besides(params: Mapping[str, Any], language: str) -> str:
    """What ends a forecast of which the worst effect speaks, and more is wrong: the first other findings."""
    found = params.get("besides") or []
    if not found:
        return ""
    named = report_words(language, "between").join(found[:BESIDES])
    more = len(found) - BESIDES
    return report_words(language, "besides_more" if more > 0 else "besides", findings=named, more=more)


_VERBS = {
    "are": "is", "were": "was", "have": "has", "lack": "lacks", "compute": "computes", "return": "returns",
    "add": "adds",
}  # fmt: skip
_EXPERTS = re.compile(rf"\b([Ee])xperts \{{experts\}}(?: ({'|'.join(_VERBS)})\b)?")
_THESE = re.compile(rf"\bthese experts\b(?: ({'|'.join(_VERBS)})\b)?")
_LAYERS = re.compile(r"\b([Ll])ayers? \{(layers|unseen|among|rest)\}")


# Words about experts that have a number of their own, and about those of a layer that has one for all.
_OF_ALL = {
    "en": (
        (", experts {experts}", " (one for all experts)"), ("the expert computes", "the layer's experts compute"),
        ("the expert returns", "the layer's experts return"), (" so that every expert sees tokens", ""),
        ("these experts", "the layer's experts"),
    ),
    "zh": (
        ("，专家 {experts}", "（全部专家共用）"), ("该专家", "这一层各专家"), ("，让每个专家都见到 token", ""),
        ("这些专家", "这一层的专家"), ("会让专家的输出", "会让这一层各专家的输出"),
    ),
}  # fmt: skip


def _inflected(template: str, params: Mapping[str, Any], language: str) -> str:
    """A template for what its lists hold: one expert or layer, several, or none where all are meant; draft layers.

    >>> _inflected("Layer {layers}: experts {experts} are absent.", {"layers": "1, 2", "experts": "5"}, "en")
    'Layers {layers}: expert {experts} is absent.'
    >>> _inflected("That of layers {among} lies far from that of layers {rest}.", {"among": "0", "rest": "1, 2"}, "en")
    'That of layer {among} lies far from that of layers {rest}.'
    """
    experts, draft = params.get("experts"), bool(params.get("draft"))
    if params.get("of_all"):
        for own, of_all in _OF_ALL[language]:
            template = template.replace(own, of_all)
    if experts == "":
        # All of a layer, in tensors that they share.
        for part in (", experts {experts}", "experts {experts}; ", "，专家 {experts}", "专家 {experts}；"):
            template = template.replace(part, "")
        template = template.replace("experts {experts}", "all experts").replace("专家 {experts}", "全部专家")
    if language == "zh":
        return re.sub(r"第 \{(layers?)\} 层(?=([\u4e00-\u9fff])?)", _chinese_draft, template) if draft else template
    if str(experts).isdecimal():
        template = _EXPERTS.sub(lambda found: f"{found[1]}xpert {{experts}}{_singular(found[2])}", template)
        template = _THESE.sub(lambda found: f"this expert{_singular(found[1])}", template)
    template = _LAYERS.sub(
        lambda found: f"{found[1]}ayer{'' if str(params.get(found[2])).isdecimal() else 's'} {{{found[2]}}}", template
    )
    if draft:
        template = re.sub(r"\bL(ayers? \{layers?\})", r"Draft l\1", template)
        template = re.sub(r"(?<!Draft )\bl(ayers? \{layers?\})", r"draft l\1", template)
    return template


def _singular(verb: str | None) -> str:
    return f" {_VERBS[verb]}" if verb else ""


def _chinese_draft(found: re.Match[str]) -> str:
    return f"草稿层 {{{found[1]}}}{' ' if found[2] else ''}"


def layer_list(layers: Sequence[int]) -> dict[str, Any]:
    """Placeholders of a finding about several layers: as words, and as the numbers that they stand for.

    >>> layer_list([0, 1, 2, 5])
    {'layers': '0–2, 5', 'numbers': [0, 1, 2, 5]}
    """
    return {"layers": id_list(tuple(layers)), "numbers": layers}


def in_full(ratio: float) -> str:
    """How many times, with four significant digits and no exponent: a ratio of scales may be a million or a millionth.

    >>> in_full(2652.4), in_full(1.2345), in_full(1234567.0), in_full(3.2e-6), in_full(1.0)
    ('2,652', '1.234', '1,235,000', '0.0000032', '1')
    """
    text = np.format_float_positional(ratio, precision=4, unique=False, fractional=False, trim="-")
    whole, point, rest = text.partition(".")
    return f"{int(whole):,}{point}{rest}"


def id_list(ids: tuple[int, ...], limit: int = 24) -> str:
    """Expert numbers for a sentence: runs as ``8–15``, bounded length.

    >>> id_list((40, 42, 82, 98)), id_list((0, 1, 2, 3, 9))
    ('40, 42, 82, 98', '0–3, 9')
    """
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [
        str(first) if first == last else f"{first}, {last}" if last == first + 1 else f"{first}–{last}"
        for first, last in runs
    ]
    return ", ".join(parts) if len(parts) <= limit else ", ".join(parts[:limit]) + ", …"
