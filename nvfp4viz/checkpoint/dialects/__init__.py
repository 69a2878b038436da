"""The layouts in which exporters store quantised experts, and how one is told from another.

A per-expert dialect says which suffix plays which role.  Adding one is a module with a `PerExpertDialect` and a
line in `PER_EXPERT`; layouts that are recognised but not yet read in full stand in `others`.
"""

from nvfp4viz.checkpoint.dialects.compressed_tensors import COMPRESSED_TENSORS
from nvfp4viz.checkpoint.dialects.modelopt import MODELOPT
from nvfp4viz.checkpoint.dialects.others import recognise_other
from nvfp4viz.checkpoint.dialects.per_expert import PROJECTIONS, ExpertName, PerExpertDialect, parse_expert_name

# In the order in which they are tried.
PER_EXPERT: tuple[PerExpertDialect, ...] = (MODELOPT, COMPRESSED_TENSORS)

__all__ = [
    "COMPRESSED_TENSORS",
    "MODELOPT",
    "PER_EXPERT",
    "PROJECTIONS",
    "ExpertName",
    "PerExpertDialect",
    "parse_expert_name",
    "recognise_other",
]
