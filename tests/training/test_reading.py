"""A recording stores what reading each document gives."""

import threading
from itertools import cycle

import families
import mlx.core as mx
import numpy as np
import pytest

import mlx_mtp
from mlx_mtp.training.reading import read, record
from mlx_mtp.training.recording import Recording
from mlx_mtp.training.texts import Text

LENGTHS = 20, 17, 33, 16, 40


@pytest.fixture(params=["deepseek_v3", "qwen3_next"])
def model(request, tmp_path):
    return mlx_mtp.load_model(families.build(request.param, tmp_path)[0], kernels="off")


def documents():
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, 13, length).tolist(), length // 2) for length in LENGTHS]
    return list(zip(texts, cycle([True, False]), strict=False))


def test_documents_are_recorded_as_they_are_read(model, tmp_path):
    """For each limit they are the same ones, and the next call begins with the document after them."""
    given = documents()
    expected = [read(model, text.tokens) for text, _ in given]
    for limit in (1, 20, 21, 37, 38, 86, 126, 1000):
        whole = next((i + 1 for i in range(len(LENGTHS)) if sum(LENGTHS[: i + 1]) >= limit), len(LENGTHS))
        recording, rest = Recording(tmp_path / str(limit), {}, model.no_hidden().shape[-1]), iter(given)
        record(model, rest, recording, limit)
        assert [d.end - d.first for d in recording.documents] == list(LENGTHS[:whole])
        assert next(rest, None) == (given[whole] if whole < len(given) else None)
        rows, tokens = recording.arrays()
        for document, (text, held), (hidden, choices) in zip(recording.documents, given, expected, strict=False):
            here = slice(document.first, document.end)
            assert (document.answer - document.first, document.held) == (text.answer, held)
            assert np.array_equal(rows[here], np.array(hidden.astype(mx.float16)))
            assert np.array_equal(tokens[here], np.stack([text.tokens, np.array(choices)], axis=1))


def test_another_thread_records_the_same(model, tmp_path):
    found = []

    def other():
        for _ in range(2):
            recording = Recording(tmp_path / "there", {}, model.no_hidden().shape[-1])
            record(model, iter(documents()[len(recording.documents) :]), recording, recording.size + 1)
        found.append(recording)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    here = Recording(tmp_path / "here", {}, model.no_hidden().shape[-1])
    record(model, iter(documents()), here, sum(LENGTHS[:2]))
    assert np.array_equal(found[0].arrays()[0], here.arrays()[0])
