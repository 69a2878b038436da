"""A self-test report as ``make selftest`` writes it, without a GPU."""

from nvfp4viz.device import selftest


def report(capability, differing, date="2026-11-29 20:00 UTC", sources=None):
    """JSON of a GPU called NVIDIA X, with one comparison of `differing` and one that it has nothing to compare for."""
    checks = (
        selftest.Check("e2m1", "E2M1 instruction against its definition", 0, None),
        selftest.Check("e4m3", "E4M3 instruction against software", 1 << 32, differing, "0x3f800000"),
    )
    done = selftest.SelfTest(
        "NVIDIA X", capability, "sm_90", "13.0", "13.0", {"torch": "2.11"}, "3.12", date, sources or {}, {}, checks, 4.0
    )
    return selftest.to_json(done)
