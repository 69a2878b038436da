"""The report as a page, for an issue, as a table, and against its published schema."""

import csv
import io
import json
import re
import string
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from nvfp4viz import cli
from nvfp4viz.audit import audit, for_gpu, run_audit, to_json
from nvfp4viz.audit.diff import diff, diff_to_json
from nvfp4viz.audit.heatmap import MARKS, slot_maps
from nvfp4viz.audit.html import to_html
from nvfp4viz.audit.markdown import to_markdown
from nvfp4viz.audit.repair import RECORD, apply_repair, plan_repair
from nvfp4viz.audit.schema import FOLDER, schemas, text_of
from nvfp4viz.audit.tables import backend_rows, to_csv
from nvfp4viz.audit.terminal import to_text
from nvfp4viz.checkpoint import memory_checkpoint, tensor, write_checkpoint
from nvfp4viz.errors import CONTENT
from nvfp4viz.figures.coverage import STATUSES
from nvfp4viz.figures.palette import MARKS as SIGNS
from nvfp4viz.figures.palette import contrast
from nvfp4viz.figures.slots import slot_statuses
from sample_checkpoints import ensure
from tests.audit.fault_matrix import FAULTS, Case
from tests.audit.layouts import LAYOUTS
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, opened, scalar, without

E = "model.layers.0.mlp.experts"
LANGUAGES = ("en", "zh")
VOID = {"meta", "br", "line", "rect"}


def broken():
    tensors = without(base(), f"{E}.2.gate_proj.input_scale", f"{E}.3.gate_proj.input_scale")
    return {**tensors, f"{E}.1.down_proj.input_scale": scalar(np.nan)}


class Page(HTMLParser):
    """Tags, attributes and text; a tag that is not closed in its place fails."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words, self.attributes = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag in VOID and (not self.open or self.open[-1] != tag):
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_is_one_file_that_loads_and_runs_nothing(language):
    text = to_html(run_audit(opened(broken())), language)
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    for name, value in page.attributes:
        assert name not in ("src", "href", "srcset", "data", "onload", "onclick")
        assert "http" not in (value or "")
    assert "default-src 'none'" in text
    assert not re.search(r"url\((?!#hatch\))|@import", text)
    assert 'lang="zh-Hans"' in text if language == "zh" else 'lang="en"' in text
    assert text.count("<style>") == 1
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert "scale.missing" in page.text
    assert f"{E}.2.gate_proj.input_scale" in page.text
    # Each map once, and those without anything to see not at all.
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert len(labels) == len(set(labels)) == 2
    assert "{" not in page.text


def test_both_languages_say_the_same_of_each_finding():
    done = run_audit(opened(broken()))
    english, chinese = (Page(to_html(done, language)).text for language in LANGUAGES)
    assert "no tensor is stored" in english
    assert "expert 2–3: missing" in english
    assert "没有对应的张量" in chinese
    assert "专家 2–3: 缺失" in chinese
    for code in ("scale.missing", "scale.nan"):
        assert english.count(code) == chinese.count(code)


def test_the_reports_own_words_are_the_same_in_both_languages():
    """The same keys, and the same placeholders in each."""
    english, chinese = (
        dict(_leaves(tomllib.loads((CONTENT / language / "report.toml").read_text(encoding="utf-8"))))
        for language in LANGUAGES
    )
    assert list(english) == list(chinese)
    for key, text in english.items():
        names = [{name for _, name, _, _ in string.Formatter().parse(t) if name} for t in (text, chinese[key])]
        assert names[0] == names[1], key


def _leaves(table, before=""):
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield before + key, value


def test_colours_are_legible_in_light_in_dark_and_on_paper():
    """WCAG's 4.5:1 for words and signs on the page and on panels, and 3:1 for outlines on what is in order."""
    text = to_html(run_audit(opened(broken())))
    themes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", text, re.S)
    ]
    assert len(themes) == 3
    for theme in themes:
        words = ["ink", "muted", *(name for name in theme if name.startswith("s-"))]
        assert len(words) == 7
        for word in words:
            for ground in ("page", "panel"):
                assert contrast(theme[word], theme[ground]) >= 4.5, (word, theme[word])
        assert contrast(theme["ink"], theme["ok"]) >= 3


