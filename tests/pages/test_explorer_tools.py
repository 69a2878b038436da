"""The Explorer's tools as a reader in either language meets them: compare, repair, ranks, and code for what is open."""

import io
import json
import os
import shutil
import zipfile

import msgspec
import numpy as np
import pytest

from nvfp4viz.audit import audit, run_audit
from nvfp4viz.audit.diff import diff, diff_to_json
from nvfp4viz.audit.parallel import expert_ranks, width_ranks
from nvfp4viz.audit.repair import POLICIES, RECORD, plan_repair, repaired_files
from nvfp4viz.audit.texts import report_words
from nvfp4viz.checkpoint import MemorySource, open_checkpoint, write_checkpoint
from nvfp4viz.errors import CheckpointError, InputError, content_words
from nvfp4viz.serving.remedies import MARGIN, run_remedy
from nvfp4viz.ui import caches, explorer_repair, explorer_roots, i18n
from nvfp4viz.ui.explorer_diff import Row, diff_rows, filtered, said_apart, setting_name
from nvfp4viz.ui.explorer_open import open_folder, open_sample
from nvfp4viz.ui.explorer_repair import COLUMNS, ROOM, archive, plan_rows, write_beside
from nvfp4viz.ui.explorer_repair_cost import texts as cost_texts
from nvfp4viz.ui.explorer_roots import VARIABLE, WRITE
from nvfp4viz.ui.explorer_rows import width_for
from nvfp4viz.ui.snippets import run
from sample_checkpoints import ensure
from tests.audit.layouts import LAYOUTS

from .conftest import clean, tab, texts

LANGUAGES = ["en", "zh"]
HOLES, SOUND, MX = "tiny-moe-nvfp4-holes", "tiny-moe-nvfp4-full", "tiny-moe-mxfp4"
RANKS, COMPARE, REPAIR = 4, 5, 6


@pytest.fixture(autouse=True)
def _language_outside_a_run(request, monkeypatch):
    """As in `test_explorer.py`."""
    language = getattr(request.node, "callspec", None) and request.node.callspec.params.get("lang")
    if language:
        monkeypatch.setattr(i18n, "lang", lambda: language)


def plain(at) -> str:
    return texts(at).replace("\\", "")


def table(at):
    [found] = at.dataframe
    return found.value


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ---------------------------------------------------------------------------------------------------------- compare


@pytest.mark.parametrize("lang", LANGUAGES)
def test_two_samples_are_compared_as_on_the_command_line(open_page, lang):
    at = tab(open_page("explorer", lang=lang), "explorer", COMPARE)
    found = diff(ensure(HOLES), ensure(SOUND))
    assert len(found.only_b) > 0
    assert len(found.values) > 0
    assert i18n.t("explorer.compare.count.only_b", count=f"{len(found.only_b):,}") in plain(at)
    assert i18n.t("explorer.compare.count.values", count=f"{len(found.values):,}") in plain(at)
    shown = table(at)
    assert len(shown) == len(found.only_b) + len(found.values)
    by_name = {row["name"]: row for _, row in shown.iterrows()}
    for item in found.values:
        row = by_name[item.tensor]
        assert (row["layer"], row["expert"], row["projection"], row["A"], row["B"]) == (
            item.layer, item.expert, item.projection, str(item.a), str(item.b),
        )  # fmt: skip


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("other", [SOUND, HOLES])
def test_a_comparison_says_what_could_not_be_read(open_page, lang, other, monkeypatch):
    """A shard of B that fails midway: it is named, and without another difference A and B are not called the same."""

    def cut(*sides, **more):
        return msgspec.structs.replace(diff(*sides, **more), same=False, unread_b=("model-00002.safetensors",))

    monkeypatch.setattr("nvfp4viz.ui.explorer_diff.diff", cut)
    at = tab(open_page("explorer", lang=lang, other=other), "explorer", COMPARE)
    shown = plain(at)
    assert i18n.t("explorer.compare.unread", side="B", count=1, file="model-00002.safetensors") in shown
    assert (i18n.t("explorer.compare.same_so_far") in shown) == (other == HOLES)
    assert i18n.t("explorer.compare.same") not in shown


IGNORED = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(600))]


