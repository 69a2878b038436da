"""Backend selection: the tables against a literal reading of the spec, over every input there is."""

from dataclasses import replace
from itertools import product

import pytest

from nvfp4viz.errors import FormatError, ServingError, error_texts
from nvfp4viz.serving import selection as moe
from nvfp4viz.serving import selection_cost as cost
from nvfp4viz.serving import selection_linear as linear
from nvfp4viz.serving import selection_mxfp4 as mx

BOOLS = (False, True)


def domain():
    for gpu, activation, scheme, parallel in product(moe.GPUS, moe.ACTIVATIONS, moe.SCHEMES, moe.PARALLEL):
        for flashinfer, humming, limit in product(BOOLS, repeat=3):
            yield moe.MoeRequest(gpu, activation, scheme, parallel, flashinfer, humming, limit)


def literal(name, r):
    """Whether one class accepts: section 5.1's table, cell by cell, by hand."""
    cuda = r.gpu != "rocm"
    sm = int(r.gpu[3:]) if cuda else 0
    batched = r.parallel == "deepep_ll"
    if name == "FLASHINFER_TRTLLM":
        return (
            sm in (100, 103) and r.flashinfer and not batched and r.scheme != "W4A16"
            and r.activation in ("silu", "gelu", "gelu_tanh", "relu2_no_mul", "swigluoai_uninterleave", "situ")
        )  # fmt: skip
    if name == "FLASHINFER_CUTEDSL":
        return (
            sm in (100, 103) and r.flashinfer and not batched and r.scheme != "W4A16"
            and r.activation in ("silu", "swigluoai", "swigluoai_uninterleave", "relu2_no_mul", "situ")
        )  # fmt: skip
    if name == "FLASHINFER_CUTEDSL_BATCHED":
        fits = sm in (100, 103) and r.flashinfer and batched
        return fits and r.scheme == "W4A4" and r.activation == "silu" and not r.swiglu_limit
    if name == "FLASHINFER_CUTLASS":
        return (
            sm in (100, 103, 120, 121) and r.flashinfer and not batched and r.scheme == "W4A4"
            and r.activation not in ("gelu", "situ")
        )  # fmt: skip
    if name == "VLLM_CUTLASS":
        return sm >= 100 and r.scheme == "W4A4" and r.parallel in ("tp", "ep")
    if name == "MARLIN":
        return cuda and not batched and r.parallel != "nvlink_two_sided"
    if name == "HUMMING":
        return cuda and r.humming and r.scheme != "W4A4-token"
    if name == "EMULATION":
        return r.scheme == "W4A4" and not batched
    assert name == "FLASHINFER_B12X"
    return (
        sm in (120, 121) and r.flashinfer and r.parallel == "tp" and r.scheme != "W4A4-token"
        and r.activation in ("silu", "gelu_tanh", "relu2_no_mul") and not r.swiglu_limit
    )  # fmt: skip


def literal_winner(r):
    """The automatic order, written out."""
    if r.gpu == "sm_90":
        names = ["FLASHINFER_TRTLLM", "FLASHINFER_CUTEDSL", "FLASHINFER_CUTEDSL_BATCHED", "FLASHINFER_CUTLASS"]
        names += ["VLLM_CUTLASS", "HUMMING", "MARLIN", "EMULATION"]
    else:
        names = ["FLASHINFER_TRTLLM", "FLASHINFER_CUTEDSL", "FLASHINFER_CUTEDSL_BATCHED", "FLASHINFER_CUTLASS"]
        names += ["VLLM_CUTLASS", "MARLIN", "HUMMING", "EMULATION"]
    for name in names:
        if literal(name, r):
            return name
    return None


def test_the_winner_is_the_literal_one_over_the_whole_domain():
    count = 0
    for request in domain():
        found = moe.select_moe(request)
        expected = literal_winner(request)
        assert (None if found.winner is None else found.winner.enum) == expected, request
        assert (found.error is None) == (
            expected is not None and (request.scheme != "W4A4-token" or expected == "FLASHINFER_TRTLLM")
        ), request
        count += 1
    assert count == len(moe.GPUS) * len(moe.ACTIVATIONS) * len(moe.SCHEMES) * len(moe.PARALLEL) * 8


