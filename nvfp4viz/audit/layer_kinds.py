"""What kind each layer is of, as the configuration says it: attention, a recurrence in its place, or an MLP alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nvfp4viz.audit.shapes import is_size, text_part

# What a configuration calls its list of layers' kinds.
_LISTS = re.compile(r"^(?:layer_types|layers?_block_types?|block_types?|hybrid_override_pattern)$")
_MIXING = re.compile(r"attention|mamba|ssm|conv|recurrent|linear|delta|^(?:full|sliding|global|local|hybrid)$")
# "no_attention", "attention_free": a layer that does without.
_WITHOUT = re.compile(r"no_|none|free|skip|identity")
_MLP = re.compile(r"^(?:moe|mlp|ffn|dense|sparse)$")
# NemotronH's letters, one a layer.
_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
# Models whose layers are not all built alike, although no list says what each of them is.
_UNEVEN = re.compile(
    r"block_configs|drop_(?:attn|attention|mlp|layer)|(?:attn|attention|layer)_(?:drop|skip)_list|no_op"
)
# Families in which every layer of the model has attention, under no key that could say otherwise.
_ALL_ATTEND = re.compile(
    r"\b(?:mixtral|qwen2moe|qwen3moe|qwen3vlmoe|deepseekv[23]|deepseekv32|kimik2|glm4moe|glmmoedsa|gptoss|olmoe|llama4|gemma4"
    r"|minimaxm2|dots1)"
)


def kinds_of(config: Mapping[str, Any], layers: int) -> Sequence[Any]:
    """What kind each layer is of, as the configuration says it in one of several ways.

    Parameters
    ----------
    layers
        How many it must speak of; where it speaks of fewer, or does not, the answer is empty.

    >>> kinds_of({"hybrid_override_pattern": "ME*"}, 3)
    ('mamba', 'moe', 'attention')
    >>> kinds_of({"full_attention_interval": 2, "num_hidden_layers": 4}, 4)
    ('linear_attention', 'full_attention', 'linear_attention', 'full_attention')
    """
    holder = text_part(config)
    listed = next((value for key, value in holder.items() if _LISTS.match(key) and isinstance(value, (list, str))), ())
    if isinstance(listed, str):
        listed = [_LETTERS[letter] for letter in listed] if set(listed) <= _LETTERS.keys() else ()
    count = holder["num_hidden_layers"] if is_size(holder.get("num_hidden_layers")) else 0
    # The number may be anybody's.
    if not listed and count >= layers:
        every, period = (holder.get(key) or 0 for key in ("full_attention_interval", "attn_layer_period"))
        if is_size(every):
            listed = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
        elif is_size(period):
            offset = holder.get("attn_layer_offset", 0)
            listed = ["attention" if layer % period == offset else "mamba" for layer in range(layers)]
    return tuple(listed) if len(listed) >= layers else ()


def mixes_tokens(kind: Any) -> bool:
    """Does a layer of this kind have attention, or what stands in its place?

    >>> mixes_tokens("linear_attention"), mixes_tokens("moe"), mixes_tokens("no_attention")
    (True, False, False)
    """
    return isinstance(kind, str) and bool(_MIXING.search(kind)) and not _WITHOUT.search(kind)


def are_halves(kinds: Sequence[Any]) -> bool:
    """Is each layer either something that mixes tokens or an MLP, and never both (NemotronH)?"""
    return any(map(is_mlp, kinds)) and any(map(mixes_tokens, kinds))


def is_mlp(kind: Any) -> bool:
    """Is a layer of this kind an MLP, or experts, alone?"""
    return isinstance(kind, str) and bool(_MLP.match(kind))


def is_uneven(config: Mapping[str, Any]) -> bool:
    """Were layers searched one by one, or parts of them left out by a list?"""
    holders = (config, text_part(config))
    return any(_UNEVEN.search(key) and value for holder in holders for key, value in holder.items())


def all_attend(config: Mapping[str, Any]) -> bool:
    """Is this a family whose layers all have attention?"""
    holder = text_part(config)
    listed = (one.get("architectures") for one in (config, holder))
    names = [config.get("model_type"), holder.get("model_type")]
    names += [name for found in listed if isinstance(found, list) for name in found]
    return bool(_ALL_ATTEND.search(re.sub(r"[^a-z0-9 ]", "", " ".join(map(str, names)).lower())))
