"""Kimi K2: DeepSeek-V3's architecture under a `model_type` of its own, released without an MTP layer."""

from .deepseek_v3 import Model, ModelArgs

__all__ = ["Model", "ModelArgs"]