def test_every_candidate_is_refused_exactly_where_the_literal_table_refuses():
    rows = [row for row in moe.MOE if not row.open]
    for request in domain():
        for row in rows:
            assert (moe.first_failed(row, request) is None) == literal(row.enum, request), (row.enum, request)


def test_outcomes_are_consistent():
    """One winner, nobody able before it, a reason with every refusal."""
    for request in domain():
        outcomes = [each.outcome for each in moe.select_moe(request).candidates]
        wins = outcomes.count("wins")
        assert wins <= 1
        if wins:
            assert "able" not in outcomes[: outcomes.index("wins")]
        else:
            assert "able" not in outcomes
        assert all(
            (each.check is not None) == (each.outcome == "refused") for each in moe.select_moe(request).candidates
        )


@pytest.mark.parametrize("choice", moe.CHOICES)
def test_a_choice_is_served_or_refused_and_never_replaced(choice):
    for request in domain():
        found = moe.select_moe(replace(request, choice=choice))
        first = found.candidates[0]
        name = {row.flag: row.enum for row in moe.MOE}[choice]
        if choice == "flashinfer_cutedsl" and request.parallel == "deepep_ll":
            name = "FLASHINFER_CUTEDSL_BATCHED"
        assert first.backend.enum == name
        if name in ("B12X", "FLASHINFER_MOE_EP_CUTEDSL"):
            assert found.winner is None
            assert found.error is None
            assert [row.enum for row in found.rests_with] == [name]
            continue
        accepts = literal(name, request)
        assert first.outcome == ("wins" if accepts else "refused")
        assert found.winner is (first.backend if accepts else None)
        if accepts:
            assert (found.error is None) == (request.scheme != "W4A4-token" or name == "FLASHINFER_TRTLLM")
        else:
            clamps = name in ("FLASHINFER_B12X", "FLASHINFER_CUTEDSL_BATCHED") and request.swiglu_limit
            assert found.error.code.removesuffix("-too") == (
                "serving.moe-clamp" if clamps else "serving.moe-unsupported"
            )


@pytest.mark.parametrize(
    ("gpu", "scheme", "expected"),
    [
        ("sm_100", "W4A4", "FLASHINFER_TRTLLM"),
        ("sm_103", "W4A4", "FLASHINFER_TRTLLM"),
        ("sm_120", "W4A4", "FLASHINFER_CUTLASS"),
        ("sm_110", "W4A4", "VLLM_CUTLASS"),
        ("sm_90", "W4A4", "MARLIN"),
        ("sm_75", "W4A4", "MARLIN"),
        ("sm_89", "W4A4", "MARLIN"),
        ("rocm", "W4A4", "EMULATION"),
        ("sm_120", "W4A16", "MARLIN"),
        ("rocm", "W4A16", None),
    ],
)
def test_the_practical_results_of_the_spec(gpu, scheme, expected):
    winner = moe.select_moe(moe.MoeRequest(gpu, scheme=scheme)).winner
    assert (winner and winner.enum) == expected


def test_humming_moves_before_marlin_on_9_0_alone():
    for gpu in moe.GPUS:
        names = [row.enum for row in moe.automatic_order(gpu)]
        assert (names.index("HUMMING") < names.index("MARLIN")) == (gpu == "sm_90")
    assert moe.select_moe(moe.MoeRequest("sm_90", humming=True)).winner.enum == "HUMMING"


def test_the_reported_defect_is_reachable_without_a_flag_on_sm_110_alone():
    """vLLM #51525 needs the backend that reads a scale an expert."""
    reached = {gpu for gpu in moe.GPUS if moe.select_moe(moe.MoeRequest(gpu)).winner.reach == "expert"}
    assert reached == {"sm_110"}
    without = {
        gpu for gpu in moe.GPUS if moe.select_moe(moe.MoeRequest(gpu, flashinfer=False)).winner.reach == "expert"
    }
    assert without == {"sm_100", "sm_103", "sm_110", "sm_120", "sm_121"}


