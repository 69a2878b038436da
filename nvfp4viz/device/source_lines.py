"""Which lines of a kernel a target compiles: the preprocessor's conditions, evaluated without a compiler.

The gate between one instruction and the software path is a handful of ``#if`` lines in ``nvfp4_math.cuh``.  Evaluating
them for a target tells which branch its build took, so that a page can set the line beside the instruction it became.
``tests/device/test_source_lines.py`` holds this against NVRTC (the macros of every target), against g++ (the lines
that are left) and against the committed machine code (an instruction is there exactly where its line is).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4viz.device.build import sources_of

__all__ = ["Excerpt", "Line", "callers", "compiled_lines", "excerpts", "macros_of", "places_of", "strip"]

DIRECTIVE = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif|else|endif|define|undef|include)\b\s*(.*?)\s*(?://.*)?$")
DEFINED = re.compile(r"defined\s*(?:\(\s*(\w+)\s*\)|(\w+))")
ARITHMETIC = re.compile(r"[\d\s()<>=!+*-]*(?:(?:and|or|not)\b[\d\s()<>=!+*-]*)*")
# A function, a struct or a kernel starts at the left margin and ends with a brace there.
OPENING = re.compile(r"^(?!template|namespace|typedef|using|const\b|static_assert)[A-Za-z_].*?\b(?!__)(\w+)\s*[({]")
COMMENT_LINES = 2  # kept above a function
DEPTH = 2  # how far the software path is followed: packing calls rounding
# Casts and single IEEE operations: the header's alphabet, not worth an excerpt.
PRIMITIVES = {"bits", "value", "magnitude", "multiply", "divide", "larger", "smaller", "is_nan", "is_finite"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a kernel's source, for one target."""

    number: int  # from 1
    text: str
    compiled: bool  # whether the target's build reads it
    gated: bool  # whether that depends on the target: it is no directive and stands inside an ``#if``


@dataclass(frozen=True, slots=True)
class Function:
    """Where a function or struct stands; lines from 1, both included."""

    file: str
    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Excerpt:
    """One function of a source file."""

    file: str
    function: str
    lines: tuple[Line, ...]


def macros_of(target: str) -> dict[str, int]:
    """The macros of a target that our sources ask for, as NVRTC defines them.

    >>> macros_of("sm_100")
    {'__CUDACC__': 1, '__CUDACC_RTC__': 1, '__cplusplus': 201703, '__CUDA_ARCH__': 1000}
    >>> sorted(set(macros_of("sm_100a")) - set(macros_of("sm_100")))
    ['__CUDA_ARCH_FAMILY_SPECIFIC__', '__CUDA_ARCH_SPECIFIC__']
    """
    number, letter = re.fullmatch(r"sm_(\d+)([af]?)", target).groups()  # type: ignore[union-attr]
    architecture = 10 * int(number)
    macros = {"__CUDACC__": 1, "__CUDACC_RTC__": 1, "__cplusplus": 201703, "__CUDA_ARCH__": architecture}
    if letter:
        macros["__CUDA_ARCH_FAMILY_SPECIFIC__"] = architecture
    if letter == "a":
        macros["__CUDA_ARCH_SPECIFIC__"] = architecture
    return macros


def holds(condition: str, macros: Mapping[str, int]) -> bool:
    """Evaluate the expression of an ``#if``.

    >>> holds("__CUDA_ARCH__ >= 1000 && !defined(NV_FORCE_SOFT)", {"__CUDA_ARCH__": 1000})
    True
    """
    text = DEFINED.sub(lambda found: str(int((found[1] or found[2]) in macros)), condition)
    text = re.sub(r"\b[A-Za-z_]\w*", lambda found: str(macros.get(found[0], 0)), text)
    text = text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", text)
    if not ARITHMETIC.fullmatch(text):
        raise ValueError(f"not a condition that is understood here: {condition}")
    return bool(eval(text, {"__builtins__": {}}))  # digits, parentheses, comparisons, and, or, not: checked above


def compiled_lines(
    source: str, target: str, texts: Mapping[str, str] | None = None
) -> dict[str, tuple[tuple[bool, bool], ...]]:
    """``(compiled, gated)`` for every line of a kernel file and of all it includes, by file.

    Parameters
    ----------
    source
        Name of a file in ``kernels/``.
    target
        Such as ``"sm_120a"``.
    texts
        As `nvfp4viz.device.build.sources_of` gives them; read from ``kernels/`` by default.
    """
    texts = sources_of(source) if texts is None else texts
    macros: dict[str, int] = macros_of(target)
    found: dict[str, tuple[tuple[bool, bool], ...]] = {}

    def read(name: str) -> None:
        lines: list[tuple[bool, bool]] = []
        found[name] = ()  # #pragma once
        open_ifs: list[list[bool]] = []  # per #if: is this branch read, has any been
        for line in texts[name].splitlines():
            directive = DIRECTIVE.match(line)
            here = all(branch for branch, _ in open_ifs)
            if directive is None:
                lines.append((here, bool(open_ifs)))
                continue
            word, rest = directive.groups()
            if word in ("if", "ifdef", "ifndef"):
                outer = here
                taken = outer and (holds(rest, macros) if word == "if" else (rest in macros) == (word == "ifdef"))
                open_ifs.append([taken, taken])
            elif word in ("elif", "else"):
                outer = all(branch for branch, _ in open_ifs[:-1])
                taken = outer and not open_ifs[-1][1] and (word == "else" or holds(rest, macros))
                open_ifs[-1] = [taken, open_ifs[-1][1] or taken]
            elif word == "endif":
                open_ifs.pop()
                outer = all(branch for branch, _ in open_ifs)
            else:
                outer = here
                if here:
                    _obey(word, rest, macros, texts, found, read)
            lines.append((outer, False))
        found[name] = tuple(lines)

    read(source)
    return found


