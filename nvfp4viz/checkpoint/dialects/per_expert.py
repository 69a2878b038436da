"""Names of the form ``….experts.E.P.suffix`` and ``….experts.P.E.suffix``: one tensor per expert and projection."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

# What the projections are called on disk, and what they are called here.  w1 is the gate, w3 up, w2 down.
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
PROJECTION_ORDER = ("gate", "up", "down")
ROLES = ("weight", "weight_scale", "weight_scale_2", "input_scale")


class ExpertName(NamedTuple):
    """A parsed tensor name.

    Attributes
    ----------
    block
        Everything up to and including ``experts``: one MoE layer.
    expert
        Its number.
    projection
        As on disk.
    suffix
        What follows the projection.
    projection_major
        The projection stands before the expert's number.
    """

    block: str
    expert: int
    projection: str
    suffix: str
    projection_major: bool


def parse_expert_name(name: str) -> ExpertName | None:
    """Split a per-expert tensor's name, or None where it is none.

    >>> parse_expert_name("model.layers.3.mlp.experts.17.gate_proj.input_scale")[:4]
    ('model.layers.3.mlp.experts', 17, 'gate_proj', 'input_scale')
    >>> parse_expert_name("model.layers.3.mlp.shared_experts.gate_proj.weight") is None
    True
    """
    parts = name.rsplit(".", 4)
    if len(parts) == 4:
        parts = ["", *parts]
    if len(parts) != 5 or parts[1] != "experts":
        return None
    head, _, first, second, suffix = parts
    block = f"{head}.experts" if head else "experts"
    if second in PROJECTIONS and _is_number(first):
        return ExpertName(block, int(first), second, suffix, False)
    if first in PROJECTIONS and _is_number(second):
        return ExpertName(block, int(second), first, suffix, True)
    return None


def _is_number(text: str) -> bool:
    # More than six digits is no expert's number, and a list of that length must not be made.
    return text.isascii() and text.isdigit() and len(text) <= 6


@dataclass(frozen=True, slots=True)
class PerExpertDialect:
    """How one exporter names the four tensors of a projection.

    Attributes
    ----------
    id
        Name in reports.
    suffixes
        Suffix on disk by role.
    divisors
        Second-level scales are stored as 2688/amax (to divide by) rather than amax/2688.
    packed
        Element types of packed codes.
    """

    id: str
    suffixes: dict[str, str]
    divisors: bool
    packed: tuple[str, ...] = ("U8",)

    def recognises(self, census: Set[tuple[str, str]]) -> bool:
        """Do these pairs (suffix, dtype) of per-expert tensors show this dialect?"""
        own_second_level = (self.suffixes["weight_scale_2"], "F32") in census
        weight, block_scale = self.suffixes["weight"], self.suffixes["weight_scale"]
        # `weight_scale` alone is shared with other dialects; packed codes or a second level decide.
        return own_second_level or (
            any((weight, dtype) in census for dtype in self.packed) and (block_scale, "F8_E4M3") in census
        )
