"""The Kernel lab as a reader without a GPU meets it, in either language."""

import json
import shutil
import subprocess
import sys

import pytest

from nvfp4viz import device, quant
from nvfp4viz.device import build, cpu_checks, dispatch, paths, records, sass, selftest
from nvfp4viz.figures import kernel_lab as figures
from nvfp4viz.figures.words import words
from nvfp4viz.ui import i18n, kernel_lab, kernel_lab_run
from nvfp4viz.ui.snippets import fill, run
from tests.device.selftest_reports import report

from .conftest import ROOT, clean, skipped, texts

LANGUAGES = ["en", "zh"]
PAGE = "kernel_lab"
TITLES = {"en": "Kernel lab", "zh": "内核实验室"}


@pytest.fixture(autouse=True)
def _language_outside_a_run(request, monkeypatch):
    """AppTest calls ``format_func`` after the run, where the session's language is out of reach."""
    language = getattr(request.node, "callspec", None) and request.node.callspec.params.get("lang")
    if language:
        monkeypatch.setattr(i18n, "lang", lambda: language)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    """As almost every reader meets it; what a GPU adds is tested in ``tests/gpu``."""
    monkeypatch.setenv("NVFP4VIZ_DEVICE", "cpu")


@pytest.fixture
def no_records(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    return tmp_path


def builds():
    return {one.target: one for one in kernel_lab.library().builds[kernel_lab.default_kernel()]}


def html(at):
    return "\n".join(str(element.proto.body) for element in at.get("html"))


# ------------------------------------------------------------------------------------------------ the opening view


@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_opens_on_a_line_and_the_instruction_it_became(open_page, lang, no_records):
    at = open_page(PAGE, lang=lang)
    assert at.title[0].value == TITLES[lang]
    here = builds()["sm_120a"]
    (pack,) = figures.found(figures.feature("to_e2m1"), here)
    said = texts(at)
    assert f"{pack.count} " in said
    assert f"`{pack.opcode}`" in said
    assert str(here.instructions) in said
    assert pack.example in html(at)
    assert "cvt.rn.satfinite.e2m1x2.f32" in html(at)
    assert words(lang, "kernel_lab.not_run") in said


def test_what_computes_here_and_why_is_said(open_page):
    said = texts(open_page(PAGE))
    assert "this machine's CPU" in said
    assert "NVFP4VIZ_DEVICE" in said or "driver" in said


def test_a_target_without_the_instruction_shows_the_software(open_page):
    at = open_page(PAGE, target="sm_90")
    assert "e2m1_pack8_soft" in html(at)
    assert "gets no instruction" in texts(at)
    assert str(builds()["sm_90"].instructions) in texts(at)
    assert '<span class="line off' in html(at)


@pytest.mark.parametrize(
    ("lang", "differ", "same"),
    [("en", "last bits may differ", "same bits"), ("zh", "最后几位可能有差别", "同样的比特")],
)
@pytest.mark.parametrize("target", ["sm_75", "sm_90"])
def test_bf16_sums_in_software_are_not_called_the_same_bits(open_page, lang, differ, same, target):
    """HMMA adds in an order of its own, the software term after term."""
    at = open_page(PAGE, lang=lang, kernel="nv_grouped_w4a16_32", feature="bf16_product", target=target)
    (finding,) = [element.value for element in at.markdown if "mma.sync" in element.value and "sm_75" in element.value]
    assert differ in finding
    assert same not in finding


def test_the_letter_is_asked_about_before_plain_targets_are_shown(open_page):
    at = open_page(PAGE)
    shown = at.get("button_group")
    before = json.dumps([str(group.proto) for group in shown])
    assert '○ sm_100"' not in before.replace("\\", "")
    skipped(at, "kernel_lab.predict.letter")
    said = texts(at)
    plain, special = builds()["sm_100"], builds()["sm_100a"]
    assert "**the software path" in said
    assert f"is {special.instructions} instructions long" in said
    assert f"is {plain.instructions} long" in said


def test_a_link_to_a_plain_target_shows_it(open_page):
    at = open_page(PAGE, target="sm_100")
    assert "without its letter" in texts(at)


def test_every_operation_of_the_matrix_kernel(open_page):
    at = open_page(PAGE, kernel="nv_grouped_w4a4_nvfp4_linear_bf16", target="sm_100a")
    assert "mma_soft" in html(at)
    assert "tcgen05" in texts(at)
    at = open_page(PAGE, kernel="nv_grouped_w4a4_nvfp4_linear_bf16", target="sm_121a")
    assert "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X" in texts(at)


@pytest.mark.parametrize("part", kernel_lab.PARTS)
@pytest.mark.parametrize("kernel", ["nv_probe", "nv_quantize_bf16_vllm_linear"])
def test_every_part_stands_with_any_kernel(open_page, part, kernel):
    open_page(PAGE, part=part, kernel=kernel)


def test_another_file_brings_its_own_kernel(open_page):
    at = open_page(PAGE)
    clean(at.selectbox(key="kernel_lab.file").set_value("dequantize.cu").run())
    assert at.session_state["kernel_lab.kernel"].startswith("nv_dequantize")
    assert at.selectbox(key="kernel_lab.file").value == "dequantize.cu"


def test_the_whole_file_is_there_when_asked_for(open_page):
    at = open_page(PAGE)
    at.session_state["kernel_lab.open.source.whole"] = True
    clean(at.run())
    text = build.sources_of("quantize.cu")["quantize.cu"]
    assert f'<span class="number">{len(text.splitlines())}</span>' in html(at)


# ---------------------------------------------------------------------------------------------------- the extracts


@pytest.fixture
def extracts(monkeypatch, tmp_path):
    """A copy of the committed extracts to spoil."""
    folder = tmp_path / "sass"
    shutil.copytree(sass.FOLDER, folder)
    monkeypatch.setattr(sass, "FOLDER", folder)
    kernel_lab._library.clear()
    yield folder
    kernel_lab._library.clear()


@pytest.mark.parametrize("lang", LANGUAGES)
def test_an_extract_of_older_sources_is_named(open_page, extracts, lang):
    path = extracts / "quantize.txt"
    lines = path.read_text().splitlines()
    lines[1] = "# sources " + "0" * 64
    path.write_text("\n".join(lines) + "\n")
    assert "make sass" in texts(open_page(PAGE, lang=lang))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("part", ["code", "matrix"])
def test_without_extracts_the_page_says_so(open_page, extracts, lang, part):
    shutil.rmtree(extracts)
    at = open_page(PAGE, lang=lang, part=part)
    assert "make sass" in texts(at)
    at.session_state["kernel_lab.open.code"] = True
    clean(at.run())


# ------------------------------------------------------------------------------------------------------- the links


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"part": "everything"},
        {"kernel": "nv_nothing"},
        {"feature": "to_bf16"},
        {"target": "sm_101a"},
        {"recipe": "modelopt"},
        {"values": "zeros"},
        {"rows": "0"},
        {"rows": str(kernel_lab_run.MOST_ROWS + 1)},
        {"blocks": "half"},
        {"seed": "-1"},
        {"torch": "yes"},
        {"colour": "red"},
    ],
    ids=lambda query: " ".join(map("=".join, query.items())),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page(PAGE, lang=lang, **query)
    (name,) = query
    assert f"`{name}=" in texts(at)
    assert at.selectbox(key="kernel_lab.kernel").value == kernel_lab.default_kernel()