def _obey(
    word: str, rest: str, macros: dict[str, int], texts: Mapping[str, str], found: Mapping[str, Any], read: Any
) -> None:
    """What a directive in a branch that is read does."""
    name, _, value = rest.partition(" ")
    if word == "define":
        macros[name.split("(")[0]] = int(value) if value.strip().isdigit() else 1
    elif word == "undef":
        macros.pop(name, None)
    elif rest.startswith('"') and rest.strip('"') in texts and rest.strip('"') not in found:
        read(rest.strip('"'))


def strip(line: str) -> str:
    """A line without its comment and its string literals.

    >>> strip('asm("mma.sync"); // tensor core')
    'asm(""); '
    """
    return re.sub(r'"[^"]*"', '""', line).split("//")[0]


def _functions(texts: Mapping[str, str]) -> list[Function]:
    """Everything that opens at the left margin of any file."""
    found = []
    for file, text in texts.items():
        lines = text.splitlines()
        number = 0
        while number < len(lines):
            opening = OPENING.match(lines[number])
            if opening is None or lines[number].rstrip().endswith(";"):
                number += 1
                continue
            first = number
            while not lines[number].rstrip().endswith("}") if number == first else not lines[number].startswith("}"):
                number += 1
                if number == len(lines):
                    raise ValueError(f"{file}: {opening[1]} has no end")
            if first and lines[first - 1].startswith("template"):
                first -= 1
            above = 0
            while above < COMMENT_LINES and first and lines[first - 1].startswith("//"):
                first, above = first - 1, above + 1
            found.append(Function(file, opening[1], first + 1, number + 1))
            number += 1
    return found


def places_of(texts: Mapping[str, str], mnemonic: str) -> list[tuple[str, int]]:
    """``(file, line)`` wherever the sources write a PTX instruction; comments do not count."""
    return [
        (file, number)
        for file, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if mnemonic in line.split("//")[0]
    ]


def excerpts(source: str, target: str, mnemonic: str, texts: Mapping[str, str] | None = None) -> list[Excerpt]:
    """The functions that write a PTX instruction; where a target has none, also the software that stands in for it.

    Each of them comes with every line's fate on ``target``.
    """
    texts = sources_of(source) if texts is None else texts
    fates = compiled_lines(source, target, texts)
    functions = _functions(texts)
    places = places_of(texts, mnemonic)
    wanted = [one for one in functions if any(one.file == file and one.first <= n <= one.last for file, n in places)]
    used = _used(texts, functions, source)
    wanted = [one for one in wanted if one.name in used] or wanted
    if not any(fates[file][number - 1][0] for file, number in places):
        # Either another function of the same name, or what the other branch of this one calls.
        wanted += [one for one in functions if one not in wanted and one.name in {home.name for home in wanted}]
        wanted += _called(texts, fates, functions, wanted)
    return [Excerpt(one.file, one.name, _lines(texts, fates, one)) for one in wanted]


def _used(texts: Mapping[str, str], functions: list[Function], source: str) -> set[str]:
    """Names of the functions that a kernel file reaches from its own text."""
    bodies: dict[str, set[str]] = {}
    for one in functions:
        lines = texts[one.file].splitlines()[one.first - 1 : one.last]
        bodies.setdefault(one.name, set()).update(re.findall(r"\w+", " ".join(map(strip, lines))))
    waiting = set(re.findall(r"\w+", " ".join(map(strip, texts[source].splitlines())))) & bodies.keys()
    used: set[str] = set()
    while waiting:
        used |= waiting
        waiting = set().union(*(bodies[name] for name in waiting)) & bodies.keys() - used
    return used


Fates = Mapping[str, tuple[tuple[bool, bool], ...]]


def _lines(texts: Mapping[str, str], fates: Fates, one: Function) -> tuple[Line, ...]:
    lines = texts[one.file].splitlines()
    return tuple(Line(n, lines[n - 1], *fates[one.file][n - 1]) for n in range(one.first, one.last + 1))


def _called(texts: Mapping[str, str], fates: Fates, functions: list[Function], start: list[Function]) -> list[Function]:
    """What the gated lines of ``start`` call on this target, and what these call; in that order."""
    by_name = {one.name: one for one in functions if one.name not in PRIMITIVES}
    found: list[Function] = []
    layer = start
    for _ in range(DEPTH):
        reached: dict[Function, None] = {}
        for one in layer:
            for line in _lines(texts, fates, one):
                if line.compiled and (line.gated or layer is not start):
                    calls = re.findall(r"\b(\w+)(?:<[^<>()]*>)?\s*\(", strip(line.text))
                    reached |= dict.fromkeys(by_name[call] for call in calls if call in by_name)
        layer = [one for one in reached if one not in start and one not in found]
        found += layer
    return found


def callers(texts: Mapping[str, str], mnemonic: str) -> set[str]:
    """Names of all functions that reach a PTX instruction, directly or through others of ours."""
    places = places_of(texts, mnemonic)
    bodies = []
    reaching: set[str] = set()
    for one in _functions(texts):
        lines = texts[one.file].splitlines()[one.first - 1 : one.last]
        bodies.append((one.name, "\n".join(map(strip, lines))))
        if any(one.file == file and one.first <= number <= one.last for file, number in places):
            reaching.add(one.name)
    while True:
        known = re.compile(rf"\b(?:{'|'.join(reaching)})\b") if reaching else re.compile(r"(?!)")
        more = {name for name, body in bodies if name not in reaching and known.search(body)}
        if not more:
            return reaching
        reaching |= more