def test_the_messages_are_the_server_s():
    found = moe.select_moe(moe.MoeRequest("sm_90", choice="cutlass"))
    assert (
        "NvFp4 MoE backend 'VLLM_CUTLASS' does not support the deployment configuration since kernel does not support "
        "current device (sm_90)" in str(found.error)
    )
    assert "takes MARLIN here" in str(found.error)
    found = moe.select_moe(moe.MoeRequest("sm_100", choice="triton"))
    assert "moe_backend='triton' is not supported for NVFP4 MoE" in str(found.error)
    found = moe.select_moe(moe.MoeRequest("sm_90", marlin_8bit=True))
    assert found.error.code == "serving.moe-marlin-dtype"
    assert moe.select_moe(moe.MoeRequest("sm_120", marlin_8bit=True)).error is None
    with pytest.raises(ServingError, match="no GPU sm_70"):
        moe.select_moe(moe.MoeRequest("sm_70"))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_error_fills_in_both_languages(language):
    for request in (
        moe.MoeRequest("rocm", scheme="W4A16"),
        moe.MoeRequest("sm_90", choice="cutlass"),
        moe.MoeRequest(choice="triton"),
        moe.MoeRequest(choice="flashinfer_b12x", swiglu_limit=True),
        moe.MoeRequest(scheme="W4A4-token"),
        moe.MoeRequest("sm_90", marlin_8bit=True),
    ):
        error = moe.select_moe(request).error
        assert error.code in error_texts(language)
        assert all("{" not in text for text in error.text(language).values())


ROWS = {row.enum: row for row in moe.MOE}


def test_trtllm_and_marlin_pad():
    trtllm = ROWS["FLASHINFER_TRTLLM"]
    assert cost.padded(trtllm, 2816, 704) == (2816, 704)
    assert cost.padded(trtllm, 2816, 176) == (2816, 192)
    assert cost.padded(trtllm, 2816, 176, gated=False) == (2816, 256)
    assert cost.padded(trtllm, 2816, 176, gated=False, per_token=True) == (3072, 256)
    marlin = ROWS["MARLIN"]
    assert cost.padded(marlin, 2816, 704) == (2816, 704)
    assert cost.padded(marlin, 128, 32) == (128, 64)
    assert cost.padded(marlin, 2880, 704) == (2880, 768)  # where 128 does not divide the hidden size
    for row in moe.MOE:
        if row.layout not in ("trtllm", "marlin"):
            assert cost.padded(row, 2880, 176) == (2880, 176)


@pytest.mark.parametrize(
    ("width", "refused"), [(64, False), (32, True), (96, True), (128, False), (704, False), (80, True)]
)
def test_vllm_s_cutlass_path_refuses_fused_rows_that_fill_no_tile(width, refused):
    for row in moe.MOE:
        found = cost.rank_bytes(row, 64, 128, width)
        assert found.stops == (refused and row.enum == "VLLM_CUTLASS")
        assert not cost.rank_bytes(row, 64, 128, width, gated=False).stops
    # What counts is a rank's share; whole experts are as wide as the model's.
    assert cost.rank_bytes(ROWS["VLLM_CUTLASS"], 64, 128, 4 * width, ranks=4).stops == refused
    assert (
        not cost.rank_bytes(ROWS["VLLM_CUTLASS"], 64, 128, 4 * width, ranks=4, parallel="ep").stops or 8 * width % 128
    )


