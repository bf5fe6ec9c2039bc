"""Test the demo's heads at the first of its loads in a process, and remember: they are half of a load's time."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mtp.checkpoint import head_self_test
from mlx_mtp.demo import demo_path

SHARES: dict[tuple, tuple[tuple[str, float], ...]] = {}


def self_test(model, path: Path, texts: dict[str, list[int]]) -> None:
    """What came of the same weights, wired alike, on the same texts; of other checkpoints nothing is remembered."""
    if path != demo_path() or not model.mtp:
        head_self_test.self_test(model, path, texts)
        return
    sums = mx.stack([mx.sum(w.astype(mx.float32)) for _, w in tree_flatten(model.parameters())]).tolist()
    key = (*sums, repr(model.spec), repr(texts))
    if key not in SHARES:
        head_self_test.self_test(model, path, texts)
        SHARES[key] = model.report.agreement
    model.report = replace(model.report, agreement=SHARES[key])
