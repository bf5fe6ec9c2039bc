"""Choose the cases of a default run, and further ones of a sweep (MLX_MTP_SWEEP=1)."""

import itertools
import os
from collections.abc import Iterable

import pytest

SWEEP = os.environ.get("MLX_MTP_SWEEP") == "1"
sweep = pytest.mark.skipif(not SWEEP, reason="long: MLX_MTP_SWEEP=1 runs it")


def sampled(sample: Iterable, cases: Iterable) -> list:
    """Return the hand-picked sample; in a sweep all cases."""
    return list(cases if SWEEP else sample)


def paired(first: Iterable, second: Iterable) -> list[tuple]:
    """Return pairs in which every value of both lists occurs; in a sweep the whole product."""
    first, second = list(first), list(second)
    if SWEEP:
        return list(itertools.product(first, second))
    return [(first[i % len(first)], second[i % len(second)]) for i in range(max(len(first), len(second)))]
