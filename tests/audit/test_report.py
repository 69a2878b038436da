"""The report is an interface: its shape, its words in both languages, and its text for people."""

import json
import re
import string

import numpy as np
import pytest

from nvfp4viz.audit import audit, describe, run_audit, to_json, to_text
from nvfp4viz.audit.html import to_html
from nvfp4viz.audit.texts import finding_texts, id_list
from nvfp4viz.checkpoint import MemorySource, file_bytes, tensor
from nvfp4viz.errors import error_texts
from tests.audit.layouts import LAYOUTS
from tests.checkpoint.checkpoint_fixtures import CONFIG, base, opened, scalar, without

E = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def report():
    tensors = without(base(), f"{E}.2.gate_proj.input_scale", f"{E}.3.up_proj.weight_scale")
    tensors[f"{E}.1.down_proj.input_scale"] = scalar(np.nan)
    return audit(opened(tensors), gpu="sm_110")


def test_the_json_has_the_fields_of_the_interface(report):
    data = json.loads(to_json(report))
    assert data["schema"] == "nvfp4viz.audit/1"
    assert set(data) == {
        "schema", "source", "fingerprint", "verdict", "format", "model", "container", "coverage", "findings",
        "backends", "auto", "gpu",
    }  # fmt: skip
    assert set(data["format"]) == {"dialect", "scheme", "config_sources", "group_size"}
    assert set(data["model"]) == {
        "architecture", "layers", "moe_layers", "experts", "projections", "top_k", "draft_layers",
    }  # fmt: skip
    assert {"files", "tensors", "bytes", "header_bytes", "bytes_read"} <= set(data["container"])
    assert set(data["coverage"]) == {"input_scale", "weight_scale", "weight_scale_2"}
    for row in data["coverage"].values():
        assert {"expected", "present", "missing", "invalid", "filled"} <= set(row)
        assert row["expected"] == row["present"] + row["missing"] + row["unreadable"]
    for finding in data["findings"]:
        assert {
            "code", "severity", "role", "layer", "projection", "experts", "tensors", "count", "value", "message",
            "advice",
        } <= set(finding)  # fmt: skip
    for backend in data["backends"]:
        assert {"name", "outcome", "possible", "scope", "layers", "why"} <= set(backend)
        assert backend["outcome"] in (
            "safe", "degraded", "undefined", "nan", "zero", "load-error", "ignored", "unsupported",
        )  # fmt: skip
        assert backend["scope"] in ("none", "experts", "layer", "model")
    assert data["auto"] == "vllm-cutlass"


def test_without_a_gpu_there_is_no_automatic_choice():
    assert "auto" not in json.loads(to_json(audit(opened(base()))))
    assert json.loads(to_json(audit(opened(base()), gpu="sm_70")))["auto"] is None


@pytest.mark.parametrize(
    ("stored", "shown"),
    [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (0.0, 0.0), (-2e-3, -0.002), (4.4e-42, 4.4e-42)],
)
def test_values_that_json_cannot_hold_are_texts(stored, shown):
    data = json.loads(to_json(audit(opened({**base(), f"{E}.1.down_proj.input_scale": scalar(stored)}))))
    assert data["findings"][0]["value"] == shown


def test_values_that_differ_have_no_single_value():
    tensors = {**base(), f"{E}.1.up_proj.input_scale": scalar(-1e-3), f"{E}.2.up_proj.input_scale": scalar(-2e-3)}
    [finding] = audit(opened(tensors)).findings
    assert finding.value is None
    assert finding.experts == (1, 2)
    assert "-0.001, -0.002" in finding.message


def test_the_worst_finding_comes_first_and_is_the_verdict(report):
    assert report.verdict == report.findings[0].severity == "error"
    order = ("error", "backend", "warn", "info")
    ranks = [order.index(item.severity) for item in report.findings]
    assert ranks == sorted(ranks)


def test_equal_checkpoints_give_equal_reports(report):
    tensors = without(base(), f"{E}.2.gate_proj.input_scale", f"{E}.3.up_proj.weight_scale")
    tensors[f"{E}.1.down_proj.input_scale"] = scalar(np.nan)
    shuffled = dict(reversed(list(tensors.items())))
    assert to_json(audit(opened(shuffled), gpu="sm_110")) == to_json(report)


# Words.


