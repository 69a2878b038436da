"""What a dialect is, and how tensors of routed experts are named.

One tensor a projection and expert (``….experts.E.P.suffix``, ``….experts.P.E.suffix``), one tensor a projection with
the experts along its first axis (``….moe.P.suffix``: *stacked*), or the same with underscores on the parameter's own
name (``….experts.P_suffix``: *fused*).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

# What the projections are called on disk, and what they are called here.  w1 is the gate, w3 up, w2 down.  Where a
# layout stores gate and up as one tensor, that is one projection.
PROJECTIONS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down",
    "gate_up_proj": "gate_up", "w13": "gate_up", "w13_weight": "gate_up", "w2_weight": "down",
}  # fmt: skip
PROJECTION_ORDER = ("gate", "up", "gate_up", "down")
ROLES = ("weight", "weight_scale", "weight_scale_2", "input_scale")
E8M0 = ("F8_E8M0", "U8")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one exporter names and stores the tensors of a projection.

    Attributes
    ----------
    id
        Name in reports.
    suffixes
        Suffix on disk by role; an empty one means the parameter's own name.
    block
        ``"NVFP4"`` (E4M3 scales of 16 values and a second level) or ``"MXFP4"`` (E8M0 scales of 32).
    arrangement
        ``"expert"``, ``"stacked"`` or ``"fused"``.
    divisors
        Second-level scales are stored as 2688/amax (to divide by) rather than amax/2688.
    aliases
        Other suffixes that play a role.
    methods
        Beginnings of `quant_method` that belong to these names.
    certain
        Roles whose names are known well enough to call their absence a defect.
    projections
        Projections that every layer has, with their names on disk; empty where that differs from model to model.
    """

    id: str
    suffixes: dict[str, str]
    block: str = "NVFP4"
    arrangement: str = "expert"
    divisors: bool = False
    aliases: dict[str, str] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    certain: tuple[str, ...] = ROLES
    projections: dict[str, str] = field(default_factory=dict)

    @property
    def group(self) -> int:
        """Values that share a block scale."""
        return 32 if self.block == "MXFP4" else 16

    @property
    def scale_types(self) -> tuple[str, ...]:
        """Element types of block scales."""
        return E8M0 if self.block == "MXFP4" else ("F8_E4M3",)

    @property
    def names_activations(self) -> bool:
        """Is it known what an activation scale would be called, so that none under that name means none?"""
        return "input_scale" in self.certain

    def may_have(self, role: str) -> bool:
        """May a file of this layout have a tensor of a role, whether this one does or not?

        >>> from nvfp4viz.checkpoint.dialects import COMPRESSED_TENSORS_MXFP4, GPT_OSS
        >>> GPT_OSS.may_have("input_scale"), GPT_OSS.may_have("weight_scale_2")
        (True, False)
        >>> COMPRESSED_TENSORS_MXFP4.may_have("input_scale")
        False
        """
        # A global scale is a second level's, which MXFP4 has not.
        second = role == "weight_scale_2" or (role == "input_scale" and self.divisors)
        return role in self.suffixes and not (second and self.block == "MXFP4")

    def name(self, module: str, role: str) -> str:
        """A tensor's name, from its module's.

        >>> from nvfp4viz.checkpoint.dialects import GPT_OSS
        >>> GPT_OSS.name("model.layers.0.mlp.experts.down_proj", "weight_scale")
        'model.layers.0.mlp.experts.down_proj_scales'
        """
        suffix = self.suffixes.get(role, role)
        separator = "_" if self.arrangement == "fused" else "."
        return f"{module}{separator}{suffix}" if suffix else module

    def role_of(self, suffix: str) -> str | None:
        """The role that a suffix plays, or None."""
        for role, own in self.suffixes.items():
            if own == suffix:
                return role
        return self.aliases.get(suffix)


class ExpertName(NamedTuple):
    """A parsed tensor name.

    Attributes
    ----------
    block
        Everything up to and including ``experts`` (or ``moe``): one MoE layer.
    expert
        Its number; None where the tensor holds all experts.
    projection
        As on disk.
    suffix
        What follows the projection.
    projection_major
        The projection stands before the expert's number.
    """

    block: str
    expert: int | None
    projection: str
    suffix: str
    projection_major: bool


QUANTIZERS = (".weight_quantizer", ".input_quantizer")
_FUSED = re.compile(r"^(gate_up_proj|gate_proj|up_proj|down_proj|w13_weight|w2_weight)(?:_(.+))?$")


def parse_expert_name(name: str) -> ExpertName | None:
    """Split the name of one expert's tensor, or None where it is none.

    >>> parse_expert_name("model.layers.3.mlp.experts.17.gate_proj.input_scale")[:4]
    ('model.layers.3.mlp.experts', 17, 'gate_proj', 'input_scale')
    >>> parse_expert_name("model.layers.3.mlp.shared_experts.gate_proj.weight") is None
    True
    """
    module, _, suffix = name.rpartition(".")
    if module.endswith(QUANTIZERS):
        # Quark's `P.weight_quantizer.scale` belongs to the projection P.
        module, _, quantizer = module.rpartition(".")
        suffix = f"{quantizer}.{suffix}"
    parsed = parse_module(module)
    return None if parsed is None else parsed._replace(suffix=suffix)


def parse_module(module: str) -> ExpertName | None:
    """As `parse_expert_name`, of a name without its suffix."""
    block, _, tail = module.rpartition(".")
    block, _, first = block.rpartition(".")
    if not block.endswith("experts") or (len(block) > 7 and block[-8] != "."):
        return None
    if tail in PROJECTIONS and _is_number(first):
        return ExpertName(block, int(first), tail, "", False)
    if first in PROJECTIONS and _is_number(tail):
        return ExpertName(block, int(tail), first, "", True)
    return None


def parse_whole(name: str) -> ExpertName | None:
    """Split the name of a tensor that holds a projection of all experts; `expert` is None.

    >>> parse_whole("model.layers.0.moe.up_proj.input_scale")[:4]
    ('model.layers.0.moe', None, 'up_proj', 'input_scale')
    >>> parse_whole("model.layers.0.mlp.experts.gate_up_proj_weight_scale_2")[2:4]
    ('gate_up_proj', 'weight_scale_2')
    >>> parse_whole("model.layers.0.mlp.gate_proj.weight") is None
    True
    """
    module, _, last = name.rpartition(".")
    if is_block(module):
        match = _FUSED.match(last)
        return ExpertName(module, None, match[1], match[2] or "", False) if match else None
    block, _, projection = module.rpartition(".")
    if projection in PROJECTIONS and is_block(block):
        return ExpertName(block, None, projection, last, False)
    return None


def is_block(module: str) -> bool:
    """Does this name a layer's routed experts as a whole?"""
    return module.endswith((".experts", ".moe")) or module in ("experts", "moe")


def _is_number(text: str) -> bool:
    # More than six digits is no expert's number, and a list of that length must not be made.
    return text.isascii() and text.isdigit() and len(text) <= 6
