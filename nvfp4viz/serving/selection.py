"""Which backend vLLM takes for NVFP4 experts: every candidate asked in order, accepted or refused with its reason.

Source: `serving-vllm.md` 5.1 and 4.4, read from vLLM 0.33.0 (``fused_moe/oracle/nvfp4.py`` and the classes it asks).
`MOE` is the one table of these backends; the servers that run here and the audit's forecasts take their rows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from nvfp4viz.errors import ServingError

GPUS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121", "rocm")
"""Compute capabilities that vLLM's NVFP4 classes tell apart, and AMD's platform as one."""

Devices = tuple[tuple[int, int], ...]
FAMILY_100: Devices = ((100, 109),)
FAMILY_110: Devices = ((110, 119),)
FAMILY_120: Devices = ((120, 129),)
FROM_75: Devices = ((75, 129),)
HOPPER: Devices = ((90, 90),)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2_no_mul", "swigluoai", "swigluoai_uninterleave", "situ")
NOT_GATED = ("relu2_no_mul",)
SCHEMES = ("W4A4", "W4A4-token", "W4A16")
"""Static activation scales, one scale a token (``nvfp4_per_token``), activations left in BF16."""

PARALLEL = ("tp", "ep", "deepep_ht", "deepep_ll", "nvlink_one_sided", "nvlink_two_sided")
"""Tensor parallel or alone; expert parallel without a special all-to-all; and with one of four."""

CHECKS = ("clamp", "device", "package", "gated", "activation", "scheme", "parallel", "format")
"""In the order in which they are asked.  ``clamp`` thins the list out before anybody is asked."""


def capability_of(gpu: str) -> int | None:
    """``"sm_103"`` → 103; None for ROCm.

    Raises
    ------
    ServingError
        ``serving.gpu``.
    """
    if gpu not in GPUS:
        raise ServingError("serving.gpu", gpu=gpu, known=", ".join(GPUS))
    return None if gpu == "rocm" else int(gpu[3:])


def within(capability: int | None, devices: Devices) -> bool:
    """Whether a CUDA capability lies in one of the ranges; ROCm lies in none."""
    return capability is not None and any(low <= capability <= high for low, high in devices)


@dataclass(frozen=True, slots=True)
class MoeBackend:
    """A row of the table.

    Attributes
    ----------
    id
        As in the audit's vocabulary, where it has a word for it.
    enum
        vLLM's name, as its log prints it.
    flag
        The value of ``--moe-backend``; empty where there is none.
    automatic
        Stands in the automatic order.
    devices, rocm
        Where its class runs.
    package
        ``"flashinfer"`` or ``"humming"`` must be installed.
    activations
        None where no condition was read, or where it takes whatever ``apply_moe_activation`` does.
    gated
        Takes gated experts only.
    schemes
        Pairs of weights and activations it takes.
    without
        Kinds of parallelism it refuses.
    formats
        Layouts of activations it takes: ``"standard"``, ``"batched"``.
    clamps
        Applies ``swiglu_limit``.
    biases
        Adds biases of the experts' projections.
    open
        Its conditions were not read; then nothing is said about it.
    reach
        How far one input scale reaches: ``"expert"``, ``"layer"``, ``"none"``, or ``"open"`` where it was not read.
    reads_down
        The second GEMM's input scale is read.
    gate_rules
        Gate's ``weight_scale_2`` is used for up as well.
    layout
        What it does to the weights after loading; a key of the texts.
    multiplies
        ``"fp4"``: codes by codes on the tensor cores; ``"bf16"``: decoded first.
    """

    id: str
    enum: str
    flag: str
    devices: Devices
    activations: tuple[str, ...] | None
    schemes: tuple[str, ...]
    reach: str
    layout: str
    automatic: bool = True
    rocm: bool = False
    package: str | None = None
    gated: bool = False
    without: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("standard",)
    clamps: bool = True
    biases: bool = True
    open: bool = False
    reads_down: bool = True
    gate_rules: bool = True
    multiplies: str = "fp4"

    @property
    def serves(self) -> tuple[str, ...]:
        """Checkpoint schemes among W4A4 and W4A16."""
        return tuple(scheme for scheme in ("W4A4", "W4A16") if scheme in self.schemes)

    @property
    def per_token(self) -> bool:
        """ModelOpt's online ``nvfp4_per_token`` accepts this one alone (4.1)."""
        return self.enum == "FLASHINFER_TRTLLM"


