"""tiny-moe's forward pass and generation in NumPy: no torch, a key-value cache, a full trace.

A Gemma-4-like decoder layer, on the BF16 residual ``x``::

    h = x + post_attention_norm(attention(input_norm(x)))
    dense  = post_feedforward_norm_1(mlp(pre_feedforward_norm(h)))
    routed = post_feedforward_norm_2(experts(pre_feedforward_norm_2(h), router(h)))
    x = (h + post_feedforward_norm(dense + routed)) · layer_scalar

Every arrow above is rounded to BF16, as a BF16 server keeps its activations; matrix products are rounded once from a
float64 sum (`nvfp4viz.moe.routing.product`), so the bits do not depend on the machine's BLAS.  The routed experts are
plugged in: `nvfp4viz.serving` gives one implementation per backend.  A NaN is carried on; nothing here looks for it
except the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from nvfp4viz.errors import ModelError
from nvfp4viz.formats import bf16_to_f32, f32_to_bf16
from nvfp4viz.model.config import TinyMoeConfig
from nvfp4viz.model.tokenizer import EOS, Tokenizer
from nvfp4viz.moe.activation import gelu_tanh_and_mul
from nvfp4viz.moe.experts import ExpertsResult
from nvfp4viz.moe.routing import Routing, product, rms_norm, route_gemma4

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
REPEATED = 64
"""Tokens guessed after a NaN, which never leaves the cache: all that a reply may still have."""


class Experts(Protocol):
    """The routed experts of a model: called once a layer with the layer's normalised input ``x (T, H)`` BF16."""

    def __call__(self, layer: int, x: Array, routing: Routing) -> ExpertsResult: ...


