"""What may lie in a file that was lost, cut or not given: nothing is said of it but that the file was not read."""

from __future__ import annotations

from collections.abc import Iterator

from nvfp4viz.checkpoint import Checkpoint

# What each role's tensor is called by one exporter or another.
NAMES = {
    "weight": ("weight", "weight_packed", "qweight"),
    "weight_scale": ("weight_scale", "scale", "weight_scale_inv", "scale_inv", "weight_quantizer.scale", "scales"),
    "weight_scale_2": ("weight_scale_2", "weight_global_scale", "scale2"),
    "input_scale": ("input_scale", "input_scale_2", "input_global_scale", "activation_scale", "input_quantizer.scale"),
}


def may_lie_unread(checkpoint: Checkpoint, module: str, role: str) -> bool:
    """May a module's tensor of a role, under any of its names, lie in a file that was not read?

    A tensor of all experts has its suffix after an underscore.
    """
    if checkpoint.blind_files:
        return True
    lost = checkpoint.unreadable
    return bool(lost) and any(f"{module}{dot}{suffix}" in lost for suffix in NAMES[role] for dot in "._")


def unread_below(checkpoint: Checkpoint, start: str) -> Iterator[str]:
    """What follows ``start`` in the names that are known and cannot be read."""
    return (name[len(start) :] for name in checkpoint.unreadable if name.startswith(start))
