"""Find the demo, a tiny Step-3.5 with three MTP depths, which runs when no model is named."""

from pathlib import Path

__all__ = ["demo_path"]


def demo_path() -> Path:
    """Return the directory of the shipped checkpoint (config.json, model.safetensors, tokenizer, model card)."""
    return Path(__file__).parent / "checkpoint"
