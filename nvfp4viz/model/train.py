"""Train tiny-moe with PyTorch: minutes on one GPU, also runs (slowly) on a CPU.

    python -m nvfp4viz.model.train --out trained

The defaults are those of the shipped model; `sample_checkpoints/tiny-moe-bf16/training.json` repeats them.

First plain steps, then steps with fake quantisation (straight-through NVFP4 on expert weights and activations), without
which arithmetic does not survive W4A4.  Writes ``model.safetensors`` (BF16), ``config.json`` and ``training.json`` with
the losses and the coverage that decide whether a run is fit to ship.  Python's and PyTorch's generators are seeded, but
GPU kernels add in no fixed order: two runs give models alike, not equal, which is why the trained model is committed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from nvfp4viz.model import corpus
from nvfp4viz.model.config import TinyMoeConfig
from nvfp4viz.model.tokenizer import EOS, PAD, Tokenizer

POOL_DOCUMENTS = 8_000
"""Training documents generated per domain; arithmetic has 7,290 different ones."""
CALIBRATION_DOCUMENTS = 1_500
IGNORED = -100


# --- data -----------------------------------------------------------------------------------------------------------
def encode(document: str) -> list[int]:
    """``<bos> text <eos>``."""
    return [*Tokenizer().encode(document), EOS]


def pack(documents: Iterator[tuple[int, list[int]]], rows: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fill rows with whole documents one after another.

    Returns
    -------
    ids, segments, positions, domains : each (rows, length) int64
        A document attends only to itself and counts its own positions, exactly as in generation.
        Segment 0 is padding.
    """
    ids = np.full((rows, length), PAD, np.int64)
    segments, positions, domains = np.zeros_like(ids), np.zeros_like(ids), np.zeros_like(ids)
    domain, waiting = next(documents)
    for row in range(rows):
        filled, segment = 0, 0
        while filled + len(waiting) <= length:
            end, segment = filled + len(waiting), segment + 1
            ids[row, filled:end], segments[row, filled:end] = waiting, segment
            positions[row, filled:end] = np.arange(len(waiting))
            domains[row, filled:end] = domain
            filled, (domain, waiting) = end, next(documents)
    return tuple(torch.from_numpy(array) for array in (ids, segments, positions, domains))  # type: ignore[return-value]


def training_stream(seed: int) -> Iterator[tuple[int, list[int]]]:
    """Documents of all domains with their domain's number; each domain gives about the same number of characters."""
    rng = np.random.default_rng(seed)
    pools = [[encode(text) for text in corpus.sample(domain, 1, POOL_DOCUMENTS)] for domain in corpus.DOMAINS]
    lengths = np.array([np.mean([len(ids) for ids in pool]) for pool in pools])
    share = (1 / lengths) / (1 / lengths).sum()
    while True:
        for domain in rng.choice(len(pools), size=1024, p=share):
            yield int(domain), pools[domain][rng.integers(POOL_DOCUMENTS)]


# --- fake quantisation ----------------------------------------------------------------------------------------------
def fake_nvfp4(x: Tensor, amax: Tensor) -> Tensor:
    """``x`` as NVFP4 would hold it; the gradient passes as if nothing had happened.

    Blocks of 16 along the last axis, scales rounded to E4M3 relative to ``amax / 2688``, codes by round-half-even.
    Written for gradients, not for bits: the exact arithmetic is `nvfp4viz.quant`'s.
    """
    with torch.no_grad():
        blocks = x.detach().unflatten(-1, (-1, 16))
        encode_scale = 2688.0 / amax.clamp_min(1e-12).unsqueeze(-1)
        scale = (encode_scale * blocks.abs().amax(-1, keepdim=True) / 6).clamp(max=448)
        scale = scale.to(torch.float8_e4m3fn).float()
        factor = torch.where(scale > 0, encode_scale / scale, 0.0)
        y = (blocks * factor).clamp(-6, 6)
        step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
        rounded = (torch.round(y / step) * step) * scale / encode_scale
        rounded = rounded.flatten(-2)
    return x + (rounded - x).detach()


