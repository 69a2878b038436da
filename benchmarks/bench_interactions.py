"""What a reader waits for after touching a control, on every page: from the input to the last change of the picture.

Measured inside Chromium (`watch.js`): from the gesture's last input event to the frame after the page's last change,
with Streamlit at rest.  Controls are found on the page, part by part, so that a page's new control is measured too;
what components of ours answer by themselves stands beside it.  Sliders and steppers go on to values that nobody has
asked for; choices come back to values that are cached.  Needs Chromium; it shares the machine's cores with the server.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Error as PlaywrightError

from benchmarks import harness
from benchmarks.bench_pages import ADDRESSES, MAIN_FIGURES, PLOT, chromium, paint, running
from nvfp4viz.figures.words import words
from tests.e2e.conftest import drawn

FIGURE_GOAL, LOCAL_GOAL = 0.250, 0.010
REPEATS, WARM = 5, 2
MOST = 4
"""Controls a page, beside the choice of its part and what its components do."""
WATCH = Path(__file__).with_name("watch.js")
PARTS = "[class*=st-key-parts] [role=radio]"

Act = Callable[[Any, int], None]
"""A gesture; told how often it has been made."""


@dataclass(frozen=True, slots=True)
class Control:
    """Something to touch.

    ``local`` where a component shows it before the server answers; ``answered`` where the picture waits for the answer,
    and not the link alone.  Those with a high ``last`` come after the others of their part: a source, a checkpoint or a
    number of ranks takes other controls away.
    """

    name: str
    act: Act
    local: bool = False
    answered: bool = True
    last: int = 0


# ------------------------------------------------------------------ Streamlit's own


def _label(box: Any) -> str:
    text = box.locator("label, [data-testid=stWidgetLabel]").first
    return text.text_content().strip() if text.count() else "?"


_CHOSEN = """options => options.findIndex(option =>
  option.matches("[aria-checked=true], [aria-selected=true]") || option.querySelector("input:checked"))"""


def _choice(options: Any) -> Act:
    """The next one of the first three."""

    def act(page: Any, lap: int) -> None:
        chosen = options.evaluate_all(_CHOSEN)
        options.nth((chosen + 1) % min(options.count(), 3)).click()

    return act


def _stepper(field: Any, up: str, down: str) -> Act:
    """On and on by keyboard, to what nobody has asked for; back from either end.  Narrow boxes have no buttons."""
    way = [1]

    def act(page: Any, lap: int) -> None:
        if not lap:
            field.focus()
        if not field.input_value():
            field.fill("1")
            field.press("Enter")
            return
        value = float(field.input_value())
        ends = [float(field.get_attribute(name) or "nan") for name in ("min", "max")]
        if ends[0] == ends[1]:
            raise LookupError("it has one value alone")
        way[0] = 1 if value == ends[0] else -1 if value == ends[1] else way[0]
        field.press(up if way[0] > 0 else down)

    return act


def _slider(box: Any) -> Act:
    return _stepper(box.locator("input[type=range]").first, "ArrowRight", "ArrowLeft")


def _number(box: Any) -> Act:
    return _stepper(box.locator("input").first, "ArrowUp", "ArrowDown")


def _select(box: Any) -> Act:
    """One of the first three that the box does not show."""

    def act(page: Any, lap: int) -> None:
        box.scroll_into_view_if_needed()
        page.wait_for_timeout(200)  # a list that opens while the page still scrolls closes again
        shown = box.locator("input").input_value()
        box.get_by_role("button", name="Open").click()
        page.locator("[role=option]").first.wait_for()
        others = [text for text in page.locator("[role=option]").all_inner_texts()[:3] if text.strip() != shown]
        page.get_by_role("option", name=others[lap % len(others)], exact=True).click()

    return act


def streamlit_controls(page: Any) -> Iterator[Control]:
    """One of each kind that the part shows."""
    main = page.locator("[data-testid=stMain]")
    kinds: tuple[tuple[str, int, Callable[[Any], Act]], ...] = (
        ("stSlider", 1, _slider),
        ("stNumberInput", 0, _number),
        ("stButtonGroup", 3, lambda box: _choice(box.locator("[role=radio]"))),
        ("stSelectbox", 2, _select),
        ("stRadio", 0, lambda box: _choice(box.locator("label:has(input)"))),
    )
    for kind, last, make in kinds:
        boxes = main.get_by_test_id(kind).filter(visible=True)
        for index in range(boxes.count()):
            box = boxes.nth(index)
            inside = box.evaluate("box => box.closest('[class*=st-key-parts], .st-key-topbar') !== null")
            if inside or (kind == "stButtonGroup" and box.locator("[role=radio]").count() < 2):
                continue
            yield Control(f"{kind.removeprefix('st').lower()} {_label(box)!r}", make(box), last=last)
            break


# ------------------------------------------------------------------ components


def _click(selector: str, count: int = 3) -> Act:
    return lambda page, lap: page.locator(selector).filter(visible=True).nth(lap % count).click()


def _press(selector: str, *keys: str) -> Act:
    def act(page: Any, lap: int) -> None:
        target = page.locator(selector).first
        if not lap:
            target.focus()
        page.keyboard.press(keys[lap % len(keys)])

    return act


def _drag(selector: str) -> Act:
    """Across the middle of an element, in small steps."""

    def act(page: Any, lap: int) -> None:
        box = page.locator(selector).nth(5).bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x, y + (20 + 3 * lap) * (-1) ** lap, steps=5)
        page.mouse.up()

    return act


def _spot(selector: str) -> Act:
    """A click at another place of a picture's middle line each time."""

    def act(page: Any, lap: int) -> None:
        box = page.locator(selector).first.bounding_box()
        page.mouse.click(box["x"] + box["width"] * (0.2 + 0.05 * (lap % 12)), box["y"] + box["height"] / 2)

    return act


