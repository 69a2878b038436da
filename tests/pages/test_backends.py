"""The page on backends as a reader in either language meets it."""

import html
import re

import pytest

from nvfp4viz.errors import ServingError
from nvfp4viz.figures.backends import REFERENCE
from nvfp4viz.figures.words import listed, words
from nvfp4viz.serving.remedies import judge
from nvfp4viz.serving.selection import CHOICES, GPUS, MOE, SCHEMES, MoeRequest, automatic_order, select_moe
from nvfp4viz.serving.selection_linear import (
    LINEAR,
    LINEAR_CHOICES,
    NO_KERNEL,
    LinearRequest,
    linear_order,
    select_linear,
)
from nvfp4viz.serving.selection_mxfp4 import Mxfp4Request, select_mxfp4
from nvfp4viz.ui import backends_remedies as remedies
from nvfp4viz.ui import i18n
from nvfp4viz.ui.backends_defaults import default_rows
from nvfp4viz.ui.backends_parts import PARTS

from .conftest import clean, guessed, shown_code_output, skipped, texts

PAGE = "backends"
LANGUAGES = ["en", "zh"]
TITLES = {"en": "Backends", "zh": "后端"}
WRONG = f"{PAGE}.predict.wrong"
AUTO = f"{PAGE}.predict.auto"
ASKED = {
    "moe": AUTO,
    "linear": f"{PAGE}.predict.name",
    "mxfp4": f"{PAGE}.predict.activations",
    "defaults": f"{PAGE}.predict.uninstalled",
}


def answered(open_page, lang="en", **query):
    """The page past the question of its part."""
    at = open_page(PAGE, lang=lang, **query)
    return skipped(at, ASKED[query.get("part", "moe")])


def ladder(at):
    """The HTML of the candidates."""
    return next(str(part.proto.body) for part in at.get("html") if "<ol" in str(part.proto.body))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", [part for part in PARTS if part != "remedies"])
def test_every_part_opens_by_link(open_page, lang, part):
    at = open_page(PAGE, lang=lang, part=part)
    assert at.title[0].value == TITLES[lang]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"part": "nowhere"},
        {"gpu": "sm_70"},
        {"act": "tanh"},
        {"scheme": "W8A8"},
        {"par": "pp"},
        {"fi": "2"},
        {"pick": "vllm"},
        {"ranks": "3"},
        {"ranks": "nan"},
        {"lin": "W4A4-token"},
        {"off": "Triton"},
        {"lpick": "x"},
        {"model": "gemma"},
        {"want": "fp8"},
        {"form": "sparse"},
        {"mpick": "b12x"},
    ],
    ids=lambda query: " ".join(f"{name}={value}" for name, value in query.items()),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    (name,) = query
    assert f"`{name}=" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_asks_who_is_taken_and_shows_whom_vllm_asks(open_page, lang):
    """Before the answer: the order and what each would read, and no verdict."""
    at = open_page(PAGE, lang=lang)
    assert [radio.key for radio in at.radio] == [f"predict.asked.{AUTO}"]
    rungs = ladder(at)
    order = automatic_order("sm_120")
    places = [rungs.index(f'<span class="name">{row.enum}<') for row in order]
    assert places == sorted(places)
    assert rungs.count('class="asked"') == len(order)
    assert "✓" not in rungs
    assert "✗" not in rungs
    reads = {"en": "would read each expert's own scale", "zh": "会读每个专家自己的缩放因子"}[lang]
    assert html.unescape(rungs).count(reads) == 1


def picture(at):
    """The HTML of one file over all GPUs."""
    return next(str(part.proto.body) for part in at.get("html") if '<ul class="over"' in str(part.proto.body))


def rows_drawn(at):
    """Class and GPUs of each row of the picture."""
    return re.findall(r'<li class="([^"]*)"><span class="gpus">([^<]*)<', picture(at))


