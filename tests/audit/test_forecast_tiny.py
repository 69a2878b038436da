"""The forecast against tiny-moe itself: every fault that shows in the scalars, on every backend that is simulated.

One layer of the trained model is loaded, converted and run as `nvfp4viz.serving` does, on the hidden states that a
prompt brings there, with every token on the broken expert.  Undefined slots are run under every allocator.
"""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from nvfp4viz import serving
from nvfp4viz.audit import audit, run_audit
from nvfp4viz.audit.backends import FATES
from nvfp4viz.audit.deep_findings import deepen
from nvfp4viz.checkpoint import FAULTS, Tensor, canonical, inject_tensors, memory_checkpoint, open_checkpoint, tensor
from nvfp4viz.model.tokenizer import Tokenizer
from nvfp4viz.serving import ALLOCATORS, load_parameters, process_weights_after_loading
from nvfp4viz.serving.backends import RUNNERS, prepare_layer
from sample_checkpoints import ensure
from tests.audit.layouts import packed

LAYER, BAD, OTHER = 1, 5, 9
BACKENDS = ("vllm-cutlass", "vllm-flashinfer-cutlass", "vllm-flashinfer-trtllm", "vllm-emulation", "vllm-marlin")
PROMPT = "The orchard was quiet, and 12 + 7 = "
# Faults whose finding needs no weight to be read.
VISIBLE = [fault for fault in FAULTS.values() if fault.findings and not fault.deep]
# A maximum of gate and up hides what is too small in one of them; both together, whose input is one, nothing hides.
CASES = [
    pytest.param(fault.id, role, projection, id=f"{fault.id}-{role}-{projection}")
    for fault in VISIBLE
    for role in fault.roles
    for projection in ("gate", "up", "down", *(["gate+up", "gate+up+down"] if role == "input_scale" else []))
    if not (fault.id == "pair-mismatch" and projection == "down")
]


@cache
def layer():
    """One layer's tensors, its configuration, and the hidden states of a prompt there."""
    served = serving.load(ensure("tiny-moe-nvfp4-full"), backend="vllm-marlin")
    seen = {}

    def watching(at, x, routing):
        seen.setdefault(at, np.array(x))
        return served.experts(at, x, routing)

    served.model.forward(Tokenizer().encode(PROMPT), watching)
    checkpoint = open_checkpoint(ensure("tiny-moe-nvfp4-full"))
    prefix = canonical(checkpoint).blocks[LAYER]
    tensors = {name: checkpoint.read_tensor(name) for name in checkpoint.tensors if name.startswith(f"{prefix}.")}
    # One layer is no model of four.
    config = {key: value for key, value in checkpoint.config.items() if key != "num_hidden_layers"}
    return tensors, config, checkpoint.hf_quant_config, seen[LAYER]


def opened(tensors):
    _, config, quant, _ = layer()
    return memory_checkpoint(tensors, config=config, hf_quant_config=quant)


def parameters_of(tensors, allocator="zeros", seed=0):
    checkpoint = opened(tensors)
    [parameters], _ = load_parameters(checkpoint, canonical(checkpoint), allocator=allocator, seed=seed)
    return parameters


def run(parameters, backend, expert):
    """The layer's output with every token on one expert."""
    x = layer()[3]
    experts = prepare_layer(parameters, process_weights_after_loading(parameters, backend))
    routing = SimpleNamespace(ids=np.full((len(x), 1), expert, np.int32), weights=np.ones((len(x), 1), np.float32))
    return RUNNERS[type(experts)](x, routing, experts).out.astype(np.float64)


@cache
def truth(expert):
    """The answer with activations in BF16, which no activation scale touches."""
    return run(parameters_of(layer()[0]), "vllm-marlin", expert)


def outcome(values, expert):
    reference = truth(expert)
    if not np.isfinite(values).all():
        return "nan"
    if np.abs(values).max() <= 1e-12 * np.abs(reference).max():
        return "zero"
    error = np.linalg.norm(values - reference) / np.linalg.norm(reference)
    return "safe" if error < 0.3 else "degraded"


def agrees(forecast, seen):
    if forecast.outcome == "ignored":
        return seen == "safe"
    return seen == forecast.outcome or seen in forecast.possible


# Its class has no GELU, the experts' activation function.
REFUSING = "vllm-flashinfer-cutedsl"


