"""The Explorer as a reader in either language meets it."""

import csv
import io
import json
import pickle
import re
import struct
from pathlib import Path

import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.repair import POLICIES
from nvfp4viz.checkpoint import MemorySource, file_bytes, open_checkpoint, write_checkpoint
from nvfp4viz.cli import main
from nvfp4viz.errors import InputError
from nvfp4viz.model import TinyMoeConfig
from nvfp4viz.ui import i18n
from nvfp4viz.ui.samples import SAMPLE_IDS
from nvfp4viz.ui.snippets import fill, run
from sample_checkpoints import ensure
from tests.audit.layouts import LAYOUTS
from tests.audit.test_drafts import drafted
from tests.checkpoint.checkpoint_fixtures import CONFIG as FOUR_EXPERTS
from tests.checkpoint.checkpoint_fixtures import QUANT

from .conftest import clean, strips, tab, texts

LANGUAGES = ["en", "zh"]
TITLES = {"en": "Explorer", "zh": "检查点浏览器"}
HOLES = "tiny-moe-nvfp4-holes"
ALIGNMENT = "parallel.alignment"


CONFIG = TinyMoeConfig.from_json(open_checkpoint(ensure(HOLES)).config)
SHAPE = f"{CONFIG.num_hidden_layers} × {CONFIG.num_experts}"


def first_hole():
    """Layer, expert and projection of the first finding."""
    first = next(item for item in audit(ensure(HOLES)).findings if item.code == "scale.missing")
    return first.layer, first.experts[0], first.projection


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """The broken sample as somebody uploads it: shards, index, configuration."""
    return {path.name: path.read_bytes() for path in sorted(ensure(HOLES).iterdir())}


@pytest.fixture(scope="module")
def shards(files) -> list[str]:
    return [name for name in files if name.endswith(".safetensors")]


@pytest.fixture(autouse=True)
def _language_outside_a_run(request, monkeypatch):
    """AppTest calls ``format_func`` after the run, where the session's language is out of reach."""
    language = getattr(request.node, "callspec", None) and request.node.callspec.params.get("lang")
    if language:
        monkeypatch.setattr(i18n, "lang", lambda: language)


def choose(at, source: str):
    """Where the checkpoint comes from: ``"sample"``, ``"upload"`` or ``"address"``."""
    return at.button_group(key="explorer.source").set_value(source).run()


def upload(at, *files: tuple[str, bytes]):
    clean(choose(at, "upload"))
    for name, data in files:
        at.file_uploader(key="explorer.files").upload(name, data)
    return clean(at.run())


@pytest.mark.parametrize("lang", LANGUAGES)
def test_it_opens_on_the_first_hole_of_the_broken_sample(open_page, lang):
    at = open_page("explorer", lang=lang)
    assert at.title[0].value == TITLES[lang]
    assert tuple(at.session_state[name] for name in ("layer", "expert", "projection")) == first_hole()
    assert at.metric[1].value == SHAPE
    assert len(strips(at)) == 1
    assert f'aria-label="{ {"en": "One slot", "zh": "单个槽位"}[lang] }"' in strips(at)[0]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("sample", SAMPLE_IDS)
def test_every_sample_opens(open_page, lang, sample):
    at = open_page("explorer", lang=lang, checkpoint=sample)
    assert len(at.metric) == 4
    mapped = len(strips(at))
    assert mapped == (0 if sample in ("tiny-moe-bf16", "tiny-moe-mxfp4") else 1)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    "query",
    [
        {"checkpoint": "../../etc"},
        {"role": "weight"},
        {"gpu": "sm_1"},
        {"layer": "-1"},
        {"expert": "many"},
        {"projection": "left"},
        {"unknown": "1"},
    ],
    ids=lambda query: " ".join(query),
)
def test_a_bad_link_is_named_and_leaves_the_page_usable(open_page, lang, query):
    at = open_page("explorer", lang=lang, **query)
    (name,) = query
    assert f"`{name}=" in texts(at)
    assert len(at.metric) == 4


def test_a_slot_that_this_checkpoint_lacks_falls_back_to_a_hole(open_page):
    at = open_page("explorer", layer="29", expert="120", projection="w13")
    assert tuple(at.session_state[name] for name in ("layer", "expert", "projection")) == first_hole()