def test_bytes_of_a_rank_by_hand():
    """64 experts of tiny-moe: three matrices of 64 x 128."""
    found = cost.rank_bytes(ROWS["VLLM_CUTLASS"], 64, 128, 64)
    assert (found.codes, found.block_scales) == (64 * 3 * 64 * 128 // 2, 64 * 3 * 64 * 128 // 16)
    # (E, 2) and (E,) twice, in float32
    assert found.scalars == 4 * (64 * 2 + 64) * 2
    assert found.padding == 0
    wide = cost.rank_bytes(ROWS["FLASHINFER_TRTLLM"], 64, 128, 64)
    assert wide.padding == found.codes + found.block_scales  # hidden 128 becomes 256


def test_flashinfer_keeps_every_rank_s_input_scales():
    own = cost.rank_bytes(ROWS["VLLM_CUTLASS"], 64, 128, 64, ranks=4, parallel="ep")
    every = cost.rank_bytes(ROWS["FLASHINFER_CUTLASS"], 64, 128, 64, ranks=4, parallel="ep")
    assert own.experts == every.experts == 16
    assert every.scalars - own.scalars == 4 * 3 * 48
    assert cost.rank_bytes(ROWS["VLLM_CUTLASS"], 64, 128, 64, ranks=4).intermediate == 16
    with pytest.raises(FormatError):
        cost.rank_bytes(ROWS["VLLM_CUTLASS"], 64, 128, 64, ranks=8)


# ------------------------------------------------------------------ linear


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"gpu": "sm_90", "choice": "cutlass"}, ("choice",)),
        ({"gpu": "sm_90", "choice": "cutlass", "disabled": "FI-Cutlass"}, ("choice",)),
        ({"gpu": "sm_120", "scheme": "W4A16", "batch_invariant": True}, ("batch_invariant",)),
        ({"gpu": "sm_90", "choice": "marlin", "disabled": "Marlin"}, ("choice", "disabled")),
        ({"gpu": "sm_120"}, ()),
    ],
)
def test_what_strikes_out_the_kernels_that_would_serve(asked, found):
    request = linear.LinearRequest(**asked)
    refused = linear.select_linear(request).winner is None
    assert refused == bool(found)
    if refused:
        assert linear.struck(request) == found
        plain = {name: linear.STRIKES[name] for name in found}
        assert linear.select_linear(replace(request, **plain)).winner is not None


def linear_domain():
    disabled = ("", *(row.enum for row in linear.LINEAR))
    for gpu, scheme, off in product(moe.GPUS, linear.LINEAR_SCHEMES, disabled):
        for flashinfer, humming, cutlass, invariant in product(BOOLS, repeat=4):
            yield linear.LinearRequest(gpu, scheme, flashinfer, humming, cutlass, invariant, off)


def literal_linear(r):
    """The winner's name, ``None``, or ``"?"`` where it rests with a kernel whose conditions the spec does not give."""
    sm = 0 if r.gpu == "rocm" else int(r.gpu[3:])
    on = lambda name: r.disabled != name  # noqa: E731
    if r.batch_invariant:  # what is forced is not asked whether it is switched off; neither takes W4A16
        return None if r.scheme == "W4A16" else "Cutlass" if sm >= 100 and r.cutlass_fp4 else "Emulation"
    if sm == 0:
        return None if not on("Emulation") else "Emulation" if r.scheme == "W4A4" else "?"
    if r.scheme == "W4A16":
        if sm == 90 and r.humming and on("Humming"):
            return "Humming"
        if sm in (100, 103) and r.flashinfer and on("FI-CuteDsl-W4A16"):
            return "FI-CuteDsl-W4A16"
        if on("Marlin"):
            return "Marlin"
        return "Humming" if r.humming else None
    if sm in (100, 103) and r.flashinfer and on("FI-CuteDsl"):
        return "FI-CuteDsl"
    if sm >= 100 and r.flashinfer and r.cutlass_fp4 and on("FI-Cutlass"):
        return "FI-Cutlass"
    if sm >= 120 and r.flashinfer and on("FI-B12x"):
        return "FI-B12x"
    if sm >= 100 and r.cutlass_fp4 and on("Cutlass"):
        return "Cutlass"
    if sm in (100, 103, 120, 121) and r.flashinfer and on("FI-CuteDsl-W4A16"):
        return "FI-CuteDsl-W4A16"
    return "Marlin" if on("Marlin") else "?"