def all_safe(report):
    return {item.outcome for item in report.backends if item.name != REFUSING} == {"safe"}


def test_the_healthy_layer_is_safe_wherever_it_can_be_served():
    tensors = layer()[0]
    report = audit(opened(tensors))
    assert all_safe(report)
    assert {item.name: item.why for item in report.backends if item.outcome == "unsupported"} == {
        REFUSING: "Its class in vLLM 0.33.0 does not take the experts' activation function gelu_tanh: an explicit "
        "choice of it is refused (ValueError), without a fallback."
    }
    for backend in BACKENDS:
        for expert in (BAD, OTHER):
            assert outcome(run(parameters_of(tensors), backend, expert), expert) == "safe"


@pytest.mark.parametrize(("fault", "role", "projection"), CASES)
def test_every_fault_comes_out_as_forecast(fault, role, projection):
    healthy, config, quant, _ = layer()
    tensors = healthy
    for kind in projection.split("+"):
        tensors = inject_tensors(
            tensors, fault, layer=LAYER, expert=BAD, projection=kind, role=role, seed=3, config=config,
            hf_quant_config=quant,
        )  # fmt: skip
    forecasts = {item.name: item for item in audit(opened(tensors)).backends}
    lost = fault == "missing"
    fates = (
        [(name, seed) for name in ALLOCATORS for seed in range(4 if name == "random" else 1)]
        if lost
        else [("zeros", 0)]
    )
    loaded = [parameters_of(tensors, *fate) for fate in fates]
    for backend in BACKENDS:
        forecast = forecasts[backend]
        seen = {outcome(run(parameters, backend, BAD), BAD) for parameters in loaded}
        for each in seen:
            assert agrees(forecast, each), (backend, forecast.outcome, forecast.possible, seen)
        if forecast.scope in ("none", "experts"):
            others = {outcome(run(parameters, backend, OTHER), OTHER) for parameters in loaded}
            assert others == {"safe"}, (backend, forecast.scope, others)


def changed(values):
    """The layer with other scales, by the end of their names."""
    healthy = layer()[0]
    prefix = canonical(opened(healthy)).blocks[LAYER]
    names = {f"{prefix}.{end}": value for end, value in values.items()}
    assert names.keys() <= healthy.keys()
    return {**healthy, **{name: tensor(np.float32(value)) for name, value in names.items()}}


@pytest.mark.parametrize("power", [-6.5, -8, -9, -10, -12, -16, -20, -23, -26])
@pytest.mark.parametrize("halves", [("gate", "up"), ("down",), ("gate", "up", "down")], ids="+".join)
def test_scales_that_are_too_small(halves, power):
    """Gate and up are clipped both, and their product falls by the square: down's own scale is then far too large."""
    healthy = layer()[0]
    prefix = canonical(opened(healthy)).blocks[LAYER]
    names = [f"{BAD}.{kind}_proj.input_scale" for kind in halves]
    own = {name: np.frombuffer(healthy[f"{prefix}.{name}"].tobytes(), np.float32)[0] for name in names}
    tensors = changed({name: value * np.float32(2.0**power) for name, value in own.items()})
    [forecast] = [item for item in audit(opened(tensors)).backends if item.name == "vllm-cutlass"]
    seen = outcome(run(parameters_of(tensors), "vllm-cutlass", BAD), BAD)
    assert seen in ("degraded", "zero")
    assert agrees(forecast, seen), (forecast.outcome, forecast.possible, seen)
    if power > -7:
        # The blocks of the product keep normal scales; and activations may be as small as their scale says.
        assert (seen, forecast.outcome, forecast.possible) == ("degraded", "degraded", ("degraded", "safe"))


@pytest.mark.parametrize(("first", "second"), [(20, -15), (14, -10), (-10, 10), (-7, 9), (-12, -12), (18, 18)])
def test_scales_that_are_off_both_ways(first, second):
    healthy = layer()[0]
    prefix = canonical(opened(healthy)).blocks[LAYER]
    off = {f"{BAD}.{kind}_proj.input_scale": power for kind, power in
           (("gate", first), ("up", first), ("down", second))}  # fmt: skip
    own = {name: np.frombuffer(healthy[f"{prefix}.{name}"].tobytes(), np.float32)[0] for name in off}
    tensors = changed({name: own[name] * np.float32(2.0) ** power for name, power in off.items()})
    [forecast] = [item for item in audit(opened(tensors)).backends if item.name == "vllm-cutlass"]
    seen = outcome(run(parameters_of(tensors), "vllm-cutlass", BAD), BAD)
    assert agrees(forecast, seen), (forecast.outcome, forecast.possible, seen)