def test_a_link_restores_the_slot_and_its_sentence(open_page):
    at = open_page("explorer", layer="2", expert="5", projection="down", role="weight_scale_2")
    assert "Layer 2, expert 5, `down`: `weight_scale_2` is" in texts(at)


def test_findings_can_be_filtered(open_page):
    at = open_page("explorer")
    assert "`scale.missing`" in texts(at)
    pills = next(group for group in at.get("button_group") if "severity" in str(group.proto.id))
    pills.set_value([]).run()
    assert "`scale.missing`" not in texts(clean(at))
    assert f"All {len(audit(ensure(HOLES)).findings)} findings are hidden" in texts(at)


def pills(at):
    return next(group for group in at.get("button_group") if "severity" in str(group.proto.id))


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_filter_of_findings_is_in_the_link(open_page, lang):
    """What is hidden, so that a checkpoint with another kind of finding shows it; and a link hides the same."""
    found = audit(ensure(HOLES)).findings
    present = {item.severity for item in found}
    assert "backend" in present
    at = open_page("explorer", lang=lang)
    assert "hidden" not in at.query_params
    pills(at).set_value([name for name in pills(at).value if name != "backend"]).run()
    assert at.query_params["hidden"] in ("backend", ["backend"])
    assert "`scale.missing`" not in texts(clean(at))
    # Again, by the link; what this checkpoint does not have stays in it.
    at = clean(open_page("explorer", lang=lang, hidden="warn,backend"))
    assert "`scale.missing`" not in texts(at)
    assert set(pills(at).value) == present - {"warn", "backend"}
    pills(at).set_value([*pills(at).value, "backend"]).run()
    assert "`scale.missing`" in texts(clean(at))
    assert at.query_params["hidden"] in ("warn", ["warn"])
    # On another tab the choice is no widget's, and stays.
    back = clean(open_page("explorer", lang=lang, hidden="backend"))
    tab(tab(back, "explorer", 3), "explorer", 0)
    assert "`scale.missing`" not in texts(back)
    assert "backend" not in pills(back).value


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("bad", ["fatal", "warn,fatal", "backend,backend"])
def test_a_filter_that_means_nothing_is_told_in_one_line(open_page, lang, bad):
    at = clean(open_page("explorer", lang=lang, hidden=bad))
    allowed = i18n.t("ui.allowed.choices", options="info, warn, backend, error")
    assert texts(at).replace("\\", "").count(allowed) == 1
    assert "`scale.missing`" in texts(at)
    assert "hidden" not in at.query_params


def test_findings_of_one_code_about_two_things_are_not_called_alike(open_page):
    """Rows of an expert over TP ranks, and experts over EP ranks: each with its own advice."""
    at = open_page("explorer", checkpoint="tiny-moe-nvfp4-full", tp="4", ep="3")
    about = [item for item in audit(ensure("tiny-moe-nvfp4-full"), tp=4, ep=3).findings if item.code == ALIGNMENT]
    assert len({item.text for item in about}) == len(about) == 2
    shown = texts(at)
    assert shown.count(f"`{ALIGNMENT}`") == 2
    assert "findings alike" not in shown
    for item in about:
        message, advice = describe(item)
        assert shown.replace("\\", "").index(message) < shown.replace("\\", "").index(advice)


def test_findings_alike_share_a_card_that_opens(open_page):
    """Twelve near-identical cards would make a page that nobody reads; the report still has each of them."""
    alike = [item for item in audit(ensure(HOLES)).findings if item.code == "scale.missing"]
    assert len(alike) > 3
    at = open_page("explorer")
    shown = texts(at)
    assert shown.count("`scale.missing`") == 1
    assert f"× {len(alike)}" in shown
    assert f"{sum(item.count for item in alike)} slots in {len(alike)} findings" in shown
    # What is wrong, why, and what to do stand on the card; the others behind it.
    plain = shown.replace("\\", "")
    assert describe(alike[0])[0] in plain
    assert describe(alike[0])[1] in plain
    assert describe(alike[1])[0] not in plain
    box = next(item for item in at.expander if str(len(alike)) in item.label)
    at.session_state[f"explorer.each.{alike[0].severity}.scale.missing"] = True
    shown = texts(clean(at.run())).replace("\\", "")
    for item in alike:
        assert describe(item)[0] in shown
    assert box.label == f"Show each of the {len(alike)}"


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_few_findings_alike_are_each_written_out(open_page, lang):
    found = audit(ensure("gemma4-skeleton")).findings
    assert {(item.severity, item.code) for item in found} == {("backend", "scale.missing")}
    assert 1 < len(found) <= 3
    at = open_page("explorer", lang=lang, checkpoint="gemma4-skeleton")
    shown = texts(at).replace("\\", "")
    for item in found:
        assert all(part in shown for part in describe(item, lang))


