"""The nine links of the chain: a `ChainTrace` and its calibrated twin become the texts of the chain component."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nvfp4viz.figures.coverage import shown
from nvfp4viz.formats import decode_e4m3
from nvfp4viz.ui.components import load
from nvfp4viz.ui.i18n import lang, t
from nvfp4viz.ui.numbers import exact, four, hex_byte, hex_f32, near

if TYPE_CHECKING:
    from nvfp4viz.serving.chain import ChainTrace, GemmLink

_CHAIN = load("failure_chain")
_NONE = "–"
LINKS = ("key", "slot", "reciprocal", "block_scale", "codes", "product", "residual", "logits", "token")


@dataclass(frozen=True, slots=True)
class Link:
    """One link: headline in both columns, its rows, and how it is drawn (``""``, ``"missing"`` or ``"bad"``)."""

    id: str
    hole: str
    twin: str
    rows: tuple[tuple[str, str, str], ...]
    state: str = ""
    mark: str = ""


def chain_view(chain: ChainTrace, twin: ChainTrace | None, *, key: str, open_link: str, tall: bool) -> str:
    """Draw the chain; returns the id of the link that the reader has open."""
    links = [
        {
            "id": link.id,
            "title": _t(f"{link.id}.title"),
            "what": _t(f"{link.id}.what"),
            "hole": link.hole,
            "twinText": link.twin,
            "rows": [{"name": name, "hole": hole, "twin": other} for name, hole, other in link.rows],
            "state": link.state,
            "mark": link.mark,
        }
        for link in links_of(chain, twin)
    ]
    data = {
        "links": links,
        "open": open_link,
        "hole": _t("hole_column"),
        "twin": _t("twin_column"),
        "quantity": _t("quantity"),
        "tall": tall,
        "lang": lang(),
    }
    result = _CHAIN(key=key, data=data, on_link_change=lambda: None)
    chosen = result.get("link")
    return open_link if chosen is None else str(chosen)


def _t(key: str, **values: object) -> str:
    return t(f"empty_answer.chain.{key}", **values)


def titles() -> dict[str, str]:
    """The links' names in the reader's language."""
    return {link: _t(f"{link}.title") for link in LINKS}


def telling(chain: ChainTrace) -> int:
    """Which of the two products to look at: the first that holds a NaN block scale, else the first."""
    return 1 if chain.first.nan_blocks or not chain.second.nan_blocks else 2


def links_of(chain: ChainTrace, twin: ChainTrace | None) -> tuple[Link, ...]:
    """All links, in order."""
    which = telling(chain)
    gemm = _gemm(chain, which)
    other = None if twin is None else _gemm(twin, which)
    return (
        _key(chain, twin),
        _slot(chain, twin),
        _reciprocal(chain, twin),
        _block_scale(chain, twin, gemm, other),
        _codes(chain, twin, gemm, other),
        _product(chain, twin, gemm, other),
        _residual(chain, twin),
        _logits(chain, twin),
        _token(chain, twin),
    )


def _gemm(chain: ChainTrace, which: int) -> GemmLink:
    return chain.first if which == 1 else chain.second


def _key(chain: ChainTrace, twin: ChainTrace | None) -> Link:
    there, gone = _t("key.present"), _t("key.absent")
    others = {} if twin is None else {slot.projection: slot for slot in twin.slots}
    rows = []
    for slot in chain.slots:
        other = others.get(slot.projection)
        rows.append(
            (slot.name, there if slot.written else gone, _NONE if other is None else there if other.written else gone)
        )
    missing = sum(not slot.written for slot in chain.slots)
    count = len(chain.slots)
    found = _NONE if twin is None else _t("key.count", n=sum(slot.written for slot in twin.slots), of=len(twin.slots))
    state = "missing" if missing else ""
    return Link("key", _t("key.count", n=count - missing, of=count), found, tuple(rows), state, "∅" if missing else "")


def _slot(chain: ChainTrace, twin: ChainTrace | None) -> Link:
    others = {} if twin is None else {slot.projection: slot.value for slot in twin.slots}
    rows = tuple(
        (f"{slot.projection} · input_scale", f32(slot.value), f32(others.get(slot.projection))) for slot in chain.slots
    )
    value = chain.slots[0].value
    return Link("slot", f32(value), f32(others.get(chain.slots[0].projection)), rows, _state(value), _mark(value))


def _reciprocal(chain: ChainTrace, twin: ChainTrace | None) -> Link:
    rows = []
    for gemm, name in ((1, "w13"), (2, "w2")):
        mine = _gemm(chain, gemm)
        other = None if twin is None else _gemm(twin, gemm)
        for quantity in ("input_scale", "gscale", "alpha"):
            rows.append(
                (
                    f"{name} · {_t(f'reciprocal.{quantity}')}",
                    f32(getattr(mine, quantity)),
                    f32(None if other is None else getattr(other, quantity)),
                )
            )
    value = chain.first.gscale
    return Link(
        "reciprocal",
        f32(value),
        f32(None if twin is None else twin.first.gscale),
        tuple(rows),
        _state(value),
        _mark(value),
    )


def _block_scale(chain: ChainTrace, twin: ChainTrace | None, gemm: GemmLink, other: GemmLink | None) -> Link:
    rows = []
    for which, name in ((1, "w13"), (2, "w2")):
        mine = _gemm(chain, which)
        peer = None if twin is None else _gemm(twin, which)
        rows += [
            (f"{name} · {_t('block_scale.block')}", str(mine.block), str(mine.block)),
            (
                f"{name} · {_t('block_scale.amax')}",
                f32(mine.block_amax[mine.block]),
                f32(None if peer is None else peer.block_amax[mine.block]),
            ),
            (f"{name} · {_t('block_scale.byte')}", _byte(mine, mine.block), _byte(peer, mine.block)),
            (f"{name} · {_t('block_scale.nan_blocks')}", _nan_blocks(mine), _nan_blocks(peer)),
        ]
    bad = gemm.nan_blocks > 0
    return Link(
        "block_scale",
        _byte(gemm, gemm.block),
        _byte(other, gemm.block),
        tuple(rows),
        "bad" if bad else "",
        "N" if bad else "",
    )


def _codes(chain: ChainTrace, twin: ChainTrace | None, gemm: GemmLink, other: GemmLink | None) -> Link:
    rows = []
    for which, name in ((1, "w13"), (2, "w2")):
        mine = _gemm(chain, which)
        peer = None if twin is None else _gemm(twin, which)
        rows.append(
            (
                f"{name} · {_t('codes.codes', block=mine.block)}",
                _codes_of(mine, mine.block),
                _codes_of(peer, mine.block),
            )
        )
        rows.append((f"{name} · {_t('codes.values')}", _values_of(mine, mine.block), _values_of(peer, mine.block)))
    stuck = gemm.codes is not None and gemm.nan_blocks > 0
    shown_codes = _codes_of(gemm, gemm.block), _codes_of(other, gemm.block)
    return Link("codes", *shown_codes, tuple(rows), "bad" if stuck else "", "!" if stuck else "")


def _product(chain: ChainTrace, twin: ChainTrace | None, gemm: GemmLink, other: GemmLink | None) -> Link:
    rows = []
    for which, name in ((1, "w13"), (2, "w2")):
        mine = _gemm(chain, which)
        peer = None if twin is None else _gemm(twin, which)
        rows += [
            (f"{name} · {_t('product.accumulator')}", f32(mine.acc[0]), f32(None if peer is None else peer.acc[0])),
            (f"{name} · {_t('product.alpha')}", f32(mine.alpha), f32(None if peer is None else peer.alpha)),
            (f"{name} · {_t('product.out')}", _first(mine.out), _first(None if peer is None else peer.out)),
            (f"{name} · {_t('product.nan')}", _nan_count(mine.out), _nan_count(None if peer is None else peer.out)),
        ]
    value = gemm.out
    return Link(
        "product",
        _nan_or_range(value),
        _nan_or_range(None if other is None else other.out),
        tuple(rows),
        "bad" if _has_nan(value) else "",
        "N" if _has_nan(value) else "",
    )


def _residual(chain: ChainTrace, twin: ChainTrace | None) -> Link:
    rows = [
        (_t("residual.weight"), f32(chain.weight), f32(None if twin is None else twin.weight)),
        (_t("residual.expert_out"), _nan_or_range(chain.expert_out), _nan_or_range(_get(twin, "expert_out"))),
        (_t("residual.moe_out"), _nan_or_range(chain.moe_out), _nan_or_range(_get(twin, "moe_out"))),
    ]
    for layer, share in enumerate(chain.nan_after):
        peer = _NONE if twin is None else _share(twin.nan_after[layer])
        rows.append((_t("residual.after", layer=layer), _share(share), peer))
    last = chain.nan_after[-1]
    bad = float(last) > 0
    return Link(
        "residual",
        _t("nan_share", share=_share(last)),
        _NONE if twin is None else _t("nan_share", share=_share(twin.nan_after[-1])),
        tuple(rows),
        "bad" if bad else "",
        "N" if bad else "",
    )


def _logits(chain: ChainTrace, twin: ChainTrace | None) -> Link:
    rows = [
        (_t("logits.count"), _nan_count(chain.logits), _nan_count(_get(twin, "logits"))),
        (_t("logits.largest"), _largest(chain.logits), _largest(_get(twin, "logits"))),
        (_t("logits.zero"), f32(chain.logits[0]), f32(None if twin is None else twin.logits[0])),
    ]
    bad = chain.logit_nans > 0
    return Link(
        "logits",
        _nan_or_range(chain.logits),
        _nan_or_range(_get(twin, "logits")),
        tuple(rows),
        "bad" if bad else "",
        "N" if bad else "",
    )


def _token(chain: ChainTrace, twin: ChainTrace | None) -> Link:
    rows = [
        (_t("token.ids"), _ids(chain), _NONE if twin is None else _ids(twin)),
        (_t("token.text"), _text(chain), _NONE if twin is None else _text(twin)),
    ]
    bad = chain.token_ids[0] == 0
    first = [_one(c) for c in (chain, twin)]
    return Link("token", first[0], first[1], tuple(rows), "bad" if bad else "", "0" if bad else "")


# ---- how numbers are written


def f32(value: Any) -> str:
    """A float32 and its bits, or a dash."""
    if value is None:
        return _NONE
    return f"{near(float(np.float32(value)))}  {hex_f32(value)}"


def _byte(gemm: GemmLink | None, block: int) -> str:
    if gemm is None or gemm.scales is None:
        return _NONE
    byte = int(gemm.scales[block])
    return f"{hex_byte(byte)}  {exact(float(decode_e4m3(np.array([byte], np.uint8))[0]))}"


def _nan_blocks(gemm: GemmLink | None) -> str:
    return _NONE if gemm is None or gemm.scales is None else _t("of", n=gemm.nan_blocks, of=len(gemm.scales))


def _codes_of(gemm: GemmLink | None, block: int) -> str:
    if gemm is None or gemm.codes is None:
        return _NONE
    digits = "".join(f"{code:X}" for code in gemm.codes[block * 16 : block * 16 + 16])
    return " ".join(digits[start : start + 4] for start in range(0, 16, 4))


def _values_of(gemm: GemmLink | None, block: int) -> str:
    from nvfp4viz.formats import decode_e2m1

    if gemm is None or gemm.codes is None:
        return _NONE
    return " ".join(exact(value) for value in decode_e2m1(gemm.codes[block * 16 : block * 16 + 16]))


def _first(values: Any) -> str:
    if values is None:
        return _NONE
    value = values[0]
    bits = int(np.asarray(value).reshape(1).view(np.uint16)[0])
    return f"{near(float(value))}  0x{bits:04X}"


def _nan_count(values: Any) -> str:
    if values is None:
        return _NONE
    floats = np.asarray(values, np.float32)
    return _t("of", n=int(np.isnan(floats).sum()), of=floats.size)


def _has_nan(values: Any) -> bool:
    return bool(np.isnan(np.asarray(values, np.float32)).any())


def _nan_or_range(values: Any) -> str:
    """NaN count where there is one, else the span of the values."""
    if values is None:
        return _NONE
    floats = np.asarray(values, np.float32)
    if np.isnan(floats).any():
        return _t("nan_of", n=int(np.isnan(floats).sum()), of=floats.size)
    return _t("span", low=four(float(floats.min())), high=four(float(floats.max())))


def _largest(logits: Any) -> str:
    from nvfp4viz.model import Tokenizer

    if logits is None:
        return _NONE
    if np.isnan(logits).all():
        return "NaN"
    best = int(np.nanargmax(logits))
    return f"{four(float(logits[best]))}  id {best} {shown(Tokenizer().vocabulary[best])}"


def _share(share: Any) -> str:
    return f"{four(100 * float(share))} %"


def _get(twin: ChainTrace | None, name: str) -> Any:
    return None if twin is None else getattr(twin, name)


def _ids(chain: ChainTrace) -> str:
    return " ".join(map(str, chain.token_ids[:16])) + (" …" if len(chain.token_ids) > 16 else "")


def _text(chain: ChainTrace) -> str:
    text = "".join(shown(c) for c in chain.text)
    return text if len(text) <= 60 else text[:60] + "…"


def _one(chain: ChainTrace | None) -> str:
    from nvfp4viz.model import Tokenizer

    if chain is None:
        return _NONE
    token = chain.token_ids[0]
    return f"id {token}  {shown(Tokenizer().vocabulary[token])}"


def _state(value: Any) -> str:
    number = float(np.float32(value)) if value is not None else 1.0
    return "bad" if not np.isfinite(number) or number == 0 else ""


def _mark(value: Any) -> str:
    if value is None:
        return ""
    number = float(np.float32(value))
    if np.isnan(number):
        return "N"
    if np.isinf(number):
        return "∞" if number > 0 else "−∞"
    return "0" if number == 0 else ""