# --- the model ------------------------------------------------------------------------------------------------------
@dataclass
class Recorder:
    """What a forward pass leaves behind for calibration and reports; one entry per layer."""

    ids: list[Tensor] = field(default_factory=list)
    input_amax: list[Tensor] = field(default_factory=list)  # (experts, 2): before w13, before w2
    balance: list[Tensor] = field(default_factory=list)
    probabilities: list[Tensor] = field(default_factory=list)  # (tokens, experts), the router's softmax over all


def specialisation(probabilities: Tensor, domains: Tensor, count: int) -> Tensor:
    """Mutual information, in nats, of a token's domain and its expert under the router's softmax.

    Training raises it a little: experts then divide the domains among themselves while all of them stay in use, which a
    model of this size does not do by itself as large ones do (Mod-Squad, Chen et al., arXiv 2212.08066, trains with
    the same term between tasks and experts).

    Parameters
    ----------
    probabilities : (tokens, experts)
    domains : (tokens,) int64
    count
        Number of domains.
    """
    chosen = F.one_hot(domains, count).to(probabilities.dtype)
    share = chosen.mean(0)
    joint = chosen.T @ probabilities / len(domains)  # (domains, experts)
    expected = share[:, None] * probabilities.mean(0)
    return (joint * ((joint + 1e-12) / (expected + 1e-12)).log()).sum()