@pytest.mark.parametrize("halves", [("gate", "up"), ("down",), ("gate", "up", "down"), ("gate",)], ids="+".join)
def test_a_layer_of_negative_scales(halves):
    """No sound expert hides them; as it is where all experts have one scale together.  Software keeps the sign."""
    healthy = layer()[0]
    prefix = canonical(opened(healthy)).blocks[LAYER]
    own = {
        name.removeprefix(f"{prefix}."): -np.frombuffer(item.tobytes(), np.float32)[0]
        for name, item in healthy.items() if name.endswith(tuple(f"{kind}_proj.input_scale" for kind in halves))
    }  # fmt: skip
    tensors = changed(own)
    loaded = parameters_of(tensors)
    for forecast in audit(opened(tensors)).backends:
        if forecast.name in BACKENDS:
            seen = outcome(run(loaded, forecast.name, BAD), BAD)
            assert agrees(forecast, seen), (forecast.name, forecast.outcome, forecast.possible, seen)
            if forecast.name == "vllm-emulation":
                assert (seen, "sign" in forecast.why) == ("safe", len(halves) != 1 or "down" in halves)


def stored(end):
    """The healthy layer's numbers by the last three parts of their names, of the names that end so."""
    return {
        ".".join(name.split(".")[-3:]): np.frombuffer(item.tobytes(), np.float32)[0]
        for name, item in layer()[0].items() if name.endswith(end)
    }  # fmt: skip


EXPERTS = 64


@pytest.mark.parametrize("factor", [None, 2.0**20, 2.0**40], ids=["reciprocal", "2^20", "2^40"])
@pytest.mark.parametrize(
    ("halves", "first"), [(("gate", "up"), 0), (("down",), 0), (("gate", "up", "down"), 0), (("gate", "up"), 31)]
)
def test_weight_scales_the_other_way_up(halves, first, factor):
    """Marlin's products overflow to NaN, others' not; experts whose scales are right do not suffer."""
    own = {name: value for kind in halves for name, value in stored(f"{kind}_proj.weight_scale_2").items()}
    hit = {name: value for name, value in own.items() if int(name.split(".")[0]) >= first}
    tensors = changed({name: 1 / value if factor is None else value * factor for name, value in hit.items()})
    report, loaded = audit(opened(tensors)), parameters_of(tensors)
    assert "scale.convention" in {item.code for item in report.findings}
    for forecast in report.backends:
        if forecast.name in BACKENDS:
            ends = {expert: outcome(run(loaded, forecast.name, expert), expert) for expert in (BAD, 20, EXPERTS - 1)}
            assert all(agrees(forecast, seen) for seen in ends.values()), (forecast.name, forecast.possible, ends)
            assert forecast.scope == ("experts" if first else "layer")
            assert (ends[BAD] == "safe") == (first > BAD)
            assert ends[EXPERTS - 1] == ("nan" if forecast.name == "vllm-marlin" and factor != 2.0**20 else "degraded")


@pytest.mark.parametrize("inputs", [(), ("gate", "up"), ("down",), ("gate", "up", "down")], ids="+".join)
@pytest.mark.parametrize("weights", [("gate", "up"), ("gate",), ("down",), ("gate", "up", "down")], ids="+".join)
@pytest.mark.parametrize("everywhere", [False, True])
def test_signs_that_cancel(inputs, weights, everywhere):
    """What is negative twice is not; where no activation scale is negative the forecast is certain.

    Hardware may keep the sign of a block scale, which this arithmetic drops (section 4.5).
    """
    roles = [(kind, "input_scale") for kind in inputs] + [(kind, "weight_scale_2") for kind in weights]
    tensors = changed({
        name: -value for kind, role in roles for name, value in stored(f"{kind}_proj.{role}").items()
        if everywhere or name.startswith(f"{BAD}.")
    })  # fmt: skip
    loaded = parameters_of(tensors)
    for forecast in audit(opened(tensors)).backends:
        if forecast.name in BACKENDS:
            seen = outcome(run(loaded, forecast.name, BAD), BAD)
            assert agrees(forecast, seen), (forecast.name, forecast.outcome, forecast.possible, seen)
            assert forecast.outcome == "degraded"
            assert ("safe" in forecast.possible) >= (seen == "safe")
            if not inputs:
                assert bool(forecast.possible) == (seen == "safe")