@pytest.mark.parametrize(
    ("a", "b", "cells"),
    [
        (IGNORED[:2], IGNORED[:1] + IGNORED[2:3], ("…yers.0.mlp.…", "…yers.1.mlp.…")),
        (IGNORED[:2], IGNORED[:3], ('…gate"]', '…gate","model.layers.1.mlp.gate"]')),
        (IGNORED, [*IGNORED[:-1], "x"], ('…te","model.layers.599.mlp.gate"]', '…te","x"]')),
        (IGNORED[:3], None, ('["lm_head","model.layers.0.mlp.gate","model.layers.1.mlp.gate"]', "∅")),
        ("NVFP4", "FP8", ('"NVFP4"', '"FP8"')),
        (16, None, ("16", "∅")),
    ],
)
def test_long_settings_that_differ_look_different(a, b, cells):
    """A cell shows some twenty characters, of which lists have the first in common; numbers and names stay whole."""
    assert said_apart(a, b) == cells
    assert said_apart(b, a) == cells[::-1]


def test_long_names_of_settings_look_different():
    """The cell is 365 pixels wide, and paths of compressed-tensors begin alike."""
    groups = "quantization_config.config_groups.group_0"
    names = [setting_name("config.json", f"{groups}.{end}") for end in ("weights.num_bits", "weights.type", "targets")]
    assert names[0] == "config.json: …nfig_groups.group_0.weights.num_bits"
    assert len(set(names)) == 3
    assert max(map(len, names)) <= 50
    assert setting_name("hf_quant_config.json", "quantization.quant_algo") == (
        "hf_quant_config.json: quantization.quant_algo"
    )


def test_a_comparison_can_be_filtered_and_what_is_hidden_is_not_counted_away(open_page):
    at = tab(open_page("explorer"), "explorer", COMPARE)
    at.text_input(key="explorer.compare.words").set_value("layers.0 DOWN")
    shown = table(clean(at.run()))
    assert len(shown) > 0
    assert set(shown["layer"]) == {0}
    assert set(shown["projection"]) == {"down"}
    found = diff(ensure(HOLES), ensure(SOUND))
    assert i18n.t("explorer.compare.count.values", count=f"{len(found.values):,}") in plain(at)
    at.text_input(key="explorer.compare.words").set_value("no such tensor")
    assert i18n.t("explorer.compare.no_row") in plain(clean(at.run()))


@pytest.mark.parametrize(("a", "b"), [(HOLES, SOUND), (MX, SOUND), (HOLES, "tiny-moe-compressed-tensors")])
def test_every_difference_has_one_row(a, b):
    found = diff(ensure(a), ensure(b))
    views = open_sample(a).audit.view, open_sample(b).audit.view
    rows = list(diff_rows(found, *views))
    assert len(rows) == sum(map(len, (found.config, found.types, found.only_a, found.only_b, found.values)))
    for kind in {row.kind for row in rows}:
        assert list(filtered(rows, (kind,), "")) == [row for row in rows if row.kind == kind]
    for row in rows:  # words are looked for in what the cells say
        cells = row.cells()
        assert all((cells[column] or "") in row.text for column in ("projection", "role"))
        assert cells["A"]
        assert cells["B"]
        assert max(len(cells["A"]), len(cells["B"])) <= 20  # as many as a cell shows
        assert len(cells["name"]) <= 50
    assert list(filtered(rows, (), "")) == []


def test_what_one_side_lacks_stands_beside_what_the_other_has():
    found = diff(ensure(HOLES), ensure(SOUND))
    one, two = open_sample(HOLES).audit, open_sample(SOUND).audit
    for a, b, at in ((one, two, "only_b"), (two, one, "only_a")):
        rows = [row for row in diff_rows(diff(a.checkpoint, b.checkpoint), a.view, b.view) if row.kind == at]
        assert len(rows) == len(found.only_b) > 0
        assert {row.sides() for row in rows} == {("F32 []", "∅") if at == "only_a" else ("∅", "F32 []")}


def test_a_long_setting_beside_an_empty_side_ends_in_an_ellipsis():
    row = Row("config", "config.json: quantization_config.ignore", "", *said_apart(IGNORED, None))
    cells = row.cells()
    assert (cells["A"], cells["B"]) == ('["lm_head","model.l…', "∅")
    assert len(row.sides()[0]) > 400


