"""Every page says what computes here; the story's replies say what computed them."""

import pytest

from nvfp4viz import device
from nvfp4viz.errors import DeviceError

from .conftest import texts

H200 = device.Gpu("NVIDIA H200", (9, 0))
GPU = device.DeviceReport("cuda", "EPYC", 2, (H200,), (13, 0), None)
FULL = device.DeviceReport("cpu", "EPYC", 2, (H200,), (13, 0), DeviceError("device.torch-cpu"))


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(
    ("report", "there"),
    [(GPU, ["NVIDIA H200", "EPYC"]), (FULL, ["EPYC", {"en": "built without CUDA", "zh": "不带 CUDA"}])],
    ids=["gpu", "no cuda build"],
)
def test_the_line_names_what_computes(open_page, monkeypatch, lang, report, there):
    monkeypatch.setattr(device, "_found", lambda: report)
    monkeypatch.setattr(device.outcome, "failure", None)
    read = texts(open_page("e2m1", lang=lang))
    for part in there:
        assert (part if isinstance(part, str) else part[lang]) in read


def test_a_reply_says_what_computed_it(open_page):
    read = "\n".join(str(part.value) for part in open_page("empty_answer", lang="en").get("html"))
    assert " s, CPU" in read or " s, GPU" in read
