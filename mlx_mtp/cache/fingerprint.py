"""Digest what decides keys, values and states, so that a saved cache is known to be this model's."""

import hashlib
import json
import re
from dataclasses import asdict, is_dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

SAMPLED = 256  # values of each tensor: another finetune changes some of nearly every one


def fingerprint(model: Any, *, heads: bool) -> str:
    """Digest a model's configuration and of its parameters' names, shapes, types and a sample of their values.

    heads: of its draft heads, without their LM heads, on which no state depends; else of the target.
    """
    arrays: Any = tree_flatten(model.parameters())
    other = re.compile(r"mtp\.\d+\.(head\.|d2t$)|(?!mtp\.)" if heads else r"mtp\.")
    own = sorted((name, array) for name, array in arrays if not other.match(name))
    facts: list[Any] = [f"{name} {array.shape} {array.dtype}" for name, array in own]
    if heads:
        facts.append(str(getattr(model, "spec", None)))
    elif is_dataclass(args := getattr(model, "args", None)):
        facts.append(asdict(args))  # type: ignore[arg-type] - no class, but one of its values
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    if own:
        digest.update(np.array(mx.concatenate([_sample(array) for _, array in own])).tobytes())
    return digest.hexdigest()


def _sample(array: mx.array) -> mx.array:
    """Take the bytes [n] of up to SAMPLED values, spread evenly over an array."""
    flat = array.reshape(-1)
    return mx.view(mx.contiguous(flat[:: -(-flat.size // SAMPLED) or 1]), mx.uint8)
