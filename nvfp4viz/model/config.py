"""Sizes of tiny-moe, and the name and shape of every tensor outside the quantised experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nvfp4viz.errors import ModelError
from nvfp4viz.model.tokenizer import BOS, EOS, PAD, Tokenizer

MODEL_TYPE = "tiny_moe"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class TinyMoeConfig:
    """Hyper-parameters, named as Gemma 4's ``config.json`` names them.

    >>> TinyMoeConfig().parameter_count
    6636548
    """

    vocab_size: int = Tokenizer().size
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 64
    num_experts: int = 64
    top_k_experts: int = 4
    moe_intermediate_size: int = 64
    max_position_embeddings: int = 256
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    def dense_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that stays BF16, in the order of a forward pass."""
        h, d = self.hidden_size, self.head_dim
        q, kv, i = self.num_attention_heads * d, self.num_key_value_heads * d, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, h)}
        for layer in range(self.num_hidden_layers):
            block: dict[str, tuple[int, ...]] = {
                "input_layernorm.weight": (h,),
                "self_attn.q_proj.weight": (q, h),
                "self_attn.k_proj.weight": (kv, h),
                "self_attn.v_proj.weight": (kv, h),
                "self_attn.o_proj.weight": (h, q),
                "self_attn.q_norm.weight": (d,),
                "self_attn.k_norm.weight": (d,),
                "post_attention_layernorm.weight": (h,),
                "pre_feedforward_layernorm.weight": (h,),
                "mlp.gate_proj.weight": (i, h),
                "mlp.up_proj.weight": (i, h),
                "mlp.down_proj.weight": (h, i),
                "post_feedforward_layernorm_1.weight": (h,),
                "router.proj.weight": (self.num_experts, h),
                "router.scale": (h,),
                "router.per_expert_scale": (self.num_experts,),
                "pre_feedforward_layernorm_2.weight": (h,),
                "post_feedforward_layernorm_2.weight": (h,),
                "post_feedforward_layernorm.weight": (h,),
                "layer_scalar": (1,),
            }
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
        shapes["model.norm.weight"] = (h,)
        return shapes

    def expert_shapes(self) -> dict[str, tuple[int, ...]]:
        """The BF16 experts as Gemma 4 stores them: fused over experts, gate rows before up rows."""
        e, h, i = self.num_experts, self.hidden_size, self.moe_intermediate_size
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(self.num_hidden_layers):
            shapes[f"model.layers.{layer}.experts.gate_up_proj"] = (e, 2 * i, h)
            shapes[f"model.layers.{layer}.experts.down_proj"] = (e, h, i)
        return shapes

    @property
    def parameter_count(self) -> int:
        """Trained numbers; the output layer shares the embedding's."""
        total = 0
        for shape in (self.dense_shapes() | self.expert_shapes()).values():
            size = 1
            for length in shape:
                size *= length
            total += size
        return total

    def to_json(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return {
            "architectures": ["TinyMoeForCausalLM"],
            "model_type": MODEL_TYPE,
            "dtype": "bfloat16",
            **asdict(self),
            "hidden_activation": "gelu_pytorch_tanh",
            "enable_moe_block": True,
            "tie_word_embeddings": True,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "bos_token_id": BOS,
        }

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> TinyMoeConfig:
        """Read what `to_json` wrote; further keys are ignored.

        Raises
        ------
        ModelError
            ``model.not-tiny-moe``, ``model.bad-config``.
        """
        if config.get("model_type") != MODEL_TYPE:
            raise ModelError("model.not-tiny-moe", model_type=str(config.get("model_type", "none")))
        values: dict[str, Any] = {}
        for name, default in asdict(cls()).items():
            value = config.get(name, default)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
                raise ModelError("model.bad-config", key=name, value=repr(value))
            values[name] = type(default)(value)
        return cls(**values)
