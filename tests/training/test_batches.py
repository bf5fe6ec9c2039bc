"""Batches hold each position of a recording once in an epoch, with the first position of its document."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.training.batches import alone, batches
from mlx_mtp.training.recording import Document, Recording

LENGTHS = 30, 7, 55, 16, 41


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Documents whose tokens are their positions in the recording; choices are 1,000 more, hidden rows too."""
    made = Recording(tmp_path_factory.mktemp("recording") / "one", {}, 2)
    for length in LENGTHS:
        tokens = np.arange(made.size, made.size + length)
        hidden = mx.array(tokens)[:, None] + mx.array([[0, 1]])
        made.append(tokens.tolist(), hidden, mx.array(tokens + 1000), 3, held=False)
    return made


def test_an_epoch_has_each_position_once(recording):
    rows, length, first = 2, 9, np.repeat(np.cumsum([0, *LENGTHS[:-1]]), LENGTHS)
    seen, keys = [], []
    for seed in (0, 1):
        found = [*batches(recording, recording.documents, rows, length, seed)]
        assert len(found) == (sum(LENGTHS) - 1) // length // rows
        for batch in found:
            tokens, starts = np.array(batch.tokens), np.array(batch.starts)
            assert tokens.shape == starts.shape == batch.counted.shape == (rows, length + 1)
            np.testing.assert_array_equal(batch.choices, tokens + 1000)
            np.testing.assert_array_equal(np.array(batch.hidden)[..., 1], tokens + 1)
            for row, begins in zip(tokens, starts, strict=True):
                for i, (token, begin) in enumerate(zip(row, begins, strict=True)):
                    assert first[row[begin]] == first[token]
                    assert begin in (0, i - (token - first[token]))
                    assert begin or i <= token - first[token]
        seen.append([token for batch in found for row in batch.tokens.tolist() for token in row[:-1]])
        assert len({*seen[-1]}) == len(seen[-1])
        keys += [tuple(key) for batch in found for key in batch.keys.tolist()]
    assert seen[0] != seen[1]
    assert len({*keys}) == len(keys)


def test_few_documents_are_repeated(recording):
    (batch,) = batches(recording, recording.documents[1:2], 1, 9, 0)
    assert {*batch.tokens.tolist()[0]} <= {*range(30, 37)}


def test_a_row_counts_from_the_token_before_the_answer_on(recording):
    batch = alone(recording, Document(30, 37, 34, held=True))
    assert batch.tokens.tolist() == [[*range(30, 37)]]
    assert batch.counted.tolist() == [[False] * 3 + [True] * 4]