def test_a_single_finding_stands_open(open_page):
    [finding] = [item for item in audit(ensure("tiny-moe-mislabelled")).findings if item.severity != "info"]
    at = open_page("explorer", checkpoint="tiny-moe-mislabelled")
    assert describe(finding)[0] in texts(at).replace("\\", "")


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("index", "wanted"),
    [(1, "input_scale"), (2, "`vllm-marlin`"), (3, "`model-00001-of-")],
    ids=["anatomy", "backends", "files"],
)
def test_the_other_tabs(open_page, lang, index, wanted):
    assert wanted in texts(tab(open_page("explorer", lang=lang, gpu="sm_120"), "explorer", index))


@pytest.mark.parametrize(("lang", "state"), [("en", "(quantised)"), ("zh", "（已量化）")])
def test_the_anatomy_says_in_the_reader_s_language_that_the_projection_is_quantised(open_page, lang, state):
    assert state in texts(tab(open_page("explorer", lang=lang), "explorer", 1))


@pytest.mark.parametrize("lang", LANGUAGES)
def test_up_s_weight_scale_is_compared_and_then_dropped(open_page, lang):
    """Servers multiply gate and up by gate's: `test_fault_lab.py` recomputes it on every backend."""
    at = tab(open_page("explorer", lang=lang, layer="0", expert="0", projection="up"), "explorer", 1)
    says = i18n.t("explorer.roles.weight_scale_2_up.reads")
    assert says in texts(at)
    at = tab(open_page("explorer", lang=lang, layer="0", expert="0", projection="gate"), "explorer", 1)
    assert says not in texts(at)


# ---------------------------------------------------------------------------------------------------------- uploads


def alone(files: dict[str, bytes], shard: str) -> dict[str, bytes]:
    """One shard with its configuration."""
    return {name: data for name, data in files.items() if name == shard or name.endswith("config.json")}


def test_an_upload_gives_the_report_of_the_same_file(open_page, files):
    at = upload(open_page("explorer"), *files.items())
    assert at.metric[1].value == SHAPE
    count = audit(ensure(HOLES)).coverage["input_scale"]
    assert f"{count.missing} of {count.expected}" in texts(at)


def test_a_shard_that_was_not_uploaded_is_named_and_its_slots_are_not_called_missing(open_page, files, shards):
    lost = shards[1]
    at = upload(open_page("explorer"), *((name, data) for name, data in files.items() if name != lost))
    assert "`container.missing-shard`" in texts(at)
    assert lost in texts(at).replace("\\", "")
    count = audit(MemorySource({name: data for name, data in files.items() if name != lost})).coverage["input_scale"]
    assert count.unreadable > 0
    assert f"{count.unreadable} of {count.expected} slots" in texts(at)
    assert f"{count.missing} are missing" in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_an_index_beside_one_shard_is_used(open_page, files, shards, lang, monkeypatch):
    """It says what lies in the shards that were not given, as in a folder: their slots are not called missing."""
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    given = {name: data for name, data in files.items() if name not in shards or name == shards[1]}
    report = audit(MemorySource(given))
    at = upload(open_page("explorer", lang=lang), *given.items())
    shown = texts(at)
    lost = [line.replace("\\", "") for line in shown.splitlines() if line.startswith("- ")]
    for item in (item for item in report.findings if item.code == "container.missing-shard"):
        assert f"- {describe(item, lang)[0]}" in lost
    count = report.coverage["input_scale"]
    assert count.unreadable > 0
    assert i18n.t("explorer.map.finding_unreadable", role="input_scale", **{
        name: f"{getattr(count, name):,}" for name in ("missing", "invalid", "expected", "unreadable")
    }) in shown  # fmt: skip
    assert {"en": "is one shard of several", "zh": "是多个分片之一"}[lang] not in shown
    assert all(f"`{item.name}`" in texts(tab(at, "explorer", 2)) for item in report.backends)
    shown = texts(tab(at, "explorer", 3))
    assert all(f"| `{name}`" in shown for name in shards)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_one_shard_that_was_given_alone_is_a_part(open_page, files, shards, lang, monkeypatch):
    """Nothing is unreadable and nothing lost: the others were not given, and no backend is forecast."""
    monkeypatch.setattr(i18n, "lang", lambda: lang)  # AppTest formats the choices after the run, without a session
    given = alone(files, shards[1])
    at = upload(open_page("explorer", lang=lang), *given.items())
    shown = texts(at)
    assert {"en": "are not in this shard; the others were not given", "zh": "个不在这个分片里"}[lang] in shown
    assert {"en": "cannot be read", "zh": "无法读"}[lang] not in shown
    assert "container." not in shown
    assert {"en": "A check that counts names", "zh": "只数名字"}[lang] not in shown
    assert {"en": "is one shard of several", "zh": "是多个分片之一"}[lang] in shown
    shown = texts(tab(at, "explorer", 2))
    assert {"en": "this is one shard of several", "zh": "这里只有多个分片中的一个"}[lang] in shown
    assert "vllm-humming" not in shown


