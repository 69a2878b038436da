"""A checkpoint of DeepSeek-R1's shape, made of sparse files: full headers and scalars, weights that are holes.

178,176 expert tensors in 80 shards look like 368 GB and take 40 MB of disk.  Names, types, shapes and order are those
of ModelOpt's export; scalars are healthy (gate and up share their second-level scale), so that an audit finds nothing.
Never write into such a file: its holes would become real.
"""

from __future__ import annotations

import argparse
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HIDDEN, WIDTH, EXPERTS, FIRST_LAYER = 7168, 2048, 256, 3
PROJECTIONS = (("down_proj", HIDDEN, WIDTH), ("gate_proj", WIDTH, HIDDEN), ("up_proj", WIDTH, HIDDEN))
TENSORS_PER_LAYER = EXPERTS * len(PROJECTIONS) * 4
DEEPSEEK_LAYERS, DEEPSEEK_SHARDS = 58, 80
# Place in a writer's order: widest alignment first.
RANK = {"F32": 0, "F8_E4M3": 1, "U8": 2}


@dataclass(frozen=True, slots=True)
class Made:
    """What was written: counts, header bytes (8 per file included), scalars, and the apparent size."""

    folder: Path
    tensors: int
    shards: int
    header_bytes: int
    scalars: int
    nbytes: int


@dataclass(slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    value: float | None = None


def make(
    folder: Path,
    *,
    layers: int = DEEPSEEK_LAYERS,
    shards: int = DEEPSEEK_SHARDS,
    layout: str = "sorted",
    experts: int = EXPERTS,
    filled_bytes: int = 0,
    seed: int = 0,
) -> Made:
    """Write the checkpoint.

    Parameters
    ----------
    layers
        MoE layers, of 3072 tensors each where there are 256 experts.
    layout
        ``"sorted"``, as the reference writer does (all scalars of a shard lie together), or ``"interleaved"``: the
        four tensors of a projection one after the other.
    filled_bytes
        So many bytes of block scales and packed codes are really written, spread evenly over the shards, for benches
        that read weights.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    tensors = [item for layer in range(layers) for item in _layer(FIRST_LAYER + layer, experts, rng)]
    per_shard = -(-len(tensors) // shards)
    weight_map, header_bytes, nbytes = {}, 0, 0
    for number in range(shards):
        part = tensors[number * per_shard : (number + 1) * per_shard]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        if layout == "sorted":
            part.sort(key=lambda item: (RANK[item.dtype], item.name))
        header, size = _write_shard(folder / file, part, filled_bytes // shards, rng)
        header_bytes, nbytes = header_bytes + header, nbytes + size
        weight_map |= {item.name: file for item in part}
    # Sorted and indented, as transformers writes it: another order than the headers'.
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "hf_quant_config.json", _quantisation())
    _write_json(folder / "config.json", _config(experts))
    scalars = sum(item.value is not None for item in tensors)
    return Made(folder, len(tensors), shards, header_bytes, scalars, nbytes)


def _layer(layer: int, experts: int, rng: np.random.Generator) -> list[_Tensor]:
    second = rng.uniform(4e-5, 8e-5, (experts, 2))
    inputs = np.exp(rng.normal(np.log(2e-3), 0.3, (experts, 3)))
    out = []
    for expert in range(experts):
        for place, (projection, rows, columns) in enumerate(PROJECTIONS):
            at = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
            out += [
                _Tensor(f"{at}.weight", "U8", (rows, columns // 2), rows * columns // 2),
                _Tensor(f"{at}.weight_scale", "F8_E4M3", (rows, columns // 16), rows * columns // 16),
                _Tensor(f"{at}.weight_scale_2", "F32", (), 4, second[expert, int(projection == "down_proj")]),
                _Tensor(f"{at}.input_scale", "F32", (), 4, inputs[expert, place]),
            ]
    return out


def _write_shard(path: Path, part: list[_Tensor], filled: int, rng: np.random.Generator) -> tuple[int, int]:
    """One sparse file; returns its header's bytes and its size."""
    entries, places, at = ['"__metadata__":{"format":"pt"}'], [], 0
    for item in part:
        shape = ",".join(map(str, item.shape))
        entries.append(
            f'"{item.name}":{{"dtype":"{item.dtype}","shape":[{shape}],"data_offsets":[{at},{at + item.nbytes}]}}'
        )
        places.append(at)
        at += item.nbytes
    header = ("{" + ",".join(entries) + "}").encode()
    header += b" " * (-len(header) % 8)
    base = 8 + len(header)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(base + at)
        for item, place in zip(part, places, strict=True):
            if item.value is not None:
                file.seek(base + place)
                file.write(struct.pack("<f", item.value))
            elif filled >= item.nbytes:
                file.seek(base + place)
                # Block scales are positive and normal.
                low, high = (0x30, 0x78) if item.dtype == "F8_E4M3" else (0, 256)
                file.write(rng.integers(low, high, item.nbytes, dtype=np.uint8).data)
                filled -= item.nbytes
    return base, base + at


def _quantisation() -> dict:
    return {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }


def _config(experts: int) -> dict:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        # Only experts are made: a number of layers would promise dense ones before them.
    }


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a sparse checkpoint of DeepSeek-R1's shape.")
    parser.add_argument("folder", type=Path, help="one that does not exist yet")
    parser.add_argument("--layers", type=int, default=DEEPSEEK_LAYERS)
    parser.add_argument("--shards", type=int, default=DEEPSEEK_SHARDS)
    parser.add_argument("--layout", choices=("sorted", "interleaved"), default="sorted")
    options = parser.parse_args()
    made = make(options.folder, layers=options.layers, shards=options.shards, layout=options.layout)
    print(f"{made.tensors} tensors, {made.shards} shards, {made.header_bytes:,} header bytes, {made.nbytes:,} in all")


if __name__ == "__main__":
    main()