def test_linear_kernels_over_the_whole_domain():
    for request in linear_domain():
        found = linear.select_linear(request)
        got = found.winner.enum if found.winner is not None else "?" if found.rests_with else None
        assert got == literal_linear(request), request
        assert (found.error is None) == (got is not None)


def test_a_weight_only_choice_is_kept_where_its_kernel_runs():
    """The short order of W4A16 is that of auto: with a name, CuTe DSL's kernel serves the family of sm_120 as well."""
    for gpu, taken in {"sm_100": True, "sm_110": False, "sm_120": True, "sm_90": False}.items():
        found = linear.select_linear(linear.LinearRequest(gpu, "W4A16", choice="flashinfer_cutedsl"))
        assert found.warning is None
        assert [each.backend.enum for each in found.candidates] == ["FI-CuteDsl-W4A16"]
        assert (found.error is None) == (found.winner is not None) == taken
    open_ = linear.select_linear(linear.LinearRequest("sm_120", "W4A16", choice="b12x"))
    assert [row.enum for row in open_.rests_with] == ["B12x-W4A16"]
    # A kernel for W4A4 alone is none for these layers: a warning, and the whole list is asked.
    other = linear.select_linear(linear.LinearRequest("sm_120", "W4A16", choice="cutlass"))
    assert (other.warning, other.winner.enum) == ("no-kernel", "FI-CuteDsl-W4A16")


def test_a_named_kernel_that_refuses_stops_the_server():
    found = linear.select_linear(linear.LinearRequest("sm_90", choice="cutlass"))
    assert (found.winner, found.warning, found.error.code) == (None, None, "serving.linear-none")
    assert linear.select_linear(linear.LinearRequest("sm_90")).winner.enum == "Marlin"


@pytest.mark.parametrize(("gpu", "enum"), [("sm_120", "Cutlass"), ("sm_90", "Emulation")])
def test_what_batch_invariance_forces_does_not_take_weight_only_layers(gpu, enum):
    found = linear.select_linear(linear.LinearRequest(gpu, "W4A16", batch_invariant=True))
    assert (found.winner, found.error.code) == (None, "serving.linear-forced")
    assert enum in found.error.text("en")["what"]


def test_advice_to_use_auto_is_given_where_auto_takes_something():
    for gpu, scheme, activation, clamp in product(moe.GPUS, moe.SCHEMES, moe.ACTIVATIONS, BOOLS):
        for choice in moe.CHOICES:
            request = moe.MoeRequest(gpu, activation=activation, scheme=scheme, swiglu_limit=clamp, choice=choice)
            error = moe.select_moe(request).error
            if error is not None and error.code.startswith(("serving.moe-unsupported", "serving.moe-clamp")):
                auto = moe.select_moe(replace(request, choice="auto")).winner
                advice = error.text("en")["next"]
                assert (f"takes {auto.enum} here" in advice) if auto else ("nothing is taken here" in advice)


def test_a_linear_choice_without_a_kernel_is_a_warning():
    for gpu in moe.GPUS:
        auto = linear.select_linear(linear.LinearRequest(gpu))
        odd = linear.select_linear(linear.LinearRequest(gpu, choice=linear.NO_KERNEL))
        assert odd.warning == "no-kernel"
        assert odd.winner == auto.winner


def test_batch_invariance_overrides_the_flag():
    found = linear.select_linear(linear.LinearRequest("sm_100", batch_invariant=True, choice="marlin"))
    assert (found.winner.enum, found.warning) == ("Cutlass", "overridden")
    assert linear.select_linear(linear.LinearRequest("sm_90", batch_invariant=True)).winner.enum == "Emulation"


@pytest.mark.parametrize("choice", linear.LINEAR_CHOICES)
def test_a_linear_choice_keeps_its_own_kernels(choice):
    for request in linear_domain():
        if request.batch_invariant:
            continue
        found = linear.select_linear(replace(request, choice=choice))
        if found.warning is None:
            assert {each.backend.choice for each in found.candidates} == {choice}
        else:
            asked = linear.linear_order(replace(request, choice=choice))
            assert not [row for row in asked if row.choice == choice]


