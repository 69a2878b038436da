"""tiny-moe: a small mixture-of-experts language model that is really trained and really collapses."""

from nvfp4viz.model.config import TinyMoeConfig
from nvfp4viz.model.inference import Cache, Experts, Generation, GenerationTrace, TinyMoe, generate, greedy
from nvfp4viz.model.tokenizer import Tokenizer

__all__ = [
    "Cache",
    "Experts",
    "Generation",
    "GenerationTrace",
    "TinyMoe",
    "TinyMoeConfig",
    "Tokenizer",
    "generate",
    "greedy",
]