COMPONENTS: dict[str, tuple[str, tuple[Control, ...]]] = {
    "e2m1": ("", (Control("click a bit", _click(".editor .bit", 4), True, False),)),
    "two_level_scaling": (
        "?step=0",
        (
            Control("a bar by keyboard", _press(".lab [data-bar='0']", "ArrowUp"), True),
            Control("drag a bar", _drag(".lab .grip"), True),
            Control("a step", _click(".lab .step", 4), True, False),
        ),
    ),
    "tensor_core": ("", (Control("a rule", _click(".lab .step", 4), True, False),)),
    "dataflow": ("", (Control("a step", _click(".lab .step", 4), True, False),)),
    "mega_kernel": ("", (Control("a cell", _click(".map .cell", 5), True, False),)),
    "explorer": ("", (Control("a cell of the map", _spot(".field canvas")),)),
}
"""By page: the link's settings, and gestures in a component of the part that opens."""


# ------------------------------------------------------------------ the clock


def skip_questions(page: Any) -> None:
    """Every prediction of the part is passed, one after the other; an answer may uncover the next question."""
    skip = page.get_by_role("button", name=words("en", "ui.predict.skip")).filter(visible=True)
    while skip.count():
        button = skip.first.element_handle()
        page.evaluate("watch.arm()")
        button.click()
        page.wait_for_function("watch.settled(true)", polling=50)


def waited(page: Any, act: Act, lap: int, answered: bool = True) -> tuple[float, float | None]:
    """Seconds until the picture rests, and until a component first answered (None if none did)."""
    drawn(page)  # a run that is still going would swallow the next one
    page.evaluate("watch.arm()")
    act(page, lap)
    page.wait_for_function("answered => watch.settled(answered)", arg=answered, polling=50)
    seen = page.evaluate("({...watch})")
    if not seen["figure"] or seen["painted"] < seen["input"]:
        raise LookupError("nothing on the page changed")
    local = seen["local"] / 1e3 if seen["local"] else None
    return (seen["painted"] - seen["input"]) / 1e3, local


def measure_control(page: Any, control: Control, repeats: int) -> dict[str, list[float]]:
    whole, local = [], []
    for lap in range(WARM + repeats):
        seconds, first = waited(page, control.act, lap, control.answered)
        if lap >= WARM:
            whole.append(seconds)
            if control.local and first is not None:
                local.append(first)
    return ({"": whole} if control.answered else {}) | ({", in the browser": local} if local else {})


def measure_page(page: Any, url: str, id: str, repeats: int, times: dict[str, list[float]]) -> None:
    """Adds every measure of one page by name."""
    query, own = COMPONENTS.get(id, ("", ()))
    paint(page, url + query, MAIN_FIGURES.get(id, PLOT))

    def take(where: str, control: Control) -> None:
        try:
            found = measure_control(page, control, repeats)
        # One control must not cost the run: the log names it.
        except (LookupError, ArithmeticError, PlaywrightError) as problem:
            print(f"{id}, {where}{control.name}: NOT MEASURED: {str(problem).splitlines()[0]}", file=sys.stderr)
            page.keyboard.press("Escape")
            drawn(page)
            return
        for ending, values in found.items():
            name = f"{id}, {where}{control.name}{ending}"
            times[name] = values
            print(f"{name}: {harness.time_text(statistics.median(values))}", file=sys.stderr)

    skip_questions(page)
    for control in own:
        take("", control)
    parts = page.locator(PARTS)
    names = [text.strip() for text in parts.all_text_contents()]
    taken = 0
    for index in range(max(1, len(names))):
        if names:
            try:
                if parts.evaluate_all(_CHOSEN) != index:
                    waited(page, lambda page, lap, index=index: parts.nth(index).click(), 0)
            except PlaywrightError as problem:
                print(f"{id}, {names[index]}: NOT OPENED: {str(problem).splitlines()[0]}", file=sys.stderr)
                continue
            skip_questions(page)
        here = list(streamlit_controls(page))[: min(2 if names else MOST, MOST - taken)]
        taken += len(here)
        for control in sorted(here, key=lambda control: control.last):
            take(f"{names[index]}: " if names else "", control)
    if len(names) > 1:
        take("", Control("another part", _choice(parts)))


def measure(quick: bool, only: tuple[str, ...] = ()) -> list[harness.Section]:
    repeats = 1 if quick else REPEATS
    times: dict[str, list[float]] = {}
    with running() as server, chromium() as window:
        for id, address in ADDRESSES.items():
            if only and id not in only:
                continue
            context = window()
            context.add_init_script(path=WATCH)
            page = context.new_page()
            page.set_default_timeout(30_000)
            try:
                measure_page(page, f"{server.url}/{address}", id, repeats, times)
            except PlaywrightError as problem:  # nor one page: what it gave so far stays
                print(f"{id}: GIVEN UP: {str(problem).splitlines()[0]}", file=sys.stderr)
            context.close()
    goals = [
        harness.Goal(
            f"{name}, seconds",
            statistics.median(values),
            LOCAL_GOAL if name.endswith("in the browser") else FIGURE_GOAL,
            at_most=True,
        )
        for name, values in times.items()
    ]
    return [
        harness.Section(
            "Interactions",
            "From a gesture's last event to the frame after the page's last change; *in the browser*: from an event to "
            f"a component's first change. Medians of {repeats} after {WARM} to warm up.",
            harness.rows_from(times),
            "",
            goals,
        )
    ]


if __name__ == "__main__":
    pages = tuple(sys.argv.pop(sys.argv.index(name)) for name in list(sys.argv[1:]) if name in ADDRESSES)
    harness.main(lambda quick: measure(quick, pages))
