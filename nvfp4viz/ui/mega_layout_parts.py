"""Where the mega-kernel's bytes lie: packed codes, scales and rows, before and after; parts of the page."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import streamlit as st

from nvfp4viz.figures import mega_kernel as figures
from nvfp4viz.figures import mega_stations
from nvfp4viz.figures.scaling import power_of_two
from nvfp4viz.formats import (
    E2M1,
    check_tensor_map,
    decode_e2m1,
    decode_e4m3,
    interleave_gate_up,
    interleaved_row,
    offset_128x4,
    pack_ue8m0,
    padded_place,
    unpack_nibbles,
    utccp_row,
    widen_e2m1,
)
from nvfp4viz.formats.places import ATOM_BYTES, ATOM_CODES, GAP_BYTES, UTCCP_ROWS
from nvfp4viz.formats.tma import BOX_CODES, STRIDE_END, SWIZZLES, TensorMap
from nvfp4viz.moe.mega_kernel import GROUP, PACKING
from nvfp4viz.ui import predict, registry
from nvfp4viz.ui.i18n import lang, listed
from nvfp4viz.ui.lesson import Lesson
from nvfp4viz.ui.mega_kernel_parts import PAGE, layer_of, power
from nvfp4viz.ui.numbers import bits, exact, hex_byte, hex_nibble
from nvfp4viz.ui.place_map import Cells, Panel, place_map
from nvfp4viz.ui.theme import theme

ROWS = 64
"""Rows of gate and up together in the picture of the interleave."""
MIX = 8
MAP_FIELDS = ("rows", "codes", "stride", "address", "box_rows", "box_codes")
USUAL = TensorMap(rows=4096, codes=4096, stride=2048)
LARGEST = 2**41
"""What may be typed for a side of a tensor map: more than any is allowed to be."""


# ------------------------------------------------------------------ packed bytes, alignment, widening


def bytes_part(page: Lesson) -> None:
    """What moves and what changes; 128 codes in global and in shared memory; what the tensor core makes of a code; what
    TMA demands."""
    found = mega_stations.stations(layer_of(page))
    page.figure(
        mega_stations.stations_figure(found, theme=theme(), lang=lang()),
        alt=page.t("way.alt"),
        finding=mega_stations.describe_stations(found, lang()),
        rows=lambda: mega_stations.station_rows(found),
    )
    page.heading("bytes.heading")
    stage, side = page.stage((5, 2))
    packed = layer_of(page).w13[0, 0, : BOX_CODES // 2]
    with stage:
        _bytes_map(page, packed)
    with side:
        page.finding("bytes.seen", codes=BOX_CODES, packed=len(packed), padded=BOX_CODES, gap=BOX_CODES - len(packed))
        page.prose("bytes.text", codes=ATOM_CODES, atom=ATOM_BYTES, gap=GAP_BYTES)
        page.glossary("tma", "shared_memory")
    page.heading("widen.heading")
    if _which_change(page):
        _widened(page)
    page.heading("align.heading")
    align(page)


def _which_change(page: Lesson) -> bool:
    """Asked: which codes change their value when the tensor core takes them for E4M3?"""
    codes = np.arange(16, dtype=np.uint8)
    changed = int((decode_e4m3(widen_e2m1(codes)) != decode_e2m1(codes)).sum())
    return predict.ask(
        f"{PAGE}.predict.widen",
        ("none", "half", "most"),
        answer="none" if not changed else "half" if changed == 2 else "most",
        count=len(codes),
        changed=changed,
        half=exact(E2M1.min_subnormal),
    )


def _widened(page: Lesson) -> None:
    page.table(
        ("code", ">code_bits", ">value", ">byte", ">byte_bits"),
        [
            (
                hex_nibble(code),
                f"`{_spaced(bits(code, 4), 1, 2)}`",
                exact(float(decode_e2m1([code])[0])),
                hex_byte(byte),
                f"`{_spaced(bits(byte, 8), 1, 4)}`",
            )
            for code, byte in enumerate(widen_e2m1(range(16)).tolist())
        ],
    )
    half = int(np.flatnonzero(decode_e2m1(range(16)) == E2M1.min_subnormal)[0])
    page.prose("widen.text", half=exact(E2M1.min_subnormal), code=hex_nibble(half), minus=hex_nibble(half | 8))


def _spaced(digits: str, *widths: int) -> str:
    """Binary digits with a space between sign, exponent and mantissa."""
    parts, at = [], 0
    for width in widths:
        parts.append(digits[at : at + width])
        at += width
    return " ".join([*parts, digits[at:]])


def _bytes_map(page: Lesson, packed: figures.U8) -> None:
    codes = unpack_nibbles(packed).tolist()
    places = [padded_place(k) for k in range(BOX_CODES)]
    said = [
        page.t(
            "bytes.place",
            k=k,
            code=hex_nibble(code),
            value=exact(float(decode_e2m1([code])[0])),
            nibble=page.t("bytes.high" if k % 2 else "bytes.low"),
            byte=k // 2,
            hex=hex_byte(packed[k // 2]),
            place=places[k][0],
            address=hex_byte(places[k][0]),
            atom=places[k][0] // ATOM_BYTES,
        )
        for k, code in enumerate(codes)
    ]
    cells = Cells(
        [2 * byte + nibble for byte, nibble in places],
        ["shade" if k % 2 else "plain" for k in range(BOX_CODES)],
        [f"{code:X}" for code in codes],
        said,
        page.t("bytes.gap", gap=GAP_BYTES),
    )
    place_map(
        page.view,
        "k",
        Panel(page.t("bytes.before", count=len(packed)), ATOM_CODES, BOX_CODES, 26, unit=2),
        Panel(page.t("bytes.after", count=BOX_CODES), 2 * ATOM_BYTES, 2 * BOX_CODES, 26, unit=2, share=2),
        cells,
        legend=page.t("bytes.legend"),
        keys=page.t("bytes.keys"),
    )


def code_rows(page: Lesson) -> list[dict[str, object]]:
    """The 128 codes of the map, each with its byte before and after, and what the tensor core makes of it."""
    packed = layer_of(page).w13[0, 0, : BOX_CODES // 2]
    codes = unpack_nibbles(packed)
    return [
        {
            "k": k,
            "code": code,
            "value": float(value),
            "global_byte": k // 2,
            "nibble": "high" if k % 2 else "low",
            "shared_byte": padded_place(k)[0],
            "e4m3": e4m3,
        }
        for k, (code, value, e4m3) in enumerate(
            zip(codes.tolist(), decode_e2m1(codes), widen_e2m1(codes).tolist(), strict=True)
        )
    ]


def wanted_map(page: Lesson) -> TensorMap:
    """The tensor map of the page's settings."""
    return TensorMap(**{name: page.view[name] for name in MAP_FIELDS}, swizzle=page.view["swizzle"])


