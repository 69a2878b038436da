"""The forecast against the arithmetic itself: what is predicted is what running one layer gives.

A small layer is loaded, converted and run as `nvfp4viz.serving` does for four backends, once with the fault and once
healthy, with every token on the broken expert; the outcome is classed by looking at the numbers.
"""

from functools import cache
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz.audit import audit, describe
from nvfp4viz.audit.backends import FAMILIES, automatic_backend, outcome_of_scales
from nvfp4viz.checkpoint import canonical, inject_tensors, memory_checkpoint, tensor
from nvfp4viz.serving import ALLOCATORS, BACKENDS, load_parameters, process_weights_after_loading
from nvfp4viz.serving.backends import RUNNERS, prepare_layer
from tests.audit.layouts import LAYOUTS

HIDDEN, WIDTH, EXPERTS, TOKENS, BAD = 64, 32, 4, 6, 1
E = "model.layers.0.mlp.experts"
CONFIG = {"num_hidden_layers": 1, "num_experts": EXPERTS, "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH}
QUANT = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": []}}
RUNNABLE = ("vllm-cutlass", "vllm-flashinfer-cutlass", "vllm-emulation", "vllm-marlin")
# What the kernel sees of these tokens and weights: amax/2688 of the input and of the intermediate.
SCALES = {"gate": 1.2e-3, "up": 1.2e-3, "down": 4e-3}


@cache
def healthy():
    """Calibrated for the tokens below: no block is all zero and nothing clips."""
    rng = np.random.default_rng(11)
    out = {}
    for expert in range(EXPERTS):
        for kind, (rows, columns) in {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}.items():
            codes = rng.integers(1, 8, (rows, columns), np.uint8) | rng.choice([0, 8], (rows, columns)).astype(np.uint8)
            at = f"{E}.{expert}.{kind}_proj"
            out[f"{at}.weight"] = tensor(codes[:, 0::2] | codes[:, 1::2] << 4)
            out[f"{at}.weight_scale"] = tensor(rng.integers(0x38, 0x68, (rows, columns // 16), np.uint8), "F8_E4M3")
            out[f"{at}.weight_scale_2"] = tensor(np.float32(1e-3))
            out[f"{at}.input_scale"] = tensor(np.float32(SCALES[kind] * (1 + 0.01 * expert)))
    return out


def tokens():
    return np.random.default_rng(5).standard_normal((TOKENS, HIDDEN)).astype(ml_dtypes.bfloat16)


def run(tensors, backend, expert=BAD, allocator="zeros", seed=0):
    """The layer's output with every token on one expert."""
    checkpoint = memory_checkpoint(tensors, config=CONFIG, hf_quant_config=QUANT)
    [parameters], _ = load_parameters(checkpoint, canonical(checkpoint), allocator=allocator, seed=seed)
    experts = prepare_layer(parameters, process_weights_after_loading(parameters, backend))
    routing = SimpleNamespace(ids=np.full((TOKENS, 1), expert, np.int32), weights=np.ones((TOKENS, 1), np.float32))
    return RUNNERS[type(experts)](tokens(), routing, experts).out.astype(np.float64)


@cache
def truth(expert):
    """The layer's answer with activations in BF16, which no activation scale touches."""
    return run(healthy(), "vllm-marlin", expert)


def outcome(values, expert=BAD):
    """``nan`` (or infinite: the next norm makes NaN of it), ``zero``, ``safe`` or ``degraded``."""
    reference = truth(expert)
    if not np.isfinite(values).all():
        return "nan"
    # BF16 products with a vanishing alpha leave crumbs of 1e-30; nothing of the answer is in them.
    if np.abs(values).max() <= 1e-12 * np.abs(reference).max():
        return "zero"
    error = np.linalg.norm(values - reference) / np.linalg.norm(reference)
    # Healthy four-bit activations are 0.15 to 0.18 off here, and the mildest damage 0.85.
    return "safe" if error < 0.3 else "degraded"


FAULTS = {
    "w13 zero": {"gate": 0.0, "up": 0.0},
    "gate zero": {"gate": 0.0},
    "w2 zero": {"down": 0.0},
    "all zero": {"gate": 0.0, "up": 0.0, "down": 0.0},
    "all minus zero": {"gate": -0.0, "up": -0.0, "down": -0.0},
    "gate nan": {"gate": np.nan},
    "up nan": {"up": np.nan},
    "w2 nan": {"down": np.nan},
    "gate inf": {"gate": np.inf},
    "w2 inf": {"down": np.inf},
    "gate minus inf": {"gate": -np.inf},
    "w13 negative": {"gate": -1.2e-3, "up": -1.2e-3},
    "w2 negative": {"down": -4e-3},
    "gate negative": {"gate": -1.2e-3},
    "all subnormal": {"gate": 4.4e-42, "up": 4.4e-42, "down": 4.4e-42},
    "w13 subnormal": {"gate": 4.4e-42, "up": 4.4e-42},
    "w2 subnormal": {"down": 4.4e-42},
    "w13 times 64": {"gate": 1.2e-3 * 64, "up": 1.2e-3 * 64},
    "w13 times 2^14": {"gate": 1.2e-3 * 2**14, "up": 1.2e-3 * 2**14},
    "w2 times 2^18": {"down": 4e-3 * 2**18},
    "w13 by 100": {"gate": 1.2e-5, "up": 1.2e-5},
    "w2 by 100": {"down": 4e-5},
    "w2 huge": {"down": 1e38},
}


def broken(values):
    return {**healthy(), **{f"{E}.{BAD}.{kind}_proj.input_scale": tensor(np.float32(v)) for kind, v in values.items()}}


def forecasts(tensors):
    return {
        item.name: item for item in audit(memory_checkpoint(tensors, config=CONFIG, hf_quant_config=QUANT)).backends
    }


def agrees(forecast, seen):
    """What was seen is what was forecast, or one of what was said to be possible."""
    if forecast.outcome == "ignored":
        return seen == "safe"
    return seen == forecast.outcome or seen in forecast.possible


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("backend", RUNNABLE)
def test_stored_values(fault, backend):
    tensors = broken(FAULTS[fault])
    forecast = forecasts(tensors)[backend]
    seen = outcome(run(tensors, backend))
    assert agrees(forecast, seen), (forecast.outcome, forecast.possible, seen)
    # Scope: another expert is untouched where the forecast says so, and shares the fate where a maximum is taken.
    other = outcome(run(tensors, backend, expert=0), expert=0)
    if forecast.scope in ("none", "experts"):
        assert other == "safe"
    else:
        assert other == seen


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("lost", [("gate", "up", "down"), ("gate", "up"), ("gate",), ("down",)])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_missing_slots_come_out_as_one_of_the_possible(allocator, lost, backend):
    names = {f"{E}.{BAD}.{kind}_proj.input_scale" for kind in lost}
    tensors = {name: item for name, item in healthy().items() if name not in names}
    forecast = forecasts(tensors)[backend]
    assert forecast.outcome == ("ignored" if backend == "vllm-marlin" else "undefined")
    for seed in range(6 if allocator == "random" else 1):
        seen = outcome(run(tensors, backend, allocator=allocator, seed=seed))
        assert agrees(forecast, seen), (forecast.possible, seen)


@pytest.mark.parametrize("kind", ["gate", "down"])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_a_stored_nan_is_certain_whatever_an_open_slot_of_its_layer_holds(kind, backend):
    """The open slots are another expert's: what memory held there decides nothing where a maximum is taken."""
    lost = {f"{E}.{0 if BAD else 1}.{each}_proj.input_scale" for each in ("gate", "up", "down")}
    tensors = {name: item for name, item in broken({kind: np.nan}).items() if name not in lost}
    forecast = forecasts(tensors)[backend]
    seen = {outcome(run(tensors, backend, allocator=allocator)) for allocator in ALLOCATORS}
    assert len(seen) == 1
    assert agrees(forecast, seen.pop())
    assert forecast.outcome != "undefined" or forecast.scope == "experts"


@pytest.mark.parametrize(("lost", "value"), [("gate", np.nan), ("up", np.inf), ("gate", 1.2e-3)])
@pytest.mark.parametrize("backend", ["vllm-cutlass", "vllm-flashinfer-cutlass"])
def test_what_stands_beside_an_open_slot_may_decide(lost, value, backend):
    """Of gate and up the larger is taken: a NaN or an infinity wins over whatever memory held in the other's slot."""
    name = f"{E}.{BAD}.{lost}_proj.input_scale"
    beside = {"gate": "up", "up": "gate"}[lost]
    tensors = {each: item for each, item in broken({beside: value}).items() if each != name}
    forecast = forecasts(tensors)[backend]
    seen = {outcome(run(tensors, backend, allocator=allocator)) for allocator in ALLOCATORS}
    if np.isfinite(value):
        assert forecast.outcome == "undefined"
        assert len(seen) > 1
    else:
        assert seen == {"nan"}
        assert (forecast.outcome, forecast.possible) == ("nan", ())
        assert "memory" not in forecast.why


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1e-3, 4.4e-42])
@pytest.mark.parametrize("kind", ["gate", "up", "down"])
@pytest.mark.parametrize("backend", RUNNABLE)
def test_second_level_weight_scales(value, kind, backend):
    """gate's is used for up as well, so a bad one of up's own is never read."""
    tensors = {**healthy(), f"{E}.{BAD}.{kind}_proj.weight_scale_2": tensor(np.float32(value))}
    forecast = forecasts(tensors)[backend]
    seen = outcome(run(tensors, backend))
    if kind == "up":
        assert forecast.outcome == "degraded"
        assert seen == "safe"  # here gate and up had the same scale; a real up may have had another
    else:
        assert agrees(forecast, seen), (forecast.outcome, seen)


def test_a_healthy_layer_is_safe_everywhere():
    assert {item.outcome for item in forecasts(healthy()).values()} == {"safe"}
    for backend in RUNNABLE:
        assert outcome(run(healthy(), backend)) == "safe"


def test_a_mismatched_pair_is_off_by_the_ratio():
    tensors = {**healthy(), f"{E}.{BAD}.up_proj.weight_scale_2": tensor(np.float32(1e-2))}
    for backend in RUNNABLE:
        assert forecasts(tensors)[backend].outcome == "degraded"
        # The server uses gate's, so the answer is what it was with equal scales: a tenth of what up asks for.
        assert outcome(run(tensors, backend)) == "safe"


def test_every_backend_of_the_vocabulary_is_forecast():
    assert tuple(forecasts(healthy())) == tuple(FAMILIES) == (
        "vllm-cutlass", "vllm-flashinfer-trtllm", "vllm-flashinfer-cutlass", "vllm-flashinfer-cutedsl",
        "vllm-flashinfer-b12x", "vllm-marlin", "vllm-humming", "vllm-emulation", "sglang-flashinfer",
        "sglang-generic", "sglang-marlin", "tensorrt-llm", "transformers",
    )  # fmt: skip


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in FAMILIES])
def test_forecast_and_server_describe_a_backend_alike(backend):
    assert FAMILIES[backend].reach == BACKENDS[backend].scope
    assert FAMILIES[backend].schemes == BACKENDS[backend].schemes


