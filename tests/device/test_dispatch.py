"""Choosing between CPU and GPU, and the GPU's pass through a layer, played on the CPU by stand-ins for the operators.

The stand-ins compute with `nvfp4viz.moe`, so what is tested here is the order of steps, which scale goes where, and
what comes back; the kernels themselves are compared on a GPU (``tests/gpu``).
"""

import dataclasses
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from nvfp4viz import device, quant
from nvfp4viz.device import dispatch
from nvfp4viz.errors import DeviceError, FormatError
from nvfp4viz.moe import (
    Routing,
    W4A4Experts,
    combine_routes,
    plan_dispatch,
    quantize_rows,
    run_w4a4_experts,
    shuffle_rows,
)
from nvfp4viz.moe.experts import activate, epilogue

torch = pytest.importorskip("torch")

T, H, INNER, E, K = 7, 64, 32, 5, 2


def bf16(tensor):
    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def as_torch(array):
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)


def owners_of(offsets):
    """The expert of every row."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets.numpy()))


class FakeOps(types.ModuleType):
    """The operators of ``nvfp4viz.device.ops`` by their contract, on torch's CPU tensors."""

    @staticmethod
    def permute(x, ids, experts, *, validate):
        assert not validate  # it would wait for the GPU, for ids that the CPU has looked at
        plan = plan_dispatch(ids.numpy(), experts, n1=0, n=0, k=0)  # sizes alone
        rows = shuffle_rows(bf16(x), plan.a_map[: plan.rows])
        return types.SimpleNamespace(rows=as_torch(rows), offsets=torch.from_numpy(plan.expert_offsets), plan=plan)

    @staticmethod
    def quantize(x, *, recipe, global_scale, offsets):
        assert recipe == "vllm-cuda"
        owners = owners_of(offsets)
        return quantize_rows(bf16(x), global_scale.numpy()[owners], path="numpy")

    @classmethod
    def activation_quantize(cls, x, *, activation, **how):
        return cls.quantize(as_torch(activate(bf16(x), activation, fused=True)), **how)

    @staticmethod
    def grouped_gemm_w4a4(a, packed, scales, offsets, alphas, *, method):
        assert method == "auto"  # the library on data-centre Blackwell, else the kernel
        owners = owners_of(offsets)
        acc = quant.mma_grouped(*a, owners, packed.numpy(), scales.numpy(), path="numpy")
        return as_torch(epilogue(acc, alphas.numpy()[owners]))

    @staticmethod
    def unpermute(y, permuted, weights):
        routes = shuffle_rows(bf16(y), permuted.plan.c_map).reshape(*weights.shape, -1)
        return as_torch(combine_routes(routes, weights.numpy()))


