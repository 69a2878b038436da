"""The Explorer's tools in a browser: nothing is cut or wider than the screen, and a mended copy lands on disk."""

import io
import zipfile

import pytest
from playwright.sync_api import expect

from nvfp4viz.audit import audit
from nvfp4viz.checkpoint import MemorySource
from nvfp4viz.figures.words import words
from sample_checkpoints import ensure

from .conftest import Server, overflow, settle

LANGUAGES = ["en", "zh"]
HOLES = "tiny-moe-nvfp4-holes"
WORDS = {
    "en": {"backends": "Backends", "ranks": "TP and EP", "compare": "Compare", "repair": "Repair",
           "make": "Make the changed files",
           "zip": "Changed files as ZIP", "server": "On this server", "write": "Write the mended copy",
           "cost": "What this policy costs", "kinds": ("Your own files", "Shipped samples"),
           "reset": "Start this page over"},
    "zh": {"backends": "后端", "ranks": "TP 与 EP", "compare": "比较", "repair": "修复", "make": "生成改动的文件",
           "zip": "改动的文件 ZIP", "server": "这台服务器上", "write": "写入修复后的副本",
           "cost": "这个策略的代价", "kinds": ("你自己的文件", "随附样例"), "reset": "本页重新开始"},
}  # fmt: skip


def open_tab(page, lang: str, name: str) -> None:
    page.get_by_role("tab", name=WORDS[lang][name], exact=True).click()
    settle(page)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_choice_of_a_checkpoint_is_not_cut(visit, lang):
    page = visit(f"/explorer?lang={lang}")
    page.wait_for_function(
        """() => { const fields = [...document.querySelectorAll('[data-testid=stSelectbox] input')];
           const whole = field => field.value && field.scrollWidth <= field.clientWidth;
           return fields.length > 2 && fields.every(whole); }"""
    )
    # GPU and ranks share a row.
    rows = page.locator(".st-key-explorer_serving").evaluate(
        "box => [...box.querySelectorAll('[data-testid=stSelectbox], [data-testid=stNumberInput]')]"
        ".map(part => Math.round(part.getBoundingClientRect().bottom))"
    )
    assert len(rows) == 3
    assert max(rows) - min(rows) <= 2


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", ["ranks", "compare", "repair"])
def test_no_tool_scrolls_a_phone_sideways(visit, lang, name):
    page = visit(f"/explorer?lang={lang}&tp=3&ep=5", width=390)
    open_tab(page, lang, name)
    assert overflow(page) <= 0


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("width", [390, 700])
@pytest.mark.parametrize(
    "link", ["explorer?tab=backends", "explorer?tab=ranks", "explorer?tab=compare", "explorer?tab=repair",
             "fault_lab?tab=sweep"]
)  # fmt: skip
def test_the_tab_that_a_link_opens_is_in_sight(visit, lang, width, link):
    page = visit(f"/{link}&lang={lang}", width=width)
    tab = page.locator("[role=tab][aria-selected=true]").first
    page.locator("[role=tablist]").first.scroll_into_view_if_needed()
    ends = "box => [box.getBoundingClientRect().left, box.getBoundingClientRect().right]"
    (left, right), (first, last) = (part.evaluate(ends) for part in (tab, page.locator("[role=tablist]").first))
    assert first <= left < right <= last <= width
    # Nor is another out of reach.
    assert page.locator("[role=tablist]").first.evaluate("list => list.scrollWidth <= list.clientWidth")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_reasons_of_backends_are_not_cut(visit, lang, width):
    """A tensor's name is longer than their column; on a phone a reason stands below its outcome."""
    page = visit(f"/explorer?lang={lang}", width=width)
    open_tab(page, lang, "backends")
    frame = page.locator("[class*=st-key-table_explorer]:visible").first
    frame.get_by_text("KeyError").wait_for()
    assert frame.evaluate("box => box.scrollWidth <= box.clientWidth")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_ranks_typed_by_a_reader_reach_the_link_and_the_findings(visit, lang):
    page = visit(f"/explorer?lang={lang}")
    field = page.locator(".st-key-explorer_serving [data-testid=stNumberInput] input").first
    field.fill("3")
    field.press("Enter")
    page.wait_for_url("**tp=3**")
    settle(page)
    open_tab(page, lang, "ranks")
    page.get_by_text("parallel.group-split").first.wait_for()
    assert page.get_by_role("row").count() >= 2 + 3


