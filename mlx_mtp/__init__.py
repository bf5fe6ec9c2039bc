"""Exact multi-token-prediction decoding on MLX: load a checkpoint with its heads, and generate."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .generate import GenerationResponse, generate, generate_step, stream_generate
    from .load import load, load_model
    from .memory import Budget
    from .prompt_cache import PromptCache, make_prompt_cache
    from .report import Report
    from .saved_cache import load_prompt_cache, save_prompt_cache
    from .stats import Stats

__version__ = "0.1.0"

__all__ = [
    "Budget",
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

# MLX and transformers take a second to import, which `mlx-mtp --help` need not wait for.
_HOMES = {
    **dict.fromkeys(("GenerationResponse", "generate", "generate_step", "stream_generate"), "generate"),
    **dict.fromkeys(("load", "load_model"), "load"),
    **dict.fromkeys(("PromptCache", "make_prompt_cache"), "prompt_cache"),
    **dict.fromkeys(("load_prompt_cache", "save_prompt_cache"), "saved_cache"),
    "Budget": "memory",
    "Report": "report",
    "Stats": "stats",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `generate` and `load` the functions, whenever the submodules of these names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
