"""What the names of ordinary modules say: their layer, whether they are a draft's, attention's, or always quantised."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nvfp4viz.checkpoint import CanonicalView
from nvfp4viz.checkpoint.dialects.collect import is_tower, layer_number

# Modules that every exporter takes for linear layers to quantise; routers, norms and embeddings are never among them.
MATRICES = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2",
    "w3", "q_a_proj", "q_b_proj", "kv_b_proj",
})  # fmt: skip
# Attention's projections under all names.
ATTENTION = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "wq", "wk", "wv", "wo",
})  # fmt: skip
# Parts of a layer that mix tokens: attention, and what stands in its place.
MIXERS = re.compile(r"attn|attention|mamba|ssm|conv|mixer|recurrent|temporal|delta|linear")
# The linear layers of what stands in attention's place: Gated DeltaNet's, as stored whole or in parts, and Mamba's.  Of
# themselves exporters leave out those of DeltaNet's gates (``in_proj_a``, ``in_proj_b``), and name them in their lists;
# vLLM builds all of these by the list (``qwen_gdn_linear_attn.py``, ``mamba_mixer2.py``).
_RECURRENT = re.compile(
    r"(?:^|\.)(?:linear_attn\.(?:in_proj(?:_qkvz|_qkv|_z|_ba|_b|_a)?|out_proj)|(?:mamba|mixer)\.(?:in_proj|out_proj))$"
)
# Towers that servers leave unquantised whatever the configuration says.
_FORCED = re.compile(r"(?:vision|visual|vit_|audio|multi_modal|multimodal|aligner)")


def layer_of(names: Iterable[str], view: CanonicalView) -> int | None:
    """The one layer that all these names are of, or None; a draft layer has the number that its experts have."""
    layers = {_layer(name, view) for name in names}
    return layers.pop() if len(layers) == 1 else None


def layers_of(names: Iterable[str], view: CanonicalView) -> list[int]:
    """All layers that these names are of."""
    return sorted({layer for name in names if (layer := _layer(name, view)) is not None})


def _layer(name: str, view: CanonicalView) -> int | None:
    if is_tower(name):
        return None
    number, draft, head = layer_number(name, view.layers)
    if not draft or not head:
        return number
    # Where two namings count the same, the experts' layers have been moved apart.
    own = (layer for layer in view.draft_layers if f"{view.blocks[layer]}.".startswith(f"{head}."))
    return next(own, number)


def family_of(view: CanonicalView) -> str:
    """What stands before the number of a layer with experts, such as ``model.layers``."""
    first = view.moe_layers[0]
    return f".{view.blocks[first]}".rpartition(f".{first}.")[0].removeprefix(".")


def is_quantised_by_all(name: str) -> bool:
    """Does every exporter quantise such a module, and every server build it so, where nothing leaves it out?

    >>> is_quantised_by_all("model.layers.0.self_attn.q_proj"), is_quantised_by_all("model.layers.0.mlp.gate")
    (True, False)
    >>> is_quantised_by_all("model.visual.blocks.0.attn.q_proj")
    False
    """
    return name.rpartition(".")[2] in MATRICES and not _FORCED.search(name)


def is_built_by_list(name: str) -> bool:
    """Do servers build such a module quantised where no list leaves it out, whoever else would not quantise it?

    >>> is_built_by_list("model.layers.0.linear_attn.in_proj_ba"), is_built_by_list("backbone.layers.1.mixer.in_proj")
    (True, True)
    >>> is_built_by_list("model.layers.0.linear_attn.conv1d"), is_built_by_list("model.layers.0.mlp.shared_expert_gate")
    (False, False)
    """
    return is_quantised_by_all(name) or bool(_RECURRENT.search(name) and not _FORCED.search(name))


def is_of_attention(name: str) -> bool:
    """Is this a projection of the language model's attention?

    >>> is_of_attention("layers.0.attn.wkv"), is_of_attention("model.visual.blocks.0.attn.wq")
    (True, False)
    """
    return name.rpartition(".")[2] in ATTENTION and not _FORCED.search(name)


def without_numbers(name: str) -> str:
    """What a module is in every layer.

    >>> without_numbers("layers.12.attn.wkv")
    'layers.#.attn.wkv'
    """
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


def is_draft(name: str, layers: int | None) -> bool:
    """Is this a module of a draft (MTP, nextn) layer?

    >>> is_draft("mtp.0.ffn.w1", 4), is_draft("model.layers.4.mlp.up_proj", 4), is_draft("model.layers.3.mlp", 4)
    (True, True, False)
    """
    return layer_number(name, layers)[1]
