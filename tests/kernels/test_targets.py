"""Every kernel compiles for every architecture, and becomes the instructions it is meant to become there.

A build for plain ``sm_100`` or ``sm_120`` compiles and silently takes the software path, so that a program that
"supports Blackwell" may never have used an FP4 unit.  Only the machine code tells.
"""

import os
import re
import shutil
from types import SimpleNamespace

import pytest

from nvfp4viz.device import build, disassemble, nvrtc_library, sass
from nvfp4viz.errors import DeviceError

pytest.importorskip("cupy", reason="CuPy brings NVRTC")
if disassemble.cuobjdump() is None:
    if os.environ.get("CI") == "true":
        pytest.fail("cuobjdump is missing, and CI must have it", pytrace=False)
    pytest.skip("cuobjdump is not installed", allow_module_level=True)

# What an instruction looks like, and where the hardware has it.
FEATURES = {
    "pack E2M1": (r"F2FP\.\S*E2M1\.F32\S*", lambda number, special: special and number >= 100),
    "unpack E2M1": (r"F2FP\.F16\.E2M1\.UNPACK\S*", lambda number, special: special and number >= 100),
    "pack UE8M0": (r"F2FP\.\S*E8\.F32\S*", lambda number, special: special and number >= 100),
    "pack E4M3": (r"F2FP\.\S*E4M3\.F32\S*", lambda number, special: number >= 89),
    "block-scaled MMA, 4X": (
        r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X",
        lambda number, special: special and number >= 120,
    ),
    "block-scaled MMA, 2X": (
        r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.E8",
        lambda number, special: special and number >= 120,
    ),
    "16-byte load": (r"(LDG\S*|LDGSTS\S*)\.(128|256)\S*", lambda number, special: True),
    "16-byte store": (r"STG\S*\.(128|256)\S*", lambda number, special: True),
}
FP4 = {name for name in FEATURES if name.endswith(("E2M1", "UE8M0", "X"))}
NO_LOCAL = "no local memory"

# Which of them a kernel uses where it can: file and kernel by pattern, the first that fits.
WIDE = {"16-byte load", "16-byte store"}
EXPECTED = [
    (r"probe\.cu:.*", {NO_LOCAL}),
    (r"quantize\.cu:.*", {"pack E2M1", "pack E4M3", "16-byte load", NO_LOCAL}),
    (r"quantize_mx\.cu:.*_flashinfer_ceil_.*", {"pack E2M1", "pack UE8M0", "16-byte load", NO_LOCAL}),
    (r"quantize_mx\.cu:.*_deepgemm_ceil_.*", {"pack UE8M0", "16-byte load", NO_LOCAL}),  # its ties are not the unit's
    (r"quantize_mx\.cu:.*", {"pack E2M1", "16-byte load", NO_LOCAL}),
    (r"activation_quantize\.cu:.*", {"pack E2M1", "pack E4M3", "16-byte load", NO_LOCAL}),
    (r"dequantize\.cu:.*", {"unpack E2M1", "16-byte store", NO_LOCAL}),
    (r"amax\.cu:.*", {"16-byte load", NO_LOCAL}),
    (r"layout\.cu:nv_interleave_gate_up", {*WIDE, NO_LOCAL}),
    (r"layout\.cu:nv_swizzle_128x4", {"16-byte store", NO_LOCAL}),
    (r"layout\.cu:nv_unswizzle_128x4", {"16-byte load", NO_LOCAL}),
    (r"layout\.cu:.*", {NO_LOCAL}),
    (r"permute\.cu:nv_(gather|combine)_.*", {*WIDE, NO_LOCAL}),
    (r"permute\.cu:.*", {NO_LOCAL}),
    (r"ranges\.cu:nv_place_ranges", {*WIDE, NO_LOCAL}),
    (r"ranges\.cu:.*", {NO_LOCAL}),
    (r"dequantize\.cu:nv_dequantize_bf16_flat", {"unpack E2M1", *WIDE, NO_LOCAL}),
    (r"gemm_w4a4\.cu:nv_(grouped_w4a4|mma_tiles)_nvfp4.*", {"block-scaled MMA, 4X"}),
    (r"gemm_w4a4\.cu:nv_(grouped_w4a4|mma_tiles)_mxfp4.*", {"block-scaled MMA, 2X"}),
    (r"gemm_w4a16\.cu:nv_grouped_w4a16_.*", {"16-byte load"}),
    (r"gemm_w4a16\.cu:.*", set()),
    (r"selftest\.cu:nv_selftest_conversions", {"pack E2M1", "pack E4M3", "pack UE8M0"}),
    (r"selftest\.cu:nv_selftest_unpack", {"unpack E2M1"}),
    (r"selftest\.cu:.*", set()),
]
# Siblings of another target, left to the slow tests; the kernel that the gate was made for meets every target.
SIBLINGS = {"sm_86", "sm_90a", "sm_100f", "sm_120f", *sass.PLAIN}
ALWAYS = {"quantize.cu"}


