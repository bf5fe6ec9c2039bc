"""Port Qwen3.5's text model, exported without the wrapper: a flat config.json, else `qwen3_5`."""

from .qwen3_5 import Model, ModelArgs

__all__ = ["Model", "ModelArgs"]