def test_numbers_that_change_are_not_cut():
    """Of 14 pixels a digit is 7.3 wide; five columns fit on a phone where they can."""
    assert 16 + 7.3 * len("0.0015927269") <= width_for(["∅", "0.0015927269"], *ROOM["to"])
    assert 16 + 7.3 * len("-1.1754944e-38") <= width_for(["-1.1754944e-38"], *ROOM["to"])
    first = [COLUMNS[name] for name in ("layer", "expert", "projection")]
    assert sum(first) + width_for(["∅"], *ROOM["from"]) + width_for(["0.0015927269"], *ROOM["to"]) <= 390 - 32


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_checkpoint_does_not_differ_from_itself(open_page, lang):
    at = tab(open_page("explorer", lang=lang, other=HOLES), "explorer", COMPARE)
    assert i18n.t("explorer.compare.same") in plain(at)
    assert not at.dataframe
    found = diff(ensure(HOLES), ensure(HOLES))
    numbers = {"values": f"{found.by_value:,}", "others": f"{found.by_header:,}"}
    assert i18n.t("explorer.compare.by_header", **numbers) in plain(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_second_checkpoint_may_be_an_upload_and_the_first_stays(open_page, lang):
    at = tab(open_page("explorer", lang=lang), "explorer", COMPARE)
    clean(at.button_group(key="explorer.other.source").set_value("upload").run())
    files = contents(ensure(HOLES))
    for name, data in files.items():
        at.file_uploader(key="explorer.other.files").upload(name, data)
    at = clean(at.run())
    assert i18n.t("explorer.compare.same") in plain(at)
    assert at.session_state["explorer.source"] == "sample"
    # What cannot be read is an error in its place.
    at.file_uploader(key="explorer.other.files").set_value([("model.bin", b"", "application/octet-stream")])
    at = clean(at.run())
    assert CheckpointError("source.no-safetensors", name="upload", others="model.bin").text(lang)["what"] in plain(at)
    assert len(at.metric) == 4


def uploaded(at, place, files):
    clean(at.button_group(key=f"{place}.source").set_value("upload").run())
    for name, data in files.items():
        at.file_uploader(key=f"{place}.files").upload(name, data)
    return clean(at.run())


@pytest.mark.parametrize("lang", LANGUAGES)
def test_two_uploads_have_names_of_their_own(open_page, lang, tmp_path, monkeypatch):
    """Each is called after its shards, on the page and in the file; what a name may hold stays text."""
    from nvfp4viz.ui import explorer_diff

    offered, button = {}, explorer_diff.st.download_button

    def watch(label, **given):
        offered[given["file_name"]] = given["data"]
        return button(label, **given)

    layout = LAYOUTS["modelopt"]
    write_checkpoint(tmp_path / "one", layout.tensors(), config=layout.config, hf_quant_config=layout.quant)
    write_checkpoint(
        tmp_path / "two", layout.tensors(), config=layout.config, hf_quant_config=layout.quant, max_shard_bytes=20_000
    )
    first, second = contents(tmp_path / "one"), contents(tmp_path / "two")
    odd = "a*b[c](d)<e>.safetensors"
    first[odd] = first.pop("model.safetensors")
    shards = sorted(name for name in second if name.endswith(".safetensors"))
    assert len(shards) > 1
    at = uploaded(tab(open_page("explorer", lang=lang), "explorer", COMPARE), "explorer", first)
    monkeypatch.setattr(explorer_diff.st, "download_button", watch)
    at = uploaded(at, "explorer.other", second)
    name = f"{shards[0]} + {len(shards) - 1}"
    assert odd in plain(at)
    assert odd not in texts(at)  # escaped
    assert name in plain(at)
    [(file, data)] = ((file, data) for file, data in offered.items() if file.startswith("nvfp4viz-diff-"))
    found = json.loads(data())
    assert (found["a"]["source"], found["b"]["source"]) == (odd, name)
    assert not set("*[]()<> +/") & set(file)


def test_the_comparison_is_made_once(open_page, monkeypatch):
    from nvfp4viz.ui import explorer_diff

    made = []
    monkeypatch.setattr(explorer_diff, "diff", lambda a, b, views: made.append((a.name, b.name)) or diff(a, b, views))
    at = tab(open_page("explorer"), "explorer", COMPARE)
    clean(at.run())
    assert made == [(HOLES, SOUND)]
    at.selectbox(key="explorer.other").set_value(MX)
    clean(at.run())
    assert made == [(HOLES, SOUND), (HOLES, MX)]


def test_the_comparison_s_json_is_the_command_line_s(open_page, monkeypatch):
    from nvfp4viz.ui import explorer_diff

    offered, button = {}, explorer_diff.st.download_button

    def watch(label, **given):
        offered[given["file_name"]] = given["data"]
        return button(label, **given)

    monkeypatch.setattr(explorer_diff.st, "download_button", watch)
    tab(open_page("explorer"), "explorer", COMPARE)
    assert offered[f"nvfp4viz-diff-{HOLES}-{SOUND}.json"]() == diff_to_json(diff(ensure(HOLES), ensure(SOUND)))


# ---------------------------------------------------------------------------------------------------------- repair


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_plan_is_shown_and_nothing_is_written(open_page, lang, policy):
    before = contents(ensure(HOLES))
    at = tab(open_page("explorer", lang=lang, policy=policy, value="0.002"), "explorer", REPAIR)
    plan = plan_repair(ensure(HOLES), policy, value=0.002 if policy == "constant" else None)
    shown = table(at)
    rows = plan_rows(open_sample(HOLES), plan, i18n.t("explorer.repair.removed"))
    assert shown["to"].tolist() == [row["to"] for row in rows]
    assert shown["from"].tolist() == [row["from"] for row in rows]
    # Which slot and what changes stand first: no long name pushes them off the edge, on a phone neither.
    assert [*at.dataframe[0].proto.column_order][:5] == ["layer", "expert", "projection", "from", "to"]
    assert max(len(i18n.t(f"coverage.status_divisor.{name}")) for name in ("zero", "inf", "neginf", "subnormal")) <= 36
    if policy == "weight-only":
        # Of a long name its end; the place stands before it.
        assert all(any(name.endswith(end.lstrip("…")) for end in shown["tensor"]) for name in plan.record.dropped)
        assert any(name.startswith("hf_quant_config.json") for name in shown["tensor"])
    else:
        assert shown["to"].tolist() == [str(slot.new) for slot in plan.record.slots]
        assert set(shown["from"]) == {"∅"}
        assert set(shown["state"]) == {{"en": "no scale stored", "zh": "没有存储缩放因子"}[lang]}
    assert contents(ensure(HOLES)) == before
    assert at.query_params.get("policy", "peer-max") == policy


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("sample", "policy"), [(SOUND, "peer-max"), ("tiny-moe-bf16", "weight-only"), (MX, "constant")]
)
def test_where_nothing_is_to_be_mended_that_is_said(open_page, lang, sample, policy):
    at = tab(open_page("explorer", lang=lang, checkpoint=sample, policy=policy), "explorer", REPAIR)
    assert plan_repair(ensure(sample), policy).is_empty
    assert i18n.t("explorer.repair.nothing") in plain(at)
    assert "explorer.repair.make" not in [item.key for item in at.button]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("suspects", ["0", "1"])