# ------------------------------------------------------------------ MXFP4


def mx_domain():
    for gpu, model, wanted, format_ in product(moe.GPUS, mx.MODELS, mx.WANTED, mx.FORMATS):
        for flashinfer, humming in product(BOOLS, repeat=2):
            yield mx.Mxfp4Request(gpu, model, wanted, format_, flashinfer, humming)


def literal_mxfp4(r):
    """The winner's name, or ``"?"`` and the first candidate of unknown conditions."""
    sm = 0 if r.gpu == "rocm" else int(r.gpu[3:])
    standard, b200 = r.format == "standard", sm in (100, 103)
    marlin = "MARLIN" if standard else "BATCHED_MARLIN"
    if r.model == "deepseek-v4":
        if sm == 0:
            return "?AITER"
        if sm == 90 and r.humming:
            return "HUMMING"
        if b200 and r.flashinfer and standard:
            return "TRTLLM_MXFP8"
        return "?DEEPGEMM_MXFP4" if b200 else marlin
    if sm == 0:
        return "?AITER"
    if r.wanted == "mxfp8" and r.flashinfer and b200 and standard:
        return "TRTLLM_MXFP8"
    if r.wanted == "mxfp8" and r.flashinfer and sm in (90, 100, 103, 120, 121):
        return "?FI_CUTLASS_MXFP8"
    if r.wanted == "mxfp4":
        return "?CUTLASS_MXFP4_MXFP4"
    if r.flashinfer and b200 and standard:
        return "TRTLLM_BF16"
    if sm in (120, 121):
        return "?FI_CUTLASS_BF16" if r.flashinfer else marlin
    return "?TRITON" if sm in (90, 100, 103) else marlin


def test_mxfp4_over_the_whole_domain():
    for request in mx_domain():
        found = mx.select_mxfp4(request)
        got = found.winner.enum if found.winner is not None else f"?{found.rests_with[0].enum}"
        assert got == literal_mxfp4(request), request
        assert found.error is None


def test_triton_stands_behind_batched_marlin_on_family_120():
    for gpu in moe.GPUS:
        names = [row.enum for row in mx.mxfp4_order(mx.Mxfp4Request(gpu))]
        assert (names.index("TRITON") > names.index("BATCHED_MARLIN")) == (gpu in ("sm_120", "sm_121"))


@pytest.mark.parametrize("gpu", moe.GPUS)
@pytest.mark.parametrize("choice", ["triton", "triton_unfused"])
def test_where_triton_s_mxfp4_classes_run(gpu, choice):
    """On ROCm and from 9.0 up to below 11.0; on family 120 it was not read for the version that gives it a place."""
    found = mx.select_mxfp4(mx.Mxfp4Request(gpu, choice=choice))
    (only,) = found.candidates
    refused = gpu in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_110")
    assert (only.outcome, only.check) == (("refused", "device") if refused else ("open", None))
    assert (found.error is not None) == refused


def test_a_requested_activation_comes_first_and_bf16_follows():
    kinds = [row.activation for row in mx.mxfp4_order(mx.Mxfp4Request(wanted="mxfp8"))]
    assert kinds[:2] == ["mxfp8", "mxfp8"]
    assert set(kinds[2:]) == {"bf16"}
    assert {row.activation for row in mx.mxfp4_order(mx.Mxfp4Request())} == {"bf16"}


