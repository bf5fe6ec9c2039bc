"""The engine advances active jobs in turn; disconnected clients free it; an exception ends one job only."""

import logging
import threading
import time
import types

import pytest

from mlx_mtp.serve import engine as engines
from mlx_mtp.serve.endings import FinishedJobs
from mlx_mtp.serve.engine import Engine, JobLimits, QueueFull
from mlx_mtp.serve.job import DecodeRequest, End, Job, RequestFailed

SERVED = types.SimpleNamespace(ranks=None, batch=None, files=None, tree=types.SimpleNamespace(decoded=False))


class Steps:
    """Stands in for `answer`: a job has one step per prompt token; token -1 raises."""

    def __init__(self, monkeypatch):
        self.order, self.closed, self.hold = [], [], threading.Event()
        self.hold.set()
        monkeypatch.setattr("mlx_mtp.serve.engine.answer", self.answer)

    def answer(self, served, job, crowded):
        try:
            for token in job.request.prompt:
                self.hold.wait()
                if token < 0:
                    raise {-1: RuntimeError("broken"), -2: ValueError("wrong")}[token]
                self.order.append(job.request.prompt[0])
                yield
            job.send("end")
        finally:
            self.closed.append(job.request.prompt[0])


@pytest.fixture
def steps(monkeypatch):
    return Steps(monkeypatch)


@pytest.fixture
def engine(steps):
    made = []

    def make(load=lambda: SERVED, store=lambda served: None, **limits):
        made.append(Engine(load=load, limits=JobLimits(**limits), store=store))  # type: ignore[arg-type]
        made[-1].thread.start()
        return made[-1]

    yield make
    for each in made:
        steps.hold.set()
        each.stop(0)
        each.thread.join(5)
        assert not each.thread.is_alive()


class Client(list):
    """Collects a job's events."""

    def __init__(self, prompt, **more):
        super().__init__()
        self.finished = threading.Event()
        self.job = Job(DecodeRequest(prompt, follows=more.pop("follows", None)), self.take, **more)

    def take(self, event):
        self.append(event)
        if event == "end" or isinstance(event, (End, RequestFailed)):
            self.finished.set()


def submit(engine, *prompts, **more):
    clients = [Client(prompt, **more) for prompt in prompts]
    for client in clients:
        engine.submit([client.job])
    return clients


def wait(clients):
    assert all(client.finished.wait(5) for client in clients)


def test_steps_are_taken_in_turn(engine, steps):
    steps.hold.clear()
    clients = submit(engine(), [1] * 4, [2] * 4, [3] * 2)
    time.sleep(0.05)
    steps.hold.set()
    wait(clients)
    turn = steps.order[1:]  # the first step precedes the other requests
    assert turn[:6] == [1, 2, 3] * 2 or turn[:6] == [2, 3, 1] * 2


def test_an_exception_ends_one_job_only(engine, steps):
    one = engine()
    clients = submit(one, [1, 1, -1], [2, 2, -2], [3, 3, 3])
    wait(clients)
    assert [type(c[0]) for c in clients[:2]] == [RequestFailed, RequestFailed]
    assert [c[0].status for c in clients[:2]] == [500, 400]
    assert clients[2] == ["end"]
    wait(submit(one, [4]))


def test_a_disconnected_client_frees_the_engine(engine, steps):
    one = engine(active=1)
    first, second = submit(one, [1] * 10**7, [2])
    while not steps.order:
        time.sleep(0.001)
    first.job.cancelled = True
    wait([second])
    assert steps.closed == [1, 2]
    assert not first


@pytest.mark.parametrize("cancelled", [True, False])
def test_nothing_is_computed_for_a_client_that_has_left(engine, steps, monkeypatch, cancelled):
    """The rows of its answer are stored; the conversation of a client that still waits is prefilled."""
    done, cache = [], types.SimpleNamespace(tokens=[1, 2])
    monkeypatch.setattr(engines, "closed", lambda steps: cache)
    monkeypatch.setattr("mlx_mtp.serve.endings.keep", lambda *_: done.append("kept"))
    monkeypatch.setattr(FinishedJobs, "add", lambda self, served, job, cache: done.append(job.request.prompt[0]))
    (first,) = submit(one := engine(), [1] * 10**7)
    while not steps.order:
        time.sleep(0.001)
    first.job.prefilling = False
    setattr(first.job, *(("cancelled", True) if cancelled else ("deadline", 0.0)))
    wait(submit(one, [2]))
    assert done[:1] == ["kept" if cancelled else 1]


