"""Serve a checkpoint: read its config, load, convert for a backend, and generate.

>>> import nvfp4viz.serving as serving                                              # doctest: +SKIP
>>> served = serving.load("sample_checkpoints/tiny-moe-nvfp4-holes")                # doctest: +SKIP
>>> served.generate("12 + 34 =", 8).text                                            # doctest: +SKIP
'<pad><pad><pad><pad><pad><pad><pad><pad>'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nvfp4viz.checkpoint import CanonicalView, Checkpoint, canonical, open_checkpoint
from nvfp4viz.device.dispatch import CudaExperts, cuda_experts
from nvfp4viz.errors import DeviceError, ServingError
from nvfp4viz.moe import Bf16Experts, ExpertsResult, Routing
from nvfp4viz.moe.dense import k_first
from nvfp4viz.serving.backends import RUNNERS, BackendInfo, LayerExperts, choose_backend, prepare_layer
from nvfp4viz.serving.guard import LoadGuard
from nvfp4viz.serving.loader import ROLES, LayerParameters, LoadReport, load_parameters, refill
from nvfp4viz.serving.quant_config import Resolved, resolve_quantization
from nvfp4viz.serving.scales import ConvertedScales, process_weights_after_loading

if TYPE_CHECKING:
    from nvfp4viz.model import Generation, TinyMoe

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ServedExperts:
    """A model's routed experts on one backend: what the model calls for every MoE layer.

    Attributes
    ----------
    layers
        Prepared experts by layer number.
    record
        Whether each call keeps every tensor (`ExpertsResult.trace`); recording runs on the CPU.
    cuda
        The same experts on the GPU, where one computes.  The bits are equal.
    """

    layers: dict[int, LayerExperts] = field(repr=False)
    record: bool = False
    cuda: CudaExperts | None = field(default=None, repr=False)

    def __call__(self, layer: int, x: Array, routing: Routing) -> ExpertsResult:
        if self.cuda is not None and not self.record and (found := self.cuda(layer, x, routing)) is not None:
            return found
        experts = self.layers[layer]
        return RUNNERS[type(experts)](x, routing, experts, record=self.record)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model and everything the load decided.

    Attributes
    ----------
    name
        The checkpoint's.
    backend, allocator, seed, per_token
        As asked for.
    resolved
        What the config files said, and whether the weight-only rule fired.
    view
        The checkpoint's canonical view: what each slot's tensor is called.
    load_report
        Slots expected and written; empty for an unquantised model.
    parameters
        Each layer's parameters as allocated and filled.
    scales
        Each layer's scales after ``process_weights_after_loading``.
    experts
        The Experts protocol of `nvfp4viz.model.generate`.
    model
        Everything outside the routed experts.
    on_cpu_because
        Why the experts are computed on the CPU although a GPU was welcome; ``None`` where one computes, or the CPU was
        asked for.
    """

    name: str
    backend: BackendInfo
    allocator: str
    seed: int
    per_token: bool
    resolved: Resolved
    view: CanonicalView = field(repr=False)
    load_report: LoadReport
    parameters: tuple[LayerParameters, ...] = field(repr=False)
    scales: tuple[ConvertedScales, ...] = field(repr=False)
    experts: ServedExperts = field(repr=False)
    model: TinyMoe = field(repr=False)
    on_cpu_because: DeviceError | None = None

    @property
    def computes_on(self) -> str:
        """What computes the routed experts: ``"cuda"`` or ``"cpu"``.  Everything around them is NumPy's."""
        return "cuda" if self.experts.cuda is not None and self.experts.cuda.failure is None else "cpu"

    def generate(
        self,
        prompt: str,
        n: int = 48,
        *,
        on_token: Callable[..., Any] | None = None,
        sampler: Any = None,
        guess: Callable[..., Any] | None = None,
    ) -> Generation:
        """Answer a prompt: greedy decoding, V1's argmax rule unless `sampler` says otherwise; `guess` as in
        `nvfp4viz.model.generate` saves time and changes no bit.

        Raises
        ------
        ModelError
            For a prompt that the model cannot read.
        """
        from nvfp4viz.model import generate

        options = {} if sampler is None else {"sampler": sampler}
        return generate(self.model, self.experts, prompt, max_new_tokens=n, on_token=on_token, guess=guess, **options)

    def logits(self, ids: Sequence[int]) -> Array:
        """Logits (T, V) float32 after each of T tokens, read at once."""
        return self.model.forward(ids, self.experts)

    def recording(self) -> ServedExperts:
        """The same experts, keeping every tensor of every call: for calibration and for looking inside."""
        return ServedExperts(self.experts.layers, record=True)

    def scales_of(self, layer: int) -> ConvertedScales:
        """One layer's converted scales."""
        return next(scales for scales in self.scales if scales.layer == layer)

    def parameters_of(self, layer: int) -> LayerParameters:
        """One layer's loaded parameters."""
        return next(parameters for parameters in self.parameters if parameters.layer == layer)

    def on(self, backend: str, *, device: str = "auto") -> ServedModel:
        """The same load, with every bit that memory held, converted for another backend.

        Raises
        ------
        ServingError, DeviceError
            As :func:`load`.
        """
        info = choose_backend(backend, self.resolved.scheme, self.per_token)
        if info == self.backend:
            return self
        scales, experts, why = _converted(self.parameters, info.id, self.per_token, device)
        return replace(self, backend=info, scales=scales, experts=experts, on_cpu_because=why)

    def with_memory(self, allocator: str, seed: int = 0, *, device: str = "auto") -> ServedModel:
        """The same load onto other memory, bit for bit what :func:`load` gives with this allocator; nothing is read.

        Raises
        ------
        ServingError, DeviceError
            As :func:`load`.
        """
        parameters, report = refill(self.parameters, self.load_report, self.view, allocator, seed)
        changed = replace(self, allocator=allocator, seed=seed, load_report=report, parameters=parameters)
        if not parameters:  # unquantised
            return changed
        scales, experts, why = _converted(parameters, self.backend.id, self.per_token, device)
        return replace(changed, scales=scales, experts=experts, on_cpu_because=why)

    @property
    def describe(self) -> str:
        """One line for logs and tests."""
        missing = sum(count.expected - count.written for count in self.load_report.counts)
        algo = self.resolved.algo or "BF16"
        return f"{self.name}: {algo} on {self.backend.id}, {missing} unwritten slots ({self.allocator})"


