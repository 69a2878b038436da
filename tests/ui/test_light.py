"""First paint stays light: what a lesson page must not import before a reader asks for more."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from streamlit.testing.v1 import AppTest
import nvfp4viz.warm
nvfp4viz.warm.warm_in_background = lambda: None  # it loads kernels beside the page, not for it
at = AppTest.from_file("app.py", default_timeout=60)
at.query_params["lang"] = "en"
at.switch_page("pages/{page}.py").run()
assert not at.exception
assert at.title[0].value
print(sorted({{"torch", "numba", "cupy", "aiohttp"}} & set(sys.modules)))
"""


@pytest.mark.parametrize("page", ["e2m1", "two_level_scaling"])
def test_a_lesson_page_opens_without_heavy_packages(page):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(page=page)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"
