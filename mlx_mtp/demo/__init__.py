"""A tiny Step-3.5 with three MTP depths: the model that runs when none is named."""

from pathlib import Path

__all__ = ["demo_path"]


def demo_path() -> Path:
    """Directory of the shipped checkpoint (config.json, model.safetensors, tokenizer, model card)."""
    return Path(__file__).parent / "checkpoint"