def test_the_language_changes_and_the_view_stays(open_page):
    at = open_page(PAGE, part="run", rows="3", recipe="ocp-floor")
    at.query_params["lang"] = "zh"
    clean(at.run())
    assert at.number_input(key="kernel_lab.rows").value == 3
    assert at.selectbox(key="kernel_lab.recipe").value == "ocp-floor"


# ------------------------------------------------------------------------------------------------------- the matrix


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_matrix_has_alt_sentence_and_table(open_page, lang):
    at = open_page(PAGE, lang=lang, part="matrix")
    presence, sizes = at.get("plotly_chart")
    assert presence.proto.alt
    assert sizes.proto.alt
    assert figures.describe_presence(figures.presence_of(tuple(builds().values())), lang) in texts(at)


# ---------------------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_path_is_compared_byte_by_byte(open_page, lang, no_records):
    at = open_page(PAGE, lang=lang, part="run")
    done = kernel_lab_run.compared("grid", 32, 8, "vllm-cuda", 4)
    assert (done.same, done.asked) == (3, 3)
    contrast = done.differences[-1]
    assert contrast.differing > 0
    assert str(contrast.differing) in texts(at)
    assert f"<b>{contrast.first[4]:02x}</b>" in html(at)
    assert words(lang, "kernel_lab.run.no_record") in texts(at)