@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_opens_with_the_same_file_broken_on_one_gpu_and_sound_on_others(open_page, lang):
    at = open_page(PAGE, lang=lang)
    drawn = rows_drawn(at)
    rocm = words(lang, f"{PAGE}.gpu.rocm")
    assert [gpu for _, gpus in drawn for gpu in re.split(", |、", gpus)] == [
        rocm if gpu == "rocm" else gpu for gpu in GPUS
    ]
    reach = {row.enum: row.reach for row in MOE}
    for kind, gpus in drawn:
        first = next(gpu for gpu in GPUS if gpus.startswith(gpu) or (gpu, gpus) == ("rocm", rocm))
        winner = select_moe(MoeRequest(first)).winner.enum
        if first == "sm_120":
            assert kind == "asked here"  # and its answer is nowhere in the picture
            assert winner not in picture(at)
        else:
            assert kind == reach[winner]
            assert winner in picture(at)
    assert [gpus for kind, gpus in drawn if kind == "expert"] == ["sm_110"]
    said = {"en": "**broken on sm_110**", "zh": "在 **sm_110** 上**出错**"}[lang]
    assert said in texts(at)
    # The picture comes before the question.
    order = [
        part.proto.body if part.type == "html" else part.type for part in at.main if part.type in ("html", "radio")
    ]
    assert order.index("radio") > next(k for k, body in enumerate(order) if '<ul class="over"' in body)


def test_the_picture_tells_everything_once_answered_and_follows_the_settings(open_page):
    at = answered(open_page)
    assert "layer here" in [kind for kind, _ in rows_drawn(at)]
    assert "FLASHINFER_CUTLASS" in picture(at)
    at = answered(open_page, fi="0")
    assert ("expert here", "sm_100, sm_103, sm_110, sm_120, sm_121") in rows_drawn(at)
    assert "broken on sm_100, sm_103, sm_110, sm_120, sm_121" in texts(at)
    at = answered(open_page, scheme="W4A16")
    assert "broken nowhere" in texts(at)
    at = answered(open_page, pick="b12x")
    assert {kind for kind, _ in rows_drawn(at)} == {"open here"}


