"""Port Qwen3.5's text model with experts, exported without the wrapper: a flat config.json, else `qwen3_5_moe`."""

from .qwen3_5_moe import Model, ModelArgs

__all__ = ["Model", "ModelArgs"]
