"""Load a checkpoint with its MTP heads, and generate: exact multi-token-prediction decoding on MLX."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import grammar
    from .batch.generator import BatchGenerator
    from .cache.file import save_prompt_cache
    from .cache.make_cache import make_prompt_cache
    from .cache.prompt_cache import PromptCache
    from .checkpoint.convert import convert
    from .checkpoint.load import load, load_model
    from .checkpoint.report import Report
    from .decoding.memory_needs import Budget
    from .decoding.prompt_file import load_prompt_cache
    from .decoding.row_check import check_rows
    from .decoding.stats import Stats
    from .generate import GenerationResponse, batch_generate, generate, generate_step, stream_generate
    from .training.tune import tune_heads

__all__ = [
    "BatchGenerator",
    "Budget",
    "GenerationResponse",
    "PromptCache",
    "Report",
    "Stats",
    "__version__",
    "batch_generate",
    "check_rows",
    "convert",
    "generate",
    "generate_step",
    "grammar",
    "load",
    "load_model",
    "load_prompt_cache",
    "make_prompt_cache",
    "save_prompt_cache",
    "stream_generate",
    "tune_heads",
]

# MLX and transformers take a second to import, which `mlx-mtp --help` need not wait for.
_HOMES = {
    **dict.fromkeys(
        ("GenerationResponse", "batch_generate", "generate", "generate_step", "stream_generate"), "generate"
    ),
    **dict.fromkeys(("load", "load_model"), "checkpoint.load"),
    "PromptCache": "cache.prompt_cache",
    "make_prompt_cache": "cache.make_cache",
    "BatchGenerator": "batch.generator",
    "Budget": "decoding.memory_needs",
    "load_prompt_cache": "decoding.prompt_file",
    "save_prompt_cache": "cache.file",
    "check_rows": "decoding.row_check",
    "convert": "checkpoint.convert",
    "Report": "checkpoint.report",
    "Stats": "decoding.stats",
    "tune_heads": "training.tune",
}


def __getattr__(name: str) -> Any:
    if name == "grammar":
        return import_module(".grammar", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `generate` the function, whenever the submodule of that name is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