@pytest.mark.parametrize(
    "values",
    [
        {f"{BAD}.down_proj.weight_scale_2": 0.0, f"{OTHER}.down_proj.input_scale": np.finfo(np.float32).max / 2688},
        {f"{BAD}.down_proj.weight_scale_2": np.nan, f"{OTHER}.gate_proj.input_scale": 31460.0},
        {f"{BAD}.down_proj.weight_scale_2": -1e-4, f"{OTHER}.down_proj.input_scale": np.inf},
    ],
)
def test_two_causes_reach_as_far_as_the_wider(values):
    """One expert's weight scale, and another's activation scale, which a maximum gives to all of the layer."""
    tensors = changed(values)
    loaded, third = parameters_of(tensors), 20
    for forecast in audit(opened(tensors)).backends:
        if forecast.name in BACKENDS:
            others = {outcome(run(loaded, forecast.name, expert), expert) for expert in (third, 30)}
            assert (others == {"safe"}) == (forecast.scope == "experts"), (forecast.name, forecast.scope, others)
    narrow = dict([next(iter(values.items()))])
    assert {one.scope for one in audit(opened(changed(narrow))).backends if one.name in BACKENDS} == {"experts"}


# Faults whose finding needs the weights; an exponent cast is of MXFP4, which is not simulated here.
DEEP = [
    pytest.param(fault.id, projection, id=f"{fault.id}-{projection}")
    for fault in FAULTS.values()
    for projection in ("gate", "up", "down")
    if fault.deep and fault.id != "exponent-cast"
]


def of_bytes(tensors, state):
    """The forecasts with the weights read, and the experts that a finding names."""
    report = deepen(run_audit(opened(tensors)), state=state).report
    [item] = [item for item in report.findings if item.severity != "info"]
    return report.backends, item.experts


@pytest.mark.parametrize(("fault", "projection"), DEEP)
def test_every_fault_in_the_bytes_comes_out_as_forecast(fault, projection, tmp_path):
    healthy, config, quant, _ = layer()
    tensors = inject_tensors(
        healthy, fault, layer=LAYER, expert=BAD, projection=projection, seed=3, config=config, hf_quant_config=quant
    )
    assert all_safe(audit(opened(tensors)))
    forecasts, experts = of_bytes(tensors, tmp_path)
    loaded = parameters_of(tensors)
    for forecast in forecasts:
        assert forecast.outcome != "safe", forecast.name
        if forecast.name == REFUSING:
            assert forecast.outcome == "unsupported"
            continue
        assert (forecast.scope, forecast.layers) == ("experts", (LAYER,))
        if forecast.name in BACKENDS:
            seen = outcome(run(loaded, forecast.name, BAD), BAD)
            assert agrees(forecast, seen), (forecast.name, forecast.outcome, forecast.possible, seen)
            if OTHER not in experts:
                assert outcome(run(loaded, forecast.name, OTHER), OTHER) == "safe"


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0xB8])
def test_bad_block_scales_everywhere_in_a_matrix(byte, projection, tmp_path):
    """One NaN block may be lost among sound ones; all of them cannot be."""
    healthy = layer()[0]
    name = f"{canonical(opened(healthy)).blocks[LAYER]}.{BAD}.{projection}_proj.weight_scale"
    old = healthy[name]
    tensors = {**healthy, name: Tensor(old.dtype, old.shape, bytes([byte]) * len(old.tobytes()))}
    loaded = parameters_of(tensors)
    for forecast in of_bytes(tensors, tmp_path)[0]:
        if forecast.name in BACKENDS:
            seen = outcome(run(loaded, forecast.name, BAD), BAD)
            assert seen != "safe"
            assert agrees(forecast, seen), (forecast.name, forecast.outcome, forecast.possible, seen)


CT = {
    "weight": "weight_packed", "weight_scale": "weight_scale", "weight_scale_2": "weight_global_scale",
    "input_scale": "input_global_scale",
}  # fmt: skip