STATIC, TOKEN, ANY = ("W4A4",), ("W4A4", "W4A4-token"), SCHEMES
EVERY_EP = tuple(kind for kind in PARALLEL if kind != "tp")
SWIGLU = ("swigluoai", "swigluoai_uninterleave")

MOE: tuple[MoeBackend, ...] = (
    MoeBackend(
        "vllm-flashinfer-trtllm", "FLASHINFER_TRTLLM", "flashinfer_trtllm", FAMILY_100,
        ("silu", "gelu", "gelu_tanh", "relu2_no_mul", "swigluoai_uninterleave", "situ"), TOKEN, "layer", "trtllm",
        package="flashinfer",
    ),
    MoeBackend(
        "vllm-flashinfer-cutedsl", "FLASHINFER_CUTEDSL", "flashinfer_cutedsl", FAMILY_100,
        ("silu", *SWIGLU, "relu2_no_mul", "situ"), TOKEN, "layer", "cutedsl", package="flashinfer",
    ),
    MoeBackend(
        "vllm-flashinfer-cutedsl-batched", "FLASHINFER_CUTEDSL_BATCHED", "", FAMILY_100,
        ("silu",), STATIC, "layer", "unread", package="flashinfer", gated=True, formats=("batched",), clamps=False,
    ),
    MoeBackend(
        "vllm-flashinfer-cutlass", "FLASHINFER_CUTLASS", "flashinfer_cutlass", HOPPER + FAMILY_100 + FAMILY_120,
        ("silu", "gelu_tanh", "relu2_no_mul", *SWIGLU), STATIC, "layer", "swap", package="flashinfer",
    ),
    MoeBackend(
        "vllm-cutlass", "VLLM_CUTLASS", "cutlass", FAMILY_100 + FAMILY_110 + FAMILY_120,
        None, STATIC, "expert", "stored", without=("nvlink_one_sided", "nvlink_two_sided", "deepep_ht"),
    ),
    MoeBackend(
        "vllm-marlin", "MARLIN", "marlin", FROM_75, None, ANY, "none", "marlin",
        without=("nvlink_two_sided",), multiplies="bf16",
    ),
    MoeBackend(
        "vllm-humming", "HUMMING", "humming", FROM_75, None, ("W4A4", "W4A16"), "none", "unread", package="humming",
        formats=("standard", "batched"), gate_rules=False, multiplies="unread",
    ),
    MoeBackend(
        "vllm-emulation", "EMULATION", "emulation", FROM_75, None, STATIC, "layer", "stored", rocm=True,
        multiplies="bf16", biases=False,
    ),
    MoeBackend(
        "vllm-flashinfer-b12x", "FLASHINFER_B12X", "flashinfer_b12x", FAMILY_120,
        ("silu", "gelu_tanh", "relu2_no_mul"), ("W4A4", "W4A16"), "layer", "b12x", automatic=False,
        package="flashinfer", without=EVERY_EP, clamps=False, reads_down=False,
    ),
    MoeBackend(
        "vllm-b12x", "B12X", "b12x", (), None, ("W4A4", "W4A16"), "open", "swap", automatic=False, open=True,
    ),
    MoeBackend(
        "vllm-flashinfer-moe-ep-cutedsl", "FLASHINFER_MOE_EP_CUTEDSL", "flashinfer_moe_ep_cutedsl", (), None,
        STATIC, "none", "unread", automatic=False, package="flashinfer", open=True,
    ),
)  # fmt: skip
"""In the automatic order; the last three are taken only when asked for."""

CHOICES = tuple(row.flag for row in MOE if row.flag)
"""What ``--moe-backend`` takes for NVFP4, besides ``auto``."""