@pytest.mark.parametrize("guess", ["vllm_cutlass", "flashinfer_cutlass"])
def test_the_answer_is_the_selector_s_and_the_ladder_shows_it(open_page, guess):
    at = open_page(PAGE)
    at = guessed(at, AUTO, guess)
    winner = select_moe(MoeRequest()).winner
    said = words("en", f"ui.predict.{'as_predicted' if guess == winner.enum.lower() else 'otherwise'}", answer="")
    assert said.removesuffix("****") in texts(at)
    assert f'class="wins"><span class="sign" aria-hidden="true">✓</span><span class="name">{winner.enum}<' in ladder(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_what_the_answer_says_of_other_gpus_the_selector_says(open_page, lang):
    only = [gpu for gpu in GPUS if select_moe(MoeRequest(gpu)).winner.enum == "VLLM_CUTLASS"]
    assert only == ["sm_110"]
    # Not for every activation function, so the answer names those that it is about.
    assert [gpu for gpu in GPUS if select_moe(MoeRequest(gpu, "gelu_tanh")).winner.enum == "VLLM_CUTLASS"] == only
    assert [gpu for gpu in GPUS if select_moe(MoeRequest(gpu, "gelu")).winner.enum == "VLLM_CUTLASS"] != only
    said = {
        "en": "With SiLU or GELU-tanh vLLM takes it by itself on sm_110 only",
        "zh": "vLLM 只在 sm_110 上自动选用它",
    }[lang]
    assert said in texts(answered(open_page, lang))
    assert select_moe(MoeRequest(flashinfer=False)).winner.enum == "VLLM_CUTLASS"


def test_it_opens_on_a_winner_and_what_other_gpus_read(open_page):
    at = answered(open_page)
    assert "On sm_120 this deployment gets **FLASHINFER_CUTLASS**, which reads one maximum over the layer." in texts(at)
    assert "each expert's own on sm_110" in texts(at)
    rungs = ladder(at)
    assert rungs.count("<li") == len(MOE)
    assert rungs.count('class="wins"') == 1


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_ladder_is_the_library_s(open_page, gpu, scheme):
    at = answered(open_page, gpu=gpu, scheme=scheme)
    found = select_moe(MoeRequest(gpu, scheme=scheme))
    rungs = ladder(at)
    places = [rungs.index(f'<span class="name">{each.backend.enum}<') for each in found.candidates]
    assert places == sorted(places)
    assert rungs.count('class="refused') == sum(each.outcome == "refused" for each in found.candidates)
    assert ("Error serving." in texts(at)) == (found.error is not None)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("gpu", ["sm_90", "sm_120"])
def test_every_choice_by_name(open_page, lang, choice, gpu):
    at = answered(open_page, lang=lang, gpu=gpu, pick=choice, par="ep", ranks="2")
    found = select_moe(MoeRequest(gpu, parallel="ep", choice=choice))
    if found.error is not None:
        assert "does not support the deployment configuration since kernel does not support" in texts(at)


def test_an_unknown_name_shows_the_server_s_words(open_page):
    at = answered(open_page, pick="triton")
    assert "ValueError: moe\\_backend='triton' is not supported for NVFP4 MoE" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_later_refusal_is_no_winner(open_page, lang):
    """Marlin takes any activation key, and ModelOpt's online option then wants TRTLLM."""
    at = answered(open_page, lang=lang, scheme="W4A4-token")
    assert "serving.moe-per-token" in texts(at)
    assert "**MARLIN**" in texts(at)
    assert "EPLB" not in texts(at)


def test_scales_of_a_token_are_not_scales_of_the_file(open_page):
    """TRTLLM takes one maximum over the layer; with `nvfp4_per_token` it takes nothing from the file."""
    at = answered(open_page, gpu="sm_100", scheme="W4A4-token")
    assert "**FLASHINFER_TRTLLM**, which reads no scale of the file" in texts(at)
    assert "one a token on sm_100, sm_103; refused on" in texts(at)
    assert "one maximum" not in next(part.value for part in at.markdown if "**FLASHINFER_TRTLLM**" in part.value)
    at = answered(open_page, scheme="W4A16", pick="flashinfer_b12x")
    assert "**FLASHINFER_B12X**, which reads no activation scale" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("query", [{}, {"shape": "tiny_moe"}, {"par": "ep", "ranks": "8"}], ids=str)
def test_backends_that_store_the_same_share_a_row_and_a_sentence_says_so(open_page, lang, query):
    at = answered(open_page, lang=lang, **query)
    table = next(part.value for part in at.markdown if "VLLM_CUTLASS" in part.value and "|---" in part.value)
    assert len(table.splitlines()) == 2 + (1 if not query else 2)
    said = {"en": ("the choice costs no memory", "padding", "other ranks"), "zh": ("不影响内存", "补齐", "其他 rank")}
    assert said[lang][("shape" in query) + 2 * ("par" in query)] in texts(at)


def test_amd_s_platform_is_called_by_its_name(open_page):
    at = answered(open_page, gpu="rocm")
    assert "On AMD (ROCm) this deployment gets **EMULATION**" in texts(at)
    assert "sm_121, AMD (ROCm)" in texts(at)


def test_a_rank_boundary_through_a_block_is_explained(open_page):
    at = answered(open_page, shape="tiny_moe", ranks="8")
    assert "Error grouping.shape" in texts(at)


def test_bytes_of_a_rank_are_shown_with_their_padding(open_page):
    at = answered(open_page, gpu="sm_100", shape="tiny_moe")
    # Hidden 128 becomes 256 on TRTLLM: half of what is stored is padding, but for the scalars.
    seen = texts(at).replace("\u00a0", " ")
    assert "| **FLASHINFER_TRTLLM** | 64 × 256 × 64 | 1,769,472 |" in seen
    assert "VLLM_CUTLASS, MARLIN, EMULATION, FLASHINFER_B12X | 64 × 128 × 64 | 884,736 |" in seen
    assert "**FLASHINFER_TRTLLM** stores" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_marlin_pads_and_cutlass_stops_where_a_rank_s_rows_fill_no_tile(open_page, lang):
    at = answered(open_page, lang=lang, gpu="sm_120", shape="tiny_moe", ranks="2")
    seen = texts(at).replace("\u00a0", " ")
    # 64 experts, hidden size 128, width 32 a rank: Marlin stores 64.
    assert "| MARLIN | 64 × 128 × 64 | 884,736 |" in seen
    stops = {"en": "stops: 64 rows", "zh": "停下：64 行"}
    assert f"| VLLM_CUTLASS | {stops[lang]} | – | – | – | – |" in seen.replace("**", "")
    seen = texts(answered(open_page, lang=lang, gpu="sm_120", shape="tiny_moe"))
    assert {"en": "| stops: ", "zh": "| 停下："}[lang] not in seen


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_linear_choice_without_a_kernel_only_warns(open_page, lang):
    at = answered(open_page, lang=lang, part="linear", lpick="triton")
    assert words(lang, f"{PAGE}.warning.no-kernel", choice="triton", scheme="W4A4") in texts(at)
    assert "`triton`" in texts(at)
    assert "**FI-Cutlass**" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("query", "settings"),
    [
        ({"gpu": "sm_90", "lpick": "cutlass"}, ["--linear-backend cutlass"]),
        ({"gpu": "sm_120", "lin": "W4A16", "inv": "1"}, ["VLLM_BATCH_INVARIANT"]),
        ({"gpu": "sm_90", "lpick": "marlin", "off": "Marlin"}, ["--linear-backend marlin", "VLLM_DISABLED_KERNELS"]),
    ],
    ids=str,
)
def test_a_flag_that_strikes_kernels_out_is_named_and_not_the_gpu(open_page, lang, query, settings):
    seen = texts(answered(open_page, lang, part="linear", **query))
    named = listed(lang, (f"`{name}`" for name in settings))
    assert words(lang, f"{PAGE}.linear.seen_struck", settings=named, gpu=query["gpu"]) in seen
    assert words(lang, f"{PAGE}.linear.seen_none", gpu=query["gpu"]) not in seen


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("gpu", ["sm_120", "sm_90", "rocm"])
def test_a_dropped_name_beside_w4a16_leaves_a_longer_list_than_none(open_page, lang, gpu, monkeypatch):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    asked, plain = (linear_order(LinearRequest(gpu, "W4A16", choice=choice)) for choice in ("cutlass", "auto"))
    at = answered(open_page, lang, part="linear", gpu=gpu, lin="W4A16", lpick="cutlass")
    key = "no-kernel" if gpu == "rocm" else "no-kernel-longer"
    assert (key == "no-kernel") == (asked == plain)
    alone = i18n.listed(row.enum for row in plain)
    assert words(lang, f"{PAGE}.warning.{key}", choice="cutlass", scheme="W4A16", alone=alone) in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("query", "code"),
    [({"gpu": "sm_90", "lpick": "cutlass"}, "none"), ({"lin": "W4A16", "inv": "1"}, "forced")],
    ids=["a name that refuses", "batch invariance beside W4A16"],
)
def test_what_stops_the_server_is_an_error(open_page, lang, query, code):
    at = answered(open_page, lang=lang, part="linear", **query)
    known = {"gpu": "sm_90", "enum": "Cutlass", "scheme": "W4A16"}
    assert ServingError(f"serving.linear-{code}", **known).text(lang)["what"] in texts(at).replace("\\", "")


