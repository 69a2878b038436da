"""Which kernel vLLM takes for NVFP4 linear layers.  Source: `serving-vllm.md` 5.2, read from vLLM 0.33.0.

The rules differ from the experts': a choice that has no NVFP4 kernel is a warning and not an error, batch invariance
overrides the choice, and single kernels can be switched off by class name.  What the spec leaves open (what is forced
is not held against ``VLLM_DISABLED_KERNELS``, an explicit choice beside W4A16, the exceptions) was read in vLLM's
``init_nvfp4_linear_kernel``, commit 006fc89.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from nvfp4viz.errors import ServingError
from nvfp4viz.serving.selection import (
    FAMILY_100,
    FAMILY_120,
    FROM_75,
    Candidate,
    Devices,
    Row,
    Selection,
    ask,
    capability_of,
    within,
)

LINEAR_SCHEMES = ("W4A4", "W4A16")
FROM_100: Devices = ((100, 129),)
FROM_120: Devices = ((120, 129),)


@dataclass(frozen=True, slots=True)
class LinearKernel:
    """A row of the table.

    Attributes
    ----------
    enum
        The kernel, in the spec's short form.
    choice
        The value of ``--linear-backend`` that keeps it.
    devices, flashinfer, cutlass, humming
        Where it runs; what must be installed; whether CUTLASS's FP4 must be compiled in (runtime 12.8 or later).
    schemes
        W4A4, W4A16 or both.
    open
        Its conditions were not read.
    """

    enum: str
    choice: str
    devices: Devices = FROM_75
    schemes: tuple[str, ...] = ("W4A4",)
    flashinfer: bool = False
    cutlass: bool = False
    humming: bool = False
    rocm: bool = False
    open: bool = False


BOTH = ("W4A4", "W4A16")
LINEAR: tuple[LinearKernel, ...] = (
    LinearKernel("FI-CuteDsl", "flashinfer_cutedsl", FAMILY_100, flashinfer=True),
    LinearKernel("FI-Cutlass", "flashinfer_cutlass", FROM_100, flashinfer=True, cutlass=True),
    LinearKernel("FI-B12x", "flashinfer_b12x", FROM_120, flashinfer=True),
    LinearKernel("Cutlass", "cutlass", FROM_100, cutlass=True),
    LinearKernel("FI-CuteDsl-W4A16", "flashinfer_cutedsl", FAMILY_100 + FAMILY_120, BOTH, flashinfer=True),
    LinearKernel("Marlin", "marlin", FROM_75, BOTH),
    LinearKernel("FI-TRTLLM", "flashinfer_trtllm", open=True),
    LinearKernel("FI-cuDNN", "flashinfer_cudnn", open=True),
    LinearKernel("FBGEMM", "fbgemm", open=True),
    LinearKernel("B12x", "b12x", open=True),
    LinearKernel("B12x-W4A16", "b12x", schemes=BOTH, open=True),
    LinearKernel("Torch", "torch", open=True),
    LinearKernel("Emulation", "emulation", open=True, rocm=True),
    LinearKernel("Humming", "humming", FROM_75, BOTH, humming=True),
)
"""In the order in which CUDA asks them."""

LINEAR_CHOICES = tuple(dict.fromkeys(row.choice for row in LINEAR))
LINEAR_CHECKS = ("disabled", "device", "package", "scheme")
NO_KERNEL = "triton"
"""A value of the flag that has no NVFP4 kernel."""


@dataclass(frozen=True, slots=True)
class LinearRequest:
    """A deployment of NVFP4 linear layers.

    Attributes
    ----------
    gpu, scheme
        Of ``selection.GPUS`` and `LINEAR_SCHEMES`.
    flashinfer, humming, cutlass_fp4
        What is installed, and whether CUTLASS's FP4 kernels are compiled in.
    batch_invariant
        ``VLLM_BATCH_INVARIANT``.
    disabled
        The kernel that ``VLLM_DISABLED_KERNELS`` names, in the table's short form; empty for none.
    choice
        ``"auto"`` or the value of ``--linear-backend``.
    """

    gpu: str = "sm_120"
    scheme: str = "W4A4"
    flashinfer: bool = True
    humming: bool = False
    cutlass_fp4: bool = True
    batch_invariant: bool = False
    disabled: str = ""
    choice: str = "auto"


@dataclass(frozen=True, slots=True)
class LinearSelection(Selection):
    """Also what vLLM only warns of: ``"no-kernel"``, ``"overridden"`` or None."""

    warning: str | None = None


STRIKES: dict[str, Any] = {"choice": "auto", "batch_invariant": False, "disabled": ""}
"""Settings that take kernels away which would accept, and what each is where nobody has set it."""


def struck(request: LinearRequest) -> tuple[str, ...]:
    """Names of the settings without which a kernel would serve what is refused.

    Those of which one alone would do, else those of which two would, and so on; none where the GPU or what is installed
    is the reason.

    >>> struck(LinearRequest("sm_90", choice="cutlass"))
    ('choice',)
    """
    changed = [name for name, plain in STRIKES.items() if getattr(request, name) != plain]
    for count in range(1, len(changed) + 1):
        enough = [
            names
            for names in combinations(changed, count)
            if _serves(replace(request, **{name: STRIKES[name] for name in names}))
        ]
        if enough:
            return tuple(name for name in changed if any(name in names for names in enough))
    return ()


def _serves(request: LinearRequest) -> bool:
    found = select_linear(request)
    return found.winner is not None or bool(found.rests_with)


def linear_order(request: LinearRequest) -> tuple[LinearKernel, ...]:
    """Who is asked.

    For W4A16 left to itself vLLM's order is its own: CuTe DSL's W4A16 kernel on 10.0 and 10.3 only, then Marlin;
    Humming comes first on 9.0.  The spec lists no others for it.  With a choice, all that take W4A16 are asked.
    """
    rows = {row.enum: row for row in LINEAR}
    capability = capability_of(request.gpu)
    if capability is None:
        return (rows["Emulation"],)
    if request.scheme == "W4A4":
        return LINEAR
    if request.choice != "auto":
        return tuple(row for row in LINEAR if request.scheme in row.schemes)
    first = ("FI-CuteDsl-W4A16",) if within(capability, FAMILY_100) else ()
    names = ("Humming", "Marlin") if capability == 90 else (*first, "Marlin", "Humming")
    return tuple(rows[name] for name in names)


def linear_failed(row: LinearKernel, request: LinearRequest) -> str | None:
    """The check at which a kernel refuses, ``"open"`` where its conditions were not read, or None."""
    capability = capability_of(request.gpu)
    if row.enum == request.disabled:
        return "disabled"
    if capability is None:  # the spec names emulation for ROCm, without a word on W4A16
        return "device" if not row.rocm else None if request.scheme in row.schemes else "open"
    if row.open:
        return "open"
    installed = (
        (request.flashinfer or not row.flashinfer)
        and (request.humming or not row.humming)
        and (request.cutlass_fp4 or not row.cutlass)
    )
    answers = {
        "disabled": True,
        "device": within(capability, row.devices),
        "package": installed,
        "scheme": request.scheme in row.schemes,
    }
    return next((check for check in LINEAR_CHECKS if not answers[check]), None)


def select_linear(request: LinearRequest) -> LinearSelection:
    """Ask every kernel in vLLM's order.

    >>> select_linear(LinearRequest("sm_120")).winner.enum, select_linear(LinearRequest("sm_90")).winner.enum
    ('FI-Cutlass', 'Marlin')
    """
    if request.batch_invariant:
        return _batch_invariant(request)
    order = linear_order(request)
    warning = None
    if request.choice != "auto":
        kept = tuple(row for row in order if row.choice == request.choice)
        warning = None if kept else "no-kernel"
        order = kept or order
    found, winner, rests = ask(order, lambda row: linear_failed(row, request))
    error = None
    if winner is None and not rests:
        error = ServingError("serving.linear-none", gpu=request.gpu, asked=len(order))
    return LinearSelection(tuple(found), winner, error, tuple(rests), warning)


def _batch_invariant(request: LinearRequest) -> LinearSelection:
    """CUTLASS if it can, else emulation, whatever the flag says; neither takes W4A16, and that stops the server."""
    rows: dict[str, LinearKernel] = {row.enum: row for row in LINEAR}
    # What is forced is not held against the list of kernels that are switched off, and the scheme is looked at later.
    check = linear_failed(rows["Cutlass"], replace(request, disabled="", scheme="W4A4"))
    forced: Row = rows["Emulation"] if check else rows["Cutlass"]
    warning = "overridden" if request.choice not in ("auto", forced.choice) else None
    others = (Candidate(rows["Cutlass"], "refused", check),) if check else ()
    if request.scheme not in forced.schemes:
        error = ServingError("serving.linear-forced", enum=forced.enum, scheme=request.scheme)
        return LinearSelection((*others, Candidate(forced, "refused", "scheme")), None, error, (), warning)
    able = () if check else (Candidate(rows["Emulation"], "able"),)
    return LinearSelection((*others, Candidate(forced, "wins"), *able), forced, None, (), warning)
