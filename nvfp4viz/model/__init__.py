"""tiny-moe: a small mixture-of-experts language model that is really trained and really collapses."""

from nvfp4viz.model.calibrate import CalibrationStats, calibrate
from nvfp4viz.model.config import TinyMoeConfig
from nvfp4viz.model.inference import (
    Cache,
    Experts,
    ForwardRecord,
    Generation,
    GenerationTrace,
    TinyMoe,
    expect,
    generate,
    greedy,
)
from nvfp4viz.model.tokenizer import Tokenizer

__all__ = [
    "Cache",
    "CalibrationStats",
    "Experts",
    "ForwardRecord",
    "Generation",
    "GenerationTrace",
    "TinyMoe",
    "TinyMoeConfig",
    "Tokenizer",
    "calibrate",
    "expect",
    "generate",
    "greedy",
]