def test_an_answer_that_rests_with_an_unread_candidate_says_so(open_page):
    at = answered(open_page, part="mxfp4", gpu="sm_90")
    assert "it rests with TRITON, FI_CUTLASS_BF16, whose conditions are not among the facts that were read" in texts(at)
    at = answered(open_page, part="mxfp4", gpu="sm_90", mpick="flashinfer_trtllm")
    assert "Mxfp4 MoE backend 'TRTLLM\\_BF16' does not support" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_triton_s_mxfp4_experts_run_on_rocm_and_not_before_hopper(open_page, lang):
    at = answered(open_page, lang, part="mxfp4", gpu="rocm", mpick="triton")
    assert words(lang, f"{PAGE}.mx.seen_open", gpu=words(lang, f"{PAGE}.gpu.rocm"), names="TRITON") in texts(at)
    assert "does not support current device" not in texts(at)
    assert "these MXFP4 experts get **MARLIN**" in texts(answered(open_page, part="mxfp4", gpu="sm_80"))


def test_the_activations_asked_for_count_under_a_name_too(open_page):
    named = {"part": "mxfp4", "gpu": "sm_100", "mpick": "flashinfer_trtllm"}
    assert "these MXFP4 experts get **TRTLLM_MXFP8**" in texts(answered(open_page, want="mxfp8", **named))
    assert "these MXFP4 experts get **TRTLLM_BF16**" in texts(answered(open_page, **named))
    at = answered(open_page, model="deepseek-v4", **named)
    assert (
        "it rests with TRTLLM_BF16, whose conditions are not among the facts that were read; if they refuse"
        in texts(at)
    )


