"""The Explorer's addresses and hub ids, against servers on this machine."""

import re
import threading

import pytest

from nvfp4viz.audit import audit, describe, for_gpu, run_audit
from nvfp4viz.errors import CheckpointError
from nvfp4viz.ui import explorer_address, i18n
from nvfp4viz.ui.explorer_report import MIMES, report_text
from sample_checkpoints import ensure
from tests.checkpoint.web_server import Site, apart, serve

from .conftest import clean, strips, tab, texts

LANGUAGES = ["en", "zh"]
HOLES, SOUND = "tiny-moe-nvfp4-holes", "tiny-moe-nvfp4-full"
SHA = "c0ffee" + "0" * 34


def content(sample: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(ensure(sample).iterdir())}


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return content(HOLES)


@pytest.fixture(autouse=True)
def _quick_and_in_one_language(request, monkeypatch):
    """No pauses between attempts; and see `test_explorer.py` for the language outside a run."""
    monkeypatch.setattr("nvfp4viz.checkpoint.transport.PAUSE", 0.001)
    monkeypatch.setattr(explorer_address, "LOOK", 0.001)
    language = getattr(request.node, "callspec", None) and request.node.callspec.params.get("lang")
    if language:
        monkeypatch.setattr(i18n, "lang", lambda: language)


def at_address(open_page, lang="en"):
    at = open_page("explorer", lang=lang)
    return clean(at.button_group(key="explorer.source").set_value("address").run())


@pytest.mark.parametrize(("address", "said", "offered"), [
    ("127.0.0.1", "", True), ("localhost", "", True), ("0.0.0.0", "", False), (None, "", False),
    ("0.0.0.0", "1", True), ("127.0.0.1", "0", False),
])  # fmt: skip
def test_a_server_that_others_reach_fetches_for_nobody_unless_its_owner_says_so(monkeypatch, address, said, offered):
    monkeypatch.setenv("NVFP4VIZ_ADDRESSES", said)
    monkeypatch.setattr(explorer_address.st, "get_option", lambda name: address)
    assert explorer_address.allowed() is offered


def send(at, typed: str):
    at.text_input(key="explorer.address").set_value(typed)
    return clean(at.button(key="explorer.address_open").click().run())


def plain(at) -> str:
    return texts(at).replace("\\", "")