@pytest.mark.parametrize("recipe", dispatch.CUDA_RECIPES)
@pytest.mark.parametrize("values", paths.KINDS)
def test_own_sizes_and_every_recipe(open_page, recipe, values):
    at = open_page(PAGE, part="run", recipe=recipe, values=values, rows="5", blocks="3", seed="11")
    done = kernel_lab_run.compared(values, 5, 3, recipe, 11)
    assert done.same == done.asked
    assert f"{done.differences[0].bytes} of them" in texts(at)


def test_pytorch_joins_when_asked(open_page):
    at = open_page(PAGE, part="run", recipe="ieee", torch="1")
    assert "PyTorch" in html(at)
    assert "4 of 4 paths" in texts(at)
    at = open_page(PAGE, part="run", torch="1")  # another recipe: it cannot
    assert "3 of 3 paths" in texts(at)


def test_a_path_that_differs_is_called_a_fault(open_page, monkeypatch):
    right = paths.run_paths

    def wrong(x, recipe, torch=False):
        runs = right(x, recipe, torch)
        packed = runs[1].packed.copy()
        packed[1, 2] ^= 1
        return [runs[0], paths.PathRun("numba", recipe, packed, runs[1].scales, 0.0), *runs[2:]]

    monkeypatch.setattr(paths, "run_paths", wrong)
    at = open_page(PAGE, part="run", seed="77", values="normal", recipe="ocp-floor")
    kernel_lab_run.compared.clear()
    assert "Only 2 of 3 paths" in texts(at)
    assert "packed[1, 2]" in html(at)


def test_the_recorded_selftest_is_quoted(open_page, no_records):
    (no_records / "selftest-x.json").write_text(report((9, 0), 0))
    said = texts(open_page(PAGE, part="run"))
    assert "NVIDIA X" in said
    assert f"{1 << 32:,}" in said


@pytest.mark.parametrize("part", ["run", "selftest"])
@pytest.mark.parametrize("digest", ["0" * 12, build.source_hash("probe.cu")[:12]], ids=["other sources", "these"])
def test_a_selftest_of_other_sources_says_so(open_page, no_records, part, digest):
    (no_records / "selftest-x.json").write_text(report((9, 0), 0, sources={"probe.cu": digest}))
    said = texts(clean(open_page(PAGE, lang="en", part=part)))
    assert ("have changed: `probe.cu`" in said) == (digest == "0" * 12)