@pytest.mark.parametrize("lang", LANGUAGES)
def test_ranks_show_no_button_that_does_nothing(visit, lang):
    """An empty field cannot be stepped, and says to type; a number in it can."""
    page = visit(f"/explorer?lang={lang}")
    box = page.locator(".st-key-explorer_serving [data-testid=stNumberInput]").first
    buttons = box.locator("[data-testid=stNumberInputContainer] button")
    field = box.locator("input")
    assert field.get_attribute("placeholder") == words(lang, "explorer.ranks.any")
    assert field.evaluate("field => field.scrollWidth <= field.clientWidth")
    assert not [button for button in buttons.all() if button.is_visible()]
    field.fill("1")
    field.press("Enter")
    page.wait_for_url("**tp=1**")
    buttons.last.click()
    page.wait_for_url("**tp=2**")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_mended_archive_is_made_and_mends(visit, lang):
    page = visit(f"/explorer?lang={lang}")
    open_tab(page, lang, "repair")
    page.get_by_role("button", name=WORDS[lang]["make"]).click()
    button = page.get_by_role("button", name=WORDS[lang]["zip"])
    button.wait_for()
    with page.expect_download() as caught:
        button.click()
    with zipfile.ZipFile(io.BytesIO(caught.value.path().read_bytes())) as pack:
        files = {name: pack.read(name) for name in pack.namelist()}
    before = {path.name: path.read_bytes() for path in ensure(HOLES).iterdir() if path.is_file()}
    assert audit(MemorySource(before)).verdict == "backend"
    assert audit(MemorySource({**before, **files})).verdict in ("ok", "info", "warn")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_policy_s_cost_is_measured_when_asked(visit, lang):
    page = visit(f"/explorer?lang={lang}")
    open_tab(page, lang, "repair")
    before = page.get_by_role("row").count()
    page.get_by_text(WORDS[lang]["cost"]).click()
    page.wait_for_function("n => document.querySelectorAll('table tr').length >= n + 7", arg=before, timeout=120_000)


def test_mxfp4_has_a_map(visit):
    page = visit("/explorer?lang=en&checkpoint=tiny-moe-mxfp4")
    field = page.get_by_role("application")
    field.wait_for()
    field.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.get_by_text("one scale for every").first.wait_for()


def test_no_words_lie_over_a_typed_address(browser, server):
    """Streamlit's hint to press Enter, which the button beside the field says as well."""
    context = browser.new_context(viewport={"width": 390, "height": 800}, reduced_motion="reduce")
    try:
        page = context.new_page()
        page.goto(f"{server.url}/explorer?lang=zh")
        page.get_by_text("网址或 hub 仓库").first.click()
        field = page.locator('input[placeholder^="hf://"]')
        field.wait_for()
        field.click()
        field.type("https://example.org/some/long/model/address/folder")
        hint = page.locator("[data-testid=stForm] [data-testid=InputInstructions]")
        hint.wait_for(state="attached")
        assert not hint.is_visible()
    finally:
        context.close()