def test_a_map_has_every_slot_that_is_not_in_order():
    """Outlined or hatched, with its sign, as on the pages; and its title says which and what."""
    done = run_audit(opened(broken()))
    maps = {(found.role, found.projection): found for found in slot_maps(done.rows())}
    assert maps["input_scale", "gate"].layers == {0: [(0, "ok"), (1, "ok"), (2, "missing"), (3, "missing")]}
    assert maps["input_scale", "down"].layers[0][1] == (1, "nan")
    text = to_html(done)
    for kind, status in (("missing", "missing"), ("odd", "nan")):
        assert re.search(rf'<rect class="{kind}".*?</rect><text class="on"[^>]*>{SIGNS[status]}</text>', text)
    assert "layer 0, expert 1: NaN" in text


@pytest.mark.parametrize("name", ["modelopt", "compressed-tensors", "stacked"])
def test_outliers_and_both_infinities_carry_the_signs_of_the_page(name):
    layout = LAYOUTS[name]
    tensors = layout.tensors()
    with np.errstate(divide="ignore"):
        for expert, value in ((1, 5.0), (3, np.inf), (6, -np.inf)):
            layout.put(tensors, expert, "down", "input_scale", layout.stored(value))
    done = run_audit(layout.open(tensors))
    [found] = [one for one in slot_maps(done.rows()) if (one.role, one.projection) == ("input_scale", "down")]
    drawn = {expert: status for cells in found.layers.values() for expert, status in cells if status != "ok"}
    assert drawn == {1: "outlier", 3: "inf", 6: "neginf"}
    # The figures' own statuses of the same slots.
    layer = done.view.moe_layers[0]
    codes = slot_statuses(done.facts, done.report, done.facts.tables["input_scale", layer, "down"])
    assert {expert: STATUSES[code] for expert, code in enumerate(codes.tolist()) if code} == drawn
    assert {status: MARKS[status] for status in drawn.values()} == {s: SIGNS[s] for s in drawn.values()}
    page = to_html(done)
    for sign in ("!", "∞", "−∞"):
        assert page.count(f">{sign}</text>") == 2  # in its cell and in the key
    rows = {row["expert"]: row["status"] for row in csv.DictReader(io.StringIO(to_csv(done.rows())))
            if (row["role"], row["projection"]) == ("input_scale", "down")}  # fmt: skip
    assert (rows["1"], rows["3"], rows["6"], rows["0"]) == ("outlier", "inf", "inf", "ok")


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_status_can_be_drawn(language):
    from nvfp4viz.audit.texts import report_words

    statuses = {row.status for layout in ("modelopt", "compressed-tensors") for row in _rows(LAYOUTS[layout])}
    expected = {"missing", "zero", "nan", "inf", "negative", "subnormal", "not-a-scalar", "filled", "outlier"}
    assert expected | {"identity"} <= statuses
    assert statuses - {"ok", "not-needed"} <= set(MARKS)
    for status in MARKS:
        assert report_words(language, f"status.{status}")


def _rows(layout):
    for build in FAULTS.values():
        case = build(layout)
        if isinstance(case, Case):
            yield from run_audit(layout.open(case.tensors, **(case.changes or {}))).rows()


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_every_form(name, language):
    layout = LAYOUTS[name]
    for tensors in (None, without(layout.tensors(), layout.name(3, "down", layout.roles[-1]))):
        done = run_audit(layout.open(tensors))
        page = Page(to_html(done, language)).text
        issue = to_markdown(done.report, language)
        for item in done.report.findings:
            assert item.code in page
            assert f"`{item.code}`" in issue
        assert "{" not in page + issue
        rows = list(csv.DictReader(io.StringIO(to_csv(done.rows()))))
        assert len(rows) == len(done.rows())


EVIL = "<script>alert(1)</script>|`x`@octocat [a](https://evil.example) <!--"