@dataclass(frozen=True, slots=True)
class MoeRequest:
    """A deployment, as far as the facts that were read decide by it.

    Attributes
    ----------
    gpu, activation, scheme, parallel
        Of `GPUS`, `ACTIVATIONS`, `SCHEMES` and `PARALLEL`.  An activation that no class names is taken only by those
        that take all.
    flashinfer, humming
        The package is installed.
    swiglu_limit
        The model clamps its gate.
    marlin_8bit
        ``VLLM_MARLIN_INPUT_DTYPE`` asks Marlin for 8-bit activations.
    choice
        ``"auto"`` or the value of ``--moe-backend``.
    """

    gpu: str = "sm_120"
    activation: str = "silu"
    scheme: str = "W4A4"
    parallel: str = "tp"
    flashinfer: bool = True
    humming: bool = False
    swiglu_limit: bool = False
    marlin_8bit: bool = False
    choice: str = "auto"

    @property
    def format(self) -> str:
        """How the all-to-all hands activations over; DeepEP's low-latency kernels give a batch an expert."""
        return "batched" if self.parallel == "deepep_ll" else "standard"

    @property
    def packages(self) -> tuple[str, ...]:
        return tuple(name for name in ("flashinfer", "humming") if getattr(self, name))


class Row(Protocol):
    """What every table's rows have."""

    @property
    def enum(self) -> str: ...


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that was considered.

    Attributes
    ----------
    backend
    outcome
        ``"wins"``, ``"able"`` (would accept, but an earlier one won), ``"refused"``, ``"open"`` (its conditions were
        not read), or ``"manual"`` (never taken automatically).
    check
        For ``"refused"``: the first check that it failed.
    """

    backend: Row
    outcome: str
    check: str | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """What became of a request.

    Attributes
    ----------
    candidates
        In the order asked; those that only an explicit choice reaches stand last.
    winner
        None if nobody accepts, or if it rests with a candidate whose conditions were not read.
    error
        What stops the start, with the exception that vLLM raises.  There may be a winner all the same: a later step
        then refuses it.
    rests_with
        Candidates without known conditions that are asked before the first that accepts.
    """

    candidates: tuple[Candidate, ...]
    winner: Row | None
    error: ServingError | None = None
    rests_with: tuple[Row, ...] = ()


def _has_class(row: MoeBackend, gpu: str) -> bool:
    capability = capability_of(gpu)
    return row.rocm if capability is None else within(capability, row.devices)


def _without_nvfp4(row: MoeBackend, gpu: str) -> bool:
    """FlashInfer's CUTLASS class runs on Hopper, but not with NVFP4: that is its scheme check."""
    return row.enum == "FLASHINFER_CUTLASS" and within(capability_of(gpu), HOPPER)


def refused_on(gpu: str) -> frozenset[str]:
    """Ids of the backends that take NVFP4 experts on other GPUs, and not on this one.

    >>> sorted(refused_on("sm_110"))[2:]
    ['vllm-flashinfer-cutedsl-batched', 'vllm-flashinfer-cutlass', 'vllm-flashinfer-trtllm']
    """
    return frozenset(row.id for row in MOE if not row.open and (not _has_class(row, gpu) or _without_nvfp4(row, gpu)))


def first_failed(row: MoeBackend, request: MoeRequest) -> str | None:
    """The check at which a backend refuses, or None."""
    answers = {
        "clamp": row.clamps or not request.swiglu_limit,
        "device": _has_class(row, request.gpu),
        "package": row.package is None or row.package in request.packages,
        "gated": not row.gated or request.activation not in NOT_GATED,
        "activation": row.activations is None or request.activation in row.activations,
        "scheme": request.scheme in row.schemes and not _without_nvfp4(row, request.gpu),
        "parallel": request.parallel not in row.without,
        "format": request.format in row.formats,
    }
    return next((check for check in CHECKS if not answers[check]), None)


def automatic_order(gpu: str) -> tuple[MoeBackend, ...]:
    """Who is asked, in order; on capability 9.0 Humming comes before Marlin."""
    order = [row for row in MOE if row.automatic]
    if capability_of(gpu) == 90:
        names = [row.enum for row in order]
        order.insert(names.index("MARLIN"), order.pop(names.index("HUMMING")))
    return tuple(order)


