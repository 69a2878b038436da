"""Launching on the GPU: torch's stream, no waiting, errors that surface.  What one costs, ``bench_gpu`` measures."""

import numpy as np
import pytest

from nvfp4viz.device.load import kernel
from nvfp4viz.errors import DeviceError

GIGA = 1 << 30


@pytest.fixture
def probe():
    return kernel("probe.cu", "nv_probe")


def expected(seeds):
    return seeds.astype(np.uint32) * np.uint32(1664525) + np.uint32(1013904223)


def test_a_launch_follows_torchs_stream(torch, probe):
    """On a side stream behind slow work, the kernel sees that work's result."""
    count = 1 << 20
    seeds, out = (
        torch.zeros(count, dtype=torch.int32, device="cuda"),
        torch.zeros(count, dtype=torch.int32, device="cuda"),
    )
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # cycles: some 25 ms
        seeds.fill_(7)
        probe((count + 255) // 256, 256, (seeds, out, np.int32(count)))
        assert not side.query(), "the launch did not wait"
    side.synchronize()
    assert (out.cpu().numpy().view(np.uint32) == expected(np.full(count, 7))).all()


def test_the_default_stream_does_not_serialise(torch, probe):
    """While the default stream is busy, a launch on a side stream finishes."""
    seeds = torch.arange(1000, dtype=torch.int32, device="cuda")
    out = torch.zeros_like(seeds)
    side = torch.cuda.Stream()
    probe(4, 256, (seeds, out, np.int32(1000)))  # loaded before the clock matters
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    busy = torch.cuda.Event()
    busy.record()
    with torch.cuda.stream(side):
        probe(4, 256, (seeds, out, np.int32(1000)))
    side.synchronize()
    assert not busy.query(), "the default stream was still at work"
    torch.cuda.synchronize()


def test_an_impossible_launch_is_an_error(torch, probe):
    seeds = torch.zeros(8, dtype=torch.int32, device="cuda")
    for grid, block, shared in ((1, 4096, 0), (1, 32, GIGA)):
        with pytest.raises(DeviceError) as raised:
            probe(grid, block, (seeds, seeds, np.int32(8)), shared=shared)
        assert raised.value.code == "device.launch"
    probe(1, 32, (seeds, seeds, np.int32(8)))  # the device is still usable
    torch.cuda.synchronize()


def test_an_unknown_kernel_is_an_error(torch):
    seeds = torch.zeros(8, dtype=torch.int32, device="cuda")
    with pytest.raises(DeviceError) as raised:
        kernel("probe.cu", "nv_no_such_kernel")(1, 32, (seeds,))
    assert raised.value.code == "device.no-kernel"


def test_tensors_of_the_cpu_are_refused(torch, probe):
    seeds = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(DeviceError) as raised:
        probe(1, 32, (seeds, seeds, np.int32(8)))
    assert raised.value.code == "device.mixed"


def test_from_a_thread_without_a_context(torch, probe):
    """Streamlit computes in threads that have never touched CUDA."""
    import threading

    seeds = torch.arange(1000, dtype=torch.int32, device="cuda")
    out = torch.zeros_like(seeds)
    torch.cuda.synchronize()
    failures = []

    def work():
        try:
            kernel("probe.cu", "nv_probe", ("A_FRESH_MODULE",))(4, 256, (seeds, out, np.int32(1000)))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    torch.cuda.synchronize()
    assert (out.cpu().numpy().view(np.uint32) == expected(np.arange(1000))).all()


def test_the_second_gpu(torch, probe):
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    seeds = torch.arange(1000, dtype=torch.int32, device="cuda:1")
    out = torch.zeros_like(seeds)
    assert torch.cuda.current_device() == 0
    probe(4, 256, (seeds, out, np.int32(1000)))
    assert (out.cpu().numpy().view(np.uint32) == expected(np.arange(1000))).all()
    assert torch.cuda.current_device() == 0


def test_the_resources_are_the_drivers(torch, probe):
    probe(1, 32, (torch.zeros(8, dtype=torch.int32, device="cuda"),) * 2 + (np.int32(8),))
    found = probe.resources()
    assert 1 <= found.registers <= 255
    assert found.local_bytes == 0
    assert found.max_threads >= 256
    assert probe.blocks_per_multiprocessor(256) >= 1


def test_launches_in_a_row_all_come_about_in_order(torch, probe):
    """Each reads what the one before it wrote; nothing waits for the GPU in between."""
    assert kernel("probe.cu", "nv_probe") is probe
    seeds = torch.arange(1000, dtype=torch.int32, device="cuda")
    wanted = np.arange(1000)
    for _ in range(500):
        probe(4, 256, (seeds, seeds, np.int32(1000)))
        wanted = expected(wanted)
    assert (seeds.cpu().numpy().view(np.uint32) == wanted).all()