class Norm(nn.Module):
    """RMSNorm, with or without a weight."""

    def __init__(self, size: int, eps: float, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), scale))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys and rotary positions."""

    def __init__(self, c: TinyMoeConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        # Gemma 4 scales scores by 1 and leaves the temperature to the norms' weights.
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps, c.head_dim**-0.5)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, -1, self.c.head_dim))
        k = self.k_norm(self.k_proj(x).view(rows, length, -1, self.c.head_dim))
        v = self.v_proj(x).view(rows, length, -1, self.c.head_dim)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.c.num_attention_heads // self.c.num_key_value_heads
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Mlp(nn.Module):
    """The dense branch."""

    def __init__(self, c: TinyMoeConfig) -> None:
        super().__init__()
        self.gate_proj = linear(c.hidden_size, c.intermediate_size)
        self.up_proj = linear(c.hidden_size, c.intermediate_size)
        self.down_proj = linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Router(nn.Module):
    """Gemma 4's: a norm without weight, two scales, top-k by logit, softmax over the chosen."""

    def __init__(self, c: TinyMoeConfig, spread: float) -> None:
        super().__init__()
        self.c = c
        self.proj = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        nn.init.normal_(self.proj.weight, std=spread)
        self.scale = nn.Parameter(torch.ones(c.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(c.num_experts))

    def forward(self, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.rms_norm(residual, (residual.shape[-1],), None, self.c.rms_norm_eps)
        logits = self.proj(x * self.c.hidden_size**-0.5 * self.scale)
        top, ids = logits.topk(self.c.top_k_experts, -1)
        return ids, torch.softmax(top, -1) * self.per_expert_scale[ids], torch.softmax(logits, -1)


class Experts(nn.Module):
    """All experts of a layer, gathered per expert into one padded batch."""

    def __init__(self, c: TinyMoeConfig) -> None:
        super().__init__()
        e, h, i = c.num_experts, c.hidden_size, c.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * i, h) / math.sqrt(h))
        self.down_proj = nn.Parameter(torch.randn(e, h, i) / math.sqrt(i))

    def forward(
        self, x: Tensor, ids: Tensor, weights: Tensor, quantised: bool, amax: Tensor | None, record: Recorder
    ) -> Tensor:
        experts, chosen = self.gate_up_proj.shape[0], ids.shape[1]
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=experts)
        place = torch.arange(len(flat), device=x.device) - (counts.cumsum(0) - counts)[flat[order]]
        gathered = x.new_zeros(experts, int(counts.max()), x.shape[1])
        gathered[flat[order], place] = x[order // chosen]
        w13, w2 = self.gate_up_proj, self.down_proj
        seen = [gathered.detach().abs().amax((1, 2))]
        if quantised:
            w13 = fake_nvfp4(w13, w13.detach().abs().amax((1, 2))[:, None, None])
            w2 = fake_nvfp4(w2, w2.detach().abs().amax((1, 2))[:, None, None])
            gathered = fake_nvfp4(gathered, (seen[0] if amax is None else amax[:, 0])[:, None, None])
        gate, up = torch.bmm(gathered, w13.transpose(1, 2)).chunk(2, -1)
        middle = F.gelu(gate, approximate="tanh") * up
        seen.append(middle.detach().abs().amax((1, 2)))
        if quantised:
            middle = fake_nvfp4(middle, (seen[1] if amax is None else amax[:, 1])[:, None, None])
        out = torch.bmm(middle, w2.transpose(1, 2))[flat[order], place]
        record.input_amax.append(torch.stack(seen, 1))
        out = out * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // chosen, out)


class Block(nn.Module):
    """One Gemma-4-like decoder layer: attention, then a dense and a routed branch side by side."""

    def __init__(self, c: TinyMoeConfig, spread: float) -> None:
        super().__init__()
        h, eps = c.hidden_size, c.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = Norm(h, eps), Norm(h, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = Norm(h, eps), Norm(h, eps)
        self.pre_feedforward_layernorm_2 = Norm(h, eps)
        self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = Norm(h, eps), Norm(h, eps)
        self.self_attn, self.mlp, self.router, self.experts = Attention(c), Mlp(c), Router(c, spread), Experts(c)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
        real: Tensor,
        quantised: bool,
        amax: Tensor | None,
        record: Recorder,
    ) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos, sin, mask))
        dense = self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(x)))
        residual = x[real]  # padding is routed nowhere: it must neither train nor calibrate an expert
        ids, weights, probabilities = self.router(residual)
        routed = self.experts(self.pre_feedforward_layernorm_2(residual), ids, weights, quantised, amax, record)
        share = F.one_hot(ids, probabilities.shape[1]).sum(1).float().mean(0) / ids.shape[1]
        record.balance.append(probabilities.shape[1] * (share * probabilities.mean(0)).sum())
        record.ids.append(ids)
        record.probabilities.append(probabilities)
        dense = dense.clone()
        dense[real] += self.post_feedforward_layernorm_2(routed)
        return (x + self.post_feedforward_layernorm(dense)) * self.layer_scalar


