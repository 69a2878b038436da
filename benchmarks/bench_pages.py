"""What a reader waits for: the first paint of every page, the steps of the story, and 64 tokens of tiny-moe.

A page is *painted* when its title and main figure are drawn and Streamlit rests; server and browser caches are warm.
Needs Chromium; server, browser and kernels share the machine's cores, as on a laptop.
"""

from __future__ import annotations

import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness
from nvfp4viz.ui.registry import PAGES
from tests.e2e.conftest import FLAGS, Server, drawn

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
PAINT_GOAL, STEP_GOAL, TOKENS_GOAL = 1.0, 2.0, 2.0
PLOT = ".js-plotly-plot .main-svg"
# What must be on the screen before a page counts as painted; a page that is not named here has a plot.
MAIN_FIGURES = {
    "empty_answer": ".reply.silent",
    "e2m1": ".editor .bit",
    "two_level_scaling": ".lab",
    "tensor_core": ".lab .chart",
    "dataflow": ".lab .board",
    "backends": ".ladder",
    "mega_kernel": ".map .cell",
    "explorer": ".field canvas",
    "kernel_lab": ".kernel-lab .machine",
    "map": ".atlas .station",
    "glossary": ".terms .entry",
}
ADDRESSES = {entry.id: "" if entry.default else entry.id for entry in PAGES}
STEPS = {2: ".reply", 3: ".field canvas", 4: ".chain button.row", 5: ".story table tbody tr"}


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def paint(page, url: str, figure: str) -> None:
    page.goto(url)
    page.wait_for_selector("h1")
    page.locator(figure).filter(visible=True).first.wait_for()
    drawn(page)


def press(page, step: int) -> None:
    page.keyboard.press(str(step))
    current = page.locator(".st-key-story_steps button").nth(step - 1)
    current.and_(page.locator("[kind=primary]")).wait_for()
    page.locator(STEPS[step]).first.wait_for()
    drawn(page)


@contextmanager
def running() -> Iterator[Server]:
    """The app on a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def chromium() -> Iterator[Callable[[], Any]]:
    """A browser, as the function that opens a reader's window (a context) in it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield partial(browser.new_context, viewport={"width": 1280, "height": 900}, locale="en-US")


def compare_pages(quick: bool) -> list[harness.Section]:
    repeats = 1 if quick else 7
    with chromium() as window:
        page = window().new_page()
        page.set_default_timeout(60_000)
        with running() as server:
            paints = {
                f"/{name}": partial(paint, page, f"{server.url}/{name}", MAIN_FIGURES.get(id, PLOT))
                for id, name in ADDRESSES.items()
            }
            first = harness.interleave(paints, repeats, warm=2)
            paints["/"]()
            for step in STEPS:
                press(page, step)  # runs what the step computes; from here on it is cached
            steps: dict[str, list[float]] = {}
            for _ in range(repeats):
                for step in STEPS:
                    steps.setdefault(f"step {step}", []).append(timed(lambda s=step: press(page, s)))
            # The first reader after a start: nothing of this step has been computed yet.
            with running() as cold:
                paint(page, f"{cold.url}/", MAIN_FIGURES["empty_answer"])
                fresh = {f"step {s}, computed now": [timed(lambda s=s: press(page, s))] for s in (2, 3, 4)}
    goal = [
        harness.Goal(f"first paint of {name}, seconds", statistics.median(times), PAINT_GOAL, at_most=True)
        for name, times in first.items()
    ]
    beats = {**steps, **fresh}
    return [
        harness.Section("First paint, caches warm", "To title and main figure.", harness.rows_from(first), "", goal),
        harness.Section(
            "Steps of the story",
            "A digit pressed until the step is drawn; the last rows on a server that has computed nothing but step 1.",
            harness.rows_from(beats),
            "",
            [
                harness.Goal(f"{name}, seconds", statistics.median(times), STEP_GOAL, at_most=True)
                for name, times in beats.items()
            ],
        ),
    ]


def compare_generation(quick: bool) -> harness.Section:
    """64 tokens with a KV cache and the full trace, W4A4 through the bit-exact tensor-core product."""
    from nvfp4viz.checkpoint import open_checkpoint
    from nvfp4viz.model.corpus import DEMO_PROMPTS
    from nvfp4viz.serving import load
    from sample_checkpoints import ensure

    served = {name: load(open_checkpoint(ensure(folder)), allocator="zeros") for name, folder in SAMPLES.items()}
    candidates = {
        f"{name}, {prompt}": (lambda m=model, p=prompt: m.generate(DEMO_PROMPTS[p], 64))
        for name, model in served.items()
        for prompt in ("news", "arithmetic")
    }
    times = harness.interleave(candidates, 1 if quick else 7)
    return harness.Section(
        "64 tokens of tiny-moe",
        "`ServedModel.generate(prompt, 64)`, vllm-cutlass, 2 threads.",
        harness.rows_from(times),
        "",
        [
            harness.Goal(f"{name}, seconds", statistics.median(values), TOKENS_GOAL, at_most=True)
            for name, values in times.items()
        ],
    )