@pytest.mark.parametrize(
    ("wanted", "choice", "taken"),
    [
        ("none", "flashinfer_trtllm", "TRTLLM_BF16"),
        ("mxfp8", "flashinfer_trtllm", "TRTLLM_MXFP8"),
        ("none", "marlin", "MARLIN"),
        # Nobody read whether a name goes on in BF16 where it has no variant in the format asked for.
        ("mxfp8", "marlin", "?MARLIN"),
        ("mxfp4", "flashinfer_trtllm", "?TRTLLM_BF16"),
        ("none", "flashinfer_cutlass", "?FI_CUTLASS_BF16"),
        ("mxfp8", "flashinfer_cutlass", "?FI_CUTLASS_MXFP8"),
        ("none", "cutlass", "?CUTLASS_MXFP4_MXFP4"),
        ("mxfp8", "emulation", "?EMULATION"),
    ],
)
def test_the_activations_asked_for_decide_among_the_variants_of_a_name(wanted, choice, taken):
    found = mx.select_mxfp4(mx.Mxfp4Request("sm_100", wanted=wanted, choice=choice))
    got = found.winner.enum if found.winner is not None else f"?{found.rests_with[0].enum}"
    assert got == taken
    assert found.error is None


def test_deepseek_v4_under_a_name_is_open_where_the_name_has_mxfp8_too():
    found = mx.select_mxfp4(mx.Mxfp4Request("sm_100", "deepseek-v4", choice="flashinfer_trtllm"))
    assert found.winner is None
    assert [row.enum for row in found.rests_with] == ["TRTLLM_BF16"]
    assert [(each.backend.enum, each.outcome) for each in found.candidates] == [
        ("TRTLLM_BF16", "open"),
        ("TRTLLM_MXFP8", "able"),
    ]
    assert mx.select_mxfp4(mx.Mxfp4Request("sm_90", "deepseek-v4", choice="marlin")).winner.enum == "MARLIN"


@pytest.mark.parametrize(
    ("model", "wanted", "last"),
    [
        ("gpt-oss", "none", "TRTLLM_BF16"),
        ("gpt-oss", "mxfp8", "TRTLLM_MXFP8"),
        ("deepseek-v4", "none", "TRTLLM_MXFP8"),
    ],
)
def test_an_mxfp4_choice_keeps_the_last_error(model, wanted, last):
    found = mx.select_mxfp4(mx.Mxfp4Request("sm_90", model, wanted, choice="flashinfer_trtllm"))
    assert found.winner is None
    assert found.error.code == "serving.moe-unsupported"
    assert f"Mxfp4 MoE backend '{last}'" in str(found.error)


def test_marlin_s_name_means_the_one_for_the_layout():
    for format_, enum in (("standard", "MARLIN"), ("batched", "BATCHED_MARLIN")):
        found = mx.select_mxfp4(mx.Mxfp4Request("sm_90", format=format_, choice="marlin"))
        assert [each.backend.enum for each in found.candidates] == [enum]
        assert found.winner.enum == enum
        refused = mx.select_mxfp4(mx.Mxfp4Request("rocm", format=format_, choice="marlin"))
        assert f"'{enum}'" in str(refused.error)


@pytest.mark.parametrize("choice", ["flashinfer_b12x", "b12x", "", "AUTO"])
def test_a_name_without_an_mxfp4_backend_is_an_error_that_names_the_others(choice):
    for model in mx.MODELS:
        found = mx.select_mxfp4(mx.Mxfp4Request(model=model, choice=choice))
        assert (found.candidates, found.winner, found.rests_with) == ((), None, ())
        assert found.error.code == "serving.mxfp4-unknown"
        for lang in ("en", "zh"):
            said = found.error.text(lang)
            assert f"moe_backend='{choice}' is not supported for MXFP4 MoE." in said["why"]
            assert all(name in said["next"] for name in mx.MX_CHOICES)


def test_every_mxfp4_name_ends_in_a_winner_an_open_one_or_an_error():
    for request in mx_domain():
        for choice in mx.MX_NAMES:
            found = mx.select_mxfp4(replace(request, choice=choice))
            assert {each.backend.choice for each in found.candidates} == {choice}
            assert [found.winner is not None, bool(found.rests_with), found.error is not None].count(True) == 1
            if isinstance(found.winner, mx.MxBackend) and request.model == "gpt-oss":
                assert found.winner.activation == {"none": "bf16"}.get(request.wanted, request.wanted)
