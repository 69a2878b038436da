"""The Kernel lab's records, figures and sentences."""

import json

import pytest

from nvfp4viz.device.sass import EXTRACTED, Instruction, KernelOnTarget, kernel_sources, read_extract
from nvfp4viz.figures import kernel_lab as figures
from nvfp4viz.figures.kernel_lab import INSTRUCTION, SOFTWARE, UNUSED, Rate
from nvfp4viz.figures.palette import contrast, role, surface

THEMES = ["light", "dark"]
LANGUAGES = ["en", "zh"]
PACK = Instruction(
    "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C", 16, "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C R1, R2, R3, RZ"
)
LOAD = Instruction("LDG.E.128.CONSTANT", 4, "@!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64]")


def build(target, instructions, *telling, registers=40, name="nv_f"):
    return KernelOnTarget("f.cu", name, target, registers, 0, 0, instructions, telling)


@pytest.fixture
def presence():
    return figures.presence_of([
        build("sm_90", 500, LOAD), build("sm_120a", 200, PACK, LOAD), build("sm_120", 480, LOAD)
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C", "to_e2m1"),
        ("F2FP.RELU.SATFINITE.E2M1.F32.PACK_AB_MERGE_C", "to_e2m1"),
        ("F2FP.F16.E2M1.UNPACK_B", "from_e2m1"),
        ("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C", "to_e4m3"),
        ("F2FP.F16.E4M3.UNPACK_B", None),
        ("F2FP.SATFINITE.E8.F32.PACK_AB_MERGE_C.RP", "to_ue8m0"),
        ("F2FP.BF16.E8.UNPACK_B", None),
        ("MUFU.RCP", "reciprocal"),
        ("MUFU.EX2", None),
        ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "fp4_product"),
        ("OMMA.SF.16864.F32.E2M1.E2M1.E8", "fp4_product"),
        ("HMMA.16816.F32.BF16", "bf16_product"),
        ("LDGSTS.E.BYPASS.128", "async_copy"),
        ("LDG.E.128.CONSTANT.SYS", "wide_access"),
        ("STG.E.128", "wide_access"),
        ("LDG.E.64", None),
        ("LDL.LU", "local_memory"),
        ("STL", "local_memory"),
    ],
)
def test_an_opcode_belongs_to_one_operation(opcode, expected):
    matching = [one.id for one in figures.FEATURES if one.opcode.fullmatch(opcode)]
    assert matching == ([expected] if expected else [])


def test_a_cell_is_an_instruction_software_or_neither(presence):
    assert presence.state_of("to_e2m1", "sm_120a") == INSTRUCTION
    assert presence.state_of("to_e2m1", "sm_90") == SOFTWARE
    assert presence.state_of("to_e2m1", "sm_120") == SOFTWARE
    assert presence.state_of("wide_access", "sm_90") == INSTRUCTION
    assert presence.state_of("fp4_product", "sm_120a") == UNUSED
    assert presence.state_of("local_memory", "sm_90") == UNUSED
    assert [one.id for one in presence.features] == ["to_e2m1", "wide_access", "local_memory"]


def test_kernels_are_not_mixed():
    with pytest.raises(AssertionError, match="one kernel"):
        figures.presence_of([build("sm_90", 1), build("sm_90", 1, name="nv_g")])


def test_rows_hold_what_the_extract_holds(presence):
    assert figures.presence_rows(presence)[1] == {
        "kernel": "nv_f", "target": "sm_120a", "instructions": 200, "registers": 40, "shared_bytes": 0,
        "stack_bytes": 0, "to_e2m1": 16, "wide_access": 4, "local_memory": 0,
    }  # fmt: skip