@pytest.mark.parametrize("lang", LANGUAGES)
def test_one_shard_alone_is_not_mended_by_what_the_whole_decides(open_page, files, shards, lang, monkeypatch):
    """A label is the whole's, and so are the peers; a number of one's own can be set."""
    monkeypatch.setattr(i18n, "lang", lambda: lang)
    given = alone(files, shards[1]).items()
    for policy in POLICIES:
        refused = policy != "constant"
        at = tab(upload(open_page("explorer", lang=lang, policy=policy), *given), "explorer", 6)
        said = InputError("repair.one-shard", file=shards[1], others=len(shards) - 1, policy=policy).text(lang)
        assert all((part in texts(at).replace("\\", "")) == refused for part in (said["what"], said["next"]))


@pytest.mark.parametrize("lang", LANGUAGES)
def test_backends_say_why_there_is_nothing_to_forecast(open_page, lang):
    at = tab(open_page("explorer", lang=lang, checkpoint="tiny-moe-bf16", gpu="sm_90"), "explorer", 2)
    assert (
        "No experts in NVFP4 or MXFP4 were read here" if lang == "en" else "这里没有读到 NVFP4 或 MXFP4 的专家"
    ) in texts(at)
    assert "vllm-humming" not in texts(at)
    assert "| --- |" not in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_an_upload_outlives_a_look_at_another_page_until_it_is_taken_away(open_page, files, lang):
    """Streamlit empties the uploader of a page that was left."""
    at = upload(open_page("explorer", lang=lang), *files.items())
    clean(at.switch_page("pages/glossary.py").run())
    clean(at.switch_page("pages/explorer.py").run())
    assert not at.file_uploader(key="explorer.files").value
    said = "The files that you gave before are still open" if lang == "en" else "先前给出的文件仍然打开着"
    assert said in texts(at)
    assert at.metric[1].value == SHAPE
    upload(at, ("config.json", files["config.json"]))  # other files are another checkpoint
    assert said not in texts(at)
    clean(at.file_uploader(key="explorer.files").set_value([]).run())
    assert said not in texts(at)
    assert not at.metric


@pytest.mark.parametrize("lang", LANGUAGES)
def test_two_files_of_one_name_are_not_mixed_and_the_same_file_twice_is_one(open_page, files, lang):
    """The uploader keeps what was given before; no verdict may come from two checkpoints."""
    given = [*files.items()]
    at = upload(open_page("explorer", lang=lang), *given, ("config.json", files["config.json"] + b" "))
    shown = texts(at).replace("\\", "")
    assert ("config.json was given twice" if lang == "en" else "config.json 给了两次") in shown
    assert not strips(at)
    sound = [(name, data, "application/octet-stream") for name, data in (*given, given[0])]
    clean(at.file_uploader(key="explorer.files").set_value(sound).run())
    assert at.metric[1].value == SHAPE