def test_recorded_test_runs_are_counted(open_page, no_records):
    log = "computes on cuda: NVIDIA H200\ntests/gpu\n===== 1 failed, 66 passed in 20.76s =====\n"
    (no_records / "2026-11-29-h200.log").write_text(log)
    assert "NVIDIA H200, 2026-11-29: 66 GPU tests passed, 1 failed" in texts(open_page(PAGE, part="run"))
    (no_records / "2026-11-29-h200.log").write_text(log + "..\n10 passed in 6.18s\n")
    said = texts(open_page(PAGE, part="run"))
    assert "66 GPU tests passed, 1 failed, 0 skipped (`2026-11-29-h200.log`, run 1 of 2)" in said
    assert "10 GPU tests passed, 0 failed, 0 skipped (`2026-11-29-h200.log`, run 2 of 2)" in said


# -------------------------------------------------------------------------------------------------------- the speed


@pytest.mark.parametrize("lang", LANGUAGES)
def test_this_machine_is_measured_and_missing_records_are_said(open_page, lang, no_records):
    at = open_page(PAGE, lang=lang, part="speed")
    (chart,) = at.get("plotly_chart")
    ours, copies = json.loads(chart.proto.spec)["data"]
    assert len(ours["y"]) == 4
    assert len(copies["y"]) == 1
    assert words(lang, "kernel_lab.speed.none") in texts(at)
    assert all(rate > 0 for _, rate in kernel_lab_run.measured().rates)


def test_recorded_tables_come_with_date_and_versions(open_page, no_records):
    rows = [
        {"name": name, "seconds": 1e-4, "fastest": 1e-4, "slowest": 1e-4, "gb_per_s": rate, "ratio": ratio}
        for name, rate, ratio in (("copy bf16", 4000.0, 1.0), ("quantise bf16", 3800.0, 0.95))
    ]
    goals = [{"text": "quantise, of copy", "measured": 0.95, "required": 0.92, "at_most": False}]
    section = {"title": "Streaming", "note": "NVIDIA H200; medians", "rows": rows, "baseline": "copy", "goals": goals}
    record = {"before": {"versions": {"torch": "2.11.0"}}, "sections": [section], "commit": "abc1234"}
    (no_records / "2026-11-29-x.json").write_text(json.dumps({"date": "2026-11-29", "records": {"bench_gpu": record}}))
    at = open_page(PAGE, part="speed")
    assert len(at.get("plotly_chart")) == 2
    said = texts(at)
    for part in ("NVIDIA H200", "2026-11-29", "torch 2.11.0", "abc1234", "0.95", "**met**"):
        assert part in said


def test_a_written_report_is_there_to_read(open_page, no_records):
    (no_records / "2026-11-29-h200.md").write_text("# Title\n\n| a | b |\n|---|---|\n| quantise | 4000 |\n")
    at = open_page(PAGE, part="speed")
    assert "4000" not in texts(at)
    at.session_state["kernel_lab.open.2026-11-29-h200"] = True
    clean(at.run())
    assert "**Title**" in texts(at)
    assert "| quantise | 4000 |" in texts(at)


# ----------------------------------------------------------------------------------------------------- the self-test


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_cpu_part_of_the_selftest_counts_bits(open_page, lang, no_records):
    at = open_page(PAGE, lang=lang, part="selftest")
    assert "Blackwell" in texts(at)
    assert "make selftest" in texts(at)
    clean(at.button(key="kernel_lab.run_cpu").click().run())
    checks = at.session_state["kernel_lab.checked"]
    assert len(checks) == len(cpu_checks.CHECKS)
    assert f"{sum(check.bits for check in checks):,}" in texts(at)
    assert at.get("download_button")


def test_a_recorded_blackwell_report_ends_the_invitation(open_page, no_records):
    (no_records / "selftest-b.json").write_text(report((12, 0), 5))
    at = open_page(PAGE, part="selftest")
    assert "No Blackwell run" not in texts(at)
    assert "5 differ" in texts(at)
    assert "No Blackwell run" not in texts(open_page(PAGE))


# ---------------------------------------------------------------------------------------- as on a machine with a GPU


