"""Locate the demo, a tiny Step-3.5 that is used if no model is named, its block drafter, and heads for SmolLM2."""

from pathlib import Path

__all__ = ["NAMED", "SHIPPED_HEADS", "demo_block_path", "demo_path"]

HERE = Path(__file__).parent


def demo_path() -> Path:
    """Return the directory of the shipped checkpoint: config.json, model.safetensors, tokenizer and model card."""
    return HERE / "checkpoint"


def demo_block_path() -> Path:
    """Return the directory of the demo's shipped block drafter: config.json, model.safetensors and model card."""
    return HERE / "block"


NAMED = {"demo": demo_path(), "demo-block": demo_block_path()}  # by the names that `load` takes
SHIPPED_HEADS = (HERE / "smollm2" / "mtp.safetensors",)  # of `mlx-mtp tune-heads`; `load` finds them by their target
