"""Acceptance is the longest prefix of drafts that equal the target's tokens: every case of two tokens is tried."""

import itertools

import mlx.core as mx
import pytest

from mlx_mtp.decoding.accept import accept


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_case_alone_and_side_by_side(k):
    cases = list(itertools.product(itertools.product((0, 1), repeat=k), itertools.product((0, 1), repeat=k + 1)))
    expected = [next((i for i in range(k) if drafts[i] != tokens[i]), k) for drafts, tokens in cases]
    drafts, tokens = (mx.array(list(rows)) for rows in zip(*cases, strict=True))
    assert accept(drafts, tokens).tolist() == expected
    for row in range(len(cases)):
        assert accept(drafts[row], tokens[row]).item() == expected[row]
        assert accept(drafts[row : row + 1], tokens[row : row + 1]).tolist() == [expected[row]]