def test_a_mended_copy_lands_beside_its_source(browser, tmp_path, monkeypatch):
    import shutil

    root = tmp_path / "shared"
    shutil.copytree(ensure(HOLES), root / "holes")
    monkeypatch.setenv("NVFP4VIZ_ROOTS", str(root))
    server = Server(tmp_path)
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    try:
        page = context.new_page()
        page.set_default_timeout(180_000)  # a fresh server beside other tests
        page.goto(f"{server.url}/explorer?lang=en")
        page.wait_for_selector("h1")
        settle(page)
        page.get_by_text(WORDS["en"]["server"]).first.click()
        settle(page)
        open_tab(page, "en", "repair")
        page.get_by_role("button", name=WORDS["en"]["write"]).click()
        page.get_by_text("Wrote holes-peer-max").wait_for()
        assert audit(root / "holes-peer-max").verdict in ("ok", "info", "warn")
        page.get_by_role("button", name=WORDS["en"]["write"]).click()
        page.get_by_text("already exists").first.wait_for()
        assert str(root) not in page.inner_text("body")
    finally:
        context.close()
        server.stop()


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_link_from_an_own_checkpoint_says_so_to_both(visit, lang):
    """Beside the sender's button before it is pressed; to the receiver, whose sample has other numbers in that slot."""
    page = visit(f"/explorer?lang={lang}")
    page.get_by_role("radio", name=WORDS[lang]["kinds"][0]).click()
    page.locator("[data-testid=stFileUploader] input[type=file]").set_input_files(sorted(ensure(HOLES).iterdir()))
    page.get_by_text(words(lang, "ui.copy.no_source")).wait_for()
    page.wait_for_url("**origin=own**")
    settle(page)
    link = page.url.partition("/explorer")[2]
    assert "/" not in link
    other = visit("/explorer" + link)
    told = words(lang, "ui.own.told", sample="#", waits="").partition("**")[0]
    expect(other.get_by_text(told)).to_be_visible()
    expect(other.get_by_text(words(lang, "ui.copy.no_source"))).to_have_count(0)
    other.reload()
    other.get_by_text(told).wait_for()


def test_a_pick_sends_no_cells_and_the_map_follows(visit):
    """What the browser has of a map is not sent again; the map's cursor and the page's are one, whoever moves it."""
    page = visit("/explorer?lang=en&checkpoint=gemma4-skeleton&layer=0&expert=1&projection=gate")
    frames = []
    page.on("websocket", lambda socket: socket.on("framereceived", lambda data: frames.append(len(data))))
    page.reload()
    field, readout = page.get_by_role("application"), page.locator(".readout")
    field.wait_for()
    settle(page)
    cells = 3 * 30 * 128 * 5 * 4 // 3  # in base64: a byte and a float32 of each
    assert max(frames) > cells
    frames.clear()
    field.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_url("**expert=2**")
    settle(page)
    page.locator(".st-key-expert input").press("ArrowUp")
    page.wait_for_url("**expert=3**")
    settle(page)
    assert "expert 3" in readout.inner_text()
    assert max(frames) < cells


