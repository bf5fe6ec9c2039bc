"""Describe what the device computes with."""

import re

import mlx.core as mx

WITH_BFLOAT16 = 15  # generation of Apple's GPUs, M3's, from which on they compute in bfloat16


def has_bfloat16() -> bool:
    """Return whether the default device computes in bfloat16: a CPU, Apple GPUs from M3's on, and unknown GPUs."""
    if mx.default_device() == mx.cpu:
        return True
    match = re.match(r"applegpu_g(\d+)", str(mx.device_info().get("architecture", "")))
    return match is None or int(match[1]) >= WITH_BFLOAT16
