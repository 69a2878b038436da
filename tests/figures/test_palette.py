"""Colours: legible, told apart, and the same in Streamlit's configuration."""

import tomllib
from itertools import combinations
from pathlib import Path

import pytest

from nvfp4viz.figures.palette import DARK, LIGHT, ROLES, SANS, contrast, css_variables, surface

CONFIG = tomllib.loads((Path(__file__).parents[2] / ".streamlit" / "config.toml").read_text(encoding="utf-8"))
THEMES = ("light", "dark")
READABLE = 4.5  # WCAG AA for text


@pytest.mark.parametrize("theme", THEMES)
def test_streamlit_has_the_same_neutrals(theme):
    configured = CONFIG["theme"][theme]
    ours = surface(theme)
    assert configured["backgroundColor"] == ours.page
    assert configured["secondaryBackgroundColor"] == ours.panel
    assert configured["textColor"] == ours.ink
    assert configured["borderColor"] == ours.line
    assert configured["primaryColor"] == ours.accent


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ROLES)
def test_a_role_is_legible(theme, name):
    shade, page = ROLES[name].shade(theme), surface(theme)
    assert contrast(shade.on_fill, shade.fill) >= READABLE
    assert contrast(shade.text, page.page) >= READABLE
    assert contrast(shade.text, page.panel) >= READABLE


@pytest.mark.parametrize("neutral", [LIGHT, DARK], ids=THEMES)
def test_words_are_legible(neutral):
    for ink in (neutral.ink, neutral.muted, neutral.accent):
        for paper in (neutral.page, neutral.panel):
            assert contrast(ink, paper) >= READABLE


def test_every_role_has_its_own_mark():
    marks = [role.mark for role in ROLES.values()]
    assert len(set(marks)) == len(marks)


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
DEFICIENCIES = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def _linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def _lab(rgb: list[float]) -> tuple[float, float, float]:
    r, g, b = (min(max(c, 0.0), 1.0) for c in rgb)
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


# Just noticeable is about 2.3; side by side in a figure, 10 is told apart without effort.
APART = 10


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_roles_of_one_picture_are_told_apart(theme, deficiency):
    """Bit roles appear together, and so do the two scales; also under the three colour deficiencies."""
    matrix = DEFICIENCIES[deficiency]

    def seen(name: str) -> tuple[float, float, float]:
        rgb = _linear(ROLES[name].shade(theme).fill)
        return _lab([sum(m * c for m, c in zip(row, rgb, strict=True)) for row in matrix])

    for group in (("sign", "exponent", "mantissa"), ("block_scale", "global_scale")):
        for first, second in combinations(group, 2):
            difference = sum((a - b) ** 2 for a, b in zip(seen(first), seen(second), strict=True)) ** 0.5
            assert difference >= APART, (first, second, difference)


def test_components_get_every_colour_as_a_variable():
    css = css_variables()
    for name, role in ROLES.items():
        assert f"--{name.replace('_', '-')}: light-dark({role.light.fill}, {role.dark.fill});" in css


def test_streamlit_and_figures_have_the_same_faces_and_the_first_is_declared():
    faces = SANS.split(", ")
    for name in ("font", "headingFont"):
        assert [face.strip("'") for face in CONFIG["theme"][name].split(", ")] == faces
    sheet = (Path(__file__).parents[2] / "nvfp4viz" / "ui" / "shell.css").read_text(encoding="utf-8")
    assert f'font-family: "{faces[0]}";' in sheet