def test_defaults_are_the_library_s(open_page):
    at = answered(open_page, part="defaults")
    assert "only **sm_110** reads each expert's own scale" in texts(at)
    for row in default_rows():
        assert row["w4a4"] in texts(at)
    assert "✗ does not start" in texts(at)


# ------------------------------------------------------------------ what the other parts ask


def asked_of(at, part):
    """The question, and what it offers."""
    (radio,) = at.radio
    assert radio.key == f"predict.asked.{ASKED[part]}"
    return radio


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("part", "hidden"), [("linear", "**FI-Cutlass**"), ("mxfp4", "TRTLLM_BF16**"), ("defaults", "FlashInfer |")]
)
def test_every_part_asks_before_it_shows(open_page, lang, part, hidden):
    at = open_page(PAGE, lang=lang, part=part)
    assert len(asked_of(at, part).options) == {"linear": 3, "mxfp4": 3, "defaults": 4}[part]
    assert len(at.selectbox) == 0  # no setting beside a result that is not there
    assert hidden not in texts(at)
    assert len(answered(open_page, lang, part=part).radio) == 0


@pytest.mark.parametrize("lang", LANGUAGES)
def test_before_its_answer_linear_shows_every_name_and_none_is_the_one_asked_about(open_page, lang):
    rungs = ladder(open_page(PAGE, lang=lang, part="linear"))
    places = [rungs.index(f'<span class="name">{row.enum}<') for row in LINEAR]
    assert places == sorted(places)
    assert all(f">{choice}<" in rungs for choice in LINEAR_CHOICES)
    assert NO_KERNEL not in rungs