@pytest.mark.parametrize(
    ("a13", "a2", "expected"),
    [
        (0.0, 1e-3, "zero"), (0.0, 0.0, "nan"), (1e-3, 0.0, "zero"), (np.inf, 1e-3, "nan"), (1e-3, np.nan, "nan"),
        (1e-38, 1e-3, "zero"), (1e38, 1e-3, "zero"), (1e-3 / 64, 1e-3, "degraded"), (0.064, 1e-3, "safe"),
        (1e-3 * 2**15, 1e-3, "degraded"), (-1e-3, 1e-3, "degraded"), (1e-3, 1e-3, "safe"),
    ],
)  # fmt: skip
def test_the_rows_of_the_table_of_predicted_outcomes(a13, a2, expected):
    assert outcome_of_scales(a13, a2)[0] == expected


@pytest.mark.parametrize(
    ("gpu", "activation", "weight_only", "expected"),
    [
        ("sm_100", "silu", False, "vllm-flashinfer-trtllm"),
        ("sm_103", "gelu_tanh", False, "vllm-flashinfer-trtllm"),
        ("sm_120", "gelu_tanh", False, "vllm-flashinfer-cutlass"),
        ("sm_121", "silu", False, "vllm-flashinfer-cutlass"),
        ("sm_120", "gelu", False, "vllm-cutlass"),
        ("sm_110", "silu", False, "vllm-cutlass"),
        ("sm_90", "silu", False, "vllm-humming"),
        ("sm_89", "silu", False, "vllm-marlin"),
        ("sm_75", "silu", False, "vllm-marlin"),
        ("sm_120", "silu", True, "vllm-marlin"),
        ("sm_100", "swigluoai", False, "vllm-flashinfer-cutedsl"),
        ("sm_100", "unheard_of", False, "vllm-cutlass"),
        ("sm_101", "silu", False, "vllm-flashinfer-trtllm"),
        ("sm_70", "silu", False, None),
        ("sm_130", "silu", False, None),
    ],
)
def test_what_vllm_picks_by_itself(gpu, activation, weight_only, expected):
    assert automatic_backend(gpu, activation, weight_only) == expected


