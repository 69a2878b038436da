"""The Explorer's map and the slot beside it: they speak of one slot, and say only what was looked at."""

import pytest

from nvfp4viz.ui import i18n
from sample_checkpoints import ensure

from .conftest import clean, tab, texts
from .test_explorer import HOLES, LANGUAGES, upload

MXFP4 = "tiny-moe-mxfp4"


def pack(sample: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(ensure(sample).iterdir()) if path.is_file()}


def other(at, sample: str):
    """Open another checkpoint, as the chooser does."""
    at.session_state["checkpoint"] = sample
    return clean(at.run())


def headers_alone(data: bytes) -> bytes:
    """A shard that broke off where its tensors begin."""
    return data[: 8 + int.from_bytes(data[:8], "little")]


def cursor(at) -> tuple[int, int, str]:
    return tuple(at.session_state[name] for name in ("layer", "expert", "projection"))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(("sample", "role"), [(MXFP4, "weight_scale"), ("tiny-moe-nvfp4-full", "weight_scale")])
def test_nothing_is_said_of_bytes_that_nobody_read(open_page, lang, sample, role):
    at = open_page("explorer", lang=lang, checkpoint=sample, role=role)
    shown = texts(at)
    assert shown.count("audit --deep") == 2  # under the map, and where there is no finding
    assert {"en": "hold no usable number", "zh": "数值不可用"}[lang] not in shown
    assert {"en": "every scale.", "zh": "以及每个缩放因子"}[lang] not in shown
    scalars = texts(open_page("explorer", lang=lang, checkpoint="tiny-moe-nvfp4-full", role="weight_scale_2"))
    assert {"en": "hold no usable number", "zh": "数值不可用"}[lang] in scalars


@pytest.mark.parametrize("lang", LANGUAGES)
def test_without_scales_none_was_looked_at(open_page, lang):
    shown = texts(open_page("explorer", lang=lang, checkpoint="tiny-moe-bf16"))
    assert {"en": "No finding.", "zh": "没有发现问题。"}[lang] in shown
    assert "--deep" not in shown


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_tensor_in_a_truncated_file_is_not_called_absent(open_page, lang, monkeypatch):
    monkeypatch.setattr(i18n, "lang", lambda: lang)  # AppTest formats the choices after the run, without a session
    files = pack("tiny-moe-nvfp4-full")
    lost = max(name for name in files if name.endswith(".safetensors"))
    at = upload(
        open_page("explorer", lang=lang, role="weight_scale"),
        *((name, headers_alone(data) if name == lost else data) for name, data in files.items()),
    )
    shown = texts(at)
    assert {"en": "`weight_scale` lies in a file that cannot be read", "zh": "`weight_scale` 所在的文件无法读取"}[
        lang
    ] in shown
    assert {"en": "is not stored", "zh": "没有存储"}[lang] not in shown
    shown = texts(tab(at, "explorer", 1))
    assert {"en": "stored, not read", "zh": "已存储，未能读取"}[lang] in shown
    assert {"en": "· missing", "zh": "· 缺失"}[lang] not in shown


def test_the_page_s_own_choice_of_scale_ends_with_its_checkpoint(open_page):
    at = open_page("explorer", checkpoint=MXFP4)
    assert at.session_state["explorer.role"] == "weight_scale"
    assert cursor(at) == (0, 0, "gate")
    at = other(at, HOLES)
    assert at.session_state["explorer.role"] == "input_scale"
    assert "has no usable number" in texts(at)  # the slot shown is a hole
    fresh = open_page("explorer", checkpoint=HOLES)
    assert cursor(at) == cursor(fresh)


def test_the_reader_s_choice_of_scale_and_slot_goes_with_them(open_page):
    at = open_page("explorer", checkpoint="tiny-moe-nvfp4-full")
    at.radio(key="explorer.role").set_value("weight_scale_2").run()
    at.number_input(key="expert").set_value(7).run()
    at = other(at, HOLES)
    assert at.session_state["explorer.role"] == "weight_scale_2"
    assert at.session_state["expert"] == 7
    # And comes back after a checkpoint that has no such scale.
    at = other(at, MXFP4)
    assert at.session_state["explorer.role"] == "weight_scale"
    at = other(at, HOLES)
    assert at.session_state["explorer.role"] == "weight_scale_2"


def test_a_link_to_a_slot_that_is_in_order_opens_it(open_page):
    at = open_page("explorer", checkpoint="tiny-moe-nvfp4-full")
    first = cursor(at)
    at = open_page("explorer", checkpoint=HOLES, layer=str(first[0]), expert=str(first[1]), projection=first[2])
    assert cursor(at) == first
