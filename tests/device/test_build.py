"""Compiling needs no GPU: explicit targets, a cache that several processes share, one line when it fails."""

import concurrent.futures
import shutil
import struct
import subprocess
import sys

import pytest

from nvfp4viz.device import build
from nvfp4viz.errors import DeviceError

pytest.importorskip("cupy", reason="CuPy brings NVRTC")

HEADER = "__host__ __device__ inline float f(float x) { return x * FACTOR; }\n"
KERNEL = '#include "f.cuh"\nextern "C" __global__ void nv_f(float* x) { x[threadIdx.x] = f(x[threadIdx.x]); }\n'
TWO = ("FACTOR=2.0f",)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NVFP4VIZ_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "f.cuh").write_text(HEADER)
    (folder / "f.cu").write_text(KERNEL)
    return folder


def kept():
    return sorted(path.name for path in build.cache_dir().glob("*"))


def test_targets_name_their_architecture_in_full():
    capabilities = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
    assert [build.target_of(c) for c in capabilities] == [
        "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"
    ]  # fmt: skip


def test_a_second_call_reads_the_cache(folder, monkeypatch):
    code = build.cubin("f.cu", "sm_90", TWO, folder=folder)
    assert len(kept()) == 1
    monkeypatch.setattr(build, "compile_kernel", lambda *a, **k: pytest.fail("compiled twice"))
    assert build.cubin("f.cu", "sm_90", TWO, folder=folder) == code


@pytest.mark.parametrize("change", ["header", "source", "target", "define", "nvrtc"])
def test_whatever_decides_the_code_is_in_the_key(folder, monkeypatch, change):
    target, defines = "sm_80", TWO
    build.cubin("f.cu", target, defines, folder=folder)
    if change == "header":
        (folder / "f.cuh").write_text(HEADER + "// a comment\n")
    elif change == "source":
        (folder / "f.cu").write_text(KERNEL + "// a comment\n")
    elif change == "target":
        target = "sm_120a"
    elif change == "define":
        defines = ("FACTOR=3.0f",)
    else:
        real = build.nvrtc()

        class Newer:
            def __getattr__(self, name):
                return (lambda: (99, 9)) if name == "getVersion" else getattr(real, name)

        monkeypatch.setattr(build, "nvrtc", Newer)
    build.cubin("f.cu", target, defines, folder=folder)
    assert len(kept()) == 2


def flip(code, at):
    return code[:at] + bytes([code[at] ^ 1]) + code[at + 1 :]