@pytest.mark.parametrize(
    ("gpu", "dialect", "expected"),
    [
        ("sm_100", "gpt-oss", "vllm-flashinfer-trtllm"),
        ("sm_103", "deepseek-v4", "vllm-flashinfer-trtllm"),
        ("sm_90", "deepseek-v4", "vllm-humming"),
        ("sm_120", "deepseek-v4", "vllm-marlin"),
        ("sm_90", "gpt-oss", None),  # rests with Triton, which is no NVFP4 backend
        ("sm_120", "gpt-oss", None),  # rests with FlashInfer's CUTLASS, whose conditions were not read
        ("sm_70", "gpt-oss", None),
        # Their order was read for these two models alone.
        ("sm_100", "quark", None),
        ("sm_90", "modelopt", None),
        ("sm_100", "compressed-tensors", None),
    ],
)
def test_what_vllm_picks_for_mxfp4(gpu, dialect, expected):
    assert automatic_backend(gpu, "silu", False, dialect) == expected


def test_nothing_is_picked_where_the_configuration_is_refused():
    layout = LAYOUTS["NVFP4_AWQ"]
    assert audit(layout.open(), gpu="sm_100").auto is None
    assert audit(LAYOUTS["modelopt"].open(), gpu="sm_100").auto == "vllm-flashinfer-trtllm"
    assert audit(LAYOUTS["DeepSeek V4"].open(), gpu="sm_90").auto == "vllm-humming"


