"""Serve with a directory of prefix files: written while the engine is idle, used after any restart with any flags."""

import threading
import time
import types

import pytest
from served import start
from starlette.testclient import TestClient
from sweep import sampled

from mlx_mtp.serve import engine as engines
from mlx_mtp.serve.engine import Engine
from mlx_mtp.serve.job import DecodeRequest, Job
from mlx_mtp.serve.prefix_files import PrefixFiles
from mlx_mtp.serve.server import Loaded

FEW = [{}, {"kv_bits": 8}]
EVERY = [
    *FEW,
    {"max_kv_size": 64},
    {"mtp_kv_bits": 8},
    {"kv_bits": 8, "quantized_kv_start": 5000},
    {"max_kv_size": 65},
]
FLAGS = sampled(FEW, EVERY)
SYSTEM = "You answer in one word, whatever the question is, and never explain a word of it to your reader. "


@pytest.fixture(scope="module")
def loaded(load_one_layer):
    return load_one_layer()


def session(loaded, flags, directory, *questions, until=lambda: True):
    """Return the texts and the cached tokens of questions after one system prompt, from a new server."""
    layout = {"kv_group_size": 32, **flags}
    files = directory and PrefixFiles(directory, 1 << 28)
    service, app = start(lambda: Loaded(*loaded, {}, layout), cache_files=files)
    found = []
    while service.engine.state == "loading":
        time.sleep(0.01)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        for question in questions:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            response = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3})
            assert response.status_code == 200, response.text
            body = response.json()
            cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            found.append((body["choices"][0]["message"]["content"], cached))
        end = time.monotonic() + 60
        while not until() and time.monotonic() < end:
            time.sleep(0.01)
        assert until()
    service.engine.store = lambda served: None  # as if the process were killed here
    service.engine.stop(0)
    service.engine.thread.join()
    return found


def test_servers_with_different_flags_share_a_directory(loaded, tmp_path):
    """The first start with new flags finds no file of its own; the next one reuses it for another question."""
    for flags in FLAGS:
        fresh = session(loaded, flags, None, "What is a list?", "And a tuple?")
        assert fresh[0][1] == 0
        count = len(list(tmp_path.iterdir()))

        def stored(least=count + 1):
            return len([*tmp_path.glob("*.safetensors")]) >= least and not [*tmp_path.glob("*.partial")]

        first = session(loaded, flags, tmp_path, "What is a list?", until=stored)
        assert first == fresh[:1], flags
        (text, cached), again = session(loaded, flags, tmp_path, "And a tuple?", "What is a list?")
        assert text == fresh[1][0]
        assert cached >= 32  # the chunks of the system prompt
        assert again[0] == fresh[0][0]


class Storing:
    """Stands in for prefix files: counts its steps, whose number is given."""

    def __init__(self, steps):
        self.left, self.taken, self.error = steps, 0, None

    def load(self, tree, tokens):
        pass

    def step(self, tree):
        self.taken += 1
        if self.error:
            raise self.error
        self.left -= 1
        return self.left > 0


@pytest.fixture
def engine(monkeypatch):
    made = []

    def make(files, answer):
        monkeypatch.setattr(engines, "answer", answer)
        monkeypatch.setattr(engines, "prefill_next", lambda *_: iter(()))
        tree = types.SimpleNamespace(decoded=False)
        served = types.SimpleNamespace(ranks=None, batch=None, files=files, tree=tree)
        made.append(Engine(load=lambda: served))
        made[-1].thread.start()
        return made[-1]

    yield make
    for each in made:
        each.stop(0)
        each.thread.join(5)
        assert not each.thread.is_alive()


def asked(engine, prompt):
    finished = threading.Event()
    engine.submit([Job(DecodeRequest(prompt), lambda event: finished.set())])
    return finished


def reached(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def one_token(served, job, crowded):
    yield
    job.emit("end")


def test_requests_run_between_written_pieces(engine):
    files = Storing(10**9)
    one = engine(files, one_token)
    assert asked(one, [1]).wait(5)
    assert reached(lambda: files.taken > 3)
    for _ in range(3):
        assert asked(one, [1]).wait(5)
    before = files.taken
    assert reached(lambda: files.taken > before)


def test_everything_is_written_once_and_again_after_the_next_response(engine):
    files = Storing(3)
    one = engine(files, one_token)
    assert asked(one, [1]).wait(5)
    assert reached(lambda: files.taken == 3)
    time.sleep(0.1)
    assert files.taken == 3
    files.left = 2
    assert asked(one, [1]).wait(5)
    assert reached(lambda: files.taken == 5)


def test_a_failed_write_ends_no_request(engine):
    files = Storing(3)
    files.error = RuntimeError("broken")
    one = engine(files, one_token)
    for n in (1, 2, 3):
        assert asked(one, [1]).wait(5)
        assert reached(lambda n=n: files.taken == n)
    assert one.thread.is_alive()


def test_nothing_is_written_while_a_request_is_active(engine):
    files, hold = Storing(10**9), threading.Event()

    def slow(served, job, crowded):
        while job.request.prompt == [2] and not hold.is_set():
            yield
        job.emit("end")
        yield

    one = engine(files, slow)
    second = asked(one, [2])
    assert reached(lambda: one.running)
    assert asked(one, [1]).wait(5)
    time.sleep(0.1)
    assert files.taken == 0
    hold.set()
    assert second.wait(5)
    assert reached(lambda: files.taken > 0)