def test_a_name_in_a_file_stays_a_name():
    evil = f"{EVIL}.layers.0.mlp.experts"
    tensors = {name.replace(E, evil): item for name, item in broken().items()}
    checkpoint = memory_checkpoint(tensors, config=CONFIG, hf_quant_config=QUANT, name="<b>@octocat")
    done = run_audit(checkpoint)
    assert done.report.verdict == "backend"
    page = to_html(done)
    assert "<script" not in page
    assert "<b>" not in page
    assert EVIL in Page(page).text
    issue = to_markdown(done.report)
    # Outside code spans no tag, table cell, link or mention comes of it.
    outside = re.sub(r"(`+) .*? \1", "", issue)
    assert "@octocat" not in outside
    assert not re.search(r"(?<!\\)<(?!/?sub>)", outside)
    assert "](" not in re.sub(r"\\.", "", outside)


def test_an_issue_is_bounded():
    tensors = {}
    for layer in range(120):
        tensors |= {name.replace("layers.0.", f"layers.{layer}."): item for name, item in broken().items()}
    report = audit(memory_checkpoint(tensors, config={**CONFIG, "num_hidden_layers": 120}, hf_quant_config=QUANT))
    assert len(report.findings) == 240
    issue = to_markdown(report)
    assert "and 200 more findings" in issue
    assert len(issue) < 65_536


def test_a_large_model_stays_a_small_page():
    """Runs of one status are one rectangle: 384 experts in 30 layers, every third without a scale in one layer."""
    tensors, numbers = {}, {f"{e}.{p}" for e in range(0, 384, 3) for p in ("gate_proj",)}
    small = {name.removeprefix(f"{E}.0."): item for name, item in base().items() if name.startswith(f"{E}.0.")}
    for layer in range(30):
        for expert in range(384):
            for name, item in small.items():
                lost = layer == 7 and name == "gate_proj.input_scale" and f"{expert}.gate_proj" in numbers
                if not lost:
                    tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}"] = item
    config = {**CONFIG, "num_hidden_layers": 30, "num_experts": 384}
    text = to_html(run_audit(memory_checkpoint(tensors, config=config, hf_quant_config=QUANT)))
    assert text.count('class="missing"') == 128 + 1  # and one in the key
    assert len(text) < 100_000


def test_the_published_schemas_are_those_of_the_records():
    assert {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")} == {
        name: text_of(schema) for name, schema in schemas().items()
    }


def validator(name):
    schema = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", LAYOUTS)
def test_reports_fit_their_schema(name):
    layout, check = LAYOUTS[name], validator("audit-1.schema.json")
    for build in FAULTS.values():
        case = build(layout)
        if isinstance(case, Case):
            check.validate(json.loads(to_json(case.report(layout))))
    check.validate(json.loads(to_json(audit(layout.open(), gpu="sm_120"))))
    check.validate(json.loads(to_json(audit(layout.open(), gpu="sm_70"))))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), "nvfp4viz.audit/2"), (("verdict",), "fine"), (("findings", 0, "severity"), "bad"),
        (("findings", 0, "value"), "NaN"), (("backends", 0, "outcome"), "perhaps"), (("container",), None),
    ],
)  # fmt: skip
def test_the_schema_refuses_what_is_no_report(path, value):
    data = json.loads(to_json(audit(opened(broken()))))
    *places, last = path
    at = data
    for place in places:
        at = at[place]
    at[last] = value
    with pytest.raises(jsonschema.ValidationError):
        validator("audit-1.schema.json").validate(data)


def test_a_repairs_record_and_a_diff_fit_theirs(tmp_path):
    write_checkpoint(tmp_path / "bad", broken(), config=CONFIG, hf_quant_config=QUANT)
    for policy in ("peer-max", "weight-only"):
        apply_repair(plan_repair(tmp_path / "bad", policy), tmp_path / policy)
        validator("repair-1.schema.json").validate(json.loads((tmp_path / policy / RECORD).read_text()))
        found = diff(tmp_path / "bad", tmp_path / policy)
        assert not found.same
        validator("diff-1.schema.json").validate(json.loads(diff_to_json(found)))
    retyped = diff(opened(base()), opened({**base(), f"{E}.0.up_proj.input_scale": tensor(np.ones(2, np.float32))}))
    validator("diff-1.schema.json").validate(json.loads(diff_to_json(retyped)))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("form", ["text", "json", "html", "md", "csv"])