def test_a_name_without_a_kernel_ends_as_the_selector_says(open_page):
    """An error where experts are asked, which the question says; here the first that accepts."""
    assert select_moe(MoeRequest(choice=NO_KERNEL)).error is not None
    found, plain = select_linear(LinearRequest(choice=NO_KERNEL)), select_linear(LinearRequest())
    assert found.error is None
    assert found.winner == plain.winner
    assert found.warning == "no-kernel"
    at = open_page(PAGE, part="linear")
    at = guessed(at, ASKED["linear"], "first")
    assert words("en", "ui.predict.as_predicted", answer="").removesuffix("****") in texts(at)
    assert f"asks the whole list: {found.winner.enum} is taken, as without the flag" in texts(at)
    named = select_linear(LinearRequest(choice="flashinfer_cutedsl", batch_invariant=True))
    assert named.warning == "overridden"
    assert f"beside `--linear-backend flashinfer_cutedsl` it gives {named.winner.enum}." in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_what_activations_become_is_the_selector_s(open_page, lang, monkeypatch):
    monkeypatch.setattr(i18n, "lang", lambda: lang)  # AppTest formats a radio's options outside of the session
    winner = select_mxfp4(Mxfp4Request("sm_100")).winner
    assert winner.activation == "bf16"
    at = open_page(PAGE, lang=lang, part="mxfp4")
    table = next(part.value for part in at.markdown if "|---" in part.value)
    for name, candidates in (
        ("BF16", ("TRTLLM_BF16", "TRITON?", "FI_CUTLASS_BF16?", "MARLIN", "EMULATION?")),
        ("MXFP8", ("TRTLLM_MXFP8", "FI_CUTLASS_MXFP8?")),
    ):
        assert f"| {name} | {i18n.listed(candidates)} |" in table
    at = guessed(at, ASKED["mxfp4"], "mxfp8")
    assert words(lang, "ui.predict.otherwise", answer="").removesuffix("****") in texts(at)
    revealed = next(part.value for part in at.markdown if winner.enum in part.value and "DeepSeek V4" in part.value)
    for request in (Mxfp4Request("sm_100", wanted="mxfp8"), Mxfp4Request("sm_100", "deepseek-v4")):
        assert select_mxfp4(request).winner.enum in revealed


@pytest.mark.parametrize("lang", LANGUAGES)
def test_where_flashinfer_s_absence_is_felt_is_the_selector_s(open_page, lang, monkeypatch):
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    reach = {row.enum: row.reach for row in MOE}
    without = {gpu: select_moe(MoeRequest(gpu, flashinfer=False)).winner for gpu in GPUS}
    more = [gpu for gpu in GPUS if reach[without[gpu].enum] == "expert" and gpu != "sm_110"]
    assert more == ["sm_100", "sm_103", "sm_120", "sm_121"]
    older = [gpu for gpu in GPUS if gpu.startswith("sm_") and int(gpu[3:]) < 100]
    assert {reach[without[gpu].enum] for gpu in older} == {"none"}  # as the answer says of Marlin
    at = open_page(PAGE, lang=lang, part="defaults")
    shown = [part.value for part in at.markdown if "|---" in part.value]
    assert len(shown) == 1  # with FlashInfer alone
    assert "VLLM_CUTLASS" in shown[0]
    at = guessed(at, ASKED["defaults"], "codes")
    assert words(lang, "ui.predict.as_predicted", answer="").removesuffix("****") in texts(at)
    assert i18n.listed(more) in texts(at)


@pytest.mark.parametrize("part", ["linear", "mxfp4", "defaults"])
def test_an_answer_stays_when_the_reader_turns_to_another_part_and_back(open_page, part):
    at = answered(open_page, part=part)
    for where in ("moe", part):
        at.session_state[f"{PAGE}.part"] = where
        at = clean(at.run())
    assert len(at.radio) == 0


@pytest.fixture(scope="module")
def ran():
    """Every remedy run once; the page then finds them in the cache."""
    return remedies.everything()


def test_the_scoreboard_asks_first_and_then_shows_losses(open_page, ran):
    at = open_page(PAGE, part="remedies")
    assert len(at.get("plotly_chart")) == 0
    assert [radio.key for radio in at.radio] == [f"predict.asked.{WRONG}"]
    guessed(at, WRONG, "fill-one")
    assert len(at.get("plotly_chart")) == 1
    assert "Your guess: Fill with one" in texts(at)
    assert "Healthy to look at and wrong: **Fill with ModelOpt's fallback**" in texts(at)
    # What the page says about filling: the value that is too large does well, the one that is too small does not.
    assert "nobody measured: One maximum a layer, Fill with one, Repair with the peers' maximum." in texts(at)
    same = sum(a.text == b.text for a, b in zip(ran["fill-fallback"].replies, ran["calibrate"].replies, strict=True))
    assert f"Of the 6 replies it gave, {same} are word for word" in texts(at)
    assert same >= 4
    body = next(str(part.proto.body) for part in at.get("html") if "<table" in str(part.proto.body))
    assert f"{ran['peer-max'].bytes:,} bytes, {ran['peer-max'].tokens} tokens" in body
    assert "too high in Arithmetic, JSON, Logs" in body