def ask(rows: Sequence[R], failed: Callable[[R], str | None]) -> tuple[list[Candidate], Row | None, list[Row]]:
    """Ask in order: the first that accepts wins, unless one without known conditions was asked before it."""
    found: list[Candidate] = []
    winner: Row | None = None
    rests: list[Row] = []
    settled = False
    for row in rows:
        check = failed(row)
        if check == "open":
            found.append(Candidate(row, "open"))
            rests += [] if settled else [row]
        elif check is not None:
            found.append(Candidate(row, "refused", check))
        else:
            wins = not settled and not rests
            found.append(Candidate(row, "wins" if wins else "able"))
            winner = row if wins else winner
            settled = True
    return found, winner, rests


def select_moe(request: MoeRequest) -> Selection:
    """Ask every candidate as vLLM's oracle does.

    Raises
    ------
    ServingError
        ``serving.gpu``.  What vLLM raises is a result (`Selection.error`), not an exception.

    >>> select_moe(MoeRequest("sm_120")).winner.enum, select_moe(MoeRequest("sm_110")).winner.enum
    ('FLASHINFER_CUTLASS', 'VLLM_CUTLASS')
    """
    order = automatic_order(request.gpu)
    found, winner, _ = ask(order, lambda row: first_failed(row, request))
    found += [Candidate(row, "manual") for row in MOE if not row.automatic]
    if request.choice != "auto":
        return _explicit(request, found, winner)
    if winner is None:
        return Selection(tuple(found), None, ServingError("serving.moe-none", gpu=request.gpu))
    return Selection(tuple(found), winner, _later(request, winner))


def _explicit(request: MoeRequest, found: list[Candidate], automatic: Row | None) -> Selection:
    """One name, no fallback."""
    if request.choice not in CHOICES:
        error = ServingError("serving.moe-unknown", choice=request.choice, known=", ".join(CHOICES))
        return Selection(tuple(found), None, error)
    row = next(row for row in MOE if row.flag == request.choice)
    if row.enum == "FLASHINFER_CUTEDSL" and request.format == "batched":
        row = next(row for row in MOE if row.enum == "FLASHINFER_CUTEDSL_BATCHED")
    others = [
        Candidate(each.backend, "able" if each.outcome == "wins" else each.outcome, each.check)
        for each in found
        if each.backend != row
    ]
    if row.open:
        return Selection((Candidate(row, "open"), *others), None, rests_with=(row,))
    check = first_failed(row, request)
    if check is None:
        return Selection((Candidate(row, "wins"), *others), row, _later(request, row))
    # Advice that nobody can follow is none.
    ending, auto = ("", automatic.enum) if automatic is not None else ("-too", "")
    if check == "clamp":
        error = ServingError(f"serving.moe-clamp{ending}", choice=request.choice, auto=auto)
    else:
        error = ServingError(
            f"serving.moe-unsupported{ending}", flag=f"--moe-backend {request.choice}", method="NvFp4", enum=row.enum,
            reason=reason(check, request), auto=auto,
        )  # fmt: skip
    return Selection((Candidate(row, "refused", check), *others), None, error)


def reason(check: str, request: MoeRequest) -> str:
    """What vLLM's message names, in its words."""
    return {
        "device": f"current device ({request.gpu})",
        "package": f"current device ({request.gpu})",  # a package that is missing fails the same check
        "gated": "no act_and_mul MLP layer",
        "activation": f"{request.activation} activation",
        "scheme": f"quantization scheme {request.scheme}",
        "parallel": f"parallel config {request.parallel}",
        "format": f"{request.format} activation format",
    }[check]


def _later(request: MoeRequest, winner: Row) -> ServingError | None:
    """What refuses after the oracle has chosen."""
    if request.scheme == "W4A4-token" and winner.enum != "FLASHINFER_TRTLLM":
        return ServingError("serving.moe-per-token", enum=winner.enum)
    if winner.enum == "MARLIN" and request.marlin_8bit:
        return ServingError("serving.moe-marlin-dtype")
    return None