def test_a_value_that_only_looks_wrong_is_named_where_it_stays(open_page, lang, suspects, tmp_path):
    """As `nvfp4viz repair` says it: the switch would replace it."""
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    layout.put(tensors, 3, "down", "input_scale", np.float32(layout.get(tensors, 3, "down", "input_scale") * 500))
    write_checkpoint(tmp_path / "own", tensors, config=layout.config, hf_quant_config=layout.quant)
    at = open_page("explorer", lang=lang, policy="peer-max", suspects=suspects)
    clean(at.button_group(key="explorer.source").set_value("upload").run())
    for name, data in contents(tmp_path / "own").items():
        at.file_uploader(key="explorer.files").upload(name, data)
    shown = plain(tab(clean(at.run()), "explorer", REPAIR))
    switch = i18n.t("explorer.repair.suspects")
    assert (i18n.t("explorer.repair.suspected", count=1, switch=switch) in shown) == (suspects == "0")
    assert (i18n.t("explorer.repair.nothing") in shown) == (suspects == "0")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_what_a_policy_cannot_do_is_an_error_with_its_reason(open_page, lang):
    at = tab(open_page("explorer", lang=lang, policy="constant", value="-1"), "explorer", REPAIR)
    said = InputError("repair.value", value=-1.0).text(lang)
    assert all(said[part] in plain(at) for part in ("what", "why", "next"))
    at = tab(open_page("explorer", lang=lang, checkpoint="tiny-moe-mislabelled"), "explorer", REPAIR)
    with pytest.raises(InputError) as caught:
        plan_repair(ensure("tiny-moe-mislabelled"), "peer-max")
    assert caught.value.text(lang)["what"] in plain(at)


