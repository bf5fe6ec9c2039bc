"""Compare `TokenHistory.matched`, and the drafts of a lookup, with a plain search."""

import time
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.decoding.drafters.lookup import TRIED, Copied
from mlx_mtp.decoding.history import LONGEST, TokenHistory
from mlx_mtp.decoding.policy import lookup_drafts
from mlx_mtp.layers.kernel_site import TOGETHER_ROWS
from mlx_mtp.tuning.plan import SHORTEST

TOKENS = st.lists(st.sampled_from([0, 1, 2, 2**18 - 1]), max_size=40)


def longest(text: list[int]) -> int:
    """Return the length of the longest suffix, up to LONGEST, that occurs earlier."""
    found = [
        n for n in range(SHORTEST, LONGEST + 1) if any(text[i : i + n] == text[-n:] for i in range(len(text) - n))
    ]
    return max(found, default=0)


@settings(max_examples=150, deadline=None)
@given(TOKENS, st.lists(TOKENS.filter(len), max_size=6))
def test_matches_are_those_of_a_plain_search(prompt, runs):
    text, known = TokenHistory(prompt), list(prompt)
    assert text.matched() == longest(known)
    for run in runs:
        text.extend(run)
        known += run
        assert text.tokens.tolist() == known
        assert text.matched() == longest(known)


def copies(text: list[int]) -> list[int]:
    """Indices of the tokens that followed earlier copies of the last SHORTEST; the longest first, then the newest."""
    found = []
    for start in range(SHORTEST, len(text)):
        n = 0
        while n < min(LONGEST, start) and text[start - 1 - n] == text[-1 - n]:
            n += 1
        if n >= SHORTEST:
            found.append((-n, -start))
    return [-start for _, start in sorted(found)]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_drafts_follow_the_first_copy_that_the_unread_tokens_continue(data):
    """All of them. Tokens behind the last accepted one do not count; a copy that reaches the end repeats itself."""
    run = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=SHORTEST, max_size=12))
    known = [*data.draw(TOKENS), *run, *data.draw(TOKENS), *run]
    starts = copies(known)[:TRIED]
    follow = data.draw(st.sampled_from(starts))
    rows = [*(known[follow:] * 6)[: data.draw(st.integers(0, 6))], data.draw(st.sampled_from([0, 1, 2]))]
    if data.draw(st.booleans()):  # rows that differ anywhere and then agree again
        rows[data.draw(st.integers(0, len(rows) - 1))] = data.draw(st.sampled_from([0, 1, 2]))
    last, k = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(1, 15))
    text = TokenHistory(known)
    found = text.matches(len(known))[:TRIED]
    assert [start for _, start in found] == starts
    whole = known + rows[: last + 1]
    best = next((s for s in starts if all(whole[s + j] == rows[j] for j in range(last + 1))), starts[0])
    expected = list(whole)
    for _ in range(k):
        expected.append(expected[best - len(known)])
    drafts = Copied.of(text, len(known), found, mx.array(rows), mx.array([last]), k).chain()
    assert drafts.tolist() == expected[len(whole) :]


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


@pytest.mark.parametrize("device", [mx.cpu, mx.gpu])
def test_a_copy_has_as_many_rows_as_kernels_keep_the_bits_of(monkeypatch, device):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    cache = SimpleNamespace(is_mlx_lm=False)
    for asked in (True, None):
        assert lookup_drafts(cache, 2, plain=False, adaptive=True, asked=asked) == TOGETHER_ROWS[-1] - 1 == 15