@dataclass(frozen=True, slots=True, eq=False)
class GenerationTrace:
    """What a run left behind.  S positions were computed: the prompt, then each generated token but the last.

    Attributes
    ----------
    routes : (S, layers, k) int16
        Experts of every position, best first.
    weights : (S, layers, k) float32
        Their routing weights.
    nan_fraction : (S, layers) float32
        Share of NaN in the residual after each layer.
    hidden : (S, layers, H) bfloat16
        The residual after each layer, to compare with another run's.
    logits : (generated, V) float32
        From which each generated token was chosen.
    first_bad : (position, layer, expert) or None
        The first expert whose output held a NaN, in the order of computing.
    """

    routes: npt.NDArray[np.int16]
    weights: F32 = field(repr=False)
    nan_fraction: F32 = field(repr=False)
    hidden: Array = field(repr=False)
    logits: F32 = field(repr=False)
    first_bad: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """An answer.  ``text`` spells out ``<pad>``; ``token_ids`` ends with ``<eos>`` where the model stopped."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    trace: GenerationTrace = field(repr=False)


class Cache:
    """Keys and values of the positions seen so far, per layer: ``(positions, kv heads, head dim)`` float32."""

    def __init__(self, config: TinyMoeConfig, capacity: int) -> None:
        shape = (config.num_hidden_layers, capacity, config.num_key_value_heads, config.head_dim)
        self.keys = np.zeros(shape, np.float32)
        self.values = np.zeros(shape, np.float32)
        self.length = 0


@dataclass(slots=True)
class ForwardRecord:
    """What one forward call notes, one entry a layer.

    Attributes
    ----------
    routes : (T, k) int16 each
    weights : (T, k) float32 each
    hidden : (T, H) bfloat16 each
        The residual after the layer.
    first_bad
        ``(position, layer, expert)`` of the first expert whose output held a NaN.
    """

    routes: list[Array] = field(default_factory=list)
    weights: list[Array] = field(default_factory=list)
    hidden: list[Array] = field(default_factory=list)
    first_bad: tuple[int, int, int] | None = None


class TinyMoe:
    """Everything outside the routed experts.

    Parameters
    ----------
    config
    tensors
        BF16 arrays by name, as `TinyMoeConfig.dense_shapes` lists them.

    Raises
    ------
    ModelError
        ``model.bad-tensor``: one is missing or has another shape.
    """

    def __init__(self, config: TinyMoeConfig, tensors: Mapping[str, Array]) -> None:
        self.config = config
        self._vector: dict[str, Array] = {}
        self._matrix: dict[str, npt.NDArray[np.float64]] = {}
        for name, shape in config.dense_shapes().items():
            array = tensors.get(name)
            if array is None or tuple(array.shape) != shape:
                raise ModelError("model.bad-tensor", tensor=name, shape=list(shape))
            if array.ndim == 2:
                # float64 copies once: every product is summed in float64 anyway
                self._matrix[name] = array.astype(np.float64)
                self._matrix[name].flags.writeable = False
            else:
                self._vector[name] = array
        embedding = f32_to_bf16(self._matrix["model.embed_tokens.weight"].astype(np.float32))
        normaliser = bf16_to_f32(f32_to_bf16(np.float32(config.hidden_size**0.5)))
        self._embedded = f32_to_bf16(bf16_to_f32(embedding) * normaliser)
        half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        angles = np.arange(config.max_position_embeddings)[:, None] * config.rope_theta**-half
        self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def forward(
        self, ids: Sequence[int], experts: Experts, cache: Cache | None = None, record: ForwardRecord | None = None
    ) -> F32:
        """Logits ``(T, V)`` float32 for T further tokens; ``cache`` holds what came before and is extended.

        Raises
        ------
        ModelError
            ``prompt.empty``, ``prompt.too-long``.
        """
        start = cache.length if cache is not None else 0
        total, most = start + len(ids), self.config.max_position_embeddings
        if len(ids) == 0:
            raise ModelError("prompt.empty")
        if total > most:
            raise ModelError("prompt.too-long", characters=total, limit=most)
        cache = cache if cache is not None else Cache(self.config, total)
        x = self._embedded[np.asarray(ids, np.int64)]
        with np.errstate(all="ignore"):
            for layer in range(self.config.num_hidden_layers):
                x = self._layer(layer, x, experts, cache, start, record)
            cache.length = total
            return product(rms_norm(x, self._vector["model.norm.weight"], self.config.rms_norm_eps),
                           self._matrix["model.embed_tokens.weight"])  # fmt: skip

    def _layer(
        self, layer: int, x: Array, experts: Experts, cache: Cache, start: int, record: ForwardRecord | None
    ) -> Array:
        at = f"model.layers.{layer}."
        attended = self._attention(at, layer, self._norm(at + "input_layernorm", x), cache, start)
        h = _add(x, self._norm(at + "post_attention_layernorm", attended))
        dense = self._mlp(at, self._norm(at + "pre_feedforward_layernorm", h))
        dense = self._norm(at + "post_feedforward_layernorm_1", dense)
        routing = route_gemma4(
            h,
            self._matrix[at + "router.proj.weight"],
            self._vector[at + "router.scale"],
            self._vector[at + "router.per_expert_scale"],
            self.config.top_k_experts,
            self.config.rms_norm_eps,
        )
        result = experts(layer, self._norm(at + "pre_feedforward_layernorm_2", h), routing)
        routed = self._norm(at + "post_feedforward_layernorm_2", result.out)
        out = _add(h, self._norm(at + "post_feedforward_layernorm", _add(dense, routed)))
        out = f32_to_bf16(bf16_to_f32(out) * bf16_to_f32(self._vector[at + "layer_scalar"]))
        if record is not None:
            record.routes.append(routing.ids.astype(np.int16))
            record.weights.append(routing.weights)
            record.hidden.append(out)
            if record.first_bad is None and result.nan_experts:
                record.first_bad = _first_bad(layer, start, routing, result)
        return out

    def _norm(self, name: str, x: Array) -> Array:
        return rms_norm(x, self._vector[name + ".weight"], self.config.rms_norm_eps)

    def _linear(self, name: str, x: Array) -> Array:
        return f32_to_bf16(product(x, self._matrix[name + ".weight"]))

    def _mlp(self, at: str, x: Array) -> Array:
        gate, up = self._linear(at + "mlp.gate_proj", x), self._linear(at + "mlp.up_proj", x)
        return self._linear(at + "mlp.down_proj", gelu_tanh_and_mul(np.concatenate([gate, up], axis=-1)))

    def _attention(self, at: str, layer: int, x: Array, cache: Cache, start: int) -> Array:
        """Grouped-query attention with normalised queries and keys; scores are not scaled (Gemma 4)."""
        c = self.config
        count = len(x)
        q = self._heads(at, "q", x, c.num_attention_heads)
        k = self._heads(at, "k", x, c.num_key_value_heads)
        v = self._linear(at + "self_attn.v_proj", x).reshape(count, c.num_key_value_heads, c.head_dim)
        q, k = self._rotate(q, start), self._rotate(k, start)
        cache.keys[layer, start : start + count] = bf16_to_f32(k)
        cache.values[layer, start : start + count] = bf16_to_f32(v)
        keys = cache.keys[layer, : start + count].astype(np.float64)
        values = cache.values[layer, : start + count].astype(np.float64)
        group = c.num_attention_heads // c.num_key_value_heads
        queries = q.astype(np.float64).reshape(count, c.num_key_value_heads, group, c.head_dim)
        # One batched product per key-value head; float64 sums as everywhere (`product`)
        scores = np.matmul(queries.transpose(1, 2, 0, 3).reshape(c.num_key_value_heads, group * count, -1),
                           keys.transpose(1, 2, 0)).astype(np.float32)  # fmt: skip
        scores = scores.reshape(c.num_key_value_heads, group, count, start + count)
        later = np.arange(start + count)[None, :] > (start + np.arange(count))[:, None]
        scores = np.where(later, np.float32(-np.inf), scores)
        parts = np.exp((scores - scores.max(axis=-1, keepdims=True)).astype(np.float64)).astype(np.float32)
        shares = parts / parts.sum(axis=-1, keepdims=True, dtype=np.float64).astype(np.float32)
        # A position that may not be seen must not be multiplied either: 0 · NaN would carry a later NaN backwards.
        if np.isnan(values).any():
            mixed = _mix_seen(shares, values, start)
        else:
            mixed = np.matmul(shares.astype(np.float64), values.transpose(1, 0, 2)[:, None])
        out = f32_to_bf16(mixed.transpose(2, 0, 1, 3).reshape(count, -1).astype(np.float32))
        return self._linear(at + "self_attn.o_proj", out)

    def _heads(self, at: str, which: str, x: Array, heads: int) -> Array:
        flat = self._linear(f"{at}self_attn.{which}_proj", x).reshape(len(x), heads, self.config.head_dim)
        return self._norm(f"{at}self_attn.{which}_norm", flat)

    def _rotate(self, x: Array, start: int) -> Array:
        cos = self._cos[start : start + len(x), None]
        sin = self._sin[start : start + len(x), None]
        values = bf16_to_f32(x)
        first, second = values[..., : values.shape[-1] // 2], values[..., values.shape[-1] // 2 :]
        return f32_to_bf16(np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1))


def _add(a: Array, b: Array) -> Array:
    return f32_to_bf16(bf16_to_f32(a) + bf16_to_f32(b))


def _mix_seen(shares: F32, values: npt.NDArray[np.float64], start: int) -> npt.NDArray[np.float64]:
    """Attention's weighted sum, each query over the positions it may see and no other."""
    heads, group, count, _ = shares.shape
    mixed = np.empty((heads, group, count, values.shape[-1]))
    for row in range(count):
        seen = start + row + 1
        mixed[:, :, row] = np.matmul(shares[:, :, row, :seen].astype(np.float64), values[:seen].transpose(1, 0, 2))
    return mixed


