"""Whole models in small: what really stands around the experts of each family, named and excluded as its exporter does.

Two or three experts' layers with everything else that a checkpoint of the family holds: norms, routers and their
biases, attention, recurrent layers, towers, draft layers, heads.  Sizes are tiny; names, types and lists are the point
(sources: section 2 of the specification's `checkpoints.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nvfp4viz.checkpoint import Checkpoint, Tensor, memory_checkpoint, tensor
from tests.audit.layouts import bf16, fp8, linear, typed

E, H, WIDTH = 4, 64, 32
Tensors = dict[str, Tensor]


def f32(*shape: int) -> Tensor:
    return tensor(np.full(shape, 0.5, np.float32))


def nvfp4(module: str, rows: int, columns: int, seed: int, with_input: bool = True, second: float = 1e-4) -> Tensors:
    out = linear(module, rows, columns, second)
    if with_input:
        out[f"{module}.input_scale"] = tensor(np.float32(2e-3 * (1 + 0.01 * seed)))
    else:
        del out[f"{module}.input_scale"]
    return out


def experts(
    block: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"), with_input: bool = True
) -> Tensors:
    out: Tensors = {}
    for expert in range(E):
        for name in names:
            rows, columns = (H, WIDTH) if name in ("down_proj", "w2") else (WIDTH, H)
            out |= nvfp4(f"{block}.{expert}.{name}", rows, columns, expert + 5 * (rows == H), with_input)
    return out


def plain_experts(block: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")) -> Tensors:
    return {
        f"{block}.{e}.{n}.weight": bf16(*((H, WIDTH) if n == "down_proj" else (WIDTH, H)))
        for e in range(E)
        for n in names
    }


def mlp(prefix: str, quantised: bool = True) -> Tensors:
    """A dense or shared MLP."""
    out: Tensors = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        rows, columns = (H, WIDTH) if name == "down_proj" else (WIDTH, H)
        out |= (
            nvfp4(f"{prefix}.{name}", rows, columns, 1)
            if quantised
            else {f"{prefix}.{name}.weight": bf16(rows, columns)}
        )
    return out


def plain(*modules: str) -> Tensors:
    return {f"{module}.weight": bf16(H, H) for module in modules}


def norms(*names: str) -> Tensors:
    return {f"{name}.weight": bf16(H) for name in names}


def around(prefix: str = "model.", head: str = "lm_head") -> Tensors:
    return {**plain(f"{prefix}embed_tokens", head), **norms(f"{prefix}norm")}


def sidecar(algo: str, exclude: list[str] | None, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"quant_algo": algo, "kv_cache_quant_algo": None, "group_size": 16, **more}
    if exclude is not None:
        body["exclude_modules"] = exclude
    return {"producer": {"name": "modelopt", "version": "0.43.0"}, "quantization": body}


def config(layers: int, key: str = "num_experts", **more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, key: E, "hidden_size": H, "moe_intermediate_size": WIDTH, **more}


def mla(prefix: str) -> Tensors:
    names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    return {
        **plain(*(f"{prefix}.{name}" for name in names)),
        **norms(f"{prefix}.q_a_layernorm", f"{prefix}.kv_a_layernorm"),
    }


def deepseek_r1() -> Checkpoint:
    """Dense first layer, shared experts quantised, attention listed one by one, draft layer excluded, sidecar only."""
    out, exclude = around(), ["lm_head"]
    for k in range(4):
        at = f"model.layers.{k}"
        out |= {**mla(f"{at}.self_attn"), **norms(f"{at}.input_layernorm", f"{at}.post_attention_layernorm")}
        exclude += [
            f"{at}.self_attn.{n}" for n in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        ]
        if k == 0:
            out |= mlp(f"{at}.mlp")
            continue
        out |= {f"{at}.mlp.gate.weight": bf16(E, H), f"{at}.mlp.gate.e_score_correction_bias": f32(E)}
        exclude.append(f"{at}.mlp.gate")
        if k < 3:
            out |= {**experts(f"{at}.mlp.experts"), **mlp(f"{at}.mlp.shared_experts")}
        else:
            out |= {**plain_experts(f"{at}.mlp.experts"), **mlp(f"{at}.mlp.shared_experts", quantised=False)}
            out |= plain(f"{at}.eh_proj", f"{at}.shared_head.head", f"{at}.embed_tokens")
    exclude.append("model.layers.3*")
    return memory_checkpoint(out, config=config(3, "n_routed_experts"), hf_quant_config=sidecar("NVFP4", exclude))


def qwen3() -> Checkpoint:
    """Attention quantised with tied scales, an FP8 KV cache, router excluded."""
    out = around()
    for k in range(2):
        at = f"model.layers.{k}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            out |= linear(f"{at}.self_attn.{name}")
        out |= {
            f"{at}.self_attn.k_proj.k_scale": tensor(np.float32(0.03)),
            f"{at}.self_attn.v_proj.v_scale": tensor(np.float32(0.02)),
        }
        out |= {**experts(f"{at}.mlp.experts"), f"{at}.mlp.gate.weight": bf16(E, H), **norms(f"{at}.self_attn.q_norm")}
    quant = sidecar("NVFP4", ["lm_head", "model.layers.*.mlp.gate"], kv_cache_quant_algo="FP8")
    return memory_checkpoint(out, config=config(2), hf_quant_config=quant)


def qwen3_next() -> Checkpoint:
    """Shared expert with its own gate, linear attention, a vision tower and draft layers, all but experts excluded."""
    out = around("model.language_model.")
    exclude = ["lm_head", "model.visual*", "mtp*"]
    for k in range(2):
        at = f"model.language_model.layers.{k}"
        out |= {**experts(f"{at}.mlp.experts"), **mlp(f"{at}.mlp.shared_expert")}
        out |= {f"{at}.mlp.shared_expert_gate.weight": bf16(1, H), f"{at}.mlp.gate.weight": bf16(E, H)}
        out |= plain(f"{at}.linear_attn.in_proj_qkvz", f"{at}.linear_attn.in_proj_ba", f"{at}.linear_attn.out_proj")
        out |= {f"{at}.linear_attn.A_log": f32(8), f"{at}.linear_attn.dt_bias": f32(8)}
        out |= {f"{at}.linear_attn.conv1d.weight": bf16(8, 1, 4)}
        exclude += [f"{at}.linear_attn*", f"{at}.mlp.gate", f"{at}.mlp.shared_expert_gate"]
    out |= plain(
        "model.visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.proj", "model.visual.blocks.0.mlp.up_proj"
    )
    out |= {**plain_experts("mtp.layers.0.mlp.experts"), **plain("mtp.fc", "mtp.layers.0.self_attn.q_proj")}
    flat = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": exclude, "producer": {"name": "modelopt"},
        "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "input_activations": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "targets": ["Linear"],
        }},
    }  # fmt: skip
    nested = {"text_config": config(2), "quantization_config": flat}
    return memory_checkpoint(out, config=nested, hf_quant_config=sidecar("NVFP4", exclude))


def minimax_m2() -> Checkpoint:
    """w1, w2, w3, and a router bias in F32 among the scalars."""
    out = around()
    for k in range(2):
        at = f"model.layers.{k}.block_sparse_moe"
        out |= experts(f"{at}.experts", ("w1", "w2", "w3"))
        out |= {f"{at}.gate.weight": bf16(E, H), f"{at}.e_score_correction_bias": f32(E)}
        out |= plain(*(f"model.layers.{k}.self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")))
    exclude = ["lm_head", "model.layers.0.block_sparse_moe.gate", "model.layers.1.block_sparse_moe.gate"]
    exclude += ["model.layers.0.self_attn*", "model.layers.1.self_attn*"]
    return memory_checkpoint(out, config=config(2, "num_local_experts"), hf_quant_config=sidecar("NVFP4", exclude))


def nemotron_super() -> Checkpoint:
    """No gate, recurrent layers between, an allow-list: NVFP4 experts, FP8 linears with input scales of their own."""
    out: Tensors = {**plain("backbone.embeddings", "lm_head"), **norms("backbone.norm_f")}
    allowed: dict[str, Any] = {}
    for k, kind in enumerate("MEM*E"):
        at = f"backbone.layers.{k}"
        out |= norms(f"{at}.norm")
        if kind == "M":
            for name in ("in_proj", "out_proj"):
                module = f"{at}.mixer.{name}"
                out |= fp8(module)
                out[f"{module}.weight_scale"] = tensor(np.float32(0.01))
                out[f"{module}.input_scale"] = tensor(np.float32(0.05))
                allowed[module] = {"quant_algo": "FP8"}
            out |= {f"{at}.mixer.A_log": f32(8), f"{at}.mixer.D": f32(8), f"{at}.mixer.conv1d.weight": bf16(8, 1, 4)}
        elif kind == "E":
            out |= experts(f"{at}.mixer.experts", ("up_proj", "down_proj"))
            for name, size in (("up_proj", (WIDTH, H)), ("down_proj", (H, WIDTH))):
                out |= nvfp4(f"{at}.mixer.shared_experts.{name}", *size, 1)
                allowed[f"{at}.mixer.shared_experts.{name}"] = {"quant_algo": "NVFP4", "group_size": 16}
                allowed |= {
                    f"{at}.mixer.experts.{e}.{name}": {"quant_algo": "NVFP4", "group_size": 16} for e in range(E)
                }
            out |= {f"{at}.mixer.gate.weight": bf16(E, H), f"{at}.mixer.gate.e_score_correction_bias": f32(E)}
            out |= plain(f"{at}.mixer.fc1_latent_proj", f"{at}.mixer.fc2_latent_proj")
        else:
            out |= plain(*(f"{at}.mixer.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")))
    quant = sidecar("MIXED_PRECISION", None, exclude_modules=[], quantized_layers=allowed)
    return memory_checkpoint(out, config=config(5, "n_routed_experts", mlp_hidden_act="relu2"), hf_quant_config=quant)


def step() -> Checkpoint:
    """Stacked experts with a router beside them, a shared expert, dense first layers, draft layers excluded."""
    out = around()
    shapes = {"gate_proj": (WIDTH, H), "up_proj": (WIDTH, H), "down_proj": (H, WIDTH)}
    for k in range(4):
        at = f"model.layers.{k}"
        out |= plain(*(f"{at}.self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj")))
        if k == 0:
            out |= mlp(f"{at}.mlp")
        elif k < 3:
            for name, (rows, columns) in shapes.items():
                module = f"{at}.moe.{name}"
                rng = np.random.default_rng(rows)
                out[f"{module}.weight"] = typed(rng.integers(0, 256, (E, rows, columns // 2), np.uint8), "U8")
                scales = rng.integers(0x30, 0x78, (E, rows, columns // 16), np.uint8)
                out[f"{module}.weight_scale"] = typed(scales, "F8_E4M3")
                out[f"{module}.weight_scale_2"] = tensor(np.float32([1e-4] * E))
                out[f"{module}.input_scale"] = tensor(np.float32(2e-3) * np.float32([1.0, 1.1, 0.9, 1.05]))
            out |= {f"{at}.moe.gate.weight": bf16(E, H), f"{at}.moe.router_bias": f32(E), **mlp(f"{at}.share_expert")}
        else:
            out |= {f"{at}.moe.{name}.weight": bf16(E, *size) for name, size in shapes.items()}
    exclude = ["lm_head", "model.layers.3*", *(f"model.layers.{k}.self_attn*" for k in range(3)), "*moe.gate"]
    return memory_checkpoint(out, config=config(3, "moe_num_experts"), hf_quant_config=sidecar("NVFP4", exclude))


def gemma4(block: str = "moe.experts") -> Callable[[], Checkpoint]:
    def build() -> Checkpoint:
        out = around("model.language_model.")
        for k in range(2):
            at = f"model.language_model.layers.{k}"
            out |= {**experts(f"{at}.{block}"), **mlp(f"{at}.mlp", quantised=False)}
            out |= {f"{at}.router.per_expert_scale": f32(E), f"{at}.router.scale": f32(H), f"{at}.layer_scalar": f32(1)}
            out |= {f"{at}.router.proj.weight": bf16(E, H)}
            out |= plain(*(f"{at}.self_attn.{n}" for n in ("q_proj", "k_proj", "o_proj")))
        out |= plain("model.vision_tower.encoder.layers.0.self_attn.q_proj", "model.embed_vision.embedding_projection")
        exclude = ["lm_head", "model.vision_tower*", "model.embed_vision*", "*router*", "*self_attn*"]
        exclude += [f"model.language_model.layers.{k}.mlp.*" for k in range(2)]
        return memory_checkpoint(out, config={"text_config": config(2)}, hf_quant_config=sidecar("NVFP4", exclude))

    return build


def llama4() -> Checkpoint:
    """Fused experts in every other layer, a shared expert, dense layers between, a vision tower."""
    out = around("language_model.model.", "language_model.lm_head")
    exclude = ["language_model.lm_head", "vision_model*", "multi_modal_projector*"]
    for k in range(4):
        at = f"language_model.model.layers.{k}"
        out |= plain(*(f"{at}.self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")))
        exclude.append(f"{at}.self_attn*")
        if k % 2:
            for name, (rows, columns) in (("gate_up_proj", (2 * WIDTH, H)), ("down_proj", (H, WIDTH))):
                module = f"{at}.feed_forward.experts.{name}"
                out[module] = typed(np.full((E, columns // 2, rows), 0x21, np.uint8), "U8")
                out[f"{module}_weight_scale"] = typed(np.full((E, columns // 16, rows), 0x38, np.uint8), "F8_E4M3")
                out[f"{module}_weight_scale_2"] = tensor(np.float32(1e-4))
                out[f"{module}_input_scale"] = tensor(np.float32(2e-3))
            out |= {f"{at}.feed_forward.router.weight": bf16(E, H), **mlp(f"{at}.feed_forward.shared_expert")}
            exclude.append(f"{at}.feed_forward.router")
        else:
            out |= mlp(f"{at}.feed_forward")
    out |= plain("vision_model.model.layers.0.self_attn.q_proj", "multi_modal_projector.linear_1")
    return memory_checkpoint(
        out, config={"text_config": config(4, "num_local_experts")}, hf_quant_config=sidecar("NVFP4", exclude)
    )


def redhat() -> Checkpoint:
    """compressed-tensors with regular expressions, shared expert and attention left alone."""
    out = around()
    for k in range(2):
        at = f"model.layers.{k}"
        for name, item in experts(f"{at}.mlp.experts").items():
            head, _, suffix = name.rpartition(".")
            new = {
                "weight": "weight_packed",
                "weight_scale_2": "weight_global_scale",
                "input_scale": "input_global_scale",
            }
            if suffix in ("weight_scale_2", "input_scale"):
                item = tensor(np.float32([1]) / np.frombuffer(item.tobytes(), np.float32))
            out[f"{head}.{new.get(suffix, suffix)}"] = item
        out |= {**mlp(f"{at}.mlp.shared_expert", quantised=False), f"{at}.mlp.gate.weight": bf16(E, H)}
        out |= plain(*(f"{at}.self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")))
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    groups = {"group_0": {
        "weights": weights, "input_activations": {**weights, "dynamic": "local"}, "targets": ["Linear"],
    }}  # fmt: skip
    ignore = ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert.*", "re:.*self_attn.*"]
    section = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    return memory_checkpoint(out, config={**config(2), "quantization_config": {**section, "ignore": ignore}})


def gpt_oss() -> Checkpoint:
    out = around()
    for k in range(2):
        at = f"model.layers.{k}"
        for name, rows, columns in (("gate_up_proj", 2 * WIDTH, H), ("down_proj", H, WIDTH)):
            module = f"{at}.mlp.experts.{name}"
            out[f"{module}_blocks"] = typed(np.full((E, rows, columns // 32, 16), 0x21, np.uint8), "U8")
            out[f"{module}_scales"] = typed(np.full((E, rows, columns // 32), 120, np.uint8), "U8")
            out[f"{module}_bias"] = bf16(E, rows)
        out |= {f"{at}.mlp.router.weight": bf16(E, H), f"{at}.mlp.router.bias": bf16(E)}
        out |= {f"{at}.self_attn.sinks": bf16(8)}
        out |= plain(*(f"{at}.self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")))
    keep = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": keep}
    return memory_checkpoint(out, config={**config(2, "num_local_experts"), "quantization_config": section})


def deepseek_v4() -> Checkpoint:
    """No prefix, hash routing tables, FP8 around MXFP4 experts, draft experts in MXFP4 too."""
    out: Tensors = {**plain("embed", "head"), **norms("norm")}
    for at in ("layers.0", "layers.1", "mtp.0"):
        for expert in range(E):
            for name, rows, columns in (("w1", WIDTH, H), ("w3", WIDTH, H), ("w2", H, WIDTH)):
                module = f"{at}.ffn.experts.{expert}.{name}"
                out[f"{module}.weight"] = typed(np.full((rows, columns // 2), 0x21, np.uint8), "I8")
                out[f"{module}.scale"] = typed(np.full((rows, columns // 32), 120, np.uint8), "F8_E8M0")
        for name in (
            "attn.wq_a",
            "attn.wq_b",
            "attn.wkv",
            "attn.wo_a",
            "ffn.shared_experts.w1",
            "ffn.shared_experts.w2",
        ):
            out |= fp8(f"{at}.{name}", "scale", "F8_E8M0")
        out |= {f"{at}.ffn.gate.weight": bf16(E, H), f"{at}.ffn.gate.bias": f32(E), f"{at}.attn.attn_sink": f32(8)}
        out |= {f"{at}.hc_attn_base": f32(24), f"{at}.ffn.gate.tid2eid": tensor(np.zeros((16, 2), np.int64))}
    section = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    more = {"expert_dtype": "fp4", "quantization_config": section}
    return memory_checkpoint(out, config=config(2, "n_routed_experts", **more))


def minimax_m3() -> Checkpoint:
    """An allow-list: NVFP4 routed experts and MXFP8 linears, whose E8M0 scales are U8."""
    out, allowed = around(), {}
    for k in range(2):
        at = f"model.layers.{k}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = f"{at}.self_attn.{name}"
            out[f"{module}.weight"] = typed(np.full((H, H), 0x38, np.uint8), "F8_E4M3")
            out[f"{module}.weight_scale"] = typed(np.full((H, H // 32), 120, np.uint8), "U8")
            allowed[module] = {"quant_algo": "MXFP8"}
        out |= {**experts(f"{at}.block_sparse_moe.experts", ("w1", "w2", "w3"))}
        out |= {f"{at}.block_sparse_moe.gate.weight": bf16(E, H)}
        allowed[f"{at}.block_sparse_moe.experts"] = {"quant_algo": "NVFP4", "group_size": 16}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": allowed, "ignore": []}
    return memory_checkpoint(out, config={**config(2, "num_local_experts"), "quantization_config": section})


def weight_only() -> Checkpoint:
    """Nemotron 3.5 Lightning: W4A16, no gate, no activation scale anywhere."""
    out: Tensors = {**plain("backbone.embeddings", "lm_head")}
    for k in range(2):
        out |= experts(f"backbone.layers.{k}.mixer.experts", ("up_proj", "down_proj"), with_input=False)
        out |= {f"backbone.layers.{k}.mixer.gate.weight": bf16(E, H), f"backbone.layers.{k}.norm.weight": bf16(H)}
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}
    section = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "config_groups": {"group_0": group}}
    section["ignore"] = ["lm_head", "*mixer.gate"]
    named = config(2, "n_routed_experts", mlp_hidden_act="relu2")
    return memory_checkpoint(out, config={**named, "quantization_config": section})


def quark() -> Checkpoint:
    out = around()
    for k in range(2):
        at = f"model.layers.{k}"
        for expert in range(E):
            for name, rows, columns in (("gate_proj", WIDTH, H), ("up_proj", WIDTH, H), ("down_proj", H, WIDTH)):
                module = f"{at}.mlp.experts.{expert}.{name}"
                out[f"{module}.weight"] = typed(np.full((rows, columns // 2), 0x21, np.uint8), "U8")
                out[f"{module}.weight_scale"] = typed(np.full((rows, columns // 32), 120, np.uint8), "U8")
        out |= {f"{at}.mlp.gate.weight": bf16(E, H), **mla(f"{at}.self_attn")}
    section = {
        "quant_method": "quark", "layer_quant_config": {}, "exclude": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate"],
        "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}, "input_tensors": {"is_dynamic": True}},
    }  # fmt: skip
    return memory_checkpoint(out, config={**config(2, "n_routed_experts"), "quantization_config": section})


FAMILIES: dict[str, Callable[[], Checkpoint]] = {
    "DeepSeek-R1": deepseek_r1, "Qwen3": qwen3, "Qwen3-Next": qwen3_next, "MiniMax-M2": minimax_m2,
    "Nemotron 3 Super": nemotron_super, "Step-3.5": step, "Gemma 4, .moe.": gemma4(), "Gemma 4": gemma4("experts"),
    "Llama 4": llama4, "compressed-tensors": redhat, "gpt-oss": gpt_oss, "DeepSeek-V4": deepseek_v4,
    "MiniMax-M3": minimax_m3, "Nemotron 3.5": weight_only, "Quark": quark,
}  # fmt: skip
