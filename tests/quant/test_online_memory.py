"""Peak memory of the ways of online packing: measured where they run, and held to what is counted from shapes."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.errors import NvError
from nvfp4viz.quant import online_memory
from nvfp4viz.quant.online import WAYS, pack_online, peak_buffers, work_space

ROOT = Path(__file__).parents[2]
REST = 24 << 10
"""What no array of weights accounts for: the kernel's scratch of 15 KiB, the recipe's tables, Python's own objects."""
EXPERT = 64
"""The same for each expert: its maximum and its scale are Python objects before they are an array."""


def weights(shape):
    return (np.random.default_rng(1).standard_normal(shape) / 10).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("shape", [(64, 128, 128), (4, 2048, 1024), (1024, 1, 16)])
def test_measured_is_counted_and_the_work_space_that_is_named(shape):
    """Less than what is counted and named would mean that either is wrong; above it lies a small rest alone."""
    measured = online_memory.measure_peaks(weights(shape))
    assert tuple(measured) == WAYS
    for way, peak in measured.items():
        counted = sum(peak_buffers(shape, way).values())
        named = counted + work_space(shape, way)
        assert named <= peak <= named + REST + EXPERT * shape[0], way


def test_work_space_is_small_beside_what_is_counted():
    """At the size of a served model it is under two per cent; a list that is stacked at the end would be a hundred."""
    for way in WAYS:
        assert work_space((256, 4096, 4096), way) < 0.02 * sum(peak_buffers((256, 4096, 4096), way).values())


ONCE = """
import numpy as np
from nvfp4viz.quant import online_memory
online_memory.RUNS = 1
w = np.ones((8, 32, 64), online_memory.BFLOAT16)
print(*(online_memory.traced_peak(w, "direct") for _ in range(2)))
"""


def test_what_is_loaded_once_is_no_part_of_it():
    """In a fresh process, where packing loads the kernels first: tens of MiB, beside weights of 32 KiB."""
    done = subprocess.run([sys.executable, "-c", ONCE], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    assert abs(first - second) < 4096


RESIDENT = """
import sys, numpy as np
from pathlib import Path
from nvfp4viz.quant.online import BFLOAT16, pack_online

def pages(name):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) << 10

w = np.zeros((64, 512, 512), BFLOAT16)
w[:] = (np.random.default_rng(1).standard_normal(w.shape[1:]) / 10).astype(BFLOAT16)
pack_online(w[:1], sys.argv[1])
Path("/proc/self/clear_refs").write_text("5")  # forget the highest mark so far
before = pages("VmRSS")
made = pack_online(w, sys.argv[1])
print(pages("VmHWM") - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self")
@pytest.mark.parametrize("way", WAYS)
def test_the_kernel_s_high_water_mark_tells_the_same(way):
    """A second witness: tracemalloc would miss what NumPy does not announce.  Pages that an allocator kept from
    before, or keeps for later, are the 4 MiB either way."""
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, way], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    if "clear_refs" in done.stderr:
        pytest.skip("this system does not let a process reset its high-water mark")
    assert done.returncode == 0, done.stderr
    counted = sum(peak_buffers((64, 512, 512), way).values())
    assert abs(int(done.stdout) - counted) < (4 << 20)


def test_a_process_that_cannot_be_started_or_fails_is_named(monkeypatch):
    for program in ("/no/such/python", sys.executable):
        monkeypatch.setattr(online_memory.sys, "executable", program)
        monkeypatch.setenv("PYTHONHOME", "/no/such/home")  # the interpreter ends at once, with its reason
        with pytest.raises(NvError) as caught:
            online_memory.measure_peaks(weights((1, 1, 16)))
        assert caught.value.code == "online.process"
        reason = caught.value.params["reason"]
        assert reason.strip()
        assert "/no/such" not in reason


@pytest.mark.parametrize("w", [np.zeros((1, 1, 16), np.float32), weights((0, 1, 16)), weights((1, 16))])
def test_what_is_no_weight_is_refused(w):
    for refuses in (online_memory.measure_peaks, pack_online):
        with pytest.raises(NvError) as caught:
            refuses(w)
        assert caught.value.code == "online.weights"
