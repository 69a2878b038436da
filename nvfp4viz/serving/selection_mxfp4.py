"""Which backend vLLM takes for MXFP4 experts.  Source: `serving-vllm.md` 5.3, read from vLLM 0.33.0.

The spec gives the orders, and who is left out; of several classes it does not give the conditions.  Such a candidate is
``"open"``, and a selection that rests with one says so instead of guessing.  Which variants of a name are tried was
read in ``_filter_by_activation``, ``_get_requested_backends`` and ``select_deepseek_v4_mxfp4_moe_backend`` of vLLM's
``oracle/mxfp4.py``, commit 0920a90, whose automatic order is not yet that of 0.33.0; where Triton's two classes run, in
``experts/gpt_oss_triton_kernels_moe.py``, commit 0221ab4.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvfp4viz.errors import ServingError
from nvfp4viz.serving.selection import (
    FAMILY_100,
    FAMILY_120,
    FROM_75,
    HOPPER,
    Candidate,
    Devices,
    Selection,
    ask,
    capability_of,
    within,
)

MODELS = ("gpt-oss", "deepseek-v4")
CUDA_ROCM = ("cuda", "rocm")
WANTED = ("none", "mxfp8", "mxfp4")
"""The activation format that a quantisation config asks for."""

FORMATS = ("standard", "batched")
MX_CHECKS = ("platform", "device", "package", "format")


@dataclass(frozen=True, slots=True)
class MxBackend:
    """A row of the table.

    Attributes
    ----------
    enum
        In the spec's short form.
    choice
        The value of ``--moe-backend`` that tries it.
    activation
        ``"bf16"``, ``"fp8"``, ``"mxfp8"`` or ``"mxfp4"``: what it multiplies the weights with.
    devices, platforms, package, formats
        As far as they were read; ``devices`` are CUDA's alone.
    open
        Not all of its conditions were read; a device or package that was read can still refuse.
    id
        In the audit's vocabulary, where it has a word.
    """

    enum: str
    choice: str
    activation: str = "bf16"
    devices: Devices = FROM_75
    platforms: tuple[str, ...] = ("cuda",)
    package: str | None = None
    formats: tuple[str, ...] = ("standard",)
    open: bool = False
    id: str | None = None


_ROWS = (
    MxBackend("TRTLLM_BF16", "flashinfer_trtllm", "bf16", FAMILY_100, package="flashinfer",
              id="vllm-flashinfer-trtllm"),
    MxBackend("TRTLLM_MXFP8", "flashinfer_trtllm", "mxfp8", FAMILY_100, package="flashinfer",
              id="vllm-flashinfer-trtllm"),
    MxBackend("AITER", "aiter", platforms=("rocm",), open=True),
    # What was read keeps to 9.0 up to below 11.0, and on ROCm to gfx9 and gfx11 or later.  It leaves family 120 out,
    # for which 0.33.0 has a place in the order all the same: there it stays open.
    MxBackend("TRITON", "triton", devices=HOPPER + FAMILY_100 + FAMILY_120, platforms=CUDA_ROCM, open=True),
    # The same class as for NVFP4, so its devices are known; where it takes MXFP4 among them was not read.
    MxBackend("FI_CUTLASS_BF16", "flashinfer_cutlass", "bf16", HOPPER + FAMILY_100 + FAMILY_120, package="flashinfer",
              open=True, id="vllm-flashinfer-cutlass"),
    MxBackend("FI_CUTLASS_MXFP8", "flashinfer_cutlass", "mxfp8", HOPPER + FAMILY_100 + FAMILY_120,
              package="flashinfer", open=True, id="vllm-flashinfer-cutlass"),
    MxBackend("CUTLASS_MXFP4_MXFP4", "cutlass", "mxfp4", open=True, id="vllm-cutlass"),
    # DeepGEMM takes packed FP4 on family 100 alone, and on 9.0 DeepSeek V4 falls to Marlin (vLLM #57772); the class's
    # further conditions were not read.
    MxBackend("DEEPGEMM_MXFP4", "deep_gemm", "fp8", devices=FAMILY_100, open=True),
    MxBackend("MARLIN", "marlin", id="vllm-marlin"),
    MxBackend("BATCHED_MARLIN", "marlin", formats=("batched",), id="vllm-marlin"),
    MxBackend("HUMMING", "humming", package="humming", formats=FORMATS, id="vllm-humming"),
    MxBackend("XPU", "xpu", platforms=("xpu",)),
    MxBackend("CPU", "cpu", platforms=("cpu",)),
    MxBackend("TRITON_UNFUSED", "triton_unfused", devices=HOPPER + FAMILY_100 + FAMILY_120, platforms=CUDA_ROCM,
              open=True),
    MxBackend("EMULATION", "emulation", platforms=CUDA_ROCM, open=True, id="vllm-emulation"),
)  # fmt: skip
MXFP4: dict[str, MxBackend] = {row.enum: row for row in _ROWS}

_ORDERS = {
    "gpt-oss": (
        "TRTLLM_BF16", "TRTLLM_MXFP8", "AITER", "TRITON", "FI_CUTLASS_BF16", "FI_CUTLASS_MXFP8",
        "CUTLASS_MXFP4_MXFP4", "MARLIN", "BATCHED_MARLIN", "HUMMING", "XPU", "CPU", "EMULATION",
    ),
    "deepseek-v4": ("TRTLLM_MXFP8", "DEEPGEMM_MXFP4", "MARLIN", "BATCHED_MARLIN", "HUMMING"),
}  # fmt: skip
MX_NAMES = tuple(dict.fromkeys(row.choice for row in _ROWS))
"""What ``--moe-backend`` takes for MXFP4, besides ``auto``, as far as it was read."""

MX_CHOICES = ("flashinfer_trtllm", "flashinfer_cutlass", "triton", "cutlass", "deep_gemm", "marlin", "humming")


@dataclass(frozen=True, slots=True)
class Mxfp4Request:
    """A deployment of MXFP4 experts; ``wanted`` counts for gpt-oss alone, and ``choice`` is ``"auto"`` or a name."""

    gpu: str = "sm_120"
    model: str = "gpt-oss"
    wanted: str = "none"
    format: str = "standard"
    flashinfer: bool = True
    humming: bool = False
    choice: str = "auto"


def mxfp4_order(request: Mxfp4Request) -> tuple[MxBackend, ...]:
    """Who is asked.

    gpt-oss without a requested activation keeps the BF16 entries; with one, the matching come first and BF16 follows
    with a warning.  On family 120 Triton moves behind batched Marlin; DeepSeek V4 has Humming first on 9.0 and a list
    of its own on ROCm.
    """
    capability = capability_of(request.gpu)
    names = list(_ORDERS[request.model])
    if request.model == "deepseek-v4":
        if capability is None:
            names = ["AITER", "TRITON_UNFUSED", "EMULATION"]
        elif capability == 90:
            names.insert(0, names.pop(names.index("HUMMING")))
        return tuple(MXFP4[name] for name in names)
    if within(capability, FAMILY_120):
        names.remove("TRITON")
        names.insert(names.index("BATCHED_MARLIN") + 1, "TRITON")
    rows = [MXFP4[name] for name in names]
    matching = [row for row in rows if row.activation == request.wanted]
    return tuple(matching + [row for row in rows if row.activation == "bf16"])


def mxfp4_variants(request: Mxfp4Request) -> tuple[tuple[MxBackend, ...], tuple[MxBackend, ...]]:
    """The variants of a name that are tried in turn, and those among them of which that was not read.

    For gpt-oss the format asked for decides, and BF16 where none is.  A name without a variant in that format was an
    error in the version that was read, while the automatic order of 0.33.0 goes on in BF16; and for DeepSeek V4 every
    variant was tried, while 0.33.0 gives its experts an MXFP8 key (`numerics-vllm.md` 10).  Both are left open.
    """
    rows = tuple(
        row
        for row in MXFP4.values()
        if row.choice == request.choice and (row.choice != "marlin" or request.format in row.formats)
    )
    bf16 = tuple(row for row in rows if row.activation == "bf16")
    if request.model == "deepseek-v4":
        return rows, bf16 if any(row.activation == "mxfp8" for row in rows) else ()
    if request.wanted == "none":
        return bf16 or rows, ()
    # Emulation takes the format that is asked for, whichever it is.
    matching = tuple(row for row in rows if row.activation == request.wanted or row.enum == "EMULATION")
    return (matching, ()) if matching else (bf16 or rows, bf16 or rows)


def mxfp4_failed(row: MxBackend, request: Mxfp4Request) -> str | None:
    """The check at which a candidate refuses, ``"open"``, or None."""
    capability = capability_of(request.gpu)
    platform = "rocm" if capability is None else "cuda"
    answers = {
        "platform": platform in row.platforms,
        "device": capability is None or within(capability, row.devices),
        "package": row.package is None or getattr(request, row.package),
        "format": row.open or request.format in row.formats,
    }
    failed = next((check for check in MX_CHECKS if not answers[check]), None)
    return "open" if failed is None and row.open else failed


def select_mxfp4(request: Mxfp4Request) -> Selection:
    """Ask every candidate in vLLM's order; a name tries its variants and keeps the last one's error.

    >>> select_mxfp4(Mxfp4Request("sm_100")).winner.enum
    'TRTLLM_BF16'
    >>> select_mxfp4(Mxfp4Request("sm_100", wanted="mxfp8", choice="flashinfer_trtllm")).winner.enum
    'TRTLLM_MXFP8'
    >>> [row.enum for row in select_mxfp4(Mxfp4Request("sm_90")).rests_with]
    ['TRITON', 'FI_CUTLASS_BF16']
    """
    unread: tuple[MxBackend, ...] = ()
    if request.choice == "auto":
        order = mxfp4_order(request)
    elif request.choice in MX_NAMES:
        order, unread = mxfp4_variants(request)
    else:
        error = ServingError("serving.mxfp4-unknown", choice=request.choice, known=", ".join(MX_NAMES))
        return Selection((), None, error)

    def failed(row: MxBackend) -> str | None:
        check = mxfp4_failed(row, request)
        return "open" if check is None and row in unread else check

    found, winner, rests = ask(order, failed)
    error = None
    if winner is None and not rests and all(each.outcome == "refused" for each in found):
        error = _refusal(request, found)
    return Selection(tuple(found), winner, error, tuple(rests))


def _refusal(request: Mxfp4Request, found: list[Candidate]) -> ServingError:
    if request.choice == "auto":
        return ServingError("serving.mxfp4-none", gpu=request.gpu)
    last = found[-1]
    automatic = select_mxfp4(Mxfp4Request(**{**_fields(request), "choice": "auto"}))
    auto = automatic.winner or next(iter(automatic.rests_with), None)
    reason = "activation format" if last.check == "format" else f"current device ({request.gpu})"
    ending, named = ("-too", "") if auto is None else ("", auto.enum)
    return ServingError(
        f"serving.moe-unsupported{ending}", flag=f"--moe-backend {request.choice}", method="Mxfp4",
        enum=last.backend.enum, reason=reason, auto=named,
    )  # fmt: skip


def _fields(request: Mxfp4Request) -> dict[str, object]:
    return {name: getattr(request, name) for name in Mxfp4Request.__dataclass_fields__}