@pytest.fixture
def gpu(monkeypatch):
    """The page's side of a GPU; the kernels themselves are tested in ``tests/gpu``."""
    found = device.DeviceReport("cuda", "A CPU", 2, (device.Gpu("NVIDIA X", (9, 0)),), (13, 0), None)
    monkeypatch.setattr(device, "_found", lambda: found)
    kernel_lab_run.compared.clear()
    yield
    kernel_lab_run.compared.clear()


def test_a_gpu_is_named_with_its_target(open_page, gpu):
    said = texts(open_page(PAGE))
    assert "NVIDIA X" in said
    assert "`sm_90`; the driver serves CUDA 13.0" in said


def test_the_cuda_path_joins_the_others(open_page, gpu, monkeypatch):
    def quantize(x, recipe, global_scale, device):
        assert device == "cuda"
        return quant.quantize(x, recipe=recipe, global_scale=global_scale), "cuda"

    monkeypatch.setattr(dispatch, "quantize", quantize)
    at = open_page(PAGE, part="run")
    assert "CUDA kernel" in html(at)
    assert "4 of 4 paths" in texts(at)
    assert "No GPU computed" not in texts(at)


def test_a_gpu_that_fails_is_explained(open_page, gpu, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("CUDA error: out of memory\nmore")

    monkeypatch.setattr(dispatch, "quantize", fail)
    at = open_page(PAGE, part="run")
    assert "CUDA error: out of memory" in texts(at)


def test_a_gpu_is_measured_beside_the_cpu(open_page, gpu, monkeypatch, no_records):
    rates = (("copy", 4000.0, True), ("quantise", 3800.0, False))
    monkeypatch.setattr(kernel_lab_run, "measured_on_gpu", lambda: rates)
    at = open_page(PAGE, part="speed")
    _, chart = at.get("plotly_chart")
    ours, copies = json.loads(chart.proto.spec)["data"]
    assert ours["text"] == ["3800 · 0.95"]
    assert copies["text"] == ["4000"]


def test_the_selftest_runs_on_the_gpu_and_can_be_kept(open_page, gpu, monkeypatch, no_records):
    fields = json.loads(report((9, 0), 0))
    del fields["passed"]
    checks = tuple(selftest.Check(**check) for check in fields.pop("checks"))
    done = selftest.SelfTest(checks=checks, **fields)

    def run_it(on_check):
        for check in checks:
            on_check(check)
        return done

    monkeypatch.setattr(selftest, "run", run_it)
    at = open_page(PAGE, part="selftest")
    clean(at.button(key="kernel_lab.run_gpu").click().run())
    said = texts(at)
    assert f"of {1 << 32:,} values 0 differ" in said
    assert said.count("no such instruction here") == 2 * sum(check.differing is None for check in checks) > 0
    assert ": None" not in said
    assert len(at.get("download_button")) == 2


# ------------------------------------------------------------------------------------------------------------- foot


def test_the_code_gives_the_page_s_numbers():
    values = {"kernel": kernel_lab.default_kernel(), "feature": "to_e2m1", "recipe": "vllm-cuda", "values": "grid"}
    printed = run(fill(PAGE, values | {"rows": 32, "blocks": 8, "seed": 4, "torch": False}))
    here = builds()["sm_120a"]
    assert f"sm_120a  {here.instructions:5} instructions" in printed
    done = kernel_lab_run.compared("grid", 32, 8, "vllm-cuda", 4)
    assert f"{done.differences[-1].differing} of {done.differences[-1].bytes} bytes differ" in printed


def test_the_first_paint_loads_neither_torch_nor_cupy():
    code = f"""
import sys
from streamlit.testing.v1 import AppTest
import nvfp4viz.ui.shell as shell
shell.warm_in_background = lambda: None
at = AppTest.from_file({str(ROOT / "app.py")!r}, default_timeout=60)
at.switch_page("pages/kernel_lab.py")
at.run()
assert not at.exception
assert at.title[0].value
print(sorted({{"torch", "cupy", "triton"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
