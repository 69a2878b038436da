"""The audit's HTML report in a browser: names in one piece on screen and on paper, and nothing wider than the page."""

import numpy as np
import pytest

from nvfp4viz.audit import run_audit
from nvfp4viz.audit.html import to_html
from tests.audit.layouts import LAYOUTS

# Letter, less two margins of 15 mm, in CSS pixels.
PAPER = 702
MEASURE = """() => ({
  pieces: [...document.querySelectorAll(".names code")].map(name => name.getClientRects().length),
  tops: [...document.querySelectorAll(".names")].map(cell =>
    [...cell.querySelectorAll("code")].map(name => Math.round(name.getBoundingClientRect().top))),
  scopes: [...document.querySelectorAll(".scope, th")].map(cell => {
    const words = document.createRange();
    words.selectNodeContents(cell);
    return new Set([...words.getClientRects()].map(line => Math.round(line.top))).size;
  }),
  reasons: Math.max(...[...document.querySelectorAll(".why")].map(cell => cell.getBoundingClientRect().right)),
  width: document.documentElement.scrollWidth,
})"""


@pytest.fixture(scope="module", params=["en", "zh"])
def report(request, tmp_path_factory):
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    for expert, value in ((1, 5.0), (3, np.nan), (6, -np.inf)):
        layout.put(tensors, expert, "down", "input_scale", value)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(to_html(run_audit(layout.open(tensors)), request.param), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize(("width", "media"), [(1280, "screen"), (390, "screen"), (PAPER, "print")])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_backend_names_stay_whole_one_below_the_other(browser, report, width, media, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.emulate_media(media=media)
    page.goto(report)
    seen = page.evaluate(MEASURE)
    context.close()
    assert len(seen["pieces"]) >= 13
    assert set(seen["pieces"]) == {1}
    assert all(sorted(set(tops)) == tops for tops in seen["tops"])
    assert set(seen["scopes"]) <= {0, 1}  # Chinese would break after every character; a phone has no heads
    assert 0 < seen["reasons"] <= width
    assert seen["width"] <= width