DAMAGES = {
    "cut by a byte": lambda b: b[:-1],
    "cut": lambda b: b[:100],
    "empty": lambda b: b"",
    "junk": lambda b: b"x" * len(b),
    "a byte in the middle": lambda b: flip(b, len(b) // 2),
    "the last byte": lambda b: flip(b, len(b) - 1),
    "junk behind the header": lambda b: b[:64] + b"x" * (len(b) - 64),
    "longer": lambda b: b + b"x",
    "without its digest, as older versions wrote it": lambda b: b[: -build.DIGEST],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_cubin_is_made_again(folder, damage):
    code = build.cubin("f.cu", "sm_90", TWO, folder=folder)
    (path,) = build.cache_dir().iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert build.cubin("f.cu", "sm_90", TWO, folder=folder) == code
    assert path.read_bytes() == whole


def test_anew_does_not_ask_the_cache(folder, monkeypatch):
    code = build.cubin("f.cu", "sm_90", TWO, folder=folder)
    compiled = []
    monkeypatch.setattr(build, "compile_kernel", lambda *how, **more: compiled.append(how) or code)
    assert build.cubin("f.cu", "sm_90", TWO, folder=folder, anew=True) == code
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "target",
    ["bogus", "", "compute_90", "sm_", "sm_90\n", "sm_120a\n", "sm_120A", "sm_９0", "sm_090", " sm_90", None, 90],
)
@pytest.mark.parametrize("call", ["cubin", "compile_kernel"])
def test_what_is_no_target_is_refused(folder, call, target):
    with pytest.raises(DeviceError) as raised:
        getattr(build, call)("f.cu", target, TWO, folder=folder)
    assert (raised.value.code, raised.value.params) == ("device.target", {"target": repr(target)})


@pytest.mark.parametrize("defines", [(5,), ("A", None), ("=2",), ("",), ("a b",), "FACTOR=2.0f", (b"FACTOR=2",)])
@pytest.mark.parametrize("call", ["cubin", "compile_kernel"])
def test_what_is_no_macro_is_refused(folder, call, defines):
    with pytest.raises(DeviceError) as raised:
        getattr(build, call)("f.cu", "sm_90", defines, folder=folder)
    assert raised.value.code == "device.define"


def test_a_target_without_its_letter_is_warned_of(folder, recwarn):
    """From the compiler and from the cache; 9.0 and earlier have no FP4 to lose."""
    for _ in range(2):
        with pytest.warns(UserWarning, match="sm_120 leaves out the FP4 instructions.*Compile for sm_120a"):
            build.cubin("f.cu", "sm_120", TWO, folder=folder)
    recwarn.clear()
    for target in ("sm_90", "sm_120a", "sm_120f"):
        build.cubin("f.cu", target, TWO, folder=folder)
    assert not recwarn.list


def test_a_cache_that_cannot_be_written_is_done_without(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("NVFP4VIZ_CACHE", str(tmp_path / "file"))
    assert build.cubin("f.cu", "sm_90", TWO, folder=folder)[:4] == b"\x7fELF"


def test_several_processes_share_the_cache(folder):
    """All of them get the same whole file, and no half-written one stays behind."""
    code = (
        "import sys, hashlib; from pathlib import Path; from nvfp4viz.device.build import cubin;"
        "print(hashlib.sha256(cubin('f.cu', 'sm_90', ('FACTOR=2.0f',), folder=Path(sys.argv[1]))).hexdigest())"
    )
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        runs = list(
            pool.map(
                lambda _: subprocess.run(
                    [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
                ),
                range(3),
            )
        )
    assert len({run.stdout for run in runs}) == 1
    assert len(kept()) == 1
    assert not any(name.endswith(".part") for name in kept())


def test_the_code_is_as_long_as_its_header_says(folder):
    """CuPy 14.2 hands out one byte less; loaders and cuobjdump refuse that."""
    code = build.compile_kernel("f.cu", "sm_120a", TWO, folder=folder)
    table, size, count = (struct.unpack_from(kind, code, at)[0] for kind, at in (("<Q", 40), ("<H", 58), ("<H", 60)))
    assert len(code) >= table + size * count
    readelf = shutil.which("readelf")
    if readelf:
        (folder / "code").write_bytes(code)
        subprocess.run([readelf, "-S", "-l", "code"], cwd=folder, capture_output=True, check=True)
    with pytest.raises(ValueError, match="ends after"):
        build.whole_elf(code[:-2])


def test_a_compile_error_is_one_line(folder):
    (folder / "f.cu").write_text('#include "f.cuh"\n// fine\n__device__ float wrong() { return nonsense; }\n')
    with pytest.raises(DeviceError) as raised:
        build.cubin("f.cu", "sm_90", TWO, folder=folder)
    assert raised.value.code == "device.compile"
    assert raised.value.params["log"] == 'f.cu(3): error: identifier "nonsense" is undefined'
    assert not build.cache_dir().exists()


def test_a_target_that_nvrtc_does_not_know_is_named(folder):
    with pytest.raises(DeviceError) as raised:
        build.cubin("f.cu", "sm_999a", TWO, folder=folder)
    assert raised.value.params["target"] == "sm_999a"
    assert "--gpu-architecture" in raised.value.params["log"]


def test_a_missing_include_is_named(folder):
    (folder / "f.cuh").unlink()
    with pytest.raises(DeviceError) as raised:
        build.cubin("f.cu", "sm_90", TWO, folder=folder)
    assert raised.value.params == {"file": "f.cuh"}


def test_includes_are_followed_through_headers(folder):
    (folder / "f.cuh").write_text('#pragma once\n  #  include "g.cuh"\n#include "f.cuh"\n' + HEADER)
    (folder / "g.cuh").write_text("#pragma once\n")
    assert set(build.sources_of("f.cu", folder)) == {"f.cu", "f.cuh", "g.cuh"}
    assert "g.cuh" in build.sources_of("f.cu", folder)


def test_without_nvrtc_there_is_a_reason(monkeypatch):
    build.nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(DeviceError) as raised:
        build.cubin("probe.cu", "sm_90")
    assert raised.value.code == "device.no-nvrtc"
    build.nvrtc.cache_clear()