def test_ranks_do_not_stand_in_a_repair_s_way(open_page):
    at = tab(open_page("explorer", tp="3"), "explorer", REPAIR)
    assert len(table(at)) == len(plan_repair(ensure(HOLES), "peer-max").record.slots)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("policy", ["peer-max", "weight-only"])
def test_the_changed_files_come_as_an_archive_that_mends(open_page, lang, policy):
    at = tab(open_page("explorer", lang=lang, policy=policy), "explorer", REPAIR)
    assert "explorer.kept.repaired" not in at.session_state
    at = clean(at.button(key="explorer.repair.make").click().run())
    data = at.session_state["explorer.kept.repaired"]
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        files = {name: pack.read(name) for name in pack.namelist()}
    assert files == repaired_files(plan_repair(ensure(HOLES), policy))
    assert archive(files) == data
    mended = audit(MemorySource({**contents(ensure(HOLES)), **files}))
    assert mended.verdict in ("ok", "info", "warn")
    assert json.loads(files[RECORD])["policy"] == policy
    # Another policy, another archive: the old one is gone.
    at.button_group(key="explorer.policy").set_value("layer-max")
    assert "explorer.kept.repaired" not in clean(at.run()).session_state


def test_a_single_file_says_that_it_gets_another_name(open_page):
    tensors = open_checkpoint(ensure(HOLES)).read_tensors()
    from nvfp4viz.checkpoint import file_bytes

    at = open_page("explorer")
    clean(at.button_group(key="explorer.source").set_value("upload").run())
    files = {"model.safetensors": file_bytes(tensors)}
    files |= {name: data for name, data in contents(ensure(HOLES)).items() if name.endswith("config.json")}
    for name, data in files.items():
        at.file_uploader(key="explorer.files").upload(name, data)
    at = tab(clean(at.run()), "explorer", REPAIR)
    at = clean(at.button(key="explorer.repair.make").click().run())
    assert i18n.t("explorer.repair.renamed", file="model.safetensors") in texts(at)
    with zipfile.ZipFile(io.BytesIO(at.session_state["explorer.kept.repaired"])) as pack:
        assert "model-00001-of-00002.safetensors" in pack.namelist()


def test_large_changes_are_left_to_the_command_line(open_page, monkeypatch):
    monkeypatch.setattr(explorer_repair, "MOST_BYTES", 1000)
    at = tab(open_page("explorer", policy="weight-only"), "explorer", REPAIR)
    assert "nvfp4viz repair FOLDER OUT" in texts(at)
    assert "explorer.repair.make" not in [item.key for item in at.button]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_what_a_policy_costs_is_measured(open_page, lang):
    at = tab(open_page("explorer", lang=lang), "explorer", REPAIR)
    at.session_state["explorer.open.repair.cost.title"] = True
    shown = plain(clean(at.run()))
    asked = dict(cost_texts())
    given = {"broken": ensure(HOLES), "calibrated": ensure(SOUND), "texts": asked}
    peer, best = (run_remedy(name, [], **given).losses for name in ("peer-max", "calibrate"))
    for domain in asked:
        assert f"| {peer[domain]:.4f} | {best[domain]:.4f} |" in shown
    more = max(peer[domain] - best[domain] for domain in asked)
    assert more <= MARGIN
    assert f"{more:+.4f}" in shown


def test_a_difference_that_rounds_to_nothing_has_no_minus():
    from nvfp4viz.ui.explorer_repair_cost import _signed

    assert [_signed(value) for value in (-1e-6, 1e-6, -0.0001, 0.5)] == ["+0.0000", "+0.0000", "−0.0001", "+0.5000"]