def test_a_full_queue_and_an_ending_engine_refuse_requests(engine, steps):
    steps.hold.clear()
    one = engine(active=1, queued=2)
    clients = submit(one, [1])
    while one.queued:
        time.sleep(0.001)
    clients += submit(one, [2], [3])
    with pytest.raises(QueueFull):
        submit(one, [4])
    one.stop(0)
    steps.hold.set()
    one.thread.join(5)
    assert [type(c[-1]) for c in clients[1:]] == [RequestFailed, RequestFailed]
    with pytest.raises(QueueFull):
        submit(one, [5])


def test_an_ending_engine_finishes_active_jobs_within_grace(engine, steps):
    steps.hold.clear()
    one = engine()
    clients = submit(one, [1] * 20)
    time.sleep(0.02)
    one.stop(30)
    steps.hold.set()
    wait(clients)
    assert clients[0] == ["end"]


def test_time_limits(engine, steps):
    (client,) = submit(engine(), [1] * 10, deadline=time.monotonic() - 1)
    wait([client])
    assert client[0].status == 504


@pytest.mark.parametrize("breaks", [False, True])
def test_the_last_prompt_is_prefilled_to_its_end_in_quiet_time(engine, steps, monkeypatch, breaks):
    """A failure sends no event to any client."""
    read, served = [], types.SimpleNamespace(**{**vars(SERVED), "tree": types.SimpleNamespace(decoded=True)})

    def prefill_tail(served, prompt):
        read.append(prompt)
        yield 1 // (not breaks)

    monkeypatch.setattr(engines, "prefill_next", lambda *_: iter(()))
    monkeypatch.setattr(engines, "prefill_tail", prefill_tail)
    one = engine(lambda: served)
    wait(submit(one, [1], [2, 2]))
    until = time.monotonic() + 60
    while not read and time.monotonic() < until:
        time.sleep(0.01)
    wait(submit(one, [3]))
    assert read[0] == [2, 2]


def test_an_idle_model_is_unloaded_and_loaded_again(engine, steps):
    one = engine(idle_unload=0.01)
    wait(submit(one, [1]))
    until = time.monotonic() + 60
    while one.state != "unloaded" and time.monotonic() < until:
        time.sleep(0.01)
    assert one.served is None
    wait(submit(one, [2]))
    assert steps.order == [1, 2]


def test_an_unloaded_model_waits_for_a_request_without_turns(engine, steps, monkeypatch):
    """Also after `keep_alive` 0, whose wait would end at once."""
    one, turns = engine(), []
    wait(submit(one, [1]))
    monkeypatch.setattr(one, "_turn", lambda: turns.append(1) or Engine._turn(one))
    one.idle_unload = 0
    one.signal.set()
    until = time.monotonic() + 60
    while one.state != "unloaded" and time.monotonic() < until:
        time.sleep(0.001)
    del turns[:]
    time.sleep(0.05)
    assert len(turns) < 5
    wait(submit(one, [2]))


def refuse(*_):
    raise ValueError("the chat template refuses this conversation\nbecause")


def test_failed_background_work_is_dropped_with_one_log_line(engine, steps, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("mlx_mtp.serve"), "propagate", True)
    one = engine(store=refuse, idle_unload=0.01)
    wait(submit(one, [1], follows=refuse))
    until = time.monotonic() + 60
    while one.state != "unloaded" and time.monotonic() < until:
        time.sleep(0.01)
    wait(submit(one, [2]))
    reason = "not {}: ValueError: the chat template refuses this conversation"
    prefilled, stored = reason.format("prefilled"), reason.format("stored")
    assert caplog.messages[:2] == [f"the next prompt was {prefilled}", f"prefixes were {stored}"]


def test_a_client_whose_events_fail_is_cancelled(engine, steps):
    """Its response is visibly incomplete; the other responses are complete."""
    one = engine()
    gone, other = Client([1, 1, 1]), Client([2, 2, 2])
    gone.job.emit = lambda event: gone.append(event) or (len(gone) == 1 and 1 // 0)
    for client in (gone, other):
        one.submit([client.job])
    wait([other])
    while not gone.job.finished:
        time.sleep(0.001)
    assert other == ["end"]
    assert [type(event) for event in gone] == [str, RequestFailed]


def test_a_failed_reload_fails_the_queued_requests(engine, steps):
    calls = []

    def load():
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no memory")
        return SERVED

    one = engine(load, idle_unload=0.01)
    for status in (503, None):
        until = time.monotonic() + 60
        while one.state != "unloaded" and time.monotonic() < until:
            time.sleep(0.01)
        (client,) = submit(one, [1])
        wait([client])
        assert [event.status for event in client if isinstance(event, RequestFailed)] == ([status] if status else [])
    assert one.error is None
