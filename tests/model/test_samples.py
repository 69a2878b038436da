"""The shipped samples: built byte for byte from what is committed, and what `product.md` demands of them."""

import hashlib
import json

import numpy as np
import pytest
from safetensors import safe_open

from nvfp4viz import serving
from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import file_bytes, open_checkpoint
from nvfp4viz.errors import CheckpointError
from nvfp4viz.model import CalibrationStats, corpus
from sample_checkpoints import CALIBRATION, HERE, SAMPLES, ensure, is_ready
from sample_checkpoints.build import MAX_SHARD_BYTES, build
from sample_checkpoints.measure import MARKS, tables

NEWS = CalibrationStats.read(CALIBRATION / "news.json")
ALL = CalibrationStats.read(CALIBRATION / "all.json")
MEASURED = json.loads((HERE / "measured.json").read_text(encoding="utf-8"))


def test_the_committed_export_is_rebuilt_byte_for_byte(tmp_path):
    build("tiny-moe-nvfp4-holes", tmp_path / "again")
    committed = HERE / "tiny-moe-nvfp4-holes"
    assert {p.name for p in committed.iterdir()} == {p.name for p in (tmp_path / "again").iterdir()}
    for path in committed.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_the_committed_export_is_sharded_as_a_real_one():
    """Several shards and an index that says where each tensor lies; no layer ends with a shard."""
    folder = HERE / "tiny-moe-nvfp4-holes"
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards == [f"model-{k + 1:05d}-of-{len(shards):05d}.safetensors" for k in range(len(shards))]
    assert len(shards) >= 3
    found, total = {}, 0
    for shard in shards:
        with safe_open(folder / shard, framework="pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118
            found |= dict.fromkeys(file.keys(), shard)
        assert sum(sizes) <= MAX_SHARD_BYTES
        total += sum(sizes)
    assert found == index["weight_map"]
    assert index["metadata"]["total_size"] == total
    layers = {}
    for name, shard in found.items():
        if ".experts." in name:
            layers.setdefault(name.split(".")[2], set()).add(shard)
    assert [len(where) for where in layers.values()].count(2) == len(shards) - 1


def test_sharding_moved_no_byte():
    """All tensors in one file are, to the byte, the export as it was before it came in shards."""
    tensors = open_checkpoint(HERE / "tiny-moe-nvfp4-holes").read_tensors()
    digest = hashlib.sha256(file_bytes(tensors, {"format": "pt"})).hexdigest()
    assert digest == "41011e463d435b38733b5f1764cdff3692f90ed860f58e557e3f3ca9a089dcd7"


def test_committed_samples_are_small():
    files = [p for name in ("tiny-moe-bf16", "tiny-moe-nvfp4-holes") for p in (HERE / name).iterdir()]
    assert sum(p.stat().st_size for p in files) < 25_000_000
    assert max(p.stat().st_size for p in files) < 8_000_000


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.id)
def test_a_sample_opens_with_the_safetensors_package_and_shows_its_defect(sample):
    folder = ensure(sample.id)
    assert is_ready(sample.id)
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, framework="np") as file:
            assert len(list(file.keys())) > 0
    found = {item.code for item in audit(folder).findings if item.severity != "info"}
    assert found == ({sample.defect} if sample.defect else set())


def test_an_unknown_sample_is_refused():
    with pytest.raises(CheckpointError) as caught:
        ensure("../../etc")
    assert caught.value.code == "sample.unknown"


def test_news_calibration_leaves_holes_in_every_layer():
    assert 0.10 <= NEWS.holes.mean() <= 0.30
    assert (NEWS.holes.sum(axis=1) >= 1).all()


def test_full_calibration_reaches_every_expert():
    assert ALL.counts.min() > 0
    assert (ALL.input_amax > 0).all()


def test_statistics_survive_their_file():
    again = CalibrationStats.from_json(NEWS.to_json())
    assert again.counts.tolist() == NEWS.counts.tolist()
    assert again.input_amax.tobytes() == NEWS.input_amax.tobytes()


def test_the_holes_are_the_experts_without_a_token(holed):
    missing = {(slot.layer, slot.expert) for slot in holed.load_report.unwritten}
    assert missing == {(int(layer), int(expert)) for layer, expert in np.argwhere(NEWS.holes)}


@pytest.mark.parametrize("model", ["bf16", "full"])
def test_demo_prompts_are_answered_sensibly(model, request):
    served = request.getfixturevalue(model)
    replies = {domain: served.generate(prompt, 48).text for domain, prompt in corpus.DEMO_PROMPTS.items()}
    assert replies["arithmetic"] == " 82"
    assert replies["code"] == "    return [x * factor for x in values]"
    assert replies["news"].endswith(".")
    assert json.loads(corpus.DEMO_PROMPTS["json"] + served.generate(corpus.DEMO_PROMPTS["json"], 120).text)["id"] == 417
    assert all("<pad>" not in reply and len(reply) > 2 for reply in replies.values())


def test_the_measured_table_in_the_readme_is_the_measured_file():
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    assert readme.split(MARKS[0])[1].split(MARKS[1])[0].strip() == tables(MEASURED)


def test_measured_losses_meet_the_bound():
    assert set(MEASURED["losses"]) == set(corpus.DOMAINS)
    for loss in MEASURED["losses"].values():
        assert loss["w4a4"] - loss["bf16"] < 0.05


def test_measured_collapse_meets_the_bound():
    zeros = {domain: sum(counts) for domain, counts in MEASURED["collapses"]["zeros"].items()}
    assert zeros[corpus.CALIBRATION_DOMAIN] == 0
    assert sum(MEASURED["collapses"]["zeros"][domain][0] >= 45 for domain in corpus.DOMAINS) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("domain", ["news", "arithmetic", "code"])
def test_the_measured_collapse_is_recomputed(holed, domain):
    found = serving.collapse(holed, corpus.held_out_prompts(domain), MEASURED["tokens"])
    assert [found.silent, found.broken] == MEASURED["collapses"]["zeros"][domain]


@pytest.mark.slow
@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_the_measured_losses_are_recomputed(bf16, full, domain):
    documents = corpus.held_out_documents(domain, MEASURED["documents"])
    for name, served in (("bf16", bf16), ("w4a4", full)):
        assert round(serving.evaluate(served, documents), 4) == MEASURED["losses"][domain][name]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("which", "committed"), [("news", NEWS), ("all", ALL)])
def test_recalibrating_gives_the_same_statistics(which, committed):
    from sample_checkpoints.calibrate import run

    again = run(which)
    assert again.counts.tolist() == committed.counts.tolist()
    assert again.input_amax.tobytes() == committed.input_amax.tobytes()