def test_each_policy_s_cost_is_that_of_the_story_s_remedy():
    asked = cost_texts()
    given = {"broken": ensure(HOLES), "calibrated": ensure(SOUND), "texts": dict(asked)}
    for policy, value, remedy in (("constant", 1.0, "fill-one"), ("weight-only", None, "weight-only")):
        assert caches.repair_losses(policy, value, asked) == run_remedy(remedy, [], **given).losses


def test_a_bad_constant_is_seen_in_the_loss(open_page):
    at = tab(open_page("explorer", policy="constant", value="1e6"), "explorer", REPAIR)
    at.session_state["explorer.open.repair.cost.title"] = True
    shown = plain(clean(at.run()))
    losses = caches.repair_losses("constant", 1e6, cost_texts())
    best = caches.losses(caches.Build(SOUND), cost_texts())
    over = [domain for domain in losses if not losses[domain] <= best[domain] + MARGIN]
    assert over
    assert ", ".join(i18n.t(f"explorer.repair.cost.domains.{domain}") for domain in over) in shown


def test_the_scales_to_take_away_say_whose_they_are_and_by_which_rule():
    plan = plan_repair(ensure(HOLES), "constant", value=0.5)
    data = explorer_repair.scales_file(plan)
    said = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert said == {
        "format": "pt",
        "source": plan.record.source,
        "fingerprint": plan.record.fingerprint,
        "policy": "constant",
        "value": "0.5",
    }
    assert explorer_repair.scales_file(plan_repair(ensure(HOLES), "weight-only")) == b""


# ------------------------------------------------------------------------------------------- writing on the server


@pytest.fixture
def root(tmp_path, monkeypatch):
    folder = tmp_path / "shared"
    shutil.copytree(ensure(HOLES), folder / "holes")
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setenv(WRITE, "1")
    return folder


def on_server(open_page, lang="en", **query):
    at = open_page("explorer", lang=lang, **query)
    return tab(clean(at.button_group(key="explorer.source").set_value("server").run()), "explorer", REPAIR)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_mended_copy_is_written_beside_and_never_over_anything(open_page, lang, root):
    before = contents(root / "holes")
    at = on_server(open_page, lang)
    assert os.listdir(root) == ["holes"]
    at = clean(at.button(key="explorer.repair.write").click().run())
    out = root / "holes-peer-max"
    assert {**before, **repaired_files(plan_repair(root / "holes", "peer-max"))} == contents(out)
    assert audit(out).verdict in ("ok", "info", "warn")
    assert contents(root / "holes") == before
    assert str(root.parent) not in texts(at)
    # Once more: the name is taken.
    written = contents(out)
    at = clean(at.button(key="explorer.repair.write").click().run())
    assert InputError("roots.exists", folder="holes-peer-max").text(lang)["what"] in plain(at)
    assert contents(out) == written


def test_a_press_does_not_fall_to_another_plan(open_page, root):
    at = on_server(open_page)
    # Pressed for the plan that was shown, and the page starts over with another policy before it gets there.
    at.session_state["explorer.kept.repair_asked"] = at.session_state["explorer.kept.plan"][0]
    at.button_group(key="explorer.policy").set_value("weight-only")
    clean(at.run())
    assert os.listdir(root) == ["holes"]
    assert "explorer.kept.repair_asked" not in at.session_state


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "x" * 200, "a\nb", "/abs"])
def test_only_a_plain_name_is_taken(root, name):
    opened = open_folder(root / "holes")
    plan = plan_repair(opened.audit, "peer-max")
    with pytest.raises(InputError) as caught:
        write_beside(plan, opened.audit.checkpoint.source, name)
    assert caught.value.code == "roots.name"
    assert os.listdir(root) == ["holes"]


