"""Threads take turns in the order in which they ask, and leave nothing behind when they end."""

import gc
import threading
import time

import mlx.core as mx

from mlx_mtp.machine import stream
from mlx_mtp.machine.stream import in_turn, in_turns


def in_thread(call, *args):
    """What a call returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call(*args)))
    thread.start()
    thread.join(60)
    assert found
    return found[0]


def test_what_is_not_computed_yet_is_computed_by_any_thread():
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


def test_who_comes_again_joins_the_line():
    order = []
    other = threading.Thread(target=in_turn()(lambda: order.append("other")))
    with in_turn():
        other.start()
        while stream._line.acquire(blocking=False):  # until it stands there
            stream._line.release()
            time.sleep(0.001)
    with in_turn():
        order.append("again")
    other.join(60)
    assert order == ["other", "again"]


def test_a_generator_goes_on_and_ends_in_any_thread():
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


def test_threads_that_end_are_cleaned_up_behind(monkeypatch):
    cleared = []
    monkeypatch.setattr(stream._Cleanup.__del__, "__defaults__", (lambda: cleared.append(threading.get_ident()),))
    here = in_thread(in_turn()(threading.get_ident))
    assert cleared == [here]
    with in_turn():  # the main thread keeps what it has compiled
        pass
    assert len(cleared) == 1
