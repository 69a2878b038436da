"""The committed machine-code extracts belong to the present sources and say what a compiler says today."""

import pytest

from nvfp4viz.device import disassemble, nvrtc_library, sass

LINES = (
    "@!P0 LDG.E.128 R4, desc[UR4][R2.64]",
    "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C R5, R7, R6, RZ",
    "LDG.E.128 R8, desc[UR4][R2.64+0x10]",
    "LDG.E R8, desc[UR4][R2.64]",
    "@UP1 UTCOMMA.4X gdesc[UR6], gdesc[UR8], tmem[UR4]",
    "EXIT",
)


def test_the_telling_instructions_are_counted():
    assert sass.telling(LINES) == (
        sass.Instruction("F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C", 1, LINES[1]),
        sass.Instruction("LDG.E.128", 2, LINES[0]),
        sass.Instruction("UTCOMMA.4X", 1, LINES[4]),
    )


def test_an_extract_reads_back_as_written():
    records = tuple(
        sass.KernelOnTarget("f.cu", name, target, 40, 1024, 8, 6, sass.telling(LINES[:count]))
        for name in ("nv_f", "nv_g")
        for count, target in enumerate(("sm_90", "sm_120a"), start=2)
    )
    extract = sass.Extract(
        "f.cu", "ab" * 32, "13.0", "13.5.37", (*records, records[0].__class__("f.cu", "nv_h", "sm_90", 2, 0, 0, 1, ()))
    )
    assert sass.from_text(sass.to_text(extract)) == extract


@pytest.mark.parametrize("source", sass.kernel_sources())
def test_the_extract_belongs_to_the_sources(source):
    assert sass.is_fresh(source), f"{source} or a header of it has changed: run make sass"
    extract = sass.read_extract(source)
    names = {kernel.name for kernel in extract.kernels}
    assert {(k.name, k.target) for k in extract.kernels} == {(n, t) for n in names for t in sass.EXTRACTED}


def test_no_extract_outlives_its_source():
    assert {path.name for path in sass.FOLDER.glob("*.txt")} == {sass.path_of(s).name for s in sass.kernel_sources()}


@pytest.mark.slow
@pytest.mark.parametrize("source", sass.kernel_sources())
def test_compiling_today_says_the_same(source):
    """The same compiler and the same sources give the same code: that of ``tests/kernels/test_targets.py``, kept."""
    if nvrtc_library.find_nvrtc13() is None or disassemble.cuobjdump() is None:
        pytest.skip("NVRTC 13 or cuobjdump is not installed")
    assert disassemble.extract(source, cached=True) == sass.path_of(source).read_text(encoding="utf-8")