def says(at, code: str, lang: str, **params: object) -> None:
    """What happened, why, and what to do."""
    text = CheckpointError(code, **params).text(lang)
    assert all(text[part] in plain(at) for part in ("what", "why", "next")), plain(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_nothing_is_asked_of_the_network_before_an_address_is_sent(open_page, lang):
    at = at_address(open_page, lang)
    assert i18n.t("explorer.address.waiting") in texts(at)
    assert not at.metric
    assert i18n.t("explorer.address.waiting") in texts(send(at, "  "))


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("blank", ["", "   "])
def test_an_emptied_field_is_a_field_without_an_address(open_page, files, lang, blank):
    """Neither the last address's error nor its checkpoint stands below it."""
    at = send(at_address(open_page, lang), "ftp://host/model")
    says(at, "source.remote-field", lang, scheme="ftp")
    at = send(at, blank)
    assert i18n.t("explorer.address.waiting") in texts(at)
    assert i18n.t("ui.error.code", code="source.remote-field") not in plain(at)
    with serve(Site(files)) as site:
        at = send(at, site.address)
        assert at.metric
        at = send(at, blank)
    assert not at.metric
    assert i18n.t("explorer.address.waiting") in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("form", ["/", "/model.safetensors.index.json"])
def test_a_folder_on_a_server_gives_the_report_of_the_folder_here(open_page, files, lang, form):
    local = audit(ensure(HOLES))
    with serve(Site(files)) as site:
        at = send(at_address(open_page, lang), site.address + form)
    kept = at.session_state["explorer.kept.address"].opened.audit.report
    assert (kept.fingerprint, kept.findings, kept.backends) == (local.fingerprint, local.findings, local.backends)
    first = next(item for item in local.findings if item.code == "scale.missing")
    assert describe(first, lang)[0] in plain(at)
    assert len(strips(at)) == 1
    assert i18n.t("explorer.address.shown", name=kept.source).replace("\\", "") in plain(at)


def test_what_was_read_is_kept_for_the_session(open_page, files):
    with serve(Site(files)) as site:
        at = send(at_address(open_page), f"{site.address}/")
        asked = len(site.asked)
        at.selectbox(key="explorer.gpu").set_value("sm_120")
        clean(at.run())
        at.selectbox(key="layer").set_value(2)
        at = tab(clean(at.run()), "explorer", 2)
        assert len(site.asked) == asked
    assert f"vLLM picks **{audit(ensure(HOLES), gpu='sm_120').auto}**" in texts(at)


def test_the_backend_of_a_gpu_needs_no_second_audit():
    done = run_audit(ensure(HOLES))
    before = done.checkpoint.bytes_read
    for gpu in ("sm_75", "sm_90", "sm_100", "sm_120"):
        assert for_gpu(done, gpu).report.auto == audit(ensure(HOLES), gpu=gpu).auto
    assert done.checkpoint.bytes_read == before


def test_another_content_at_the_same_address_is_read_when_it_is_sent_again(open_page, files):
    with serve(Site(files)) as site:
        at = send(at_address(open_page), f"{site.address}/")
        first = at.session_state["explorer.kept.address"].opened.identity
        assert send(at, f"{site.address}/").session_state["explorer.kept.address"].opened.identity == first
        assert "`scale.missing`" in texts(at)
        site.files = content(SOUND)
        at = send(at, f"{site.address}/")
    assert at.session_state["explorer.kept.address"].opened.identity != first
    assert "`scale.missing`" not in texts(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_an_unchanged_address_is_not_read_again_and_says_what_it_is_known_by(open_page, files, lang):
    with serve(Site(files, tagged=True)) as site:
        at = send(at_address(open_page, lang), f"{site.address}/")
        marked = i18n.t("explorer.address.version_files", count=len(files), mark="")
        assert marked.strip() in plain(at)
        assert i18n.t("explorer.address.again").strip() not in plain(at)
        first, read = at.session_state["explorer.kept.address"].opened, site.sent
        before = len(site.asked)
        at = send(at, f"{site.address}/")
        assert at.session_state["explorer.kept.address"].opened is first
        assert i18n.t("explorer.address.again").strip() in plain(at)
        # Of shards only the first bytes were asked for, to see their marks: no header and no scale.
        shards = [wanted for path, wanted, _ in site.asked[before:] if path.endswith(".safetensors")]
        assert shards
        assert {wanted.partition("-")[0] for wanted in shards} == {"bytes=0"}
        assert site.sent - read < read
        # Another content of the same sizes is another version.
        changed = {**files}
        shard = next(name for name in files if name.endswith(".safetensors"))
        data = bytearray(files[shard])
        data[-1] ^= 1
        changed[shard] = bytes(data)
        site.files = changed
        at = send(at, f"{site.address}/")
        assert at.session_state["explorer.kept.address"].opened is not first
        assert i18n.t("explorer.address.again").strip() not in plain(at)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_an_address_without_marks_is_read_each_time(open_page, files, lang):
    with serve(Site(files)) as site:
        at = send(at_address(open_page, lang), f"{site.address}/")
        assert i18n.t("explorer.address.version_none").strip() in plain(at)
        first = at.session_state["explorer.kept.address"].opened
        at = send(at, f"{site.address}/")
        assert at.session_state["explorer.kept.address"].opened is not first


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_shard_whose_numbers_are_not_given_is_named_everywhere_and_read_next_time(open_page, lang):
    """Its header came: the map has its slots, and nobody forecasts a backend from the others."""
    files, begins = apart(ensure(SOUND))
    with serve(Site(files, tagged=True, lists=True)) as site:
        tensors = run_audit(site.address).checkpoint.tensors
        slot = next(name for name in tensors if name.endswith(".input_scale"))
        lost = tensors[slot].file
        site.late = {lost: (begins[lost], 500)}
        at = send(at_address(open_page, lang), f"{site.address}/")
        done = at.session_state["explorer.kept.address"].opened.audit
        assert done.checkpoint.unread == (lost,)
        said = i18n.t("explorer.summary.unread", count=1, names=f"`{lost}`")
        assert said in plain(at)
        says(at, "source.status", lang, name=lost, status=500)
        count = done.report.coverage["input_scale"]
        numbers = {name: f"{getattr(count, name):,}" for name in ("missing", "invalid", "expected", "unreadable")}
        assert count.unreadable
        assert i18n.t("explorer.map.finding_unreadable", role="input_scale", **numbers) in texts(at)
        row = next(row for row in done.rows() if row.tensor == slot)
        for name in ("layer", "expert", "projection"):
            at.session_state[name] = getattr(row, name)
        words = ["", "explorer.anatomy.status.unread", "explorer.backends.unread", "explorer.files.header"]
        for index in range(len(at.tabs)):
            text = texts(tab(at, "explorer", index))
            if 0 < index < len(words):
                assert i18n.t(words[index]) in text
            assert "**nan**" not in text
        for kind in MIMES:
            assert report_text(done, kind, lang)
        site.late = {}
        at = send(at, f"{site.address}/")
        assert at.session_state["explorer.kept.address"].opened.audit.report.backends
        assert i18n.t("explorer.files.header") not in texts(tab(at, "explorer", 3))


def test_few_addresses_are_kept_and_none_of_them_by_its_name(open_page, files, monkeypatch):
    monkeypatch.setattr(explorer_address, "REMEMBERED", 2)
    with serve(Site(files, tagged=True)) as site:
        at = at_address(open_page)
        for k in range(4):
            at = send(at, f"{site.address}/?key=hunter{k}")
        kept = at.session_state[explorer_address.MEMORY]
        assert len(kept) == 2
        assert "hunter" not in str(list(kept))
        assert all("hunter" not in read.opened.address for read in kept.values())


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_second_checkpoint_may_be_the_same_address(open_page, files, lang):
    with serve(Site(files, tagged=True)) as site:
        at = send(at_address(open_page, lang), f"{site.address}/")
        at = tab(at, "explorer", 5)
        clean(at.button_group(key="explorer.other.source").set_value("address").run())
        at.text_input(key="explorer.other.address").set_value(f"{site.address}/")
        at = clean(at.button(key="explorer.other.address_open").click().run())
        assert i18n.t("explorer.compare.same") in plain(at)
        assert (
            at.session_state["explorer.kept.address"].opened is at.session_state["explorer.other.kept.address"].opened
        )


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_code_for_an_address_runs_and_holds_no_secret(open_page, files, lang):
    from nvfp4viz.ui.snippets import run

    with serve(Site(files)) as site:
        address = site.address.replace("://", "://reader:hunter2@") + "/model?signature=s3cret#fr4gment"
        at = send(at_address(open_page, lang), address)
        at.session_state["explorer.open.code"] = True
        at = clean(at.run())
        source, output = at.code[0].value, at.code[1].value
        assert f'source = "{site.address}/model"' in source
        assert not re.search("hunter2|s3cret|fr4gment", source + output)
        assert output == run(source)
        # It is not run anew with every step.
        asked = len(site.asked)
        clean(at.run())
        assert len(site.asked) == asked
        # Nor does an address that has gone away break the page.
        del at.session_state["explorer.kept.code"]
        site.status = dict.fromkeys(files, 403)
        at = clean(at.run())
        # Of names it still knows all, and of backends nothing.
        assert "scale.missing" in at.code[1].value
        assert ("vllm-" in output, "vllm-" in at.code[1].value) == (True, False)
        # What is shown stays what it is.
        assert at.session_state["explorer.kept.address"].opened.audit.checkpoint.unread == ()


@pytest.mark.parametrize("lang", LANGUAGES)
def test_of_an_address_the_repair_gives_record_and_scales(open_page, files, lang):
    with serve(Site(files)) as site:
        at = tab(send(at_address(open_page, lang), f"{site.address}/"), "explorer", 6)
        before = len(site.asked)
        at = clean(at.run())
        assert len(site.asked) == before
    assert i18n.t("explorer.repair.address").strip() in texts(at)
    labels = [item.proto.label for item in at.get("download_button")]
    assert [i18n.t(f"explorer.repair.{name}") in labels for name in ("record", "scales", "zip")] == [True, True, False]
    assert "explorer.repair.make" not in [item.key for item in at.button]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_password_and_a_signature_are_sent_and_shown_nowhere(open_page, files, lang):
    with serve(Site(files)) as site:
        address = site.address.replace("://", "://reader:hunter2@") + "/model?signature=s3cret#fr4gment"
        at = send(at_address(open_page, lang), address)
        assert site.asked
        assert all("?signature=s3cret" in path for path, _, _ in site.asked)
        assert all(header and header.startswith("Basic ") for _, _, header in site.asked)
        done = at.session_state["explorer.kept.address"].opened.audit
        site.status = dict.fromkeys(files, 403)
        refused = plain(send(at, address))
    host = site.address.removeprefix("http://")
    assert done.report.source == f"{host}/model"
    shown = [plain(at), refused, str(at.query_params), str(at.session_state["_link"])]
    shown += [report_text(done, kind, lang) for kind in MIMES]
    for secret in ("hunter2", "s3cret", "fr4gment", "reader"):
        assert not [text for text in shown if secret in text]
    assert host not in str(at.query_params)
    assert host not in str(at.session_state["_link"])


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize(
    ("typed", "code", "params"),
    [
        ("/etc/passwd", "source.not-an-address", {"name": "/etc/passwd"}),
        ("../../etc/passwd", "source.not-an-address", {"name": "../../etc/passwd"}),
        ("file:///etc/passwd", "source.remote-field", {"scheme": "file"}),
        ("FTP://host/model", "source.remote-field", {"scheme": "FTP"}),
        ("hf://", "source.hub-name", {"name": "hf://"}),
        ("s3://bucket/model", "source.remote-field", {"scheme": "s3"}),
        ("me:hunter2@example.org/a/b?k=s3cret", "source.not-an-address", {"name": "example.org/a/b"}),
        ("https://me:hunter2@/a?k=s3cret", "source.not-an-address", {"name": "/a"}),
        ("hf://me:hunter2@owner/name?k=s3cret", "source.hub-name", {"name": "me"}),
        ("hf://owner?k=s3cret", "source.hub-name", {"name": "owner"}),
        ("owner/name@", "source.not-an-address", {"name": "owner/name@"}),
    ],
)
def test_what_is_no_address_is_refused_and_no_path_is_opened(open_page, lang, typed, code, params, monkeypatch):
    at = at_address(open_page, lang)
    monkeypatch.setattr("nvfp4viz.checkpoint.source.LocalSource.__init__", lambda *_: pytest.fail("opened a path"))
    at = send(at, typed)
    says(at, code, lang, **params)
    assert not re.search("hunter2|s3cret", plain(at))
    assert not at.metric


UNSOUND = {
    "source.nothing-there": {"files": {}, "said": 404},
    "source.forbidden": {"status": 403},
    "source.no-range": {"ranges": False},
    "source.status": {"status": 500},
}


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("code", UNSOUND)
def test_a_server_that_cannot_serve_is_an_error_and_the_next_address_opens(open_page, files, lang, code):
    how, name = UNSOUND[code], "model.safetensors"
    shard = max((data for key, data in files.items() if key.endswith(".safetensors")), key=len)
    assert len(shard) > 1 << 16  # a smaller one may come whole
    with (
        serve(Site(how.get("files", {name: shard}), ranges=how.get("ranges", True))) as site,
        serve(Site(files)) as sound,
    ):
        site.status = {name: how["status"]} if "status" in how else {}
        at = send(at_address(open_page, lang), f"{site.address}/{name}")
        status = how.get("said", how.get("status"))
        says(at, code, lang, name=name, status=status)
        # It stays on the next run, and the last checkpoint's numbers do not.
        says(clean(at.run()), code, lang, name=name, status=status)
        assert not at.metric
        assert len(send(at, f"{sound.address}/").metric) == 4


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("typed", ["http://127.0.0.1:9/model", "hf://owner/model@v1", "owner/model"])
def test_a_machine_without_a_network_says_so(open_page, lang, typed, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    shown = plain(send(at_address(open_page, lang), typed))
    text = i18n.t("ui.error.code", code="source.connection")
    assert text in shown
    named = "127.0.0.1:9"
    assert CheckpointError("source.connection", name=named, reason="").text(lang)["what"] in shown
    assert CheckpointError("source.connection", name=named, reason="").text(lang)["next"] in shown


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("typed", ["hf://owner/model@v1", "owner/model"])
def test_a_repository_on_a_stand_in_for_the_hub(open_page, files, lang, typed, monkeypatch):
    info = {"id": "owner/model", "sha": SHA, "siblings": [{"rfilename": name} for name in files]}
    api = {f"/api/models/owner/model{end}": (200, info, {}) for end in ("", "/revision/v1")}
    with serve(Site(files)) as storage, serve(Site({}, redirect=f"{storage.address}/blobs/", api=api)) as site:
        monkeypatch.setenv("HF_ENDPOINT", site.address)
        at = send(at_address(open_page, lang), typed)
        assert i18n.t("explorer.address.version_commit", mark=SHA[:12]).strip() in plain(at)
        before = len(storage.asked)
        at = send(at, typed)
        assert i18n.t("explorer.address.again").strip() in plain(at)
        assert len(storage.asked) == before
    kept = at.session_state["explorer.kept.address"].opened.audit.report
    assert kept.findings == audit(ensure(HOLES)).findings
    assert kept.source == f"hf://{typed.removeprefix('hf://')}"


def test_progress_is_told_in_the_page_s_own_thread(files):
    told = []
    with serve(Site(files, silent=0.05)) as site:
        opened = explorer_address.read_address(
            f"{site.address}/", lambda *news: told.append((threading.get_ident(), *news))
        )
    assert opened.opened.audit.report.verdict == audit(ensure(HOLES)).verdict
    assert {thread for thread, *_ in told} == {threading.get_ident()}
    assert {stage for _, stage, _, _ in told} >= {"files"}
    assert all(0 < done <= total for _, _, done, total in told)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_stage_of_reading_has_its_words(lang, files):
    stages = set()
    with serve(Site(files, silent=0.01)) as site:
        explorer_address._examine(f"{site.address}/", lambda stage, done, total: stages.add(stage))
    assert stages
    for stage in {*stages, "files", "headers", "ranges"}:
        assert i18n.t(f"explorer.address.stage.{stage}", done=1, total=2)