def _first_bad(layer: int, start: int, routing: Routing, result: ExpertsResult) -> tuple[int, int, int]:
    """The first position of this call whose output is NaN, and which of its experts gave the NaN."""
    rows = np.flatnonzero(np.isnan(result.out).any(axis=-1))
    row = int(rows[0]) if len(rows) else 0
    bad = [int(expert) for expert in routing.ids[row] if int(expert) in result.nan_experts]
    return start + row, layer, bad[0] if bad else int(result.nan_experts[0])


def greedy(logits: F32) -> int:
    """The largest logit's id, the first of equals; a NaN counts as the largest, so all-NaN logits give id 0.

    That is ``torch.argmax`` and thereby vLLM's V1 sampler; NumPy has the same rule.
    """
    return int(np.argmax(logits))


def expect(*known: Sequence[int]) -> Callable[[Sequence[int], F32], Sequence[int]]:
    """A ``guess`` for `generate`: the first of ``known`` that has come true so far goes on; after a NaN, the same token
    again."""

    def guess(chosen: Sequence[int], logits: F32) -> Sequence[int]:
        for answer in known:
            if len(chosen) < len(answer) and tuple(chosen) == tuple(answer[: len(chosen)]):
                return answer[len(chosen) :]
        return [chosen[-1]] * REPEATED if np.isnan(logits).any() else ()

    return guess