@cache
def divisors():
    """The same layer as compressed-tensors stores it: other names, scales the other way up."""
    out = {}
    for name, item in layer()[0].items():
        head, _, role = name.rpartition(".")
        if role in ("weight_scale_2", "input_scale"):
            item = tensor(np.float32([1]) / np.frombuffer(item.tobytes(), np.float32))
        out[f"{head}.{CT[role]}"] = item
    config = {key: value for key, value in layer()[1].items() if key != "quantization_config"}
    return out, {**config, "quantization_config": packed()}


@pytest.mark.parametrize("projection", ["gate", "down"])
@pytest.mark.parametrize("fault", ["missing", "zero", "nan", "inf", "negative", "subnormal", "scaled", "random-bits"])
def test_divisors_come_out_as_forecast(fault, projection):
    """A dead expert is an infinite divisor, which the server inverts to zero and then to infinity."""
    healthy, config = divisors()
    tensors = inject_tensors(
        healthy, fault, layer=LAYER, expert=BAD, projection=projection, role="input_scale", seed=7, config=config
    )
    checkpoint = memory_checkpoint(tensors, config=config)
    report = audit(checkpoint)
    # Random bits may also be a plausible scale, of which no file check can say anything; these are not.
    assert [item.experts for item in report.findings if item.severity != "info"] == [(BAD,)]
    forecasts = {item.name: item for item in report.backends}
    fates = [(name, seed) for name in ALLOCATORS for seed in range(4 if name == "random" else 1)]
    loaded = [
        load_parameters(checkpoint, canonical(checkpoint), allocator=name, seed=seed)[0][0]
        for name, seed in (fates if fault == "missing" else [("zeros", 0)])
    ]
    for backend in BACKENDS:
        for parameters in loaded:
            seen = outcome(run(parameters, backend, BAD), BAD)
            assert agrees(forecasts[backend], seen), (backend, forecasts[backend].outcome, seen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_model_comes_out_as_forecast(backend):
    """A NaN in one expert that the prompt reaches: generated to the end, once a backend."""
    healthy = open_checkpoint(ensure("tiny-moe-nvfp4-full"))
    served = serving.load(healthy, backend="vllm-marlin")
    used = served.generate(PROMPT, 1).trace.routes[-1, LAYER]
    tensors = inject_tensors(
        healthy.read_tensors(), "nan", layer=LAYER, expert=int(used[0]), projection="down", config=healthy.config,
        hf_quant_config=healthy.hf_quant_config,
    )  # fmt: skip
    broken = memory_checkpoint(tensors, config=healthy.config, hf_quant_config=healthy.hf_quant_config)
    forecast = next(item for item in audit(broken).backends if item.name == backend)
    nan = np.asarray(serving.load(broken, backend=backend).generate(PROMPT, 1).trace.nan_fraction, np.float64)
    assert (forecast.outcome == "nan") == bool(nan[-1, LAYER:].any())
    # What comes before the broken layer is as it was.
    assert not nan[:, :LAYER].any()
    assert forecast.outcome == ("ignored" if backend == "vllm-marlin" else "nan")
    assert forecast.layers == (() if backend == "vllm-marlin" else (LAYER,))


@pytest.mark.parametrize("lost", [("gate", "up", "down"), ("gate", "up"), ("gate",), ("down",)], ids="+".join)
@pytest.mark.parametrize("backend", BACKENDS[:-1])
def test_what_is_possible_is_what_some_memory_does(backend, lost):
    """Both ways: no fate of the slot comes out as anything else, and each outcome that is named has its fate."""
    healthy = layer()[0]
    names = [f"{canonical(opened(healthy)).blocks[LAYER]}.{BAD}.{kind}_proj.input_scale" for kind in lost]
    broken = {name: item for name, item in healthy.items() if name not in names}
    forecast = next(item for item in audit(opened(broken)).backends if item.name == backend)
    assert forecast.outcome == "undefined"
    seen = set()
    # The audit's own fates, and values that are too small or too large by less.
    own = float(np.frombuffer(healthy[names[-1]].tobytes(), np.float32)[0])
    for value in (*FATES, *(own * 2.0**k for k in (-10, 14, 16, 18, 19))):
        planted = {**broken, **dict.fromkeys(names, tensor(np.float32(value)))}
        seen.add(outcome(run(parameters_of(planted), backend, BAD), BAD))
    assert seen == set(forecast.possible)