# ---------------------------------------------------------------------------------------- several faults at once


def together():
    """A NaN in layer 0's down, and a pair that differs: two causes, and the tensors."""
    layout = LAYOUTS["modelopt"]
    at = {"layer": 0, "config": layout.config, "hf_quant_config": layout.quant}
    tensors = inject_tensors(layout.tensors(), "nan", expert=1, projection="down", role="input_scale", **at)
    tensors = inject_tensors(tensors, "pair-mismatch", expert=2, projection="up", role="weight_scale_2", **at)
    return audit(layout.open(tensors)), layout, tensors


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_worst_effect_names_the_others(language):
    report, layout, tensors = together()
    assert {item.code for item in report.findings} == {"scale.nan", "scale.pair-mismatch"}
    words = {"en": " Besides: {}.", "zh": "此外还有：{}。"}[language]
    pair, nan = "scale.pair-mismatch (weight_scale_2)", "scale.nan (input_scale)"
    for item in report.backends:
        why, _ = describe(item, language)
        if item.outcome == "nan":
            # The NaN speaks; a backend that takes gate's scale for up is told of the pair as well.
            assert why.endswith(words.format(pair))
        else:
            # It does not read the NaN, which is no harm there.
            assert nan not in why
            assert words[:5] not in why
    assert {item.outcome for item in report.backends} > {"nan"}
    # One fault alone has nothing beside it, and a healthy file has nothing at all.
    for name in (layout.name(1, "down", "input_scale"), layout.name(2, "up", "weight_scale_2")):
        alone = audit(layout.open({**tensors, name: layout.tensors()[name]}))
        assert len(alone.findings) == 1
        assert not [item for item in alone.backends if words[:5] in describe(item, language)[0]]
    assert not [item for item in audit(layout.open()).backends if "besides" in item.params]