def map_rows(page: Lesson) -> list[dict[str, object]]:
    """Every demand on the page's tensor map, and the map itself, as rows."""
    wanted = wanted_map(page)
    return [
        asdict(wanted) | {"rule": rule.id, "given": rule.given, "limit": rule.limit, "holds": rule.holds}
        for rule in check_tensor_map(wanted)
    ]


def align(page: Lesson) -> None:
    """A tensor map to edit, and every demand held against it."""
    view = page.view
    left, right = st.columns((1, 2), gap="large")
    with left:
        columns = st.columns(2)
        for index, name in enumerate(MAP_FIELDS):
            columns[index % 2].number_input(page.t(f"align.field.{name}"), 0, LARGEST, **view.widget(name))
        st.selectbox(page.t("align.field.swizzle"), SWIZZLES, **view.widget("swizzle"))
    rules = check_tensor_map(wanted_map(page))
    broken = [rule for rule in rules if not rule.holds]
    with right:
        page.finding(
            "align.refused" if broken else "align.accepted",
            rules=listed(page.t(f"align.name.{rule.id}") for rule in broken),
            count=len(rules),
        )
        page.table(
            ("demand", ">given", "holds"),
            [
                (
                    page.t(f"align.rule.{rule.id}", limit=rule.limit, most=power_of_two(STRIDE_END.bit_length() - 1)),
                    f"{rule.given}",
                    page.t("align.yes" if rule.holds else "align.no"),
                )
                for rule in rules
            ],
        )
    page.prose("align.text")


# ------------------------------------------------------------------ scales


