"""What a server says of its files' content, and what of it is believed."""

import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.checkpoint import inspect, open_checkpoint, write_checkpoint
from nvfp4viz.checkpoint.remote import HttpSource, HubSource
from nvfp4viz.checkpoint.transport import version_of
from nvfp4viz.errors import CheckpointError
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base, scalar
from tests.checkpoint.web_server import Site, apart, serve

NAME = "model.layers.0.mlp.experts.1.down_proj.input_scale"
NOON, LATER = "Mon, 02 Nov 2026 12:00:00 GMT", "Mon, 02 Nov 2026 12:00:01 GMT"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("nvfp4viz.checkpoint.transport.PAUSE", 0.001)


def content(folder, value=None):
    tensors = base(layers=12, experts=12)
    if value is not None:
        tensors[NAME] = scalar(value)
    write_checkpoint(folder, tensors, config=CONFIG, hf_quant_config=QUANT, max_shard_bytes=60_000)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("headers", "mark"),
    [
        ({"ETag": '"a"', "Last-Modified": NOON, "Date": LATER}, '"a"'),
        ({"ETag": 'W/"a"', "Last-Modified": NOON, "Date": LATER}, NOON),
        ({"Last-Modified": NOON, "Date": LATER}, NOON),
        # Within one second a file may be written twice.
        ({"Last-Modified": NOON, "Date": NOON}, None),
        ({"Last-Modified": NOON}, None),
        ({"Last-Modified": "yesterday", "Date": LATER}, None),
        ({"ETag": '"a\nb"'}, None),
        ({"ETag": "a"}, None),
        ({}, None),
    ],
)
def test_only_a_mark_that_changes_with_the_bytes_is_one(headers, mark):
    assert version_of(headers) == mark


def test_one_scalar_of_the_same_size_is_another_version(tmp_path):
    first, second = content(tmp_path / "a"), content(tmp_path / "b", 3e-3)
    assert {name: len(data) for name, data in first.items()} == {name: len(data) for name, data in second.items()}
    with serve(Site(first, tagged=True)) as site:
        known = HttpSource(site.address).version()
        assert {file for file, _, _ in known} == set(first)
        assert HttpSource(site.address).version() == known
        site.files = second
        other = HttpSource(site.address).version()
    assert next(name for name, *_ in set(known) ^ set(other)).endswith(".safetensors")
    assert len(set(known) - set(other)) == 1


def test_size_alone_is_no_version(tmp_path):
    with serve(Site(content(tmp_path / "a"))) as site:
        assert HttpSource(site.address).version() is None


def test_a_shard_that_cannot_be_had_leaves_no_version(tmp_path):
    files = content(tmp_path / "a")
    shard = next(name for name in files if name.endswith(".safetensors"))
    with serve(Site(files, tagged=True, status={shard: 500})) as site:
        source = HttpSource(site.address)
        assert source.version() is None
        assert inspect(source).problems
        # One that is not there yet makes another version when it comes.
        site.status = {shard: 404}
        without = HttpSource(site.address).version()
        site.status = {}
        assert {file for file, _, _ in set(HttpSource(site.address).version()) - set(without)} == {shard}


def test_what_changes_while_it_is_read_has_no_version(tmp_path):
    first, second = content(tmp_path / "a"), content(tmp_path / "b", 3e-3)
    with serve(Site(first, tagged=True)) as site:
        source = HttpSource(site.address)
        assert source.version() is not None
        checkpoint = inspect(source)
        source.forget()
        site.files = second
        checkpoint.all_scalars()
        assert source.version() is None


def test_the_hub_s_version_is_its_commit(tmp_path, monkeypatch):
    files, sha = content(tmp_path / "a"), "c0ffee" + "0" * 34
    listing = {"id": "owner/model", "sha": sha, "siblings": [{"rfilename": name} for name in files]}
    with serve(Site({}, api={"/api/models/owner/model": (200, listing, {})})) as site:
        monkeypatch.setenv("HF_ENDPOINT", site.address)
        assert HubSource("owner/model").version() == (("", 0, sha),)
        listing["sha"] = None
        assert HubSource("owner/model").version() is None


@pytest.mark.parametrize("fickle", [False, True])
def test_a_file_whose_mark_changes_between_two_answers_is_named(tmp_path, fickle):
    """Its header under one mark, its numbers under another: both are read, and the report says so."""
    write_checkpoint(tmp_path / "model", base(layers=24, experts=12), config=CONFIG, hf_quant_config=QUANT)
    files, _ = apart(tmp_path / "model")
    with serve(Site(files, tagged=True, fickle=fickle)) as site:
        report = audit(f"{site.address}/")
    found = [(item.severity, item.text) for item in report.findings if item.text == "audit.partial.changed"]
    assert found == ([("info", "audit.partial.changed")] if fickle else [])
    for item in report.findings:
        if item.text == "audit.partial.changed":
            assert "model.safetensors" in item.message + describe(item, "zh")[0]


def test_a_file_that_comes_in_crumbs_is_given_up(tmp_path):
    """18 bytes an answer, each where it should be: before, nobody ever stopped asking."""
    write_checkpoint(tmp_path / "model", base(layers=24, experts=12), config=CONFIG, hf_quant_config=QUANT)
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with serve(Site(files, lists=True, crumbs=18)) as site, pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{site.address}/model.safetensors")
    assert caught.value.code == "source.cut"
    assert len(site.asked) < 200
    # Half of what is asked for, again and again, is slow and comes to an end.
    with serve(Site(files, lists=True, crumbs=20_000)) as site:
        assert len(open_checkpoint(f"{site.address}/model.safetensors").tensors) > 100