def test_nothing_is_written_beside_a_root_through_a_link_or_where_the_system_refuses(root, monkeypatch):
    opened = open_folder(root / "holes")
    plan, place = plan_repair(opened.audit, "peer-max"), opened.audit.checkpoint.source
    (root / "taken").symlink_to(root.parent / "elsewhere")
    with pytest.raises(InputError) as caught:
        write_beside(plan, place, "taken")
    assert caught.value.code == "roots.exists"
    monkeypatch.setattr("nvfp4viz.checkpoint.copies._link", lambda *_: (_ for _ in ()).throw(OSError(13, "denied")))
    with pytest.raises(CheckpointError) as caught:
        write_beside(plan, place, "mended")
    assert (caught.value.code, caught.value.params["reason"]) == ("roots.not-written", "denied")
    monkeypatch.setenv(VARIABLE, str(root / "holes"))
    with pytest.raises(InputError) as caught:
        write_beside(plan, place, "mended")
    assert caught.value.code == "roots.outside"
    assert sorted(os.listdir(root)) == ["holes", "taken"]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_server_that_others_reach_writes_nothing_unless_its_owner_says_so(open_page, lang, root, monkeypatch):
    monkeypatch.setenv(WRITE, "0")
    at = on_server(open_page, lang)
    assert i18n.t("explorer.repair.read_only", variable=WRITE) in texts(at)
    assert "explorer.repair.write" not in [item.key for item in at.button]
    monkeypatch.delenv(WRITE)
    monkeypatch.setattr(explorer_roots, "served_for_all", lambda variable: variable != WRITE)
    assert not explorer_roots.may_write()


# ----------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("lang", LANGUAGES)
def test_ranks_in_the_link_are_audited_and_shown_rank_by_rank(open_page, lang):
    at = tab(open_page("explorer", lang=lang, tp="3", ep="5"), "explorer", RANKS)
    report = audit(ensure(HOLES), tp=3, ep=5)
    facts = run_audit(ensure(HOLES)).facts
    shown = texts(at)
    for code in ("parallel.group-split", "parallel.alignment"):
        assert code in [item.code for item in report.findings]
        assert f"`{code}`" in shown
    for one in expert_ranks(facts, 5):
        assert f"| {one.rank} | {one.begin} – {one.end - 1} | {one.end - one.begin} | {one.unusable} |" in shown
    for one in width_ranks(facts, 3):
        assert f"| {one.rank} | {one.begin:.2f}".removesuffix(".00") in shown
    assert (at.query_params["tp"], at.query_params["ep"]) == ("3", "5")
    # Findings, verdict and reports are of the split model too.
    assert "`parallel.group-split`" in texts(tab(at, "explorer", 0))


@pytest.mark.parametrize("lang", LANGUAGES)
def test_of_a_thousand_ranks_the_first_are_listed(open_page, lang):
    at = tab(open_page("explorer", lang=lang, tp="1024", ep="1000"), "explorer", RANKS)
    shown = texts(at)
    for count in ("1,024", "1,000"):
        assert {"en": f"The first 72 of {count} ranks.", "zh": f"共 {count} 个 rank"}[lang] in shown
    assert "| 71 |" in shown
    assert "| 72 |" not in shown


@pytest.mark.parametrize("lang", LANGUAGES)
def test_ranks_that_fit_are_said_to_fit(open_page, lang):
    at = tab(open_page("explorer", lang=lang, checkpoint="gemma4-skeleton", tp="1", ep="8"), "explorer", RANKS)
    found = [item.text for item in audit(ensure("gemma4-skeleton"), ep=8).findings]
    assert not [text for text in found if text.startswith("parallel")]
    assert "| 7 | 112 – 127 | 16 |" in texts(at)
    at = tab(open_page("explorer", lang=lang, checkpoint=MX, tp="1", ep="4"), "explorer", RANKS)
    assert i18n.t("explorer.ranks.fine", tp=1, ep=4) in texts(at)


@pytest.mark.parametrize("query", [{"tp": "0"}, {"ep": "2000"}, {"tp": "two"}], ids=str)
def test_ranks_that_make_no_sense_are_named(open_page, query):
    at = open_page("explorer", **query)
    (name,) = query
    assert f"`{name}=" in texts(at)
    assert len(at.metric) == 4


# ------------------------------------------------------------------------------------------- block scales on the map