def features_of(source, kernel):
    """What ``EXPECTED`` says of one kernel; every kernel must be spoken of."""
    for pattern, features in EXPECTED:
        if re.fullmatch(pattern, f"{source}:{kernel}"):
            return features
    raise AssertionError(f"{source}: say in EXPECTED what {kernel} must become")


def faults(source, target, codes):
    """What is missing from, or wrongly in, the machine code of one file for one target."""
    number, special = int(re.sub(r"\D", "", target)), target[-1] in "af" and target != "sm_90a"
    found = []
    for code in codes:
        wanted = features_of(source, code.name)
        opcodes = set(code.opcodes())
        for name, (pattern, exists) in FEATURES.items():
            there = any(re.fullmatch(pattern, opcode) for opcode in opcodes)
            if name in wanted and exists(number, special) and not there:
                found.append(f"{code.name} on {target} lacks: {name}")
            if there and not exists(number, special):
                found.append(f"{code.name} on {target} has: {name}")
            if there and name not in wanted and name in FP4:
                found.append(f"{code.name} on {target} uses unasked: {name}")
        if NO_LOCAL in wanted:
            local = sorted(opcode for opcode in opcodes if re.match(r"(LDL|STL)\b", opcode))
            if local or code.stack_bytes:
                found.append(f"{code.name} on {target} spills: {local} {code.stack_bytes} bytes")
    return found


def cases():
    for source in sass.kernel_sources():
        for target in sass.EXTRACTED:
            marks = [pytest.mark.slow] if target in SIBLINGS and source not in ALWAYS else []
            yield pytest.param(source, target, id=f"{source}-{target}", marks=marks)


@pytest.mark.parametrize(("source", "target"), list(cases()))
def test_a_kernel_becomes_what_it_should(source, target):
    if target == "sm_110a" and nvrtc_library.find_nvrtc13() is None:
        pytest.skip("NVRTC 13 is not installed, and 12.9 does not know sm_110a")
    codes = disassemble.disassemble(build.cubin(source, target))
    assert codes, "no kernel in the file"
    assert faults(source, target, codes) == []


@pytest.mark.parametrize("source", sass.kernel_sources())
def test_the_committed_extracts_say_the_same(source):
    """They come from NVRTC 13, which users of CUDA 13 compile with; the tests above from 12.9."""
    for built in sass.read_extract(source).kernels:
        code = SimpleNamespace(
            name=built.name, stack_bytes=built.stack_bytes, opcodes=lambda b=built: [one.opcode for one in b.telling]
        )
        assert faults(source, built.target, [code]) == []


def test_the_table_speaks_of_existing_kernels_alone():
    sources = sass.kernel_sources()
    stale = [pattern for pattern, _ in EXPECTED if not any(pattern.startswith(re.escape(s)) for s in sources)]
    assert stale == []


BROKEN_GATES = {
    "a macro misspelt": ("_FAMILY_SPECIFIC__", "_FAMILY_SPECIFC__", "ARCH_SPECIFIC__", "ARCH_SPECIFC__"),
    "a later number": ("__CUDA_ARCH__ >= 1000", "__CUDA_ARCH__ >= 1300"),
}


@pytest.fixture
def broken(tmp_path):
    """A copy of ``kernels/`` whose gate reads otherwise."""

    def copy(*replacements):
        folder = tmp_path / "kernels"
        shutil.copytree(build.KERNELS, folder)
        header = folder / "nvfp4_math.cuh"
        text = header.read_text(encoding="utf-8")
        for old, new in zip(replacements[::2], replacements[1::2], strict=True):
            assert old in text
            text = text.replace(old, new)
        header.write_text(text, encoding="utf-8")
        return folder

    return copy


@pytest.mark.parametrize("gate", BROKEN_GATES)
def test_a_gate_that_never_opens_is_seen(broken, gate):
    """The build succeeds, computes the right bits in software, and the check says what is missing."""
    folder = broken(*BROKEN_GATES[gate])
    codes = disassemble.disassemble(build.compile_kernel("quantize.cu", "sm_100a", folder=folder))
    found = faults("quantize.cu", "sm_100a", codes)
    assert any("lacks: pack E2M1" in fault for fault in found)


def test_a_gate_that_opens_for_plain_targets_does_not_compile(broken):
    folder = broken("(defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__))", "1")
    with pytest.raises(DeviceError) as raised:
        build.compile_kernel("quantize.cu", "sm_100", folder=folder)
    assert "sm_100" in raised.value.params["log"]


def test_forced_software_has_no_fp4_instruction():
    """The self-test compares the two paths, so the macro must really switch."""
    codes = disassemble.disassemble(build.cubin("quantize.cu", "sm_100a", ("NV_FORCE_SOFT",)))
    opcodes = {opcode for code in codes for opcode in code.opcodes()}
    assert not any(re.fullmatch(FEATURES[name][0], opcode) for name in FP4 for opcode in opcodes)
