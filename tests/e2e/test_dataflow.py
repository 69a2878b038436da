"""The dataflow component: scrubbed, played and linked in the browser, without a word to the server."""

import re
from urllib.parse import parse_qs, urlparse

import pytest
from playwright.sync_api import expect

from nvfp4viz.figures.words import words
from nvfp4viz.moe.steps import STEPS
from nvfp4viz.ui.dataflow_lab import OPENING

from .conftest import settle

ADDRESS = "/dataflow?lang=en"
SELECTED = ".flow .step[aria-selected=true]"


class Wire:
    """Counts what the browser sends: requests, and messages on Streamlit's socket."""

    def __init__(self, page):
        self.page, self.sent = page, 0
        page.on("request", lambda _: self._count())
        page.on("websocket", lambda socket: socket.on("framesent", lambda _: self._count()))

    def _count(self):
        self.sent += 1


@pytest.fixture
def opened(visit):
    """``opened("&step=3")`` → the page with the faulty twin uncovered, and its wire."""

    def go(query: str = "&step=1", **options):
        page = visit(ADDRESS, **options)
        wire = Wire(page)
        page.goto(page.url.split("/dataflow")[0] + ADDRESS + query)
        page.locator(".flow .chip").first.wait_for()
        settle(page)
        page.get_by_text("Show me without a guess").click()
        page.locator(".flow .faulty .chip").first.wait_for()
        settle(page)
        assert wire.sent > 0  # it does count
        return page, wire

    return go


def step_of(page) -> int:
    return int(page.locator(SELECTED).get_attribute("data-step"))


def query(page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlparse(page.url).query).items()}


def test_scrubbing_asks_nothing_of_the_server(opened):
    page, wire = opened()
    page.wait_for_load_state("networkidle")
    page.locator(SELECTED).focus()
    before = wire.sent
    for key, step in [
        ("ArrowRight", 2),
        ("ArrowRight", 3),
        ("End", 9),
        ("ArrowLeft", 8),
        ("Home", 1),
        ("ArrowLeft", 1),
    ]:
        page.keyboard.press(key)
        assert step_of(page) == step
    page.locator(".flow .scrub").fill("6")
    assert step_of(page) == 6
    page.get_by_role("tab", name=re.compile("^7 ")).click()
    assert step_of(page) == 7
    page.get_by_role("button", name="Step back").click()
    assert step_of(page) == 6
    page.locator('.flow .healthy .chip[data-route="0"]').click()
    page.wait_for_url(re.compile("step=6.*route=0|route=0.*step=6"))
    page.wait_for_timeout(700)  # longer than any component of ours waits before it reports
    assert wire.sent == before
    assert query(page)["step"] == "6"


def test_a_step_is_drawn_within_ten_milliseconds(opened):
    """Script, style and layout of the picture, in time of the browser's thread: other processes are not counted.

    The numbers below it follow with the next frame.
    """
    page, _ = opened()
    chrome = page.context.new_cdp_session(page)
    chrome.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        metrics = {entry["name"]: entry["value"] for entry in chrome.send("Performance.getMetrics")["metrics"]}
        return sum(metrics[f"{part}Duration"] for part in ("Script", "RecalcStyle", "Layout"))

    before = spent()
    steps = page.locator(".flow").evaluate(
        """flow => {
             const scrub = flow.querySelector('.scrub');
             const walk = Array.from({ length: 45 }, (_, index) => (index + 1) % 9 + 1);
             for (const step of walk) {
               scrub.value = step;
               scrub.dispatchEvent(new Event('input', { bubbles: true }));
               flow.getBoundingClientRect();
             }
             return walk.length;
           }"""
    )
    assert 0 < (spent() - before) / steps < 0.010


def test_a_pressed_step_moves_the_keyboard_before_it_changes_the_picture(opened):
    """A new tabindex on the pressed button has Chromium bring every style up to date: ten milliseconds, were the
    picture's classes changed already."""
    page, _ = opened()
    page.locator(".flow").evaluate(
        """flow => {
             const { get, set } = Object.getOwnPropertyDescriptor(HTMLElement.prototype, 'tabIndex');
             const classes = () => [...flow.querySelectorAll('.board')].map(board => board.className).join();
             window.late = [];
             let before = classes();
             addEventListener('click', () => (before = classes()), true);
             Object.defineProperty(HTMLElement.prototype, 'tabIndex', { configurable: true, get, set(value) {
               if (this.matches('.step')) window.late.push(classes() !== before);
               set.call(this, value);
             } });
           }"""
    )
    page.locator('.flow .step[data-step="4"]').click()
    page.locator('.flow .step[data-step="9"]').click()
    page.locator('.flow .step[data-step="9"][aria-selected=true]').wait_for()
    assert page.evaluate("window.late") == [False] * 4


