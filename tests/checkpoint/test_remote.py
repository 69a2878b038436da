"""Checkpoints behind HTTP: sound servers, unsound ones, and a stand-in for the hub."""

import asyncio
import contextlib
import errno
import json
import mmap
import os
import socket
import struct
import time
import tomllib
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from benchmarks.big_checkpoint import DEEPSEEK_LAYERS, DEEPSEEK_SHARDS, make
from nvfp4viz.audit import run_audit
from nvfp4viz.audit.repair import plan_repair
from nvfp4viz.checkpoint import inspect, open_checkpoint, write_checkpoint
from nvfp4viz.checkpoint.remote import HttpSource, HubSource, open_remote
from nvfp4viz.checkpoint.transport import MOST_PAUSE, PAUSE, Answer, Transport, Wanted
from nvfp4viz.cli import main
from nvfp4viz.errors import CONTENT, CheckpointError, InputError
from tests.checkpoint.checkpoint_fixtures import CONFIG, QUANT, base
from tests.checkpoint.web_server import Site, serve

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three shards with an index and both configurations, of more than 64 KiB."""
    out = tmp_path_factory.mktemp("remote") / "model"
    tensors = base(layers=12, experts=12)
    write_checkpoint(out, tensors, config=CONFIG | {"num_hidden_layers": 12, "num_experts": 12},
                     hf_quant_config=QUANT, max_shard_bytes=60_000)  # fmt: skip
    assert len(list(out.glob("*.safetensors"))) > 1
    return out


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 4560236\n"


@pytest.fixture(scope="module")
def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("nvfp4viz.checkpoint.transport.PAUSE", 0.001)


def assert_same_as_local(checkpoint, folder):
    local = open_checkpoint(folder)
    assert dict(checkpoint.tensors) == dict(local.tensors)
    assert checkpoint.problems == local.problems == []
    assert (checkpoint.config, checkpoint.hf_quant_config) == (local.config, local.hf_quant_config)
    assert np.array_equal(checkpoint.all_scalars(), local.all_scalars())
    name = next(name for name in local.tensors if name.endswith(".weight"))
    assert np.array_equal(checkpoint.read(name), local.read(name))


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("form", ["/", "", f"/{INDEX}"])
def test_a_folder_reads_as_it_does_from_disk(files, folder, lists, form):
    with serve(Site(files, lists=lists)) as site:
        assert_same_as_local(open_checkpoint(f"{site.address}{form}"), folder)


@pytest.mark.parametrize(("lists", "code"), [(True, "source.no-weights"), (False, "source.nothing-there")])
def test_a_folder_without_shards_is_there_if_the_server_shows_it(lists, code):
    with serve(Site({"README.md": b"nothing here"}, lists=lists)) as site, pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{site.address}/model")
    assert caught.value.code == code


@pytest.mark.parametrize("lists", [True, False])
def test_a_file_that_is_no_shard_is_told_as_what_it_is(files, folder, lists):
    """As on disk; a file that is not there is not found."""
    with serve(Site({**files, "weights.bin": b"PK\x03\x04 and so on"}, lists=lists)) as site:
        (folder / "weights.bin").write_bytes(b"PK\x03\x04 and so on")
        for name in ("config.json", "weights.bin"):
            with pytest.raises(CheckpointError) as here:
                open_checkpoint(folder / name)
            with pytest.raises(CheckpointError) as there:
                open_checkpoint(f"{site.address}/{name}")
            assert (there.value.code, there.value.params) == (here.value.code, here.value.params)
    with serve(Site({"weights.bin": b"PK\x03\x04 and so on"})) as site, pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{site.address}/no.bin")
    assert caught.value.code == "source.nothing-there"


@pytest.mark.parametrize("lists", [True, False])
def test_the_index_that_was_asked_for(files, folder, lists):
    """Whatever its name, and whatever else lies there; one that is not there is an error."""
    other = {name: data for name, data in files.items() if name != INDEX}
    other["second.index.json"] = files[INDEX]
    with serve(Site({**other, "stray.safetensors": b"x"}, lists=lists)) as site:
        assert_same_as_local(open_checkpoint(f"{site.address}/second.index.json"), folder)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(f"{site.address}/third.index.json")
    assert caught.value.code == "source.nothing-there"


def test_a_single_file_with_its_neighbours(files):
    shard = min(name for name in files if name.endswith(".safetensors"))
    with serve(Site(files)) as site:
        checkpoint = open_checkpoint(f"{site.address}/sub/{shard}?signature=abc")
    assert [header.file for header in checkpoint.files] == [shard]
    assert checkpoint.config is not None
    assert checkpoint.name == f"{site.address.removeprefix('http://')}/sub/{shard}"
    # The signature goes along with every request.
    assert all("signature=abc" in path for path, _, _ in site.asked)


def test_every_byte_is_counted_and_few_are_fetched(files, folder):
    with serve(Site(files)) as site:
        checkpoint = open_checkpoint(site.address)
        values = checkpoint.all_scalars()
        assert checkpoint.bytes_read + checkpoint.side_bytes == site.sent
        shards = len(checkpoint.files)
        assert checkpoint.bytes_read <= checkpoint.header_bytes + 4 * len(values) + 65536 * shards
        assert checkpoint.bytes_read < sum(map(len, files.values()))


@pytest.mark.parametrize(
    ("layers", "shards"), [(1, 2), pytest.param(DEEPSEEK_LAYERS, DEEPSEEK_SHARDS, marks=pytest.mark.slow)]
)
def test_deepseek_costs_headers_scalars_and_64_kib_a_shard(tmp_path, layers, shards):
    """The promise of the audit, on files of gigabytes in the order of the reference writer."""
    made = make(tmp_path / "big", layers=layers, shards=shards)
    with contextlib.ExitStack() as stack:
        files = {}
        for path in made.folder.iterdir():
            file = stack.enter_context(path.open("rb"))
            files[path.name] = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        site = stack.enter_context(serve(Site(files)))
        report = run_audit(site.address).report
        assert report.container.bytes_read + report.container.side_bytes == site.sent
    assert report.container.tensors == made.tensors
    assert report.container.bytes_read <= made.header_bytes + 4 * made.scalars + 65536 * made.shards
    assert report.verdict == "ok"
    assert (report.container.header_bytes, report.container.bytes) == (made.header_bytes, made.nbytes)


def apart(size, count=20):
    """A file whose scalars have ``size`` bytes of weights between them."""
    header, data, at = {}, b"", 0
    for k in range(count):
        for name, dtype, part in (
            (f"{k:02d}.weight", "U8", bytes([k]) * size),
            (f"{k:02d}.x", "F32", struct.pack("<f", k)),
        ):
            shape = [size] if dtype == "U8" else []
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(part)]}
            data, at = data + part, at + len(part)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(("size", "requests"), [(4_000, 1), (120_000, 1), (130_944, 1), (140_000, 20)])
def test_scalars_that_lie_apart_are_fetched_with_what_is_between_while_that_is_cheaper(size, requests):
    with serve(Site({"model.safetensors": apart(size)})) as site:
        checkpoint = open_checkpoint(site.address)
        before, read = len(site.asked), checkpoint.bytes_read
        assert checkpoint.all_scalars().tolist() == list(range(20))
        assert len(site.asked) - before == requests
        # What lay between is counted; of it and of the scalars, what came with the header is there already.
        assert checkpoint.bytes_read + checkpoint.side_bytes == site.sent
        spent = checkpoint.bytes_read - read
        assert spent == 4 * 20 if requests == 20 else 19 * size - 65536 <= spent <= 19 * size + 80


@pytest.mark.parametrize(("size", "most"), [(4, 64), (5000, 16)])
def test_small_ranges_are_asked_for_more_at_a_time(size, most, monkeypatch):
    running, seen = 0, []

    async def counted(self, item):
        nonlocal running
        running += 1
        seen.append(running)
        await asyncio.sleep(0.001)
        running -= 1
        return Answer(bytes(item.end - item.begin), None)

    monkeypatch.setattr(Transport, "_whole", counted)
    answers = Transport(parallel=16).fetch([Wanted("http://x/", "x", 0, size)] * 300)
    assert len(answers) == 300
    assert max(seen) == most


def test_a_folder_is_asked_for_its_files_once(files):
    with serve(Site(files, lists=True)) as site:
        checkpoint = open_checkpoint(site.address)
        asked = len(site.asked)
        assert set(checkpoint.source.files()) == set(files)
        assert len(site.asked) == asked


def test_the_audit_of_an_address_is_that_of_the_folder(files, folder):
    stages = []
    with serve(Site(files)) as site:
        remote = run_audit(inspect(site.address, progress=lambda *at: stages.append(at))).report
    local = run_audit(folder).report
    assert (remote.findings, remote.coverage, remote.fingerprint) == (local.findings, local.coverage, local.fingerprint)
    assert {stage for stage, _, _ in stages} >= {"files", "headers", "ranges"}
    assert all(0 < done <= count for _, done, count in stages)
    assert remote.source == site.address.removeprefix("http://")


def test_redirects_are_followed(files, folder):
    with serve(Site(files)) as storage, serve(Site(files, redirect=f"{storage.address}/x/")) as site:
        assert_same_as_local(open_checkpoint(site.address), folder)


def test_a_broken_connection_is_taken_up_where_it_stopped(files, folder):
    with serve(Site(files, cut=30_000)) as site:
        checkpoint = open_checkpoint(site.address)
        assert_same_as_local(checkpoint, folder)
        # Nothing was fetched twice.
        assert checkpoint.bytes_read + checkpoint.side_bytes == site.sent


def test_a_busy_server_is_asked_again(files, folder):
    with serve(Site(files, fail_first=2)) as site:
        assert_same_as_local(open_checkpoint(site.address), folder)
    assert PAUSE > 0


def weak(site, count, threads=True, timeout=1.0):
    """Scalars, each a request of its own, from a server that cannot take many at a time."""
    with serve(site, threads):
        checkpoint = open_checkpoint(HttpSource(f"{site.address}/model.safetensors", timeout=timeout))
        at = checkpoint.tensors["000.x"].begin
        data = checkpoint.source.read_ranges("model.safetensors", [(at + 4 * k, at + 4 * k + 4) for k in range(count)])
        assert np.frombuffer(b"".join(data), "<f4").tolist() == list(range(count))
        # One that finds an old request in its queue answers it, though nobody listens any more.
        sent = site.sent if threads else checkpoint.bytes_read + checkpoint.side_bytes
        assert checkpoint.bytes_read + checkpoint.side_bytes == sent <= site.sent
        # The first 64 KiB, and nothing but the scalars; what was asked for in vain brought nothing.
        assert checkpoint.bytes_read == 65536 + 4 * count


def far():
    """A file whose scalars lie beyond what is fetched at first sight."""
    tensors = {"000.w": ("U8", bytes(100_000)), "000.x": ("F32", np.arange(768, dtype="<f4").tobytes())}
    header, data = {}, b""
    for name, (dtype, part) in tensors.items():
        shape = [len(part) // (4 if dtype == "F32" else 1)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    return {"model.safetensors": struct.pack("<Q", len(text)) + text + data}


@pytest.mark.parametrize(("room", "count"), [(1, 40), (3, 200), (10, 768)])
def test_a_weak_server_is_asked_less_at_a_time(room, count):
    weak(Site(far(), room=room), count)


def test_a_server_that_serves_one_connection_at_a_time():
    weak(Site(far()), 40, threads=False, timeout=0.5)


def test_a_server_that_says_when_to_come_back(files, folder, monkeypatch):
    waited = []
    real = asyncio.sleep

    async def sleep(seconds, *rest):
        waited.append(seconds)
        await real(0, *rest)

    monkeypatch.setattr("nvfp4viz.checkpoint.transport.asyncio.sleep", sleep)
    superscript = "²".encode().decode("latin-1")  # a digit to Python, and no number
    for said, pause in (
        *(("7", 7.0), ("86400", MOST_PAUSE), ("Fri, 31 Dec 1999 23:59:59 GMT", 0.001), ("-3", 0.001)),
        (superscript, 0.001),
    ):
        waited.clear()
        with serve(Site(files, fail_first=1, wait=said)) as site:
            open_checkpoint(site.address)
        assert waited[:1] == [pause]


def test_a_server_that_dies_is_given_up_once(files):
    """One request waits in vain; the others do not each wait as long after it."""
    site = Site(far())
    with serve(site):
        checkpoint = open_checkpoint(HttpSource(f"{site.address}/model.safetensors", timeout=0.2))
        at, before = checkpoint.tensors["000.x"].begin, len(site.asked)
        site.silent = 5.0
        with pytest.raises(CheckpointError) as caught:
            checkpoint.source.read_ranges("model.safetensors", [(at + 4 * k, at + 4 * k + 4) for k in range(768)])
        assert caught.value.code == "source.timeout"
        assert len(site.asked) - before <= 3 * 64


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("form", ["/", f"/{INDEX}"])
def test_no_byte_is_asked_for_twice(files, lists, form):
    """Nor any file: config.json, which is small, costs one request."""
    with serve(Site(files, lists=lists)) as site:
        report = run_audit(site.address + form).report
        asked = [(urlsplit(path).path, wanted) for path, wanted, _ in site.asked]
    assert report.container.bytes_read > 0
    assert len(asked) == len(set(asked))
    for file in ("config.json", "hf_quant_config.json"):
        assert [path for path, _ in asked].count(f"/{file}") == 1
    spans = {}
    for path, wanted in asked:
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        spans.setdefault(path, []).append((first, last))
    for path, found in spans.items():
        found.sort()
        assert all(one[1] < two[0] for one, two in pairwise(found)), path


def test_a_server_without_lengths(files):
    """Small files come whole; a shard of unknown length is not read to its end to find out."""
    small = {name: data for name, data in files.items() if not name.endswith(".safetensors")}
    with serve(Site({**small, "model.safetensors": bytes(1 << 25)}, ranges=False, chunked=True)) as site:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(f"{site.address}/model.safetensors")
        assert site.sent < 1 << 24
    assert caught.value.code == "source.no-range"


def test_a_server_that_ignores_ranges_is_refused_and_not_downloaded(files):
    big = {name: data + bytes(5_000_000 * name.endswith(".safetensors")) for name, data in files.items()}
    with serve(Site(big, ranges=False, lists=True)) as site:
        with pytest.raises(CheckpointError) as caught:
            inspect(site.address)
        # What fits into socket buffers may leave the server; the files do not.
        assert site.sent < 2_500_000 * len(big)
    assert caught.value.code == "source.no-range"


@pytest.mark.parametrize(
    ("site", "code"),
    [
        (Site({}), "source.nothing-there"),
        (Site({"model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"}),
         "container.not-safetensors.lfs-pointer"),
        (Site({}, status={"model.safetensors": 403, INDEX: 403, "config.json": 403, "hf_quant_config.json": 403}),
         "source.forbidden"),
        (Site({}, status={"model.safetensors": 500, INDEX: 500}), "source.status"),
        (Site({}, status={"model.safetensors": 401, INDEX: 401, "config.json": 401, "hf_quant_config.json": 401}),
         "source.forbidden"),
        (Site({"model.safetensors": bytes(100_000)}, cut=0), "source.cut"),
        (Site({"model.safetensors": bytes(100_000)}, shift=8), "source.bad-range"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["/model.safetensors", ""])
def test_what_a_server_does_wrong_is_said(site, code, form):
    with serve(site), pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{site.address}{form}")
    assert caught.value.code == code
    for language in ("en", "zh"):
        told = "".join(caught.value.text(language).values())
        assert "{" not in told
        # The words of a path on this machine do not help with an address.
        assert "this program may not read" not in told
        if code in ("source.nothing-there", "source.forbidden", "source.status"):
            assert any(str(status) in told for status in (401, 403, 404, 500))


@pytest.mark.parametrize("form", ["", "/", f"/{INDEX}", "/model-00001-of-00003.safetensors"])
@pytest.mark.parametrize("lists", [True, False])
def test_a_server_that_packs_what_was_asked_for_plain(files, form, lists):
    """gzip in spite of ``Accept-Encoding: identity``: one look is enough, and the cause has a name."""
    with serve(Site(files, packed=True, lists=lists)) as site:
        with pytest.raises(CheckpointError) as caught:
            inspect(f"{site.address}{form}")
        assert len(site.asked) <= 5
    assert caught.value.code == "source.encoded"
    assert "gzip" in str(caught.value)


@pytest.mark.parametrize(("form", "lists"), [("", False), ("", True), (f"/{INDEX}", False), (f"/{INDEX}", True)])
def test_an_index_of_any_size_comes_once(files, form, lists):
    content = json.loads(files[INDEX])
    content["metadata"]["note"] = "x" * 400_000
    big = {**files, INDEX: json.dumps(content).encode()}
    with serve(Site(big, lists=lists)) as site:
        checkpoint = open_checkpoint(f"{site.address}{form}")
        assert checkpoint.side_bytes < 1.1 * len(big[INDEX])
        assert checkpoint.bytes_read + checkpoint.side_bytes == site.sent


def test_a_login_page_instead_of_everything():
    with serve(Site({}, page=b"<!doctype html><html>Please log in</html>")) as site:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(f"{site.address}/model.safetensors")
        assert caught.value.code == "container.not-safetensors.html"
        checkpoint = inspect(site.address)
        assert not any(header.readable for header in checkpoint.files)
        assert {item.text for item in checkpoint.problems} >= {"container.not-safetensors.html"}


@pytest.mark.parametrize(
    "missing",
    [(200, b"<!doctype html><html>Our app</html>"), (200, b'{"error": "not found"}'), (200, b"not found"), (503, b"")],
)
def test_a_server_that_answers_for_names_that_it_does_not_have(files, missing):
    """Whoever asks for a guessed name, and has an index that names the shards, takes such an answer for none."""
    page = missing[0] == 200 and missing[1][:1] != b"{"
    # What else it says for a configuration may be one.
    known = {name: data for name, data in files.items() if name != "hf_quant_config.json" or not page}
    with serve(Site(known, missing=missing)) as site:
        checkpoint = inspect(site.address)
        assert checkpoint.problems == []
        assert {header.file for header in checkpoint.files} == {name for name in known if name.endswith(".safetensors")}
        if page:
            assert inspect(f"{site.address}/{checkpoint.files[0].file}").problems == []


def test_a_server_that_has_a_file_beside_its_index(files):
    """A model.safetensors that is one, or half of one, is no page for a name that is not there."""
    for content in (files[min(name for name in files if name.endswith(".safetensors"))], LFS):
        with serve(Site({**files, "model.safetensors": content})) as site:
            texts = {item.code for item in inspect(site.address).problems}
        assert "container.unindexed-shard" in texts


def test_a_silent_server_is_given_up():
    site = Site({"model.safetensors": bytes(1000)}, silent=1.0)
    with serve(site), pytest.raises(CheckpointError) as caught:
        open_checkpoint(HttpSource(f"{site.address}/model.safetensors", timeout=0.2))
    assert caught.value.code == "source.timeout"
    assert "0.2 seconds" in str(caught.value)


@pytest.mark.parametrize("drip", [(4, 60.0), (1, 0.05)], ids=["a few bytes, then silence", "a byte now and then"])
@pytest.mark.parametrize("shards", [False, True], ids=["everything", "shards"])
def test_a_server_that_drips_is_given_up(files, drip, shards):
    """It always makes progress, and would keep an audit busy for days."""
    slow = tuple(name for name in files if name.endswith(".safetensors")) if shards else None
    begun = time.monotonic()
    with serve(Site(files, drip=drip, dripping=slow)) as site, pytest.raises(CheckpointError) as caught:
        open_checkpoint(HttpSource(site.address, timeout=0.2))
    assert caught.value.code == "source.timeout"
    assert time.monotonic() - begun < 15
    assert site.address.removeprefix("http://") in str(caught.value)


def test_a_redirect_in_circles():
    site = Site({})
    with serve(site):
        site.redirect = f"{site.address}/again/"
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(f"{site.address}/model.safetensors")
    assert caught.value.code == "source.redirects"


def test_a_redirect_out_of_the_web():
    with serve(Site({}, redirect="file:///etc/")) as site, pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{site.address}/model.safetensors")
    assert caught.value.code == "source.not-an-address"


# A folder, one file, an index: the host is down for all of them alike.
ASKED = ["", "/", "/m", "/m/model.safetensors", "/m/model.safetensors.index.json"]


def says_the_host(caught, code, host):
    assert caught.value.code == code
    assert caught.value.params["name"] == host
    for language in ("en", "zh"):
        words = " ".join(caught.value.text(language).values())
        assert host in words
        for hidden in ("safetensors", "config.json", "secret", "{"):
            assert hidden not in words


@pytest.fixture
def free():
    """A port where nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    return port


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_nobody_listens(scheme, path, free):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{scheme}://user:secret@127.0.0.1:{free}{path}?token=secret")
    says_the_host(caught, "source.connection", f"127.0.0.1:{free}")
    assert caught.value.params["reason"] == os.strerror(errno.ECONNREFUSED)