def make_experts(seed=0, **changes):
    rng = np.random.default_rng(seed)

    def codes(*shape):
        return rng.integers(0, 256, shape, dtype=np.uint8)

    def scales(*shape):
        return rng.integers(0x28, 0x48, shape, dtype=np.uint8)

    made = W4A4Experts(
        codes(E, 2 * INNER, H // 2), scales(E, 2 * INNER, H // 16), codes(E, H, INNER // 2), scales(E, H, INNER // 16),
        *(rng.uniform(0.5, 2, E).astype(np.float32) for _ in range(2)),
        *(rng.uniform(0.01, 0.1, E).astype(np.float32) for _ in range(2)),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def tokens(seed=1):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((T, H)).astype(ml_dtypes.bfloat16)
    ids = np.array([rng.choice(E, K, replace=False) for _ in range(T)], np.int32)
    weights = rng.uniform(0, 1, (T, K)).astype(np.float32)
    return x, Routing(ids, weights, rng.standard_normal((T, E)).astype(np.float32))


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that works, as far as ``dispatch`` can see; its memory is the CPU's."""
    monkeypatch.setattr(dispatch, "require_cuda", lambda: device.Gpu("stand-in", (9, 0)))
    monkeypatch.setattr(
        dispatch, "to_cuda", lambda a: as_torch(a) if a.dtype == ml_dtypes.bfloat16 else torch.from_numpy(np.array(a))
    )
    monkeypatch.setattr(device.outcome, "failure", None)
    ops = FakeOps("nvfp4viz.device.ops")
    monkeypatch.setitem(sys.modules, "nvfp4viz.device.ops", ops)
    monkeypatch.setattr(device, "ops", ops, raising=False)
    return ops


@pytest.fixture
def no_gpu(monkeypatch):
    def refuse():
        raise DeviceError("device.none-found")

    monkeypatch.setattr(dispatch, "require_cuda", refuse)


INF, NAN = np.inf, np.nan
SCALES = {
    "healthy": {},
    "a hole of zeros": {
        "a1_gscale": np.float32([1, INF, 1, 1, 1]),
        "g1_alphas": np.float32([0.1, 0, 0.1, 0.1, 0.1]),
    },
    "holes in both": {
        "a1_gscale": np.float32([NAN, 0, -1, 1e38, INF]),
        "a2_gscale": np.float32([1, INF, 0, NAN, -INF]),
    },
    "silu": {"activation": "silu"},
}


@pytest.mark.parametrize("case", SCALES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_layer_on_the_gpu_is_the_layer_on_the_cpu(gpu, case):
    experts, (x, routing) = make_experts(**SCALES[case]), tokens()
    cuda, why = dispatch.cuda_experts({3: experts}, "auto")
    assert why is None
    expected, found = run_w4a4_experts(x, routing, experts), cuda(3, x, routing)
    assert found.out.dtype == ml_dtypes.bfloat16
    assert np.array_equal(found.out.view(np.uint16), expected.out.view(np.uint16))
    assert found.nan_experts == expected.nan_experts
    assert found.trace is None


def test_no_token_is_left_to_the_cpu(gpu):
    cuda, _ = dispatch.cuda_experts({0: make_experts()}, "auto")
    x, routing = tokens()
    assert cuda(0, x[:0], Routing(routing.ids[:0], routing.weights[:0], routing.logits[:0])) is None


@pytest.mark.parametrize(
    "error",
    [DeviceError("device.launch", kernel="k", reason="r"), RuntimeError("CUDA error: an illegal memory access\nmore")],
)
def test_a_gpu_that_fails_on_the_way_hands_over_for_good(gpu, monkeypatch, error):
    cuda, _ = dispatch.cuda_experts({0: make_experts()}, "auto")
    x, routing = tokens()
    assert cuda(0, x, routing) is not None

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(FakeOps, "grouped_gemm_w4a4", fail)
    assert cuda(0, x, routing) is None
    assert cuda.failure.code == "device.launch"
    assert device.outcome.failure is cuda.failure
    monkeypatch.undo()
    assert cuda(0, x, routing) is None, "a GPU that failed once is not asked again"


@pytest.mark.parametrize(
    "layers",
    [{0: object()}, {0: make_experts(), 1: make_experts(per_token=True)}],
    ids=["another backend", "per token"],
)
def test_experts_without_kernels_stay_on_the_cpu(gpu, layers):
    cuda, why = dispatch.cuda_experts(layers, "auto")
    assert cuda is None
    assert why.code == "device.backend"
    with pytest.raises(DeviceError) as raised:
        dispatch.cuda_experts(layers, "cuda")
    assert raised.value.code == "device.backend"


def test_experts_that_do_not_fit_stay_on_the_cpu(gpu, monkeypatch):
    def full(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nmore")

    monkeypatch.setattr(dispatch, "to_cuda", full)
    cuda, why = dispatch.cuda_experts({0: make_experts()}, "auto")
    assert cuda is None
    assert why.params == {"reason": "CUDA out of memory. Tried to allocate 3 GiB"}


def full_above(monkeypatch, owner, name, most):
    """Let ``owner.name`` run out of memory above ``most`` rows; gives the list of how many it was asked for."""
    real, tried = getattr(owner, name), []

    def tight(x, *rest, **how):
        tried.append(len(x))
        if len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return real(x, *rest, **how)

    monkeypatch.setattr(owner, name, staticmethod(tight) if isinstance(owner, type) else tight)
    return tried


def test_tokens_that_do_not_fit_together_go_one_after_another(gpu, monkeypatch):
    """The same bits, the same broken experts, and the GPU stays in use."""
    experts, (x, routing) = make_experts(**SCALES["holes in both"]), tokens()
    cuda, _ = dispatch.cuda_experts({0: experts}, "auto")
    tried = full_above(monkeypatch, FakeOps, "permute", 2)
    found = cuda(0, x, routing)
    expected = run_w4a4_experts(x, routing, experts)
    assert found.out.tobytes() == expected.out.tobytes()
    assert found.nan_experts == expected.nan_experts
    assert tried == [7, 4, 2, 2, 2, 1]
    assert cuda.failure is None


class NumpyOps(types.ModuleType):
    """``quantize`` and ``dequantize`` of the operators by the library's NumPy path."""

    DeviceQuantized = staticmethod(lambda *fields: fields)

    @staticmethod
    def quantize(x, *, recipe, global_scale=None):
        q = quant.quantize(x.numpy(), recipe=recipe, global_scale=global_scale, path="numpy")
        return types.SimpleNamespace(packed=torch.from_numpy(q.packed.copy()), scales=torch.from_numpy(q.scales.copy()))

    @staticmethod
    def dequantize(q, dtype):
        packed, scales, g, recipe, shape = q
        values = quant.QuantizedTensor(packed.numpy(), scales.numpy(), np.float32(g), recipe, 16, shape)
        return torch.from_numpy(quant.dequantize(values, dtype=np.float32, path="numpy"))


@pytest.mark.parametrize(("most", "where"), [(3, "cuda"), (0, "cpu")])
def test_a_matrix_that_does_not_fit_goes_by_rows_and_then_to_the_cpu(gpu, monkeypatch, most, where):
    ops = NumpyOps("nvfp4viz.device.ops")
    monkeypatch.setattr(device, "ops", ops)
    monkeypatch.setitem(sys.modules, "nvfp4viz.device.ops", ops)
    x = np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32)
    expected = quant.quantize(x, recipe="vllm-cuda")
    tried = full_above(monkeypatch, dispatch, "to_cuda", most)
    found, on = dispatch.quantize(x, recipe="vllm-cuda")
    assert on == where
    assert tried == ([7, 4, 2, 2, 2, 1] if most else [7, 4, 2, 1])
    assert (found.packed.tobytes(), found.scales.tobytes()) == (expected.packed.tobytes(), expected.scales.tobytes())
    back, on = dispatch.dequantize(found)
    assert on == where
    assert back.tobytes() == quant.dequantize(expected).tobytes()
    if not most:
        for call in (lambda: dispatch.quantize(x, recipe="vllm-cuda", device="cuda"),
                     lambda: dispatch.dequantize(found, device="cuda")):  # fmt: skip
            with pytest.raises(DeviceError) as raised:
                call()
            assert raised.value.code == "ops.memory"


def test_a_wish_without_a_gpu(no_gpu):
    assert dispatch.choose("cpu") == ("cpu", None)
    where, why = dispatch.choose("auto")
    assert (where, why.code) == ("cpu", "device.none-found")
    with pytest.raises(DeviceError) as raised:
        dispatch.choose("cuda")
    assert raised.value.code == "device.none-found"
    with pytest.raises(DeviceError) as raised:
        dispatch.choose("tpu")
    assert raised.value.params == {"device": "tpu"}


@pytest.mark.parametrize(
    ("recipe", "shape", "code"),
    [("modelopt", (4, 64), "device.recipe"), ("ieee", (64,), "device.shape"), ("ieee", (2, 2, 16), "device.shape"),
     ("ieee", (4, 24), "device.shape"), ("ieee", (0, 16), "device.shape"), ("ocp-floor", (4, 48), "device.shape")],
)  # fmt: skip
def test_what_has_no_kernel_is_an_error_where_the_gpu_was_asked_for(gpu, recipe, shape, code):
    """Never quietly the CPU: whoever asks for cuda by name wants to know."""
    with pytest.raises(DeviceError) as raised:
        dispatch.quantize(np.ones(shape, np.float32), recipe=recipe, device="cuda")
    assert raised.value.code == code
    if 0 not in shape and shape[-1] % quant.RECIPES[recipe].block_size == 0:
        q, where = dispatch.quantize(np.ones(shape, np.float32), recipe=recipe)
        assert where == "cpu"
        with pytest.raises(DeviceError) as raised:
            dispatch.dequantize(q, device="cuda")
        assert raised.value.code == code


@pytest.mark.parametrize("scale", ["abc", 10**400, object()], ids=["a text", "too large", "an object"])
@pytest.mark.parametrize("wish", ["auto", "cpu", "cuda"])
def test_a_global_scale_that_is_no_number_is_refused_on_either_device(gpu, monkeypatch, scale, wish):
    monkeypatch.setitem(sys.modules, "nvfp4viz.device.ops", NumpyOps("nvfp4viz.device.ops"))
    with pytest.raises(FormatError) as raised:
        dispatch.quantize(np.ones((1, 16), np.float32), recipe="ieee", global_scale=scale, device=wish)
    assert raised.value.code == "quantize.global-number"


def test_an_unknown_recipe_is_refused_as_ever(gpu):
    with pytest.raises(FormatError):
        dispatch.quantize(np.ones((4, 64), np.float32), recipe="bogus", device="cuda")


@pytest.mark.parametrize("recipe", ["ieee", "modelopt"])
@pytest.mark.parametrize("wish", ["tpu", "CUDA", "", None])
def test_a_device_that_there_is_not_is_refused_whatever_computes(gpu, recipe, wish):
    x = np.ones((1, 16), np.float32)
    q = quant.quantize(x, recipe=recipe)
    for call in (
        lambda: dispatch.quantize(x, recipe=recipe, device=wish),
        lambda: dispatch.quantize(x[0], recipe=recipe, device=wish),
        lambda: dispatch.dequantize(q, device=wish),
    ):
        with pytest.raises(DeviceError) as raised:
            call()
        assert raised.value.code == "device.unknown"


@pytest.mark.parametrize("recipe", ["vllm-cuda", "ocp-floor", "modelopt"])
def test_quantising_without_a_gpu_is_the_librarys(no_gpu, recipe):
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    found, where = dispatch.quantize(x, recipe=recipe)
    expected = quant.quantize(x, recipe=recipe)
    assert where == "cpu"
    assert np.array_equal(found.packed, expected.packed)
    assert np.array_equal(found.scales, expected.scales)
    assert found.global_scale == expected.global_scale
    back, where = dispatch.dequantize(found)
    assert where == "cpu"
    assert np.array_equal(back, quant.dequantize(expected))
