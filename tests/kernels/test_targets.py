"""Every kernel compiles for every architecture, and becomes the instructions it is meant to become there.

A build for plain ``sm_100`` or ``sm_120`` compiles and silently takes the software path, so that a program that
"supports Blackwell" may never have used an FP4 unit.  Only the machine code tells.
"""

import json
import os
import re
import shutil
import subprocess
import sys
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
NARROW = re.compile(r"LDG(?!STS|DEPBAR)(?!.*\.(128|256)\b).*")

# Which of them a kernel uses where it can: file and kernel by pattern, the first that fits.
WIDE = {"16-byte load", "16-byte store"}
EXPECTED = [
    (r"probe\.cu:.*", {NO_LOCAL}),
    (r"quantize\.cu:.*", {"pack E2M1", "pack E4M3", "16-byte load", NO_LOCAL}),
    (r"quantize_mx\.cu:.*_flashinfer_ceil_.*", {"pack E2M1", "pack UE8M0", "16-byte load", NO_LOCAL}),
    (r"quantize_mx\.cu:.*_deepgemm_ceil_.*", {"pack UE8M0", "16-byte load", NO_LOCAL}),  # its ties are not the unit's
    (r"quantize_mx\.cu:.*", {"pack E2M1", "16-byte load", NO_LOCAL}),
    (r"activation_quantize\.cu:.*", {"pack E2M1", "pack E4M3", "16-byte load", NO_LOCAL}),
    (r"dequantize\.cu:.*", {"unpack E2M1", "16-byte store", NO_LOCAL}),  # 4 bytes of codes become 16
    (r"amax\.cu:.*", {"16-byte load", NO_LOCAL}),
    (r"layout\.cu:nv_interleave_gate_up", {*WIDE, NO_LOCAL}),
    (r"layout\.cu:nv_swizzle_128x4", {"16-byte store", NO_LOCAL}),
    (r"layout\.cu:nv_unswizzle_128x4", {"16-byte load", NO_LOCAL}),
    (r"layout\.cu:.*", {NO_LOCAL}),
    (r"permute\.cu:nv_(gather|combine)_.*", {*WIDE, NO_LOCAL}),
    (r"permute\.cu:.*", {NO_LOCAL}),
    (r"ranges\.cu:nv_place_ranges", {*WIDE, NO_LOCAL}),
    (r"ranges\.cu:.*", {NO_LOCAL}),
    (r"gemm_w4a4\.cu:nv_(grouped_w4a4|mma_tiles)_nvfp4.*", {"block-scaled MMA, 4X"}),
    (r"gemm_w4a4\.cu:nv_(grouped_w4a4|mma_tiles)_mxfp4.*", {"block-scaled MMA, 2X"}),
    (r"gemm_w4a16\.cu:nv_grouped_w4a16_.*", {"16-byte load"}),
    (r"gemm_w4a16\.cu:.*", set()),
    (r"selftest\.cu:nv_selftest_conversions", {"pack E2M1", "pack E4M3", "pack UE8M0"}),
    (r"selftest\.cu:nv_selftest_unpack", {"unpack E2M1"}),
    (r"selftest\.cu:.*", set()),
]
# How many loads of less than 16 bytes the code of a kernel with 16-byte loads holds at most, on any target: scales,
# offsets, a ragged end.  "Holds a 16-byte load" would be true of a kernel whose main loop loads word by word and whose
# end does not.  Numbers as NVRTC 13.0 and 12.9 compile them.
MOST_NARROW = [
    (r"quantize\.cu:.*_linear", 3),  # the row's global scale, and the search for its range
    (r"quantize\.cu:.*_swizzled", 4),
    (r"quantize\.cu:.*_placed", 3),  # the row's place and global scale
    (r"quantize_mx\.cu:.*", 0),
    (r"activation_quantize\.cu:.*_shared", 2),
    (r"activation_quantize\.cu:.*_global", 50),  # 48 gates from the table, one by one
    (r"amax\.cu:.*", 1),  # the element that is left over, or the search for the row's range
    (r"layout\.cu:nv_interleave_gate_up", 0),
    (r"layout\.cu:nv_unswizzle_128x4", 2),
    (r"permute\.cu:nv_gather_rows", 1),  # where the row comes from
    (r"permute\.cu:nv_combine_routes", 2),  # where from, and its weight
    (r"ranges\.cu:nv_place_ranges", 82),  # a path byte by byte beside the wide one, for rows that do not lie right
    (r"gemm_w4a16\.cu:nv_grouped_w4a16_16", 12),  # offsets, factors, block scales
    (r"gemm_w4a16\.cu:nv_grouped_w4a16_.*", 8),
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


def most_narrow(source, kernel):
    for pattern, most in MOST_NARROW:
        if re.fullmatch(pattern, f"{source}:{kernel}"):
            return most
    raise AssertionError(f"{source}: say in MOST_NARROW how many narrow loads {kernel} may hold")


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
        if "16-byte load" in wanted:
            narrow = sum(bool(NARROW.fullmatch(opcode)) for opcode in code.opcodes())
            if narrow > most_narrow(source, code.name):
                found.append(f"{code.name} on {target} holds {narrow} loads of less than 16 bytes")
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


@pytest.mark.filterwarnings("ignore:.*leaves out the FP4")  # plain targets are there to show it
@pytest.mark.parametrize(("source", "target"), list(cases()))
def test_a_kernel_becomes_what_it_should(source, target):
    if target == "sm_110a" and nvrtc_library.find_nvrtc13() is None:
        pytest.skip("NVRTC 13 is not installed, and 12 does not know sm_110a")
    codes = disassemble.disassemble(build.cubin(source, target))
    assert codes, "no kernel in the file"
    assert faults(source, target, codes) == []


@pytest.mark.parametrize("source", sass.kernel_sources())
def test_the_committed_extracts_say_the_same(source):
    """They come from NVRTC 13.0; the tests above from whichever NVRTC CuPy finds, 13 where one is installed."""
    for built in sass.read_extract(source).kernels:
        code = SimpleNamespace(
            name=built.name, stack_bytes=built.stack_bytes, opcodes=lambda b=built: [one.opcode for one in b.telling]
        )
        assert faults(source, built.target, [code]) == []


@pytest.mark.parametrize("table", [EXPECTED, MOST_NARROW], ids=["instructions", "narrow loads"])
def test_the_tables_speak_of_existing_kernels_alone(table):
    """Every line is the first that fits some kernel: one that stands too low would say nothing."""
    sources = sass.kernel_sources()
    names = {f"{source}:{kernel.name}" for source in sources for kernel in sass.read_extract(source).kernels}
    first = {next((pattern for pattern, _ in table if re.fullmatch(pattern, name)), None) for name in names}
    assert [pattern for pattern, _ in table if pattern not in first] == []


OLDER = """
import json, sys
from nvfp4viz.device import build, disassemble, nvrtc_library, sass
nvrtc_library.NvrtcLibrary(sys.argv[1])  # loaded first: CuPy takes it, as where NVRTC 13 is not installed
from tests.kernels.test_targets import faults
found = []
for source in sys.argv[3:] or sass.kernel_sources():
    found += faults(source, sys.argv[2], disassemble.disassemble(build.cubin(source, sys.argv[2])))
print(json.dumps([build.nvrtc().getVersion(), build.compiler_for(sys.argv[2]).getVersion(), found]))
"""


def compiled_by_nvrtc12(target, *sources):
    """``[CuPy's version, version that compiled, faults]`` from a process in which CuPy finds NVRTC 12 first."""
    library = nvrtc_library.wheel(12)
    if library is None:
        if os.environ.get("CI") == "true":
            pytest.fail("NVRTC 12 is missing, and CI must have it", pytrace=False)
        pytest.skip("NVRTC 12 is not installed")
    command = [sys.executable, "-c", OLDER, library, target, *sources]
    done = subprocess.run(command, cwd=build.KERNELS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", [pytest.param("sm_75", marks=pytest.mark.slow), "sm_90", "sm_100a", "sm_120a"])
def test_nvrtc_12_makes_the_same_of_every_kernel(target):
    """What requirements.txt brings where PyTorch is not a CUDA 13 build."""
    assert compiled_by_nvrtc12(target) == [[12, 9], [12, 9], []]


def test_what_nvrtc_12_does_not_know_goes_to_13():
    if nvrtc_library.find_nvrtc13() is None:
        pytest.skip("NVRTC 13 is not installed")
    cupys, used, found = compiled_by_nvrtc12("sm_110a", "probe.cu", "quantize.cu")
    assert (cupys, used[0], found) == ([12, 9], 13, [])


BROKEN_GATES = {
    "a macro misspelt": ("_FAMILY_SPECIFIC__", "_FAMILY_SPECIFC__", "ARCH_SPECIFIC__", "ARCH_SPECIFC__"),
    "a later number": ("__CUDA_ARCH__ >= 1000", "__CUDA_ARCH__ >= 1300"),
}


@pytest.fixture
def broken(tmp_path):
    """A copy of ``kernels/`` in which one file, the header with the gate by default, reads otherwise."""

    def copy(*replacements, file="nvfp4_math.cuh"):
        folder = tmp_path / "kernels"
        shutil.copytree(build.KERNELS, folder)
        header = folder / file
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


MAIN_LOOP = "for (int k = 0; k < 4; ++k) v[k] = __ldg(from + i + 32 * k);"
BY_WORDS = """for (int k = 0; k < 4; ++k) {
      const u32* words = reinterpret_cast<const u32*>(from + i + 32 * k);
      v[k] = uint4{__ldg(words), __ldg(words + 1), __ldg(words + 2), __ldg(words + 3)};
    }"""


def test_a_main_loop_that_loads_word_by_word_is_seen(broken):
    """The loop for the rest still loads 16 bytes at a time, so that "holds a 16-byte load" stays true."""
    folder = broken(MAIN_LOOP, BY_WORDS, file="amax.cu")
    codes = disassemble.disassemble(build.compile_kernel("amax.cu", "sm_90", folder=folder))
    (code,) = [code for code in codes if code.name == "nv_amax_bf16"]
    assert any(opcode.startswith("LDG.E.128") for opcode in code.opcodes())
    found = faults("amax.cu", "sm_90", [code])
    assert len(found) == 1
    assert "loads of less than 16 bytes" in found[0]


def test_forced_software_has_no_fp4_instruction():
    """The self-test compares the two paths, so the macro must really switch."""
    codes = disassemble.disassemble(build.cubin("quantize.cu", "sm_100a", ("NV_FORCE_SOFT",)))
    opcodes = {opcode for code in codes for opcode in code.opcodes()}
    assert not any(re.fullmatch(FEATURES[name][0], opcode) for name in FP4 for opcode in opcodes)
