"""What each colour means, in light and dark.  The only place where a colour is written down in Python.

A colour has one role everywhere (Okabe–Ito base).  Each role has a ``fill`` for areas, the ``on_fill`` ink that is
legible on it, and a ``text`` variant of at least 4.5:1 against the page for words and thin lines.  No role is told by
colour alone: ``mark`` is the letter or sign that goes with it.

>>> ROLES["sign"].mark, ROLES["sign"].light.fill
('S', '#D55E00')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Theme = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Shade:
    """One role in one theme: area colour, ink on that area, colour for words and thin lines."""

    fill: str
    on_fill: str
    text: str


@dataclass(frozen=True, slots=True)
class Role:
    """A meaning, the mark that doubles its colour, and its two shades."""

    mark: str
    light: Shade
    dark: Shade

    def shade(self, theme: Theme) -> Shade:
        return self.light if theme == "light" else self.dark


@dataclass(frozen=True, slots=True)
class Surface:
    """Neutral colours of a theme; equal to those in ``.streamlit/config.toml``, which a test checks."""

    page: str
    panel: str
    ink: str
    muted: str
    line: str
    accent: str


LIGHT = Surface("#FFFFFF", "#F3F5F8", "#1A2332", "#566173", "#D5DBE3", "#33456B")
DARK = Surface("#12161D", "#1B212B", "#E6EAF1", "#A3AEBF", "#333C4A", "#A9BFE8")

_WHITE, _BLACK = "#FFFFFF", "#0C1118"

ROLES: dict[str, Role] = {
    "sign": Role("S", Shade("#D55E00", _BLACK, "#B04A00"), Shade("#FF8E45", _BLACK, "#FF9C5C")),
    "exponent": Role("E", Shade("#0072B2", _WHITE, "#00659E"), Shade("#5FB0E8", _BLACK, "#7CC0EF")),
    "mantissa": Role("M", Shade("#009E73", _BLACK, "#00704F"), Shade("#3CC79C", _BLACK, "#57D0AA")),
    "block_scale": Role("⎵", Shade("#E69F00", _BLACK, "#855A00"), Shade("#F2B53A", _BLACK, "#F2B94A")),
    "global_scale": Role("□", Shade("#CC79A7", _BLACK, "#97396D"), Shade("#E3A0C6", _BLACK, "#E6A9CB")),
    "missing": Role("∅", Shade("#FFFFFF", "#1A2332", "#566173"), Shade("#12161D", "#E6EAF1", "#A3AEBF")),
    "route": Role("→", Shade("#56B4E9", _BLACK, "#1C688F"), Shade("#8CCDF2", _BLACK, "#8CCDF2")),
}

# Signs for cells whose value is no ordinary number; drawn in ink on a hatch, never as a colour of a scale.
MARKS = {
    "nan": "N",
    "inf": "∞",
    "neginf": "−∞",
    "zero": "0",
    "negative": "−",
    "outlier": "!",
    "filled": "≈",
    "missing": "∅",
}

SEQUENTIAL = "Cividis"
# Two hues, symmetric about zero; limits are always fixed by the caller.
DIVERGING: list[list[float | str]] = [
    [0.0, "#8A3D00"],
    [0.25, "#D9863F"],
    [0.5, "#F4F2EF"],
    [0.75, "#5194C4"],
    [1.0, "#0B4679"],
]

# The first is declared in ui/shell.css: it has raised digits alone, all of one face.
SANS = (
    "nvfp4viz raised, Inter, Segoe UI, Helvetica Neue, Noto Sans, Liberation Sans, PingFang SC, Microsoft YaHei, "
    "Noto Sans CJK SC, sans-serif"
)
MONO = "JetBrains Mono, SF Mono, Cascadia Mono, Menlo, Consolas, DejaVu Sans Mono, Noto Sans Mono CJK SC, monospace"


def surface(theme: Theme) -> Surface:
    """The neutral colours of a theme."""
    return LIGHT if theme == "light" else DARK


def role(name: str, theme: Theme) -> Shade:
    """The shade of a role in a theme.

    >>> role("exponent", "light").fill
    '#0072B2'
    """
    return ROLES[name].shade(theme)


def contrast(first: str, second: str) -> float:
    """WCAG contrast ratio of two hex colours.

    >>> contrast("#000000", "#FFFFFF")
    21.0
    """
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def on_sequential(share: float) -> str:
    """The ink that can be read on `SEQUENTIAL`, 0 at its dark end and 1 at its light one: by 4.5 : 1 and more.

    >>> on_sequential(0.2), on_sequential(0.8)
    ('#FFFFFF', '#000000')
    """
    # Where white and black stand out alike; the house's dark ink would not do in the middle.
    return "#FFFFFF" if share < 0.467 else "#000000"


def css_variables(selector: str = ":host") -> str:
    """Every role and neutral as a CSS custom property that follows the page's ``color-scheme``.

    Components put this in front of their own style sheet, so a colour is never typed twice.

    >>> css_variables().splitlines()[1].strip()
    '--page: light-dark(#FFFFFF, #12161D);'
    """
    pairs = [(name, getattr(LIGHT, name), getattr(DARK, name)) for name in Surface.__slots__]
    for name, meaning in ROLES.items():
        css = name.replace("_", "-")
        pairs.append((css, meaning.light.fill, meaning.dark.fill))
        pairs.append((f"on-{css}", meaning.light.on_fill, meaning.dark.on_fill))
        pairs.append((f"{css}-text", meaning.light.text, meaning.dark.text))
    lines = "\n".join(f"  --{name}: light-dark({light}, {dark});" for name, light, dark in pairs)
    return f"{selector} {{\n{lines}\n  --sans: {SANS};\n  --mono: {MONO};\n}}\n"