@pytest.mark.parametrize("step", [1, 3, 5, 6, 9])
def test_a_link_opens_its_step(opened, step):
    page, _ = opened(f"&step={step}")
    assert step_of(page) == step
    assert query(page).get("step", str(OPENING)) == str(step)


def test_the_picture_goes_to_where_the_runs_part_once_they_are_uncovered(visit):
    page = visit(ADDRESS)
    page.locator(".flow .chip").first.wait_for()
    assert step_of(page) == OPENING
    expect(page.locator(".flow .legend .item")).to_have_count(2)  # of the runs nothing is marked yet
    page.get_by_text("Show me without a guess").click()
    page.locator('.flow .step[data-step="3"][aria-selected=true]').wait_for()
    expect(page.locator('.flow .faulty .chip[data-mark="≠"]')).to_have_count(3)
    expect(page.locator(".flow .legend .item")).to_have_count(7)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [1280, 390])
def test_before_the_guess_the_healthy_rows_stand_by_token_and_by_expert(visit, lang, width):
    page = visit(f"/dataflow?lang={lang}", width=width)
    page.locator(".flow .chip").first.wait_for()
    expect(page.locator(".flow .board figcaption")).to_have_text(
        [words(lang, f"dataflow.lab.by_{order}") for order in ("token", "expert")]
    )
    expect(page.locator(".flow .faulty")).to_have_count(0)
    signs = page.locator(".flow .step").evaluate_all("tabs => tabs.map(tab => tab.querySelector('.note')?.textContent)")
    assert signs == [None, None, "÷", "×", None, "÷", "×", None, None]
    # A line leads from each row of the chosen token to the same row in its expert's group.
    ends = """flow => {
      const from = flow.querySelector('.lines').getBoundingClientRect();
      const chips = flow.querySelectorAll('[data-only=groups] .chip');
      const rows = [...chips].map(one => [one, one.getBoundingClientRect()]);
      return [...flow.querySelectorAll('.lines path')].map(path => {
        const end = path.getPointAtLength(path.getTotalLength());
        const [x, y] = [from.left + end.x, from.top + end.y];
        const met = rows.filter(([, box]) => Math.abs(box.left - x) < 1 && box.top < y && y < box.bottom);
        return met.map(([row]) => Number(row.dataset.route));
      });
    }"""
    assert page.locator(".flow").evaluate(ends) == [[12], [13], [14], [15]]
    page.locator('.flow [data-only=groups] .chip[data-route="20"]').click()
    expect(page.locator(".flow .lines path").first).to_have_class("chosen")
    assert page.locator(".flow").evaluate(ends) == [[20], [21], [22], [23]]


def test_before_the_guess_the_board_where_the_rows_are_has_the_keyboard(visit):
    page = visit(ADDRESS)
    page.locator(".flow .chip").first.wait_for()
    reached = page.locator(".flow .chip[tabindex='0']")
    for step, board in [(1, "lanes"), (2, "groups"), (7, "groups"), (9, "lanes")]:
        page.locator(f'.flow .step[data-step="{step}"]').click()
        expect(reached).to_have_count(1)
        expect(page.locator(f".flow [data-only={board}] .chip[tabindex='0']")).to_have_count(1)
        expect(page.locator(f".flow .away[data-only={board}]")).to_have_count(0)
        expect(page.locator(".flow .away")).to_have_count(1)
    reached.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator('.flow [data-only=lanes] .chip[aria-pressed=true][tabindex="0"]')).to_have_count(1)
    assert page.evaluate("document.activeElement.shadowRoot.activeElement.closest('.board').dataset.only") == "lanes"


def test_a_step_that_was_chosen_before_uncovering_stays(visit):
    page = visit(ADDRESS)
    page.locator(".flow .chip").first.wait_for()
    page.locator(SELECTED).focus()
    page.keyboard.press("End")
    page.wait_for_url(re.compile("step=9"))
    page.get_by_text("Show me without a guess").click()
    page.locator(".flow .faulty .chip").first.wait_for()
    settle(page)
    assert step_of(page) == 9


