"""Latent attention stays absorbed for the rows of a verify: what a row costs, counted in the graph and timed."""

import importlib
import math
import time
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_causal_mask

from mlx_mtp.cache import LinearKVCache
from mlx_mtp.layers.mla import ABSORBED_ROWS
from tests.families import FAMILIES

LENGTH = 4096
ROWS = range(1, ABSORBED_ROWS + 1)
MLA = [name for name in ("deepseek_v3", "glm4_moe_lite") if name in FAMILIES]
VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Split", "Squeeze", "Transpose", "Unflatten"}