def test_no_form_names_a_local_path(form, language, tmp_path, capsys):
    write_checkpoint(tmp_path / "bad", broken(), config=CONFIG, hf_quant_config=QUANT)
    out = tmp_path / f"report.{form}"
    command = ["audit", str(tmp_path / "bad"), "--format", form, "--language", language]
    assert cli.main(command) == 1
    shown = capsys.readouterr().out
    assert str(tmp_path) not in shown
    assert str(Path.home()) not in shown
    assert cli.main([*command, "--output", str(out)]) == 1
    assert out.read_text(encoding="utf-8") == shown
    assert cli.main([*command, "--paths"]) == 1
    assert (str(tmp_path / "bad") in capsys.readouterr().out.replace("\n", "").replace("\\", "")) == (form != "csv")


def test_tiny_moe_in_every_form(tmp_path):
    done = run_audit(ensure("tiny-moe-nvfp4-holes"))
    page = Page(to_html(done)).text
    assert "159 slots are never written" in page
    assert len(list(csv.DictReader(io.StringIO(to_csv(done.rows()))))) == 4 * 64 * 3 * 4


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("sample", ["tiny-moe-nvfp4-full", "tiny-moe-mxfp4"])
def test_nothing_is_written_of_block_scales_bytes_that_nobody_read(sample, language):
    done = run_audit(ensure(sample))
    page = to_html(done, language)
    row = re.search(r"<code>weight_scale</code></td>(.*?)</tr>", page)[1]
    assert re.findall(r">([^<]+)</td>", row)[3:5] == ["–", "–"]
    assert "--deep" in page
    assert re.search(r"\| `weight_scale` \| \d+ \| \d+ \| 0 \| – \| – \| 0 \|", to_markdown(done.report, language))
    assert re.search(r"weight_scale +\d+ +\d+ +0 +– +– +0\n", to_text(done.report, language))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_pick_is_said_with_its_gpu(language):
    done = run_audit(ensure("tiny-moe-nvfp4-full"))
    for write in (lambda one: to_html(one, language), lambda one: to_markdown(one.report, language),
                  lambda one: to_text(one.report, language), lambda one: to_json(one.report)):  # fmt: skip
        assert "sm_120" not in write(done)
        assert "sm_120" in write(for_gpu(done, "sm_120")).replace("\\", "")


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("source", ["tiny-moe-bf16", "pointer"])
def test_nothing_is_picked_for_experts_that_are_plain_or_unread(language, source, tmp_path):
    """vLLM's selections that are told here are of NVFP4 and MXFP4 experts; each form of the report says so."""
    if source == "pointer":
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        (tmp_path / "model.safetensors").write_bytes(pointer)
    report = audit(tmp_path if source == "pointer" else ensure(source), gpu="sm_90")
    assert (report.auto, report.backends) == (None, ())
    words = {"en": "No experts in NVFP4 or MXFP4 were read", "zh": "没有读到 NVFP4 或 MXFP4 的专家"}
    done = for_gpu(run_audit(tmp_path if source == "pointer" else ensure(source)), "sm_90")
    for text in (to_html(done, language), to_markdown(report, language), to_text(report, language)):
        assert words[language] in text
        assert "vllm-humming" not in text


def test_an_outcome_is_not_repeated_as_what_else_may_come():
    layout = LAYOUTS["modelopt"]
    report = audit(layout.open(), tp=4)
    assert any(item.outcome in item.possible for item in report.backends)
    for language in ("en", "zh"):
        for row in backend_rows(report, language):
            first, _, rest = row.outcome.partition("\n")
            assert first not in rest