def test_space_presses_a_button_and_the_keyboard_stays_on_it(opened):
    page, _ = opened("&step=6")
    page.get_by_role("button", name="Step back").focus()
    page.keyboard.press("Space")
    page.locator('.flow .step[data-step="5"][aria-selected=true]').wait_for()
    expect(page.get_by_role("button", name="Play")).to_have_count(1)
    page.locator(".flow .inspector .row:not(.chosen)").first.focus()
    page.keyboard.press("Space")
    page.locator(".flow .inspector .head", has_text="expert 0").wait_for()
    assert page.evaluate("document.activeElement.shadowRoot.activeElement.textContent") == "E0"


def test_a_copied_link_restores_step_and_row(opened, visit):
    page, _ = opened()
    page.locator(SELECTED).focus()
    page.locator('.flow .healthy .chip[data-route="17"]').click()
    page.keyboard.press("End")
    page.wait_for_url(re.compile("(?=.*route=17)(?=.*step=9)"))
    page.get_by_role("button", name="Copy link").click()
    page.get_by_text("Copied.").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    again = visit(link[link.index("/dataflow") :])
    again.locator(".flow .chip").first.wait_for()
    assert step_of(again) == 9
    expect(again.locator(".flow .healthy:not(.away) .chip[aria-pressed=true]")).to_have_attribute("data-route", "17")


def test_the_step_where_the_runs_part_has_a_link_of_its_own(opened):
    """Who opens the link has guessed nothing yet: that step is not where they would begin."""
    page, _ = opened()
    page.locator('.flow .step[data-step="5"]').click()
    page.wait_for_url(re.compile("step=5"))
    page.locator('.flow .step[data-step="3"]').click()
    page.wait_for_url(re.compile("step=3"))


def test_step_and_row_outlive_another_setting(opened):
    page, _ = opened()
    page.locator(SELECTED).focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.wait_for_url(re.compile("step=6"))
    page.get_by_text("the fully calibrated file").click()
    page.wait_for_url(re.compile("twin=calibrated"))
    settle(page)
    assert step_of(page) == 6
    page.wait_for_url(re.compile("step=6"))
    page.get_by_role("radio", name="中文").click()
    page.wait_for_url(re.compile("lang=zh"))
    settle(page)
    page.get_by_role("tab", name=re.compile("^6 用 a2 量化")).wait_for()
    assert step_of(page) == 6


def test_starting_over_leads_to_where_the_page_opens(opened):
    page, _ = opened()
    page.locator(SELECTED).focus()
    page.keyboard.press("End")
    page.wait_for_url(re.compile("step=9"))
    page.get_by_role("button", name="Start this page over").click()
    page.locator(f'.flow .step[data-step="{OPENING}"][aria-selected=true]').wait_for()
    page.wait_for_url(lambda url: "step=" not in url)


def test_space_plays_and_pauses_and_play_ends_at_the_last_step(opened):
    page, wire = opened("&step=7")
    page.wait_for_load_state("networkidle")
    page.locator(SELECTED).focus()
    before = wire.sent
    page.keyboard.press("Space")
    page.get_by_role("button", name="Pause").wait_for()
    page.locator('.flow .step[data-step="8"][aria-selected=true]').wait_for()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Play").wait_for()
    assert step_of(page) == 8
    page.get_by_role("button", name="Play").click()
    page.locator('.flow .step[data-step="9"][aria-selected=true]').wait_for()
    page.get_by_role("button", name="Play").wait_for()
    assert wire.sent == before


def test_nothing_plays_by_itself(opened):
    page, _ = opened()
    page.wait_for_timeout(3500)
    assert step_of(page) == 1
    expect(page.get_by_role("button", name="Play")).to_have_count(1)


@pytest.mark.parametrize(("motion", "glides"), [("reduce", False), ("no-preference", True)])
def test_rows_glide_only_for_readers_who_want_motion(opened, motion, glides):
    page, _ = opened()
    page.emulate_media(reduced_motion=motion)
    seconds = page.locator(".flow .chip").first.evaluate(
        "node => parseFloat(getComputedStyle(node).transitionDuration)"
    )
    assert (0 < seconds <= 0.4) if glides else seconds == 0


