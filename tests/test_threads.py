"""Load in one thread, generate in others, continue in a third: the text is that of one thread."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from sweep import sweep

import mlx_mtp
from mlx_mtp.checkpoint import parameters
from mlx_mtp.decoding import replay
from mlx_mtp.demo import demo_path
from mlx_mtp.machine.progress import watcher
from mlx_mtp.machine.stream import in_turn

pytestmark = pytest.mark.usefixtures("own_cache")
PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2]


def tokens(model, k=2, n=12, **options):
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=n, num_draft_tokens=k, **options)
    return [token for token, *_ in steps]


def by_threads(steps, count=3):
    """Return the remaining items of a generator that several threads advance in turn."""
    found, end = [], object()
    pools = [ThreadPoolExecutor(1) for _ in range(count)]
    while (item := pools[len(found) % count].submit(next, steps, end).result(60)) is not end:
        found.append(item)
    for pool in pools:
        pool.shutdown()
    return found


def test_several_threads_at_once(tiny_models):
    model, _ = tiny_models(0)
    expected = tokens(model, 0), tokens(model, 0, temp=1.0, seed=3)
    with ThreadPoolExecutor(3) as pool:
        texts = [pool.submit(tokens, model, k) for k in (0, 2, 3)]
        drawn = [pool.submit(tokens, model, k, temp=1.0, seed=3) for k in (0, 3)]
        assert [text.result(60) for text in texts] == [expected[0]] * 3
        assert [text.result(60) for text in drawn] == [expected[1]] * 2


def test_other_threads_have_turns_during_a_load(monkeypatch):
    """The load passes its turn, and reports its progress, after each piece of weights."""
    monkeypatch.setattr(parameters, "PIECE", 1 << 19)
    seen, during, ended = [], set(), threading.Event()

    def other():
        while not ended.is_set():
            with in_turn():
                during.add(len(seen))
            time.sleep(0.001)

    thread = threading.Thread(target=other)
    thread.start()
    token = watcher.set(lambda *step: seen.append(step))
    try:
        mlx_mtp.load(demo_path(), kernels="off")
    finally:
        watcher.reset(token)
        ended.set()
        thread.join()
    assert len(seen) > 10
    assert all(stage.startswith("Reading weights") and done <= total for stage, done, total in seen)
    assert seen[-1][1] == seen[-1][2] > 0
    assert len(during - {0, len(seen)}) > 3


@pytest.mark.parametrize("replayed", [False, True])
def test_each_token_by_another_thread(tiny_models, replayed, recorded_at_once):
    """Build ahead in one thread and submit in the next; recordings of threads are separate."""
    model, _ = tiny_models(0)
    stats, cache = mlx_mtp.Stats(), mlx_mtp.make_prompt_cache(model)
    options = {"compile_cycles": replayed, "adaptive": False, "logprobs": True, "stats": stats}
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=12, num_draft_tokens=1, prompt_cache=cache, **options)
    found = by_threads(steps)
    assert [token for token, *_ in found] == tokens(model, 0)
    assert all(mx.argmax(logprobs).item() == token for token, logprobs, _ in found)
    assert (stats.compiled_cycles > 3) == replayed
    more = mlx_mtp.generate_step([found[-1][0]], model, max_tokens=8, prompt_cache=cache)
    assert [token for token, *_ in found + list(more)] == tokens(model, 0, n=20)


def test_few_threads_keep_records(tiny_models, monkeypatch, recorded_at_once):
    monkeypatch.setattr(replay, "THREADS", 1)
    model, _ = tiny_models(0)
    model.runtime.recorder = replay.Recorder()
    for _ in range(3):
        thread = threading.Thread(target=tokens, args=(model,), kwargs={"compile_cycles": True, "adaptive": False})
        thread.start()
        thread.join(60)
    assert 0 < len(model.runtime.recorder.cycles) <= replay.KEPT


def test_loaded_and_closed_elsewhere(tmp_path):
    import tiny

    config = {**tiny.CONFIG, **tiny.SHORTER}
    path = tiny.save(tmp_path, config, tiny.random_weights(config, seed=0))
    with ThreadPoolExecutor(1) as pool:
        lazy = pool.submit(mlx_mtp.load_model, path, lazy=True).result(60)
    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(tokens, lazy).result(60)
    assert tokens(lazy, 0) == expected
    cache = mlx_mtp.make_prompt_cache(lazy)
    steps = mlx_mtp.generate_step(PROMPT, lazy, prompt_cache=cache, max_tokens=12)
    shown = [next(steps)[0] for _ in range(5)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(steps.close).result(60)
    assert cache.tokens == PROMPT + shown[:-1]
    more = mlx_mtp.generate_step(shown[-1:], lazy, prompt_cache=cache, max_tokens=7)
    assert shown + [token for token, *_ in more] == expected


def test_one_that_is_not_finished_keeps_nobody_waiting(tiny_models):
    model, _ = tiny_models(0)
    steps = mlx_mtp.generate_step(PROMPT, model, max_tokens=12)
    first = next(steps)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(tokens, model).result(60) == [first[0], *(token for token, *_ in steps)]


BEGINNING = """
import asyncio, threading, warnings
warnings.simplefilter("ignore")
def load():
    import mlx_mtp
    from mlx_mtp.demo import demo_path
    return mlx_mtp.load(demo_path())
def answer(n=10, **options):
    import mlx_mtp
    global model, tokenizer
    model, tokenizer = load()
    return mlx_mtp.generate(model, tokenizer, "def main(", max_tokens=n, **options)
"""
PROGRAMS = {
    # All is imported in a worker, and at the end a daemon is in the middle of MLX's code.
    "worker": """
text = asyncio.run(asyncio.to_thread(answer))
import mlx_mtp
again = lambda: [mlx_mtp.generate(model, tokenizer, "def main(", max_tokens=10) for _ in range(10**6)]
threading.Thread(target=again, daemon=True).start()
assert mlx_mtp.generate(model, tokenizer, "def main(", max_tokens=10) == text
""",
    "joined": "thread = threading.Thread(target=answer); thread.start(); thread.join()",
    "two loads": """
async def both(): return await asyncio.gather(*[asyncio.to_thread(answer) for _ in range(2)])
assert len(set(asyncio.run(both()))) == 1
""",
    "left": """
model, tokenizer = load()
import mlx_mtp
steps = mlx_mtp.stream_generate(model, tokenizer, "def main(")
thread = threading.Thread(target=next, args=(steps,)); thread.start(); thread.join()
""",
}
SLOW = [pytest.param(name, 20, marks=sweep) for name in PROGRAMS]


@pytest.mark.parametrize(("name", "times"), [("worker", 1), *SLOW])
def test_a_process_ends_cleanly(name, times):
    for _ in range(times):
        command = [sys.executable, "-c", BEGINNING + PROGRAMS[name]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
