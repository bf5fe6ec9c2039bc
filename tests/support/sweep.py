"""Choose what every run tests, and what only a sweep does: MLX_MTP_SWEEP=1."""

import itertools
import os
from collections.abc import Iterable

import pytest

SWEEP = os.environ.get("MLX_MTP_SWEEP") == "1"
sweep = pytest.mark.skipif(not SWEEP, reason="long: MLX_MTP_SWEEP=1 runs it")


def sampled(few: Iterable, every: Iterable) -> list:
    """The few that stand for all, chosen by hand; in a sweep all of them."""
    return list(every if SWEEP else few)


def paired(these: Iterable, those: Iterable) -> list[tuple]:
    """Each of these with one of those, in turn, and the other way round; in a sweep each with each."""
    these, those = list(these), list(those)
    if SWEEP:
        return list(itertools.product(these, those))
    return [(these[i % len(these)], those[i % len(those)]) for i in range(max(len(these), len(those)))]
