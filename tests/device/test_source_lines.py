"""Which lines a target compiles: held against NVRTC's macros, g++'s preprocessor, and the committed machine code."""

import re
import subprocess

import pytest

from nvfp4viz.device import build, nvrtc_library, sass, source_lines
from nvfp4viz.figures import kernel_lab

SOURCES = sass.kernel_sources()


@pytest.mark.parametrize("target", sass.EXTRACTED)
def test_macros_are_those_of_the_compiler(target):
    """A program of static assertions: every macro that we name, and the absence of those that we do not."""
    binding = nvrtc_library.find_nvrtc13()
    if binding is None:
        pytest.skip("NVRTC 13 is not installed")
    ours = source_lines.macros_of(target)
    lines = [f"#if !defined({name}) || {name} != {value}\n#error {name}\n#endif" for name, value in ours.items()]
    for name in {"__CUDA_ARCH_SPECIFIC__", "__CUDA_ARCH_FAMILY_SPECIFIC__"} - ours.keys():
        lines.append(f"#ifdef {name}\n#error {name}\n#endif")
    program = binding.createProgram("\n".join(lines), "macros.cu", [], [])
    try:
        binding.compileProgram(program, (f"--gpu-architecture={target}", *build.OPTIONS))
    finally:
        log = binding.getProgramLog(program)
        binding.destroyProgram(program)
        assert "error" not in log


def _kept_by_gxx(gxx, source, target):
    """``{(file, line)}`` of the code that g++'s preprocessor leaves."""
    macros = {name: value for name, value in source_lines.macros_of(target).items() if name != "__cplusplus"}
    flags = [f"-D{name}={value}" for name, value in macros.items()]
    command = [gxx, "-E", "-x", "c++", "-std=c++17", "-I", str(build.KERNELS), *flags, str(build.KERNELS / source)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kept, file, number = set(), "", 0
    for line in text.splitlines():
        marker = re.match(r'# (\d+) "([^"]+)"', line)
        if marker:
            file, number = marker[2].rpartition("/")[2], int(marker[1])
            continue
        if line.strip():
            kept.add((file, number))
        number += 1
    return kept


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_100", "sm_100a", "sm_120", "sm_120f"])
@pytest.mark.parametrize("source", SOURCES)
def test_the_lines_are_those_that_a_preprocessor_leaves(gxx, source, target):
    texts = build.sources_of(source)
    fates = source_lines.compiled_lines(source, target, texts)
    kept = _kept_by_gxx(gxx, source, target)
    compared = 0
    for file, text in texts.items():
        before = ""
        for number, line in enumerate(text.splitlines(), start=1):
            # Lines of a macro's definition are not kept by anybody.
            if line.strip() and not line.lstrip().startswith(("#", "//")) and "\\" not in (line[-1:], before[-1:]):
                if (file, number) in kept:
                    assert fates[file][number - 1][0], f"{file}:{number} is compiled for {target}: {line}"
                    compared += 1
                elif re.match(r"\s*(asm\b|return\b|u32\b|NV_)", line):  # a statement of its own
                    assert not fates[file][number - 1][0], f"{file}:{number} is not compiled for {target}: {line}"
                    compared += 1
            before = line
    assert compared > 3


@pytest.mark.parametrize("source", SOURCES)
def test_an_instruction_is_there_exactly_where_its_line_is_compiled(source):
    """The committed machine code and the gate agree, for every operation that the file has anywhere."""
    extract = sass.read_extract(source)
    texts = build.sources_of(source)
    for one in kernel_lab.FEATURES:
        if one.id == "reciprocal" or not one.ptx:  # every division holds a reciprocal too
            continue
        have = {build.target for build in extract.kernels if kernel_lab.found(one, build)}
        if not have:
            continue
        for target in sass.EXTRACTED:
            fates = source_lines.compiled_lines(source, target, texts)
            compiled = any(fates[file][line - 1][0] for file, line in source_lines.places_of(texts, one.ptx))
            assert compiled == (target in have), f"{one.id} of {source} on {target}"


@pytest.mark.parametrize("one", [one for one in kernel_lab.FEATURES if one.ptx], ids=lambda one: one.id)
def test_every_operation_is_written_in_some_source_and_compiled_into_some_kernel(one):
    assert any(source_lines.places_of(build.sources_of(source), one.ptx) for source in SOURCES)
    assert any(kernel_lab.found(one, kernel) for source in SOURCES for kernel in sass.read_extract(source).kernels)


def test_the_software_path_is_shown_where_there_is_no_instruction():
    ptx = "cvt.rn.satfinite.e2m1x2.f32"
    on = [e.function for e in source_lines.excerpts("quantize.cu", "sm_120a", ptx)]
    off = [e.function for e in source_lines.excerpts("quantize.cu", "sm_120", ptx)]
    assert "e2m1_pack8" in on
    assert "e2m1_pack8_soft" not in on
    assert {"e2m1_pack8", "e2m1_pack8_soft"} <= set(off)
    assert "e2m1_code" not in on + off  # in the header, but not used by this file


def test_both_definitions_of_the_matrix_step_are_told_apart():
    one, other, *more = source_lines.excerpts("gemm_w4a4.cu", "sm_90", "kind::mxf4")
    assert one.function == other.function == "mma"
    assert more[0].function == "mma_soft"
    assert not any(line.compiled for line in one.lines[1:] if "asm" in line.text)
    assert all(line.compiled for line in other.lines)


def test_calls_are_followed_to_the_operation():
    texts = build.sources_of("quantize.cu")
    names = source_lines.callers(texts, "cvt.rn.satfinite.e2m1x2.f32")
    assert {"e2m1_pack8", "quantize16", "quantize_swizzled"} <= names
    assert "e4m3_byte" not in names


TEXTS = {
    "f.cu": '#include "g.cuh"\n#ifdef G\nint a;\n#else\nint b;\n#endif\n'
    "#if 0\n#if 1\nint c;\n#endif\n#elif !defined(X)\nint d;\n#endif\n",
    "g.cuh": "#pragma once\n#if __CUDA_ARCH__ >= 900 && defined(__CUDA_ARCH_SPECIFIC__)\n#define G 1\n#endif\n",
}


def test_nested_conditions_and_macros_of_headers():
    for target, compiled in {"sm_90": {5, 12}, "sm_90a": {3, 12}}.items():
        fates = source_lines.compiled_lines("f.cu", target, TEXTS)["f.cu"]
        code = {n for n, line in enumerate(TEXTS["f.cu"].splitlines(), start=1) if line.startswith("int")}
        assert {n for n in code if fates[n - 1][0]} == compiled


def test_a_condition_that_is_not_understood_is_no_guess():
    with pytest.raises(ValueError, match="__has_include"):
        source_lines.holds('__has_include("x.h")', {})