@pytest.mark.parametrize("path", ASKED)
def test_no_such_host(path):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"http://nowhere.invalid{path}")
    says_the_host(caught, "source.connection", "nowhere.invalid:80")


@pytest.mark.parametrize("path", ASKED)
def test_a_server_that_does_not_speak_tls(path):
    with serve(Site({})) as site, pytest.raises(CheckpointError) as caught:
        open_checkpoint(site.address.replace("http:", "https:") + path)
    says_the_host(caught, "source.connection", site.address.removeprefix("http://"))


@pytest.mark.parametrize("path", ASKED)
def test_a_connection_that_never_comes_about(path):
    """The port is open, and nobody takes part in the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(HttpSource(f"https://{host}{path}", timeout=0.2))
    says_the_host(caught, "source.no-answer", host)
    assert "0.2" in str(caught.value)


def test_behind_a_redirect_it_is_the_other_host(free):
    with serve(Site({}, redirect=f"http://127.0.0.1:{free}/")) as site, pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{site.address}/model.safetensors")
    says_the_host(caught, "source.connection", f"127.0.0.1:{free}")


@pytest.mark.parametrize("address", ["http://", "https:///x", "http://[::1", "http://a b/", "http://host:99999/x"])
def test_what_is_no_address(address):
    with pytest.raises(CheckpointError) as caught:
        open_remote(address)
    assert caught.value.code == "source.not-an-address"


def test_one_lost_shard_is_one_finding(files, folder):
    lost = min(name for name in files if name.endswith(".safetensors"))
    for lists in (True, False):
        site = Site({name: data for name, data in files.items() if name != lost}, lists=lists)
        with serve(site):
            report = run_audit(site.address).report
        assert [item.code for item in report.findings if item.severity == "error"] == ["container.missing-shard"]


def partly(files, what):
    """A server of sound files that does not give all of them, and the file that it keeps."""
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    if what == "no ranges":
        # A server without ranges sends a small file whole; of a large one nothing can be had.
        site = Site({**files, shards[1]: files[shards[1]] + bytes(1 << 17)}, ranges=False)
        return site, shards[1]
    lost = {"shard": shards[1], "config": "config.json", "index": INDEX}[what.split()[0]]
    return Site(files, status={lost: int(what.split()[1])}), lost


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("what", ["shard 500", "shard 403", "no ranges", "config 500", "index 500"])
def test_what_was_not_read_is_not_called_broken(tmp_path, what, lists, capsys):
    """Neither are the tensors in it called missing, nor does a forecast speak of a whole that nobody has seen."""
    config = CONFIG | {"num_hidden_layers": 2}
    write_checkpoint(tmp_path / "x", base(2), config=config, hf_quant_config=QUANT, max_shard_bytes=4_000)
    site, lost = partly({path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}, what)
    site.lists = lists
    with serve(site):
        if what == "index 500" and not lists:
            with pytest.raises(CheckpointError) as caught:
                run_audit(site.address)
            assert caught.value.code == "source.status"
            return
        report = run_audit(site.address).report
        assert main(["audit", site.address, "--quiet"]) == 2
        assert main(["audit", site.address, "--quiet", "--fail-on", "never"]) == 2
        assert main(["audit", site.address, "--quiet", "--fail-on", "warn"]) == 1
        with pytest.raises(InputError) as caught:
            plan_repair(site.address, "constant")
    assert lost in capsys.readouterr().out
    worse = [(item.code, item.severity, item.params["file"]) for item in report.findings if item.severity != "info"]
    assert worse == [("container.unreadable", "warn", lost)]
    assert [item.params["file"] for item in report.findings if item.text == "audit.partial.unread"] == [lost]
    assert report.backends == ()
    assert all(row.missing == 0 for row in report.coverage.values())
    assert caught.value.code == "repair.unmendable"
    assert "container.unreadable" in str(caught.value.params["findings"])


def test_a_fault_beside_what_was_not_read_is_still_one(files):
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    cut = {**files, shards[0]: files[shards[0]][:-1]}
    with serve(Site(cut, status={shards[1]: 500}, lists=True)) as site:
        report = run_audit(site.address).report
        assert main(["audit", site.address, "--quiet"]) == 1
    assert {item.code for item in report.findings} >= {"container.truncated", "container.unreadable"}
    assert report.backends == ()


def test_a_secret_in_the_address_is_nowhere_in_the_report(files):
    with serve(Site(files)) as site:
        address = site.address.replace("http://", "http://user:hunter2@") + "/?sig=hunter2"
        checkpoint = open_checkpoint(address)
        assert "hunter2" not in checkpoint.name
        assert "hunter2" not in repr(run_audit(checkpoint).report)


def test_an_index_cannot_lead_elsewhere(files):
    """A shard's name out of an index stays below the folder, and asks no other host."""
    index = files[INDEX].replace(b"model-00001-of", b"../secret/model-00001-of")
    with serve(Site({**files, INDEX: index})) as site:
        checkpoint = inspect(site.address)
    assert not any("secret" in path for path, _, _ in site.asked)
    assert any(item.text == "container.index-invalid.outside-folder" for item in checkpoint.problems)


