"""What the Explorer says of files that are cut or missing, of tensors that a layout never has, and of tiles."""

import json

import pytest

from nvfp4viz.audit import audit, run_audit
from nvfp4viz.audit.parallel import width_ranks
from nvfp4viz.checkpoint import MemorySource, file_bytes
from nvfp4viz.ui import i18n
from sample_checkpoints import ensure
from tests.audit.layouts import LAYOUTS
from tests.audit.test_cases_config import of_width

from .conftest import tab, texts
from .test_explorer import upload

LANGUAGES = ["en", "zh"]
HOLES = "tiny-moe-nvfp4-holes"
ANATOMY, FILES, RANKS = 1, 3, 4


@pytest.fixture(scope="module")
def files():
    return {path.name: path.read_bytes() for path in sorted(ensure(HOLES).iterdir())}


@pytest.fixture(autouse=True)
def _language_outside_a_run(request, monkeypatch):
    """AppTest calls ``format_func`` after the run, where the session's language is out of reach."""
    monkeypatch.setattr(i18n, "lang", lambda: request.node.callspec.params["lang"])


def written(checkpoint):
    """A checkpoint in memory as the files that somebody uploads."""
    given = {"model.safetensors": file_bytes(checkpoint.read_tensors())}
    for name, content in (("config.json", checkpoint.config), ("hf_quant_config.json", checkpoint.hf_quant_config)):
        if content is not None:
            given[name] = json.dumps(content).encode()
    return given


def state_of(shown, file):
    [line] = [line for line in shown.splitlines() if line.startswith(f"| `{file}`")]
    name, state, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
    return [name, *numbers, state]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_cut_shard_says_what_it_lacks(open_page, lang, files):
    shards = [name for name in files if name.endswith(".safetensors")]
    given = {**files, shards[-1]: files[shards[-1]][:-2000]}
    [finding] = [item for item in audit(MemorySource(given)).findings if item.code == "container.truncated"]
    shown = texts(tab(upload(open_page("explorer", lang=lang), *given.items()), "explorer", FILES))
    *_, tensors, state = state_of(shown, shards[-1])
    assert state == i18n.t("explorer.files.cut", count=f"{finding.count:,}", missing="2,000")
    assert "2,000" in state
    index = json.loads(files["model.safetensors.index.json"])["weight_map"]
    assert int(tensors.replace(",", "")) + finding.count == list(index.values()).count(shards[-1])
    assert state_of(shown, shards[0])[-1] == i18n.t("explorer.files.fine")


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_missing_shard_has_its_row(open_page, lang, files, indexed):
    shards = [name for name in files if name.endswith(".safetensors")]
    given = {name: data for name, data in files.items() if name != shards[1]}
    if not indexed:
        del given["model.safetensors.index.json"]
    shown = texts(tab(upload(open_page("explorer", lang=lang), *given.items()), "explorer", FILES))
    rows = [line.split("`")[1] for line in shown.splitlines() if line.startswith("| `")]
    assert rows == shards
    _, *numbers, state = state_of(shown, shards[1])
    assert numbers == ["–"] * 3
    index = json.loads(files["model.safetensors.index.json"])["weight_map"]
    placed = f"{list(index.values()).count(shards[1]):,}"
    assert (placed in state) == indexed
    assert state == i18n.t(f"explorer.files.missing{'' if indexed else '_unknown'}", count=placed)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("id", ["gpt-oss", "DeepSeek V4", "Quark", "compressed-tensors", "fused"])
def test_a_tensor_that_a_layout_never_has_is_called_nothing(open_page, lang, id):
    layout = LAYOUTS[id]
    page = upload(open_page("explorer", lang=lang), *written(layout.open()).items())
    shown = texts(tab(page, "explorer", ANATOMY))
    second = layout.suffixes.get("weight_scale_2", "weight_scale_2")
    name = layout.name(0, layout.kinds[0], "weight").rpartition(".")[2].removesuffix("_blocks")
    for suffix in (f"{name}_weight_scale_2", "weight_global_scale"):
        here = layout.block == "NVFP4" and suffix.endswith(second) and suffix != second
        here |= suffix == second == "weight_global_scale"
        assert (f"`{suffix}`" in shown) == here
    status = i18n.t("explorer.anatomy.status.absent" if layout.block == "MXFP4" else "explorer.anatomy.status.present")
    assert f"**weight_scale_2** · {status}" in shown


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("tp", [None, "1"])
@pytest.mark.parametrize(("width", "gated"), [(16, True), (32, True), (80, True), (96, True), (128, True), (80, False)])
def test_the_table_of_ranks_and_the_report_mind_the_same_tiles(open_page, lang, tp, width, gated):
    checkpoint = of_width(width, gated=gated)
    ranks = None if tp is None else int(tp)
    done = run_audit(checkpoint, tp=ranks)
    told = [item for item in done.report.findings if item.code == "parallel.alignment"]
    [rank] = width_ranks(done.facts, ranks)
    assert rank.missed == tuple(int(size) for item in told for size in item.params["missed"].split(", "))
    assert rank.filled == tuple(size for size in (64, 128) if rank.rows % size == 0)
    given = written(checkpoint)
    page = upload(open_page("explorer", lang=lang, **({} if tp is None else {"tp": tp})), *given.items())
    shown = texts(tab(page, "explorer", RANKS))
    row = next(line for line in shown.splitlines() if line.startswith("| 0 | 0 –"))
    cell = row.strip("| ").split("|")[-1].strip()
    assert ("`parallel.alignment`" in shown) == bool(told)
    misses = i18n.t("explorer.ranks.misses", sizes="").strip()
    assert (misses in cell) == bool(told)
    if not (rank.missed or rank.filled):
        assert cell == i18n.t("explorer.ranks.below")