def test_the_tip_goes_when_the_keyboard_moves_the_cursor(visit):
    page = visit(f"/explorer?lang=en&checkpoint={HOLES}&layer=0&expert=1&projection=gate")
    field, tip = page.get_by_role("application"), page.locator(".tip")
    field.hover(position={"x": 300, "y": 20})
    expect(tip).to_be_visible()
    pointed = tip.inner_text()
    page.get_by_role("radio", name="gate", exact=True).focus()
    page.keyboard.press("ArrowRight")  # another projection, under a pointer that rests
    expect(tip).not_to_have_text(pointed)
    settle(page)
    field.focus()
    page.keyboard.press("ArrowDown")
    expect(tip).to_be_hidden()
    assert "layer 1" in page.locator(".readout").inner_text().lower()
    field.hover(position={"x": 320, "y": 20})
    expect(tip).to_be_visible()


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_projection_chosen_in_the_map_is_the_one_the_page_speaks_of(visit, lang):
    """In the link, beside the map and under it; also when it was changed elsewhere in between."""
    page = visit(f"/explorer?lang={lang}&checkpoint={HOLES}&layer=0&expert=1&projection=gate")
    chosen = page.locator(".st-key-projection input")
    down, gate = (page.get_by_role("radio", name=name, exact=True) for name in ("down", "gate"))
    for switch, name in ((down, "down"), (gate, "gate"), (down, "down")):
        switch.click()
        page.wait_for_function("name => location.search.includes(`projection=${name}`)", arg=name)
        settle(page)
        assert chosen.input_value() == name
        assert page.get_by_text(f"{name}: input_scale").or_(page.get_by_text(f"{name}：input_scale")).count()
    # The browser's Back, and then the same choice again.
    page.go_back()
    gate.and_(page.locator("[aria-checked=true]")).wait_for()
    settle(page)
    down.click()
    page.wait_for_function("() => location.search.includes('projection=down')")
    settle(page)
    assert chosen.input_value() == "down"


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_page_that_starts_over_shows_where_its_checkpoint_comes_from(visit, lang):
    """A reader would take the sample's verdict for that of the own checkpoint."""
    page = visit(f"/explorer?lang={lang}")
    own, sample = (page.get_by_role("radio", name=name) for name in WORDS[lang]["kinds"])
    own.click()
    page.locator("[data-testid=stFileUploader]").first.wait_for()
    settle(page)
    page.get_by_role("button", name=WORDS[lang]["reset"]).click()
    page.locator("[data-testid=stFileUploader]").first.wait_for(state="detached")
    settle(page)
    sample.and_(page.locator("[aria-checked=true]")).wait_for()
    own.click()
    page.locator("[data-testid=stFileUploader]").first.wait_for()


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_columns_of_a_comparison_have_room_for_their_numbers(visit, lang):
    """A number that is cut on its left loses its sign; the canvas cannot be read, so its columns are measured."""
    from nvfp4viz.ui.explorer_diff import WIDTHS, Row

    page = visit(f"/explorer?lang={lang}")
    open_tab(page, lang, "compare")
    table = page.locator("[data-testid=stDataFrame]").first
    table.wait_for()
    page.wait_for_function("document.querySelector('[data-testid=stDataFrame]').getBoundingClientRect().width > 800")
    # What one compares for is on screen: all columns up to the kind, and no other stands between them.
    first = ("name", "A", "B", "ratio", "kind")
    assert tuple(Row("values", "x", "x").cells())[:5] == first
    assert sum(WIDTHS[name] for name in first) <= table.evaluate("table => table.getBoundingClientRect().width")
    widest = page.evaluate(
        "font => { const pen = document.createElement('canvas').getContext('2d'); pen.font = font;"
        " return Object.fromEntries(['−0.00001234', '-1.1754944e-38', 'weight_scale_2'].map("
        "text => [text, pen.measureText(text).width])); }",
        "14px 'Source Sans', sans-serif",
    )
    padding = 2 * 8
    assert widest["−0.00001234"] + padding <= WIDTHS["ratio"]
    assert widest["-1.1754944e-38"] + padding <= min(WIDTHS["A"], WIDTHS["B"])
    assert widest["weight_scale_2"] + padding <= WIDTHS["role"]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("name", ["compare", "repair"])
def test_a_picked_row_is_told_in_full_on_a_phone(visit, lang, name):
    """Of its columns a phone shows the first ones."""
    page = visit(f"/explorer?lang={lang}&tab={name}&other=tiny-moe-compressed-tensors", width=390)
    table = page.locator("[data-testid=stDataFrame]").first
    table.scroll_into_view_if_needed()
    settle(page)
    table.click(position={"x": 200, "y": 150})
    row = page.locator(f".st-key-finding_explorer_{name}_row")
    row.wait_for()
    settle(page)
    assert "∅" in row.inner_text() or "quantization_config" in row.inner_text()
    assert row.evaluate("row => row.scrollWidth <= row.clientWidth && row.getBoundingClientRect().right <= 390")


