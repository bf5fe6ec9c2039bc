"""Check that threads take turns in order of arrival and leave no compiled functions when they end."""

import gc
import threading
import time

import mlx.core as mx

from mlx_mtp.machine import stream
from mlx_mtp.machine.stream import in_turn, in_turns


def in_thread(call, *args):
    """Return the result of a call in a new thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call(*args)))
    thread.start()
    thread.join(60)
    assert found
    return found[0]


def test_any_thread_computes_a_lazy_array():
    before = mx.default_stream(mx.cpu)
    with in_turn():
        lazy = mx.arange(4) * 2
    assert mx.default_stream(mx.cpu) == before
    more = in_thread(in_turn()(lambda: lazy + 1))
    with in_turn(), in_turn():  # a turn within a turn
        assert more.tolist() == [1, 3, 5, 7]
    own = mx.arange(4) * 2
    assert "no Stream" in in_thread(error_of, own)


def error_of(array):
    try:
        mx.eval(array)
    except RuntimeError as e:
        return str(e)


def test_a_thread_queues_again_after_its_turn():
    order = []
    other = threading.Thread(target=in_turn()(lambda: order.append("other")))
    with in_turn():
        other.start()
        while stream._line.acquire(blocking=False):  # until the other thread is queued
            stream._line.release()
            time.sleep(0.001)
    with in_turn():
        order.append("again")
    other.join(60)
    assert order == ["other", "again"]


def test_a_generator_continues_and_ends_in_any_thread():
    turns, ended = [], []

    def steps():
        try:
            for i in range(5):
                turns.append(stream._thread.in_turn)
                yield mx.array([i]) + 1
        finally:
            ended.append(stream._thread.in_turn)

    made = in_turns(steps())
    assert [in_thread(next, made).item() for _ in range(3)] == [1, 2, 3]
    assert not getattr(stream._thread, "in_turn", False)
    box = [made]
    del made
    in_thread(lambda: (box.clear(), gc.collect()))
    assert (turns, ended) == ([True] * 3, [True])
    assert [x.item() for x in in_turns(steps())] == [1, 2, 3, 4, 5]
    assert len(ended) == 2


def test_ended_threads_are_cleaned_up(monkeypatch):
    cleared = []
    monkeypatch.setattr(stream._Cleanup.__del__, "__defaults__", (lambda: cleared.append(threading.get_ident()),))
    here = in_thread(in_turn()(threading.get_ident))
    assert cleared == [here]
    with in_turn():  # the main thread keeps its compiled functions
        pass
    assert len(cleared) == 1
