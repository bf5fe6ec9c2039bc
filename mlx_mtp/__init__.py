"""Exact multi-token-prediction decoding on MLX: load a checkpoint with its heads, and generate."""

from .generate import GenerationResponse, generate, generate_step, stream_generate
from .load import load, load_model
from .prompt_cache import PromptCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from .report import Report
from .stats import Stats

__version__ = "0.1.0"

__all__ = [
    "GenerationResponse",
    "PromptCache",
    "Report",
    "Stats",
    "generate",
    "generate_step",
    "load",
    "load_model",
    "load_prompt_cache",
    "make_prompt_cache",
    "save_prompt_cache",
    "stream_generate",
]
