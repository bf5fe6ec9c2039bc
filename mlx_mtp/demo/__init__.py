"""Locate the demos: a tiny Step-3.5, its block drafter, and one that reads pictures; and trained heads of SmolLM2."""

from pathlib import Path

__all__ = ["NAMED", "SHIPPED_HEADS", "demo_block_path", "demo_path", "demo_vision_path"]

HERE = Path(__file__).parent


def demo_path() -> Path:
    """Return the directory of the shipped checkpoint: config.json, model.safetensors, tokenizer and model card."""
    return HERE / "checkpoint"


def demo_block_path() -> Path:
    """Return the directory of the demo's shipped block drafter: config.json, model.safetensors and model card."""
    return HERE / "block"


def demo_vision_path() -> Path:
    """Return the directory of the demo that reads pictures, a tiny Qwen3.5-VL, with example.png and a model card."""
    return HERE / "vision"


# By the names that `load` takes.
NAMED = {"demo": demo_path(), "demo-block": demo_block_path(), "demo-vision": demo_vision_path()}
SHIPPED_HEADS = (HERE / "smollm2" / "mtp.safetensors",)  # of `mlx-mtp tune-heads`; `load` finds them by their target