class TorchTinyMoe(nn.Module):
    """The whole model; parameter names are those of the checkpoint, without ``model.``."""

    def __init__(self, c: TinyMoeConfig, router_spread: float) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=c.hidden_size**-0.5)
        self.layers = nn.ModuleList(Block(c, router_spread) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        frequencies = c.rope_theta ** (-torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(
        self,
        ids: Tensor,
        segments: Tensor,
        positions: Tensor,
        quantised: bool = False,
        amax: list[Tensor] | None = None,
    ) -> tuple[Tensor, Recorder]:
        record = Recorder()
        angles = positions[..., None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        mask = (causal & (segments[:, :, None] == segments[:, None, :]))[:, None]
        real = segments > 0
        x = self.embed_tokens(ids) * self.c.hidden_size**0.5
        for number, layer in enumerate(self.layers):
            scales = None if amax is None else amax[number]
            x = layer(x, cos, sin, mask, real, quantised, scales, record)
        return self.norm(x) @ self.embed_tokens.weight.T, record


def targets_of(ids: Tensor, segments: Tensor) -> Tensor:
    """The next id inside the same document; elsewhere nothing is asked."""
    following = torch.roll(ids, -1, 1)
    same = (torch.roll(segments, -1, 1) == segments) & (segments > 0)
    same[:, -1] = False
    return torch.where(same, following, IGNORED)


# --- training -------------------------------------------------------------------------------------------------------
def train(args: argparse.Namespace, config: TinyMoeConfig) -> TorchTinyMoe:
    torch.manual_seed(args.seed)
    model = TorchTinyMoe(config, args.router_spread).to(args.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01)
    stream = training_stream(args.seed)
    total = args.steps + args.quantised_steps
    start = time.perf_counter()
    for step in range(total):
        progress = step / total
        rate = args.lr * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        *batch, domains = [t.to(args.device) for t in pack(stream, args.rows, args.length)]
        logits, record = model(*batch, quantised=step >= args.steps)
        loss = F.cross_entropy(logits.flatten(0, 1), targets_of(*batch[:2]).flatten(), ignore_index=IGNORED)
        spread = [specialisation(p, domains[batch[1] > 0], len(corpus.DOMAINS)) for p in record.probabilities]
        (
            loss + args.balance * torch.stack(record.balance).sum() - args.specialise * torch.stack(spread).sum()
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log_every == 0 or step == total - 1:
            seconds = time.perf_counter() - start
            shared = torch.stack(spread).mean().item()
            print(
                f"step {step}/{total} loss {loss.item():.4f} information {shared:.3f} lr {rate:.2e} {seconds:.0f} s",
                flush=True,
            )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


# --- is this run fit to ship? ---------------------------------------------------------------------------------------
@torch.no_grad()
def run_documents(
    model: TorchTinyMoe, documents: list[str], device: str, quantised: bool = False, amax: list[Tensor] | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Recorder]]:
    """(logits, targets, real, record) of batches of 64 documents, one document a row."""
    for begin in range(0, len(documents), 64):
        encoded = [encode(text) for text in documents[begin : begin + 64]]
        length = max(map(len, encoded))
        ids = torch.tensor([row + [PAD] * (length - len(row)) for row in encoded], device=device)
        segments = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in encoded], device=device)
        positions = torch.arange(length, device=device).expand_as(ids)
        logits, record = model(ids, segments, positions, quantised=quantised, amax=amax)
        yield logits, targets_of(ids, segments), segments > 0, record


@torch.no_grad()
def calibrate(model: TorchTinyMoe, domains: list[str], device: str) -> tuple[Tensor, list[Tensor]]:
    """Token counts (layers, experts) and per layer the input amax (experts, 2), natural routing."""
    c = model.c
    counts = torch.zeros(c.num_hidden_layers, c.num_experts, dtype=torch.int64, device=device)
    amax = [torch.zeros(c.num_experts, 2, device=device) for _ in range(c.num_hidden_layers)]
    for domain in domains:
        for _, _, _, record in run_documents(model, corpus.sample(domain, 2, CALIBRATION_DOCUMENTS), device):
            for layer in range(c.num_hidden_layers):
                counts[layer] += record.ids[layer].flatten().bincount(minlength=c.num_experts)
                amax[layer] = torch.maximum(amax[layer], record.input_amax[layer])
    return counts, amax


@torch.no_grad()
def first_documents(model: TorchTinyMoe, documents: list[str], device: str) -> Tensor:
    """The first document that reaches each expert, (layers, experts); the number of documents where none does."""
    c = model.c
    first = torch.full((c.num_hidden_layers, c.num_experts), len(documents), device=device)
    done = 0
    for _, _, real, record in run_documents(model, documents, device):
        row = done + torch.arange(len(real), device=device)[:, None].expand_as(real)[real]
        for layer, ids in enumerate(record.ids):
            values = row[:, None].expand_as(ids).flatten()
            first[layer].scatter_reduce_(0, ids.flatten(), values, "amin")
        done += len(real)
    return first


@torch.no_grad()
def report(model: TorchTinyMoe, device: str) -> dict[str, Any]:
    """Losses per domain, BF16 and fully calibrated W4A4, and what news-only calibration leaves out."""
    model.eval()
    counts, amax = calibrate(model, list(corpus.DOMAINS), device)
    news, _ = calibrate(model, [corpus.CALIBRATION_DOMAIN], device)
    holes = news == 0
    first = first_documents(model, corpus.sample(corpus.CALIBRATION_DOMAIN, 2, CALIBRATION_DOCUMENTS), device)
    held_out = first_documents(model, corpus.held_out_documents(corpus.CALIBRATION_DOMAIN, 50), device)
    coverage = {
        n: [
            (first >= n).float().mean().item(),
            (first >= n).sum(1).tolist(),
            int(((first >= n) & (held_out < 50)).sum()),
        ]
        for n in (50, 100, 200, 400, 800, CALIBRATION_DOCUMENTS)
    }
    result: dict[str, Any] = {
        "coverage": coverage,
        "uncalibrated_share": holes.float().mean().item(),
        "holes_per_layer": holes.sum(1).tolist(),
        "dead_experts": int((counts == 0).sum()),
        "least_tokens": int(counts.min()),
        "rare_news_experts": int(((news > 0) & (news < 5)).sum()),
        "domains": {},
    }
    for domain in corpus.DOMAINS:
        documents = corpus.held_out_documents(domain, 50, seed=0)
        line: dict[str, Any] = {}
        for name, quantised in (("bf16", False), ("w4a4", True)):
            loss = tokens = right = asked = 0.0
            for logits, targets, _, _ in run_documents(
                model, documents, device, quantised, amax if quantised else None
            ):
                asked_here = targets != IGNORED
                loss += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
                tokens += asked_here.sum().item()
                if domain == "arithmetic":  # the prompt "<bos>37 + 45 =" ends at position 9
                    ok = ((logits.argmax(-1) == targets) | ~asked_here)[:, 9:].all(1)
                    right, asked = right + ok.sum().item(), asked + len(ok)
            line[name] = loss / tokens
            if asked:
                line[f"{name}_right"] = right
        through = []
        for _, _, real, record in run_documents(model, documents, device):
            hits = torch.zeros_like(real)
            hits[real] = torch.stack([holes[layer][ids].any(1) for layer, ids in enumerate(record.ids)]).any(0)
            through.extend(hits)
        hit_document = sum(bool(hits.any()) for hits in through)
        prompts = [len(corpus.prompt_of(domain, document)) + 1 for document in documents]
        hit_prompt = sum(bool(hits[:length].any()) for hits, length in zip(through, prompts, strict=True))
        line |= {"prompts_through_holes": hit_prompt, "documents_through_holes": hit_document}
        result["domains"][domain] = line
    return result


def save(model: TorchTinyMoe, folder: Path, results: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value.detach().bfloat16().cpu() for name, value in model.named_parameters()}
    expected = model.c.dense_shapes() | model.c.expert_shapes()
    assert {name: tuple(value.shape) for name, value in tensors.items()} == expected
    save_file({name: tensors[name].contiguous() for name in expected}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.c.to_json(), indent=2) + "\n", encoding="utf-8")
    (folder / "training.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--balance", type=float, default=0.003, help="weight of the load-balancing loss")
    parser.add_argument("--router-spread", type=float, default=0.3, help="spread of the router's first logits")
    parser.add_argument("--specialise", type=float, default=0.008, help="weight of domain-expert mutual information")
    parser.add_argument("--steps", type=int, default=1150)
    parser.add_argument("--quantised-steps", type=int, default=350)
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch")
    parser.add_argument("--length", type=int, default=256, help="characters of a row")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.length < TinyMoeConfig().max_position_embeddings:
        parser.error("--length must be at least 256: a row holds whole documents")
    torch.set_float32_matmul_precision("high")
    start = time.perf_counter()
    model = train(args, TinyMoeConfig())
    seconds = time.perf_counter() - start
    results = {
        "arguments": {k: str(v) for k, v in vars(args).items()},
        "seconds": seconds,
        **report(model, args.device),
    }
    save(model, args.out, results)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