def scales_part(page: Lesson) -> None:
    """Four exponents to a word, and the order of rows that UTCCP wants."""
    scales = _tile(page)
    words = [f"0x{word:08X}" for word in pack_ue8m0(scales)[:, 0].tolist()]
    places = [utccp_row(row) for row in range(UTCCP_ROWS)]
    place_map(
        page.view,
        "w",
        Panel(page.t("scales.before"), 32, UTCCP_ROWS, 26, share=4),
        Panel(page.t("scales.after"), 4, UTCCP_ROWS, 15),
        Cells(
            places,
            [f"band{r // 32}" if r < 96 else "plain" for r in range(UTCCP_ROWS)],
            [str(r) for r in range(UTCCP_ROWS)],
            [
                page.t(
                    "scales.place",
                    row=r,
                    word=words[r],
                    lane=places[r] // 4,
                    quarter=places[r] % 4,
                    place=places[r],
                    byte=offset_128x4(r, 0, 4),
                )
                for r in range(UTCCP_ROWS)
            ],
        ),
        legend=page.t("scales.legend"),
        keys=page.t("scales.keys"),
    )
    registry.link("blocks", page.t("scales.link"), part="swizzle")
    left, right = st.columns(2, gap="large")
    row = page.view["w"]
    with left:
        page.finding("scales.seen", row=row, word=words[row], elements=PACKING, place=places[row])
        page.table(
            ("group", ">byte", ">scale", ">bits_at"),
            [
                (str(j), hex_byte(byte), power(byte), f"{8 * j} – {8 * j + 7}")
                for j, byte in enumerate(scales[row].tolist())
            ],
        )
        page.glossary("ue8m0", "utccp", "tensor_memory")
    with right:
        page.prose("scales.text", group=GROUP, unit=PACKING)


def _tile(page: Lesson) -> figures.U8:
    """The scales of the tile that is drawn: its rows, and the bytes of one word each."""
    return interleave_gate_up(layer_of(page).w13_scales[0])[:UTCCP_ROWS, : PACKING // GROUP]


def scale_rows(page: Lesson) -> list[dict[str, object]]:
    """Each row's word of four scales, and where UTCCP wants it."""
    scales = _tile(page)
    words = pack_ue8m0(scales)[:, 0].tolist()
    return [
        {"row": row, "word": f"0x{words[row]:08X}"}
        | {f"scale_byte_{j}": byte for j, byte in enumerate(scales[row].tolist())}
        | {"place": utccp_row(row), "first_byte": offset_128x4(row, 0, 4)}
        for row in range(UTCCP_ROWS)
    ]


# ------------------------------------------------------------------ gate and up


def rows_part(page: Lesson) -> None:
    """Where rows of gate and up go: asked, then shown."""
    half = ROWS // 2
    places = [interleaved_row(row, ROWS, MIX) for row in range(ROWS)]
    answers = {1: "one", MIX: "group", half: "stay"}
    revealed = predict.ask(
        f"{PAGE}.predict.rows", tuple(answers.values()), answer=answers[places[half]], half=half, group=MIX
    )
    if revealed:
        place_map(
            page.view,
            "r",
            Panel(page.t("rows.before", half=half), 2 * MIX, ROWS, 28),
            Panel(page.t("rows.after", group=MIX), 2 * MIX, ROWS, 28),
            Cells(
                places,
                ["plain" if r < half else "shade" for r in range(ROWS)],
                [f"g{r}" if r < half else f"u{r - half}" for r in range(ROWS)],
                [
                    page.t(
                        "rows.place",
                        name=page.t("rows.gate" if r < half else "rows.up"),
                        row=r % half,
                        stored=r,
                        place=places[r],
                        partner=places[(r + half) % ROWS],
                    )
                    for r in range(ROWS)
                ],
            ),
            legend=page.t("rows.legend"),
            keys=page.t("rows.keys"),
        )
    page.prose("rows.text", group=MIX, tile=2 * MIX)


def interleaved_rows() -> list[dict[str, object]]:
    """Where each row of gate and up goes."""
    half = ROWS // 2
    return [
        {"of": "gate" if row < half else "up", "row": row % half, "stored": row}
        | {"place": interleaved_row(row, ROWS, MIX)}
        for row in range(ROWS)
    ]