@pytest.mark.parametrize("lang", LANGUAGES)
def test_an_mxfp4_checkpoint_shows_its_block_scales(open_page, lang):
    at = open_page("explorer", lang=lang, checkpoint=MX, layer="1", expert="3", projection="down")
    assert at.radio(key="explorer.role").options == ["weight_scale"]
    slot = open_sample(MX).audit.view.slot(1, 3, "down", "weight_scale")
    shown = texts(at)
    assert f"`{slot.entry.name}`" in shown
    assert f"{slot.entry.dtype} {list(slot.entry.shape)}" in shown
    count = audit(ensure(MX)).coverage["weight_scale"]
    assert count.expected > 0
    assert str(count.expected) in shown
    assert "`input_scale`" in shown


def test_a_missing_block_scale_is_a_hole_of_the_map(open_page):
    from nvfp4viz.figures.slots import coverage_grid

    name = open_sample(MX).audit.view.slot(2, 7, "up", "weight_scale").name
    tensors = open_checkpoint(ensure(MX)).read_tensors()
    del tensors[name]
    from nvfp4viz.checkpoint import memory_checkpoint

    done = run_audit(memory_checkpoint(tensors, config=open_checkpoint(ensure(MX)).config))
    grid = coverage_grid(done.facts, done.report, "weight_scale")
    assert [np.argwhere(grid.holes(kind)).tolist() for kind in grid.roles] == [
        [[2, 7]] if kind == "up" else [] for kind in grid.roles
    ]
    assert done.report.coverage["weight_scale"].missing == 1


# ------------------------------------------------------------------------------------------------------------ code


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_code_for_an_upload_runs_on_the_upload(open_page, lang):
    at = open_page("explorer", lang=lang)
    clean(at.button_group(key="explorer.source").set_value("upload").run())
    files = contents(ensure(HOLES))
    for name, data in files.items():
        at.file_uploader(key="explorer.files").upload(name, data)
    at.session_state["explorer.open.code"] = True
    at = clean(at.run())
    source, output = at.code[0].value, at.code[1].value
    assert 'source = "FOLDER"' in source
    # A reader puts a folder there; the output is that of these files.
    assert output == run(source.replace("FOLDER", ensure(HOLES).as_posix()))
    count = audit(ensure(HOLES)).coverage["input_scale"]
    assert f"input_scale expected {count.expected} missing {count.missing}" in output


def test_the_code_audits_for_the_gpu_and_the_ranks_that_are_set(open_page):
    at = open_page("explorer", gpu="sm_100", tp="8", ep="3")
    at.session_state["explorer.open.code"] = True
    at = clean(at.run())
    output = at.code[1].value
    report = audit(ensure(HOLES), gpu="sm_100", tp=8, ep=3)
    first, backend = report.findings[0], report.backends[0]
    assert first.code.startswith("parallel.")
    assert f"{first.code} {first.severity}" in output
    assert f"{backend.name} {backend.outcome} {backend.scope}" in output


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_plan_is_told_in_whole_sentences(language):
    """The part about shards begins without a capital, and so after no full stop."""
    shards = report_words(language, "repair.shards", count=1, bytes="148")
    told = content_words("pages/explorer.toml", language, "repair.plan", what="2 slots", shards=shards, guess="X")
    assert not (shards[0].islower() and told[: told.index(shards)].rstrip().endswith("."))


@pytest.mark.parametrize(
    ("gpu", "gone", "stays"),
    [
        ("sm_110", ("vllm-flashinfer-trtllm", "vllm-flashinfer-cutlass", "vllm-flashinfer-b12x"), ("vllm-cutlass",)),
        ("sm_90", ("vllm-cutlass", "vllm-flashinfer-cutlass"), ("vllm-marlin", "vllm-humming", "sglang-generic")),
        ("sm_120", ("vllm-flashinfer-trtllm",), ("vllm-flashinfer-cutlass", "vllm-flashinfer-b12x")),
        ("any", (), ("vllm-flashinfer-trtllm", "vllm-flashinfer-b12x", "vllm-cutlass")),
    ],
)
def test_what_does_not_run_on_the_chosen_gpu_is_called_so(open_page, gpu, gone, stays):
    rows = texts(tab(open_page("explorer", checkpoint=SOUND, gpu=gpu), "explorer", 2)).splitlines()
    for names, said in ((gone, True), (stays, False)):
        for name in names:
            row = next(row for row in rows if row.startswith(f"| `{name}` |"))
            assert (f"**not on {gpu}** (elsewhere: safe)" in row) == said