def test_rows_are_walked_and_spoken(opened):
    page, _ = opened("&step=6")
    page.locator(".flow .healthy .chip[aria-pressed=true]").focus()
    label = "document.activeElement.shadowRoot.activeElement.getAttribute('aria-label')"
    assert re.fullmatch(r"Token ␣ at position 3, expert 9, rank 3 of 4, row 9; Faulty twin: NaN", page.evaluate(label))
    page.keyboard.press("ArrowDown")
    assert "expert 9" in page.evaluate(label)
    assert "row 10" in page.evaluate(label)
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    assert page.evaluate(label).endswith("Faulty twin: same bits")
    assert step_of(page) == 6


def test_rows_are_walked_from_the_slider_too(opened):
    """Up and down choose a row wherever the focus is, as the hint says; on their own they would move the slider."""
    page, _ = opened("&step=6")
    scrub = page.locator(".flow .scrub")
    scrub.focus()
    chosen = page.locator(".flow .healthy:not(.away) .chip[aria-pressed=true]")
    before = chosen.get_attribute("data-route")
    page.keyboard.press("ArrowDown")
    expect(chosen).not_to_have_attribute("data-route", before)
    page.keyboard.press("ArrowUp")
    expect(chosen).to_have_attribute("data-route", before)
    assert step_of(page) == 6
    expect(scrub).to_be_focused()


def test_the_chosen_row_shows_its_bits_side_by_side(opened):
    page, _ = opened("&step=6")
    page.locator(".flow .inspector", has_text="encode scale of expert 9").wait_for()
    strips = page.locator(".flow .inspector td.strip")
    healthy, faulty = strips.nth(0).inner_text(), strips.nth(1).inner_text()
    assert faulty.count("0x7F") == 4
    assert "0x7F" not in healthy
    assert strips.nth(3).inner_text().count("0111") == 16
    page.locator(".flow .block").select_option("3")
    page.locator(".flow .inspector td.strip .cell.shown .hex").first.wait_for()
    page.get_by_role("tab", name=re.compile("^9 ")).click()
    page.locator(".flow .inspector", has_text="token's sum").wait_for()
    assert page.locator(".flow .inspector tbody").last.locator("td").nth(1).inner_text().count("0x7FFF") == 16


def test_token_and_expert_can_be_chosen_too(opened):
    page, _ = opened()
    page.get_by_role("button", name="Token 5 at position 7", exact=True).click(position={"x": 10, "y": 15})
    page.locator(".flow .inspector .head", has_text="Token 5 at position 7").wait_for()
    page.locator(SELECTED).focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name=re.compile("^Expert 58, rows")).click(position={"x": 10, "y": 8})
    page.locator(".flow .inspector .head", has_text="expert 58").wait_for()
    page.locator(".flow .inspector", has_text="problem_sizes1[58]").wait_for()


def test_rows_stand_in_their_expert_s_group(opened):
    """At the steps between permuting and un-permuting every row lies inside its expert's box, on both boards."""
    page, _ = opened("&step=4")
    outside = page.locator(".flow").evaluate(
        """flow => {
             const found = [];
             for (const board of flow.querySelectorAll('.board')) {
               const boxes = [...board.querySelectorAll('.group')].map(group => group.getBoundingClientRect());
               for (const chip of board.querySelectorAll('.chip')) {
                 const inner = chip.getBoundingClientRect();
                 const homes = boxes.filter(box => inner.left >= box.left - 1 && inner.right <= box.right + 1
                   && inner.top >= box.top - 1 && inner.bottom <= box.bottom + 1);
                 if (homes.length !== 1) found.push(chip.dataset.route);
               }
             }
             return found;
           }"""
    )
    assert outside == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_nothing_overflows_a_phone_at_any_step(visit, lang, theme):
    page = visit(f"/dataflow?lang={lang}&prompt=logs&fate=nan", width=390, theme=theme)
    page.get_by_text(re.compile("Show me without a guess|不猜")).first.click()
    page.locator(".flow .faulty .chip").first.wait_for()
    settle(page)
    for step in range(1, len(STEPS) + 1):
        page.locator(".flow .scrub").fill(str(step))
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        too_wide = page.locator(".flow").evaluate(
            """flow => {
                 const main = document.querySelector('[data-testid=stMain]');
                 const cut = [...flow.querySelectorAll('.board, .inspector, .chip > span, .cell')]
                   .filter(part => part.scrollWidth > part.clientWidth + 1);
                 return [main.scrollWidth - main.clientWidth, flow.scrollWidth - flow.clientWidth, cut.length];
               }"""
        )
        assert too_wide == [0, 0, 0], step