def test_a_run_can_be_held_and_goes_on(open_page, ran):
    at = open_page(PAGE)
    at.session_state["backends.held"] = True
    at.session_state["backends.done"] = ("calibrate", "load-guard")
    at.session_state["backends.part"] = "remedies"
    clean(at.run())
    assert len(at.radio) == 0
    held = next(str(part.proto.body) for part in at.get("html") if "<table" in str(part.proto.body))
    assert held.count("pending") == len(remedies.ORDER) - 2
    at.button(key="backends.hold").click().run()
    clean(at)
    assert len(at.radio) == 1


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_scoreboard_in_both_languages(open_page, lang, ran):
    at = open_page(PAGE, lang=lang, part="remedies")
    skipped(at, WRONG)
    assert len(at.get("plotly_chart")) == 1


@pytest.mark.parametrize(
    "query", [{}, {"gpu": "sm_90", "pick": "cutlass"}, {"gpu": "rocm", "scheme": "W4A16"}], ids=str
)
def test_the_code_shown_gives_the_page_s_numbers(open_page, query):
    output = shown_code_output(open_page(PAGE, **query), PAGE)
    assert "sm_110 VLLM_CUTLASS expert" in output
    if query.get("pick"):
        assert "NvFp4 MoE backend 'VLLM_CUTLASS' does not support the deployment configuration" in output


def test_the_code_shown_asks_all_three_selectors(open_page):
    query = {"gpu": "sm_100", "lpick": "triton", "lin": "W4A16", "hum": "1", "model": "deepseek-v4", "off": "Marlin"}
    output = shown_code_output(open_page(PAGE, **query), PAGE)
    layers = select_linear(LinearRequest("sm_100", "W4A16", humming=True, disabled="Marlin", choice="triton"))
    assert f"NVFP4 linear layers, taken: {layers.winner.enum}\n    FI-CuteDsl-W4A16 wins" in output
    assert "Marlin refused disabled" in output
    assert "warning: no-kernel" in output
    experts = select_mxfp4(Mxfp4Request("sm_100", "deepseek-v4", humming=True))
    assert f"MXFP4 experts, taken: {experts.winner.enum}" in output
    output = shown_code_output(open_page(PAGE, gpu="sm_90"), PAGE)
    assert "MXFP4 experts, taken: ['TRITON', 'FI_CUTLASS_BF16']" in output


@pytest.mark.parametrize("query", [{}, {"shape": "tiny_moe", "ranks": "2", "gpu": "sm_100"}], ids=str)
def test_the_code_shown_says_what_a_rank_stores(open_page, query):
    at = open_page(PAGE, **query)
    output = shown_code_output(skipped(at, AUTO), PAGE)
    totals = re.findall(r": ([\d,]{7,}) bytes on a rank", output)
    stops = query.get("shape") == "tiny_moe"  # 64 rows of gate and up on a rank
    assert len(totals) == 7 - stops
    assert ("VLLM_CUTLASS: stops" in output) == stops
    shown = texts(at).replace(output, "")
    assert all(total in shown for total in totals)


@pytest.mark.slow
def test_the_code_shown_repeats_the_scoreboard(open_page):
    at = open_page(PAGE, part="remedies")
    output = shown_code_output(at, PAGE)
    for name, result in remedies.everything().items():
        assert f"{name}: {judge(result, remedies.result(REFERENCE))}, {result.tokens} tokens" in output
        assert all(f"{loss:.4f}" in output for loss in result.losses.values())


def test_downloads_open(open_page):
    at = open_page(PAGE)
    at.session_state[f"{PAGE}.download"] = True
    clean(at.run())
