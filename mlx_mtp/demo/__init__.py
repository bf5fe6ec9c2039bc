"""Locate the demo checkpoint, a tiny Step-3.5 with three MTP depths, used if no model is named."""

from pathlib import Path

__all__ = ["demo_path"]


def demo_path() -> Path:
    """Return the directory of the shipped checkpoint: config.json, model.safetensors, tokenizer and model card."""
    return Path(__file__).parent / "checkpoint"