def placeholders(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_both_languages_have_the_same_findings():
    english, chinese = finding_texts("en"), finding_texts("zh")
    assert set(english) == set(chinese)
    for key, text in english.items():
        assert set(text) == set(chinese[key])
        for part in text:
            assert placeholders(text[part]) == placeholders(chinese[key][part]), key
        assert re.search(r"[一-鿿]", chinese[key]["message"]), key


def test_no_text_has_two_homes():
    assert not set(finding_texts("en")) & set(error_texts("en"))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_finding_and_forecast_can_be_said_in_both_languages(report, language):
    for item in (*report.findings, *report.backends):
        message, advice = describe(item, language)
        assert message
        assert "{" not in message + advice
        if language == "en":
            assert message == (item.message if hasattr(item, "message") else item.why)


def test_runs_of_experts_are_short():
    assert id_list((0, 1, 2, 3, 9, 10)) == "0–3, 9, 10"
    assert id_list(tuple(range(0, 200, 2))).endswith("…")
    assert id_list(()) == ""


# For people.


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_text_says_what_the_record_says(report, language):
    text = to_text(report, language)
    assert report.source in text
    for item in report.findings:
        assert item.code in text
    for item in report.backends:
        assert item.name in text
    assert "\x1b" not in text
    assert "\x1b" in to_text(report, language, colour=True)


def test_no_findings_says_so():
    assert "no findings" in to_text(audit(opened(base())))


def test_names_out_of_files_are_neither_markup_nor_escape_sequences():
    """A tensor's name and a file's name come from strangers."""
    evil = "[red]model\x1b[31m\u202e.layers.0.mlp.experts"
    tensors = {name.replace("model.layers.0.mlp.experts", evil): item for name, item in base().items()}
    lost = {name: item for name, item in tensors.items() if "2.up_proj.input_scale" not in name}
    source = MemorySource(
        {"model.safetensors": file_bytes(lost), "config.json": json.dumps(CONFIG).encode()}, "[bold]\x1b]0;title\x07"
    )
    report = audit(source)
    assert any(item.code == "scale.missing" for item in report.findings)
    text = to_text(report)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold]" in text
    # The JSON escapes them, so that what a consumer decodes is the true name made printable.
    assert "\x1b" not in to_json(report)
    assert all(name.isprintable() for item in report.findings for name in item.tensors)


@pytest.mark.parametrize("lost", ["input_scale", "weight_scale_2"])
def test_forecasts_do_not_hand_on_what_a_terminal_obeys(lost):
    layout, evil = LAYOUTS["modelopt"], "x\ny\x1b[31mred\u202e"
    tensors = {name.replace("model.layers", f"{evil}.layers"): item for name, item in layout.tensors().items()}
    del tensors[f"{evil}.layers.0.mlp.experts.3.down_proj.{lost}"]
    done = run_audit(layout.open(tensors))
    report = done.report
    assert any("\\x1b[31mred" in item.why for item in report.backends)
    for item in (*report.backends, *report.findings):
        for language in ("en", "zh"):
            assert all(part.isprintable() for part in describe(item, language))
    assert "\x1b" not in to_text(report) + to_html(done)


def test_a_thousand_experts_stay_a_short_report():
    """Experts of one layer, projection and code are one finding."""
    tensors = {name: item for name, item in base(experts=1000).items() if "gate_proj.input" not in name}
    report = audit(opened(tensors, {**CONFIG, "num_experts": 1000}))
    assert len(report.findings) == 1
    assert len(report.findings[0].tensors) == 3
    assert report.findings[0].count == 1000


def test_hostile_numbers_of_experts_do_not_make_long_loops():
    tensors = {**base(), "model.layers.0.mlp.experts.99999.gate_proj.weight": tensor(np.zeros((16, 16), np.uint8))}
    report = audit(opened(tensors))
    assert any(item.code == "expert.gap" for item in report.findings)
    assert len(to_json(report)) < 2_000_000


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_line_of_the_text_ends_where_its_words_end(report, language):
    """It is piped into issues and logs; tables used to be filled up with blanks."""
    assert [line for line in to_text(report, language).splitlines() if line != line.rstrip()] == []


def test_the_chinese_text_is_chinese_but_for_codes_and_names(report):
    """Verdict, heads of tables, outcomes and scopes too."""
    text = to_text(report, "zh")
    for word in ("verdict", "expected", "missing", "outcome", "scope", "undefined", "may be", " none", "unsupported"):
        assert not re.search(rf"(?<![.\w]){word}(?![.\w])", text), word
    assert "结论：" in text


def test_one_file_is_one_file():
    assert "1 file," in to_text(audit(opened(base())))