def _converted(
    parameters: tuple[LayerParameters, ...], backend: str, per_token: bool, device: str
) -> tuple[tuple[ConvertedScales, ...], ServedExperts, DeviceError | None]:
    """Each layer's scales and experts as a backend has them, and why no GPU computes them."""
    scales = tuple(process_weights_after_loading(p, backend, per_token=per_token) for p in parameters)
    layers = {p.layer: prepare_layer(p, s, per_token=per_token) for p, s in zip(parameters, scales, strict=True)}
    cuda, why = cuda_experts(layers, device)
    return scales, ServedExperts(layers, cuda=cuda), why


def load(
    source: str | Path | Checkpoint,
    allocator: str = "zeros",
    seed: int = 0,
    backend: str = "vllm-cutlass",
    guard: bool = False,
    *,
    per_token: bool = False,
    device: str = "auto",
) -> ServedModel:
    """Load a tiny-moe checkpoint as a server would.

    Parameters
    ----------
    source
        A folder, a file, or an opened checkpoint.
    allocator, seed
        What slots without a tensor hold: `ALLOCATORS`.
    backend
        An id of `BACKENDS`; ``"bf16"`` for the unquantised model.
    guard
        Refuse an incomplete or impossible set of scales instead of serving it.
    per_token
        ``moe.activation="nvfp4_per_token"``: activation scales come from each token, input scales are set to 1.0.
    device
        Where the routed experts are computed: ``"auto"`` (a GPU that works and has kernels for the backend), ``"cpu"``
        or ``"cuda"``.

    Raises
    ------
    ServingError
        The server's own refusals (config, backend), and ``serving.guard``.
    DeviceError
        For ``device="cuda"``, whatever keeps a GPU from computing; for another name, ``device.unknown``.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    resolved = resolve_quantization(checkpoint.config, checkpoint.hf_quant_config)
    info = choose_backend(backend, resolved.scheme, per_token)
    view = canonical(checkpoint)
    model = _dense_model(checkpoint)
    if resolved.scheme == "UNQUANTISED":
        layers = _bf16_layers(checkpoint)
        cuda, why = cuda_experts(layers, device)
        experts = ServedExperts(layers, cuda=cuda)
        report = LoadReport(checkpoint.name, allocator, seed, (), ())
        return ServedModel(
            checkpoint.name, info, allocator, seed, False, resolved, view, report, (), (), experts, model, why
        )
    roles = ROLES if resolved.scheme == "W4A4" else ROLES[:3]
    parameters, report = load_parameters(checkpoint, view, allocator=allocator, seed=seed, roles=roles)
    if guard:
        reads = info.reads_input_scale and not per_token
        run_guard(parameters, view, tuple(role for role in roles if role != "input_scale" or reads))
    scales, experts, why = _converted(parameters, info.id, per_token, device)
    return ServedModel(
        checkpoint.name,
        info,
        allocator,
        seed,
        per_token,
        resolved,
        view,
        report,
        parameters,
        scales,
        experts,
        model,
        why,
    )


def run_guard(parameters: tuple[LayerParameters, ...], view: CanonicalView, roles: tuple[str, ...]) -> None:
    """Hand a finished load to the guard: every write that was counted, and the values of the scalar roles.

    Raises
    ------
    ServingError
        ``serving.guard``.
    """
    experts = {p.layer: p.experts for p in parameters}
    guard = LoadGuard(experts, experts, view.projections, roles)
    for p in parameters:
        for (role, projection), written in p.written.items():
            if role in roles:
                for expert in np.flatnonzero(written).tolist():
                    guard.wrote(p.layer, expert, projection, role)
    for p in parameters:
        for role in roles:
            if role in ("weight_scale_2", "input_scale"):
                for projection in view.projections_in[p.layer]:
                    guard.inspect(p.layer, projection, role, p.values(role, projection))
    guard.check()


def _dense_model(checkpoint: Checkpoint) -> TinyMoe:
    """Everything outside the routed experts, or a clear refusal: only tiny-moe runs whole."""
    from nvfp4viz.model import TinyMoe, TinyMoeConfig

    if checkpoint.config is None:
        raise ServingError("serving.no-config", name=checkpoint.name)
    config = TinyMoeConfig.from_json(checkpoint.config)
    tensors = {}
    for name in config.dense_shapes():
        if name not in checkpoint.tensors:
            raise ServingError("serving.no-tensor", name=checkpoint.name, tensor=name)
        tensors[name] = checkpoint.read(name)
    return TinyMoe(config, tensors)


def _bf16_layers(checkpoint: Checkpoint) -> dict[int, LayerExperts]:
    """Unquantised experts, fused over the expert axis as Gemma 4 stores them."""
    from nvfp4viz.model import TinyMoeConfig

    layers: dict[int, LayerExperts] = {}
    for layer in range(TinyMoeConfig.from_json(checkpoint.config or {}).num_hidden_layers):
        parts = []
        for tail in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.experts.{tail}"
            if name not in checkpoint.tensors:
                raise ServingError("serving.no-tensor", name=checkpoint.name, tensor=name)
            values = k_first(checkpoint.read(name).astype(np.float32))
            values.flags.writeable = False
            parts.append(values)
        layers[layer] = Bf16Experts(parts[0], parts[1])
    return layers