# ------------------------------------------------------------------------------------------------- the hub


@pytest.mark.parametrize("told", [{"Content-Range": "bytes */500000"}, {}])
def test_a_range_that_is_refused_is_no_empty_file(told):
    """416 of a file's first bytes: only ``bytes */0`` says that there are none."""
    for file in ("model.safetensors", "model-00001-of-00001.safetensors"):
        with serve(Site({}, api={f"/{file}": (416, {}, told)})) as site, pytest.raises(CheckpointError) as caught:
            open_checkpoint(f"{site.address}/{file}")
        assert caught.value.code == "source.bad-range"
    with serve(Site({"model.safetensors": b""})) as site, pytest.raises(CheckpointError) as caught:
        open_checkpoint(f"{site.address}/model.safetensors")
    assert caught.value.code == "container.not-safetensors.empty"


SHA = "0123456789abcdef0123456789abcdef01234567"


def hub_site(files, storage, name="owner/model"):
    """The hub's own answers: the repository's files, and redirects to storage on another host."""
    siblings = [{"rfilename": file} for file in [*files, "original/consolidated.safetensors", "README.md"]]
    info = {"id": name, "modelId": name, "sha": SHA, "siblings": siblings, "tags": [], "private": False}
    api = {f"/api/models/{name}": (200, info, {}), f"/api/models/{name}/revision/v1": (200, info, {})}
    api[f"/api/models/{name}/revision/{SHA}"] = (200, info, {})
    missing = {"X-Error-Code": "RepoNotFound"}
    api["/api/models/owner/absent"] = (404, {"error": "Repository not found"}, missing)
    api["/api/models/owner/ill"] = (500, {"error": "ill"}, {})
    # A mirror that leaves the hub's own codes out.
    api |= {f"/api/models/owner/bare-{status}": (status, {}, {}) for status in (401, 403, 404)}
    api["/api/models/owner/gated"] = (403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
    api[f"/api/models/{name}/revision/nope"] = (404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound"})
    return Site({}, redirect=f"{storage.address}/blobs/", api=api)


@pytest.fixture
def hub(files, monkeypatch):
    with serve(Site(files)) as storage, serve(hub_site(files, storage)) as site:
        monkeypatch.setenv("HF_ENDPOINT", site.address)
        monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
        yield site, storage


@pytest.mark.parametrize("address", ["hf://owner/model", "hf://owner/model@v1"])
def test_a_repository_on_the_hub(hub, folder, address):
    site, storage = hub
    checkpoint = open_checkpoint(address)
    assert_same_as_local(checkpoint, folder)
    assert checkpoint.name == address
    # One commit throughout, and only files of the top folder.
    paths = [path for path, _, _ in site.asked if "/resolve/" in path]
    assert paths
    assert all(f"/resolve/{SHA}/" in path and "original" not in path for path in paths)
    assert checkpoint.bytes_read + checkpoint.side_bytes == storage.sent


def test_the_token_stays_with_the_hub(hub):
    site, storage = hub
    open_checkpoint("hf://owner/model")
    assert all(token == "Bearer hf_hunter2" for path, _, token in site.asked if "/resolve/" in path)
    assert storage.asked
    assert all(token is None for _, _, token in storage.asked)


def test_a_revision_of_its_own(hub):
    site, _ = hub
    open_checkpoint("hf://owner/model", revision="v1")
    assert any(path.startswith("/api/models/owner/model/revision/v1") for path, _, _ in site.asked)


def test_others_are_told_the_commit(hub):
    """Workers of a cluster open the same files, though the branch may move meanwhile."""
    source = open_remote("hf://owner/model", "v1")
    assert source.pinned == f"hf://owner/model@{SHA}"
    assert open_checkpoint(source.pinned).tensors.keys() == open_checkpoint(source).tensors.keys()


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("hf://owner/absent", "source.hub-repository"),
        ("hf://owner/gated", "source.hub-gated"),
        ("hf://owner/ill", "source.status"),
        ("hf://owner/bare-404", "source.hub-repository"),
        ("hf://owner/bare-403", "source.forbidden"),
        ("hf://owner/bare-401", "source.forbidden"),
        ("hf://owner/model@nope", "source.hub-revision"),
        ("hf://owner", "source.hub-name"),
        ("hf://owner/name@", "source.hub-no-revision"),
        ("hf://owner/name@?x=1", "source.hub-no-revision"),
        ("hf://@", "source.hub-name"),
        ("hf://owner/name/more", "source.hub-name"),
        ("hf://../etc", "source.hub-name"),
    ],
)
def test_what_the_hub_refuses(hub, address, code):
    site, _ = hub
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(address)
    assert caught.value.code == code
    assert "hunter2" not in str(caught.value)
    assert site.address.removeprefix("http://") not in str(caught.value)