SAFETENSORS = "model.safetensors"
BAD = {
    # kind: (name, content, what a reader must find in English, and in Chinese)
    "pickle under its own name": (
        "pytorch_model.bin", pickle.dumps({"w": 1}), "holds no .safetensors file", "里没有 .safetensors 文件",
    ),
    "pickle": (SAFETENSORS, pickle.dumps({"w": [1.0] * 9}), "is a Python pickle.", "是 Python pickle。"),
    "LFS pointer": (
        SAFETENSORS, b"version https://git-lfs.github.com/spec/v1\noid x\n", "Git LFS pointer", "Git LFS 指针",
    ),
    "HTML page": (SAFETENSORS, b"<!DOCTYPE html><html><body>404</body></html>", "is a web page", "是网页"),
    "zero bytes": (SAFETENSORS, b"", "is empty.", "是空文件。"),
    "header of 200 MB": (
        SAFETENSORS, struct.pack("<Q", 200_000_000) + b"{}",
        "declares a header of 200,000,000 bytes. Readers refuse headers above 100,000,000 bytes",
        "声明的文件头长达 200,000,000 字节。各种读取器都拒绝超过 100,000,000 字节的文件头",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_bad_upload_gets_its_own_message_and_leaves_the_page_usable(open_page, files, lang, kind):
    name, data, english, chinese = BAD[kind]
    at = upload(open_page("explorer", lang=lang), (name, data))
    shown = texts(at).replace("\\", "")
    assert (english if lang == "en" else chinese) in shown
    assert name in shown or kind == "pickle under its own name"
    # What to do is said as well, in this language and not in the other.
    report = None if kind == "pickle under its own name" else audit(MemorySource({name: data}))
    for other in LANGUAGES if report is not None else ():
        [finding] = [item for item in report.findings if item.severity == "error"]
        assert (describe(finding, other)[1] in shown) == (other == lang)
    assert not strips(at)
    # The same uploader then takes a sound file, and the samples are still there.
    sound = [(name, data, "application/octet-stream") for name, data in files.items()]
    clean(at.file_uploader(key="explorer.files").set_value(sound).run())
    assert strips(at)
    assert at.metric[1].value == SHAPE
    assert strips(clean(choose(at, "sample")))


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_truncated_upload_is_named_and_what_is_there_is_still_drawn(open_page, lang, files, shards):
    cut = {**files, shards[-1]: files[shards[-1]][: len(files[shards[-1]]) // 2]}
    at = upload(open_page("explorer", lang=lang), *cut.items())
    assert "`container.truncated`" in texts(at)
    [finding] = [item for item in audit(MemorySource(cut)).findings if item.code == "container.truncated"]
    assert describe(finding, lang)[0] in texts(at).replace("\\", "")
    assert strips(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_of_a_file_without_experts_none_are_called_unquantised(open_page, lang):
    none = {"en": "No routed experts are stored here", "zh": "这里没有存储路由专家"}[lang]
    plain = {"en": "The experts are not quantised", "zh": "专家没有量化"}[lang]
    shown = texts(upload(open_page("explorer", lang=lang), ("model.safetensors", b"\2" + b"\0" * 7 + b"{}")))
    assert none in shown
    assert plain not in shown
    shown = texts(open_page("explorer", lang=lang, checkpoint="tiny-moe-bf16"))
    assert none not in shown
    assert plain in shown


def test_markup_in_a_file_name_stays_text(open_page):
    at = upload(open_page("explorer"), ("[x](evil)<b>.safetensors", b"<html>"))
    assert "[x](evil)" not in re.sub(r"`[^`]*`", "", texts(at))


def test_the_slots_can_be_downloaded_and_agree_with_the_report(open_page):
    from nvfp4viz.ui.explorer import slot_rows
    from nvfp4viz.ui.explorer_open import open_sample
    from nvfp4viz.ui.export import to_csv, to_json

    rows = slot_rows(open_sample(HOLES))
    missing = [row for row in rows if row["role"] == "input_scale" and row["status"] == "missing"]
    assert len(missing) == audit(ensure(HOLES)).coverage["input_scale"].missing
    assert {row["checkpoint"] for row in rows} == {HOLES}
    assert len(json.loads(to_json(rows))) == len(rows) == to_csv(rows).count(b"\n") - 1


def test_both_lists_of_slots_say_the_same_in_the_same_way(tmp_path):
    """The report's CSV and the page's own, with a draft layer and a hole: what both have is written alike."""
    from nvfp4viz.audit.tables import SLOT_COLUMNS
    from nvfp4viz.audit.tables import to_csv as report_csv
    from nvfp4viz.ui.explorer import slot_rows
    from nvfp4viz.ui.explorer_open import open_folder
    from nvfp4viz.ui.export import to_csv

    layout = LAYOUTS["modelopt"]
    own = {name: item for name, item in layout.tensors().items() if "experts.1.down_proj.input" not in name}
    drafts = {name.replace("model.layers.0.", "model.layers.1."): item for name, item in layout.tensors().items()}
    write_checkpoint(tmp_path / "drafted", {**own, **drafts}, config={**layout.config, "num_hidden_layers": 1},
                     hf_quant_config=layout.quant)  # fmt: skip
    opened = open_folder(tmp_path / "drafted")
    ours = list(csv.DictReader(io.StringIO(to_csv(slot_rows(opened)).decode("utf-8-sig"))))
    theirs = list(csv.DictReader(io.StringIO(report_csv(opened.audit.rows()))))
    assert [{name: row[name] for name in SLOT_COLUMNS} for row in ours] == theirs
    assert {row["draft"] for row in theirs} == {"True", "False"}
    assert "missing" in {row["status"] for row in theirs}


def test_the_code_gives_the_page_s_numbers():
    count = audit(ensure(HOLES)).coverage["input_scale"]
    expected = f"input_scale expected {count.expected} missing {count.missing}"
    assert expected in run(fill("explorer", {"sample": HOLES, "gpu": None, "tp": None, "ep": None}))


# ---------------------------------------------------------------------------------------------------------- reports


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("kind", ["html", "md", "json", "csv"])
def test_the_reports_are_those_of_the_command_line_and_name_no_path(lang, kind, capsys):
    from nvfp4viz.ui.explorer_open import open_sample
    from nvfp4viz.ui.explorer_report import report_text

    folder = ensure(HOLES)
    given = report_text(open_sample(HOLES).audit, kind, lang)
    main(["audit", str(folder), "--format", kind, "--language", lang, "--quiet"])
    assert given == capsys.readouterr().out
    assert str(folder.parent) not in given
    assert str(Path.home()) not in given
    count = audit(folder).coverage["input_scale"].missing
    if kind == "csv":
        assert sum(",input_scale,missing," in line for line in given.splitlines()) == count
    else:
        assert "scale.missing" in given
        assert HOLES in given.replace("\\", "")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_report_is_made_only_when_asked_for(open_page, lang, monkeypatch):
    from nvfp4viz.ui import explorer_report

    made = []
    monkeypatch.setattr(explorer_report, "report_text", lambda done, kind, language: made.append((kind, language)))
    offered = {}
    button = explorer_report.st.download_button

    def watch(label, **given):
        offered[given["file_name"]] = given["data"]
        return button(label, **given)

    monkeypatch.setattr(explorer_report.st, "download_button", watch)
    at = open_page("explorer", lang=lang)
    assert not at.get("download_button")
    at.session_state["explorer.report"] = True
    at.run()
    labels = [item.proto.label for item in at.get("download_button")]
    assert labels == [i18n.t(f"explorer.report.{kind}") for kind in ("html", "md", "json", "csv")]
    assert made == []
    offered[f"nvfp4viz-audit-{HOLES}.html"]()
    offered[f"nvfp4viz-slots-{HOLES}.csv"]()
    assert made == [("html", lang), ("csv", lang)]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_draft_layer_can_be_chosen_and_is_called_one(open_page, lang):
    """``mtp.layers.0`` of a model of one layer has the number 1, never 0."""
    tensors = drafted("mtp.layers.0.mlp.experts")
    quant = json.dumps(QUANT).encode()
    config = json.dumps({**FOUR_EXPERTS, "num_hidden_layers": 1}).encode()
    at = open_page("explorer", lang=lang)
    at = upload(
        at, ("model.safetensors", file_bytes(tensors)), ("config.json", config), ("hf_quant_config.json", quant)
    )
    [pick] = [box for box in at.selectbox if box.key == "layer"]
    assert pick.options == ["0", {"en": "1 (draft)", "zh": "1（草稿层）"}[lang]]
    # It opens on the first hole, which is the draft's.
    assert tuple(at.session_state[name] for name in ("layer", "expert", "projection")) == (1, 2, "up")
    assert {"en": "Draft layer 1", "zh": "草稿层 1"}[lang] in texts(at)
    assert {"en": "draft (MTP) layers besides: 1", "zh": "草稿（MTP）层：1"}[lang] in at.metric[1].help
    assert not [text for text in texts(at).splitlines() if "`layer=" in text]