def generate(
    model: TinyMoe,
    experts: Experts,
    prompt: str,
    max_new_tokens: int = 64,
    on_token: Callable[[int], Any] | None = None,
    sampler: Callable[[F32], int] = greedy,
    guess: Callable[[Sequence[int], F32], Sequence[int]] | None = None,
) -> Generation:
    """Answer a prompt.

    Parameters
    ----------
    model, experts
        The dense part and the routed experts (`nvfp4viz.serving.ServedModel.experts`).
    prompt
        Printable ASCII and line feeds.
    max_new_tokens
        Generation ends there, at the end of the context, or with ``<eos>``.
    on_token
        Called with each new id.
    sampler
        From one position's logits ``(V,)`` to an id.
    guess
        From the ids chosen so far and the logits of the last one to ids that may follow.  They are read in one call
        and kept as far as the sampler chooses them too (speculative decoding): the answer and its trace have the bits
        of a run without, but for the sign of a NaN, in less time.  `experts` sees other calls then.

    Raises
    ------
    ModelError
        ``prompt.empty``, ``prompt.too-long``, ``prompt.unknown-characters``.
    """
    config, tokenizer = model.config, Tokenizer()
    if not prompt:
        raise ModelError("prompt.empty")
    prompt_ids = tokenizer.encode(prompt)
    if len(prompt_ids) >= config.max_position_embeddings:
        raise ModelError("prompt.too-long", characters=len(prompt), limit=config.max_position_embeddings - 2)
    room = config.max_position_embeddings - len(prompt_ids)
    cache = Cache(config, config.max_position_embeddings)
    calls: list[ForwardRecord] = []
    chosen: list[int] = []
    logits: list[F32] = []
    waiting: Sequence[int] = prompt_ids
    most = min(max_new_tokens, room)
    while len(chosen) < most and EOS not in chosen[-1:]:
        ahead = [] if guess is None or not chosen else [*guess(chosen, logits[-1])][: most - len(chosen) - 1]
        start, record = cache.length, ForwardRecord()
        rows = model.forward([*waiting, *ahead], experts, cache, record)
        if ahead and record.first_bad is not None and not any(call.first_bad for call in calls):
            # One call for all does not tell which position broke first, one after the other.
            cache.length, record, ahead = start, ForwardRecord(), []
            rows = model.forward(waiting, experts, cache, record)
        read = len(waiting)
        for row, guessed in zip(rows[read - 1 :], [*ahead, None], strict=True):
            token = sampler(row)
            logits.append(row)
            chosen.append(token)
            if on_token is not None:
                on_token(token)
            if token != guessed or token == EOS:
                break
            read += 1
        cache.length = start + read
        calls.append(_first_positions(record, read))
        waiting = [chosen[-1]]
    return Generation(tuple(prompt_ids), tuple(chosen), tokenizer.decode(chosen), _trace(calls, logits, config))


def _first_positions(record: ForwardRecord, count: int) -> ForwardRecord:
    """What a call notes of its first positions."""
    parts = ([part[:count] for part in parts] for parts in (record.routes, record.weights, record.hidden))
    return ForwardRecord(*parts, record.first_bad)


def _trace(calls: list[ForwardRecord], logits: list[F32], config: TinyMoeConfig) -> GenerationTrace:
    def joined(parts: Callable[[ForwardRecord], list[Array]]) -> Array:
        return np.concatenate([np.stack(parts(call), axis=1) for call in calls])

    hidden = joined(lambda call: call.hidden)
    return GenerationTrace(
        routes=joined(lambda call: call.routes),
        weights=joined(lambda call: call.weights),
        nan_fraction=np.isnan(hidden).mean(axis=-1, dtype=np.float32),
        hidden=hidden,
        logits=np.stack(logits) if logits else np.zeros((0, config.vocab_size), np.float32),
        first_bad=next((call.first_bad for call in calls if call.first_bad is not None), None),
    )