@pytest.mark.parametrize("lang", LANGUAGES)
def test_a_phone_shows_the_state_beside_the_file(visit, lang):
    page = visit(f"/explorer?lang={lang}&tab=files", width=390)
    state = page.locator('[class*="st-key-table_explorer"] td:nth-child(2)').first
    state.wait_for()
    settle(page)
    box = state.evaluate(
        "cell => { const range = document.createRange(); range.selectNodeContents(cell);"
        " return range.getBoundingClientRect().right; }"
    )
    assert box <= 390 - 16


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_two_sides_of_a_comparison_fit_on_a_phone(visit, lang):
    page = visit(f"/explorer?lang={lang}&tab=compare", width=390)
    sides = page.locator('[class*="st-key-table_explorer"]').first
    sides.wait_for()
    settle(page)
    assert sides.evaluate("sides => sides.scrollWidth <= sides.clientWidth")


def test_each_status_has_its_sign_where_cells_are_narrow(browser, tmp_path, monkeypatch):
    """Gemma 4 has 128 experts: NaN and a value far from its peers may not be two bars alike."""
    from nvfp4viz.cli import main

    one, root = tmp_path / "one", tmp_path / "gem"
    at = ["--layer", "3", "--projection", "gate"]
    main(["inject", str(ensure("gemma4-skeleton")), str(one), "--fault", "nan", "--expert", "10", *at])
    main(["inject", str(one), str(root), "--fault", "scaled", "--value", "1000", "--expert", "14", *at])
    monkeypatch.setenv("NVFP4VIZ_ROOTS", str(root))
    server = Server(tmp_path)
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    # What the map writes on its field; the legend's canvases are small.
    context.add_init_script(
        "window.signs = new Set(); const write = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {"
        " if (this.canvas.width > 100) window.signs.add(String(text)); return write.call(this, text, ...at); };"
    )
    try:
        page = context.new_page()
        page.set_default_timeout(180_000)  # a fresh server beside other tests
        page.goto(f"{server.url}/explorer?lang=en")
        page.get_by_text(WORDS["en"]["server"]).first.click()
        page.wait_for_function("() => window.signs.has('L29') && window.signs.has('N') && window.signs.has('!')")
    finally:
        context.close()
        server.stop()


def test_a_link_opens_its_tab_and_back_the_one_before(visit):
    page = visit("/explorer?lang=zh&tab=backends")
    tabs = page.get_by_role("tab")
    expect(tabs.nth(2)).to_have_attribute("aria-selected", "true")
    for index, name in ((3, "files"), (4, "ranks")):
        tabs.nth(index).click()
        page.wait_for_url(f"**tab={name}**")
        settle(page)
    page.go_back()
    expect(tabs.nth(3)).to_have_attribute("aria-selected", "true")


def test_a_table_has_no_bar_beside_it(visit):
    """Where nothing is cut off there is nothing to scroll, and no shade that says so."""
    page = visit("/explorer?lang=en&tab=backends")
    tables = page.locator("[class*=st-key-table]:visible")
    assert tables.evaluate_all("boxes => boxes.map(box => box.offsetWidth - box.clientWidth)") == [0]


@pytest.mark.parametrize("path", ["/explorer?lang=en", "/fault_lab?lang=en"])
def test_another_language_keeps_the_open_tab(visit, path):
    page = visit(path)
    tabs = page.get_by_role("tab")
    tabs.nth(1).click()
    expect(tabs.nth(1)).to_have_attribute("aria-selected", "true")
    settle(page)  # until then the server may not know of the tab
    name = tabs.nth(1).inner_text()
    for language in ("中文", "English"):
        page.get_by_role("radio", name=language).click()
        (expect(tabs.nth(1)).not_to_have_text if language == "中文" else expect(tabs.nth(1)).to_have_text)(name)
        expect(tabs.nth(1)).to_have_attribute("aria-selected", "true")
        settle(page)