@pytest.mark.parametrize("lang", LANGUAGES)
def test_sentences_come_from_the_same_record(presence, lang):
    said = figures.describe_presence(presence, lang)
    assert "`sm_120a`" in said
    assert "`sm_90`" not in said
    assert "2" in said
    said = figures.describe_sizes(presence, "to_e2m1", lang)
    assert "200" in said
    assert "500" in said
    assert "200" in figures.describe_sizes(presence, "wide_access", lang)
    plain = figures.presence_of([build("sm_90", 9), build("sm_120a", 9)])
    assert "nv_f" in figures.describe_presence(plain, lang)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("theme", THEMES)
def test_presence_is_told_by_symbol_and_number(presence, theme, lang):
    spec = json.loads(figures.presence_figure(presence, theme=theme, lang=lang, picked="sm_90").to_json())
    cells, have, soft, unused = spec["data"]
    assert cells["z"] == [[None, 1, None], [1, 1, 1], [None, None, None]]
    assert len({trace["marker"]["symbol"] + str(trace["marker"]["size"]) for trace in (have, soft, unused)}) == 3
    assert have["text"] == ["16", "4", "4", "4"]
    assert soft["x"] == ["sm_90", "sm_120"]
    assert unused["x"] == ["sm_90", "sm_120a", "sm_120"]
    assert sum(len(trace["x"]) for trace in (have, soft, unused)) == 9
    assert contrast(have["marker"]["color"], have["textfont"]["color"]) >= 4.5
    assert contrast(soft["marker"]["color"], surface(theme).page) >= 4.5
    (frame,) = spec["layout"]["shapes"]
    assert frame["x0"] < 0 < frame["x1"] < 1


@pytest.mark.parametrize("theme", THEMES)
def test_software_is_hatched(presence, theme):
    spec = json.loads(figures.sizes_figure(presence, "to_e2m1", theme=theme, lang="en").to_json())
    plain, hatched = spec["data"]
    assert plain["marker"]["pattern"]["shape"] == ""
    assert hatched["marker"]["pattern"]["shape"] == "/"
    assert plain["x"] == ["sm_120a"]
    assert hatched["x"] == ["sm_90", "sm_120"]
    assert hatched["text"] == ["500", "480"]


RATES = [Rate("copy", 100.0, True), Rate("slow copy", 50.0, True), Rate("quantise", 80.0, False)]


def test_shares_are_of_the_fastest_copy_unless_recorded():
    assert figures.share_of(RATES[2], RATES) == 0.8
    assert figures.share_of(RATES[0], RATES) is None
    assert figures.share_of(Rate("q", 80.0, False, 0.95), RATES) == 0.95
    assert figures.share_of(RATES[2], RATES[2:]) is None
    assert [row["of_copy"] for row in figures.bandwidth_rows(RATES)] == [None, None, 0.8]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_bandwidth_says_the_share(lang):
    said = figures.describe_bandwidth(RATES, lang)
    assert "quantise" in said
    assert "0.8" in said
    assert "100" in said
    assert "1" in figures.describe_bandwidth(RATES[2:], lang)


@pytest.mark.parametrize("theme", THEMES)
def test_copies_are_hatched_and_the_line_is_theirs(theme):
    spec = json.loads(figures.bandwidth_figure(RATES, theme=theme, lang="en").to_json())
    ours, copies = spec["data"]
    assert ours["marker"]["pattern"]["shape"] == ""
    assert copies["marker"]["pattern"]["shape"] == "/"
    assert ours["text"] == ["80 · 0.80"]
    assert spec["layout"]["shapes"][0]["x0"] == 100.0
    assert contrast(role("mantissa", theme).fill, role("mantissa", theme).on_fill) >= 4.5


@pytest.mark.parametrize("source", kernel_sources())
def test_every_committed_kernel_can_be_shown(source):
    kernels = read_extract(source).kernels
    for name in {kernel.name for kernel in kernels}:
        presence = figures.presence_of([kernel for kernel in kernels if kernel.name == name])
        assert presence.targets == EXTRACTED
        for lang in LANGUAGES:
            assert name in figures.describe_presence(presence, lang)
        assert len(figures.presence_figure(presence, theme="light", lang="en").data) == 4