# 80 layers of 384 experts: 92,160 slots of a role, in 368,640 tensors.
BIG = {"layers": 80, "experts": 384, "shards": 40}
INTERACTION_GOAL = 0.3
# Resident megabytes of the page with two such checkpoints open and compared: about 1 kB a tensor of each.
MEMORY_GOAL = 1500


def compare_interactions(quick: bool) -> harness.Section:
    """What the server computes between a reader's click in the Explorer and the last message to the browser."""
    from streamlit.testing.v1 import AppTest

    from benchmarks.big_checkpoint import make
    from nvfp4viz.ui.explorer_roots import VARIABLE

    with tempfile.TemporaryDirectory() as folder:
        size = {"layers": 2, "experts": 384, "shards": 1} if quick else BIG
        make(Path(folder) / "big", **size)
        # Other scales throughout: a comparison has as many rows as there are scales.
        make(Path(folder) / "other", seed=1, **size)
        spoil(Path(folder) / "big")
        os.environ[VARIABLE] = folder
        page = AppTest.from_file(str(Path(__file__).parents[1] / "app.py"), default_timeout=300)
        page.query_params["lang"] = "en"
        page.switch_page("pages/explorer.py")
        page.run()
        source = page.button_group(key="explorer.source")
        opening = timed(lambda: source.set_value("server").run())
        assert not page.exception
        [severity] = [item.key for item in page.button_group if str(item.key).startswith("explorer.severity.")]
        turns = {
            "another role": ("explorer.role", ("weight_scale_2", "weight_scale", "input_scale")),
            "another GPU": ("explorer.gpu", ("sm_120", "sm_100", "any")),
            "another expert": ("expert", (5, 100, 383)),
            "another layer": ("layer", (3, 4)),
            "another severity of findings": (severity, (["warn"], ["backend", "warn"], [])),
        }
        compared = {
            "words to look for among 184,320 differences": (
                "explorer.compare.words",
                ("down input_scale", "layers.5.", ""),
            ),
            "another tab and back, with the comparison": ("explorer.tabs", ("Findings", "Compare")),
        }
        repaired = {"another policy of repair (dry run)": ("policy", ("peer-max", "layer-max", "weight-only"))}

        def turn(key: str, value: object) -> None:
            page.session_state[key] = value
            page.run()
            # The big one is what is drawn: its layers and experts stand on the page.
            assert not page.exception
            assert any("384" in metric.value for metric in page.metric)

        times: dict[str, list[float]] = {}

        def measured(turns: dict[str, tuple[str, tuple[object, ...]]]) -> None:
            for lap in range(4 if quick else 9):
                for name, (key, values) in turns.items():
                    value = values[lap % len(values)]
                    seconds = timed(lambda k=key, v=value: turn(k, v))
                    if lap > 2:
                        times.setdefault(name, []).append(seconds)

        measured(turns)
        turn("explorer.tabs", "Compare")
        page.button_group(key="explorer.other.source").set_value("server").run()
        second = page.selectbox(key="explorer.other.root")
        [place] = [name for name in second.options if name.endswith("other")]
        comparing = timed(lambda: second.set_value(place).run())
        assert not page.exception
        assert any("184,320" in text.value for text in page.markdown) or quick
        measured(compared)
        turn("explorer.tabs", "Repair")
        measured(repaired)
        memory = resident()
    goals = [
        harness.Goal(f"{name}, seconds", statistics.median(values), INTERACTION_GOAL, at_most=True)
        for name, values in times.items()
    ]
    goals.append(harness.Goal("resident memory, both checkpoints open, MB", memory / 1e6, MEMORY_GOAL, at_most=True))
    return harness.Section(
        "Interactions in the Explorer on 92,160 slots",
        f"Server time of one rerun (AppTest); opening the checkpoint took {opening:.1f} s, opening a second one and "
        f"comparing them {comparing:.1f} s, once each.",
        harness.rows_from(times),
        "",
        goals,
    )


def spoil(folder: Path) -> None:
    """A NaN and an outlier among the activation scales, so that there are findings and something to mend."""
    from nvfp4viz.checkpoint import open_checkpoint

    tensors = open_checkpoint(folder).tensors
    for expert, value in ((5, "nan"), (100, 1e3)):
        entry = tensors[f"model.layers.3.mlp.experts.{expert}.down_proj.input_scale"]
        with (folder / entry.file).open("r+b") as file:
            file.seek(entry.begin)
            file.write(struct.pack("<f", float(value)))


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SAMPLES = {"holed export": "tiny-moe-nvfp4-holes", "full export": "tiny-moe-nvfp4-full"}


def measure(quick: bool) -> list[harness.Section]:
    return [compare_generation(quick), compare_interactions(quick), *compare_pages(quick)]


if __name__ == "__main__":
    harness.main(measure)