def test_no_more_than_a_few_others_are_named():
    report, layout, tensors = together()
    for kind, fault in enumerate(("zero", "inf", "negative", "subnormal")):
        tensors = inject_tensors(
            tensors, fault, layer=0, expert=3 + kind, projection="down", role="weight_scale_2", config=layout.config,
            hf_quant_config=layout.quant,
        )  # fmt: skip
    report = audit(layout.open(tensors))
    long = [item for item in report.backends if len(item.params.get("besides", ())) > 3]
    assert long
    for item in long:
        more = len(item.params["besides"]) - 3
        assert item.why.endswith(f" and {more} more.")
        assert item.why.partition("Besides: ")[2].count("(") == 3
        chinese, _ = describe(item, "zh")
        assert chinese.endswith(f"，以及另外 {more} 项。")
        assert chinese.partition("此外还有：")[2].count("、") == 2
        assert "…" not in item.why + chinese


@pytest.mark.parametrize("id", ["modelopt", "compressed-tensors", "stacked", "projection-major"])
def test_one_slot_is_not_called_the_whole_cause(id):
    """A NaN speaks before a slot that is missing in its layer, and names it, and other layers like its own."""
    layout = LAYOUTS[id]
    one = layout.tensors()
    kind = layout.kinds[0]
    layout.put(one, 1, kind, "input_scale", layout.stored(np.nan))
    nan = {name.replace("layers.0.", f"layers.{k}."): item for k in range(3) for name, item in one.items()}
    config = {**layout.config, "num_hidden_layers": 3}
    alone = {item.name: item for item in audit(layout.open(nan, config=config)).backends}
    name = layout.name(5, "down", "input_scale")
    both = {key: item for key, item in nan.items() if key != name}
    for item in audit(layout.open(both, config=config)).backends:
        before = alone[item.name]
        assert "besides" not in before.params
        if before.outcome == "nan":
            assert before.params["alike"] == 2
            assert "The same in 2 other layers." in describe(before)[0]
            assert "另有 2 层也是如此" in describe(before, "zh")[0]
        if item.outcome in ("nan", "load-error"):
            said = describe(item)[0]
            # Of down's, a backend that reads it tells.
            read = FAMILIES[item.name].reads_down
            assert ("scale.missing (input_scale)" in said) == (item.outcome == "nan" and read)
            assert ("scale.nan (input_scale)" in said) == (item.outcome == "load-error")


def test_one_layer_alone_is_like_no_other():
    layout = LAYOUTS["modelopt"]
    tensors = layout.tensors()
    layout.put(tensors, 1, "down", "input_scale", np.nan)
    assert not any("alike" in item.params for item in audit(layout.open(tensors)).backends)
    layout.put(tensors, 5, "down", "weight_scale_2", 0.0)
    layout.put(tensors, 6, "down", "weight_scale_2", np.nan)
    said = {item.name: describe(item)[0] for item in audit(layout.open(tensors)).backends}
    # The NaN of a weight is told, and the zero of another stands beside it.
    assert all("scale.zero (weight_scale_2)" in text for text in said.values())
