"""Recording reads documents at the same time, and stores what reading one after the other gives."""

import os
import threading
from contextlib import nullcontext
from itertools import cycle

import families
import mlx.core as mx
import numpy as np
import pytest

import mlx_mtp
from mlx_mtp.training import reading
from mlx_mtp.training.reading import read, record
from mlx_mtp.training.recording import Recording
from mlx_mtp.training.streams import STREAMS, WIDTH, interleave_streams, streams
from mlx_mtp.training.texts import Text

LENGTHS = 20, 17, 33, 16, 40


@pytest.fixture(params=["deepseek_v3", "qwen3_next"])
def model(request, tmp_path):
    return mlx_mtp.load_model(families.build(request.param, tmp_path)[0], kernels="off")


def documents():
    rng = np.random.default_rng(0)
    texts = [Text(rng.integers(0, 13, length).tolist(), length // 2) for length in LENGTHS]
    return list(zip(texts, cycle([True, False]), strict=False))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_documents_are_recorded_as_one_by_one(model, count, tmp_path, monkeypatch):
    """For each limit they are the same ones, and the next call begins with the document after them."""
    monkeypatch.setattr(reading, "streams", lambda most=3: [nullcontext()] * min(count, most))
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


def test_each_thread_has_its_own_streams(model, tmp_path):
    """MLX refuses another thread's; two calls of one thread use the same ones."""
    assert len(streams()) == STREAMS
    assert len(streams(1)) == 1
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


@pytest.mark.parametrize(
    ("device", "before", "after"), [(mx.cpu, None, "1000"), (mx.cpu, "20", "20"), (mx.gpu, None, None)]
)
def test_a_cpus_streams_are_interleaved_unless_the_user_decides(device, before, after, monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: device)
    monkeypatch.setenv(WIDTH, before or "")  # restored at the end
    if before is None:
        monkeypatch.delenv(WIDTH)
    interleave_streams()
    assert os.environ.get(WIDTH) == after
