"""Compare `TokenHistory.matched` with a plain search."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.decoding.history import LONGEST, TokenHistory
from mlx_mtp.tuning.plan import SHORTEST

TOKENS = st.lists(st.sampled_from([0, 1, 2, 2**18 - 1]), max_size=40)


def longest(text: list[int]) -> int:
    """Return the length of the longest suffix, up to LONGEST, that occurs earlier."""
    found = [
        n for n in range(SHORTEST, LONGEST + 1) if any(text[i : i + n] == text[-n:] for i in range(len(text) - n))
    ]
    return max(found, default=0)


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.lists(TOKENS.filter(len), max_size=6))
def test_matches_are_those_of_a_plain_search(prompt, runs):
    text, known = TokenHistory(prompt), list(prompt)
    assert text.matched() == longest(known)
    for run in runs:
        text.extend(run)
        known += run
        assert text.tokens.tolist() == known
        assert text.matched() == longest(known)


@pytest.mark.timing
def test_a_long_sequence_is_searched_quickly():
    """100,000 tokens of a large vocabulary; a cycle of a small model takes 5 ms."""
    text = TokenHistory(np.random.default_rng(0).integers(0, 150_000, 100_000).tolist())
    text.extend([1, 2, 3])
    times = []
    for _ in range(9):
        tic = time.perf_counter()
        assert text.matched() == 0
        times.append(time.perf_counter() - tic)
    assert min(times) < 0.002