def test_the_hub_in_offline_mode(monkeypatch):
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    def refuse(*_, **__):
        raise OfflineModeIsEnabled("Cannot reach https://huggingface.co/api/models/owner/model")

    monkeypatch.setattr(HfApi, "model_info", refuse)
    with pytest.raises(CheckpointError) as caught:
        HubSource("owner/model")
    assert caught.value.code == "source.hub-offline"


def test_every_text_of_a_remote_error_has_its_test():
    """A message that nothing produces would be dead words."""
    here = "".join(
        path.read_text(encoding="utf-8")
        for path in (Path(__file__), Path(__file__).parents[1] / "audit" / "test_cluster.py")
    )
    texts = tomllib.loads((CONTENT / "en" / "errors_remote.toml").read_text(encoding="utf-8"))
    assert [code for code in texts if f'"{code}"' not in here] == []


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_no_hub_at_all(scheme, free, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", f"{scheme}://127.0.0.1:{free}")
    with pytest.raises(CheckpointError) as caught:
        HubSource("owner/model")
    says_the_host(caught, "source.connection", f"127.0.0.1:{free}")
    assert caught.value.params["reason"] == os.strerror(errno.ECONNREFUSED)


def test_a_hub_of_no_such_host(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://nowhere.invalid")
    with pytest.raises(CheckpointError) as caught:
        HubSource("owner/model")
    says_the_host(caught, "source.connection", "nowhere.invalid:443")


def test_a_hub_that_does_not_speak_tls(monkeypatch):
    with serve(Site({})) as site:
        monkeypatch.setenv("HF_ENDPOINT", site.address.replace("http:", "https:"))
        with pytest.raises(CheckpointError) as caught:
            HubSource("owner/model")
    says_the_host(caught, "source.connection", site.address.removeprefix("http://"))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_hub_that_does_not_answer(scheme, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        host = f"127.0.0.1:{mute.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", f"{scheme}://{host}")
        with pytest.raises(CheckpointError) as caught:
            HubSource("owner/model", timeout=0.2)
    says_the_host(caught, "source.no-answer", host)


def test_a_page_of_the_hub_is_its_repository(monkeypatch):
    asked = []
    monkeypatch.setattr("nvfp4viz.checkpoint.remote.HubSource", lambda name, revision: asked.append((name, revision)))
    for page in ("", "/", "/tree/main", "/tree/refs%2Fpr%2F1"):
        open_remote(f"https://huggingface.co/owner/model{page}")
    assert asked == [("owner/model", None)] * 2 + [("owner/model", "main"), ("owner/model", "refs/pr/1")]


def test_a_client_that_hangs_up_is_no_output_of_the_test(files, capfd):
    """A reset connection is the client's right; tests that read stderr must not find the server's thoughts about it."""
    with serve(Site(dict(files))) as site:
        parts = urlsplit(site.address)
        with socket.create_connection((parts.hostname, parts.port)) as client:
            client.sendall(b"GET /config.json HTTP/1.1\r\nHost: here\r\n\r\n")
            client.recv(1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.2)
    assert capfd.readouterr().err == ""
