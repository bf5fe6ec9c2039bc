"""Several models on one thread: each is loaded on demand and unloaded for room, never while it answers."""

import asyncio
import contextlib
import gc
import random
import threading
import time

import pytest
from model_world import SIZE, World
from sweep import sampled

from mlx_mtp.checkpoint.load import UNTRUSTED
from mlx_mtp.serve.catalog import ModelFacts
from mlx_mtp.serve.fields import Refused
from mlx_mtp.serve.job import DecodeRequest, Job
from mlx_mtp.serve.limits import QueueFull
from mlx_mtp.serve.models import Models


@pytest.fixture
def world(monkeypatch):
    with contextlib.closing(World(monkeypatch)) as made:
        yield made


async def ask(models, name, steps=1, until=float("inf")):
    """Return the name of the model that answered, or the failure."""
    slot, loop = models.named({"model": name}), asyncio.get_running_loop()
    done = loop.create_future()
    info = await models.take(slot, until)
    assert info.name == slot.offer.name
    try:
        emit = lambda event: loop.call_soon_threadsafe(done.set_result, event)  # noqa: E731
        models.submit(slot.engine, [Job(DecodeRequest([1] * steps), emit)])
    finally:
        models.give_back(slot)
    return await asyncio.wait_for(done, 20)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def gather(*coroutines):
    return await asyncio.gather(*coroutines, return_exceptions=True)


async def until(found):
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("fit", sampled([1, 2], [1, 2, 3]))
def test_hundreds_of_mixed_requests(world, fit):
    """Each is answered by its model; at no time more models are in memory than fit, and at the end none is."""
    models, draw = world.models(fit=fit, queued=1000), random.Random(fit)
    names = [draw.choice("abc") for _ in range(300)]

    async def client(name):
        await asyncio.sleep(draw.random() / 10)
        return await ask(models, name, draw.randint(1, 6))

    assert run(gather(*map(client, names))) == names
    assert world.most == fit * SIZE
    assert len(world.loads) < 100  # requests of one model share a load
    assert {slot.pins for slot in models.slots.values()} == {0}
    models.stop(0)
    models.thread.join(5)
    assert world.bytes == 0


def test_the_least_recently_used_model_is_unloaded(world):
    models = world.models(fit=2)
    for name in "abacbca":
        assert run(ask(models, name)) == name
    assert world.loads == [*"abc", "b", "a"]  # c replaces b, b replaces a, a replaces b
    assert {name for name, slot in models.slots.items() if slot.ready} == {"a", "c"}
    assert world.bytes == 2 * SIZE


@pytest.mark.parametrize(("fit", "free"), [(1, 1 << 60), (2, 0)])
def test_a_model_that_answers_is_not_unloaded_and_its_later_requests_wait(world, fit, free):
    """Whether the limit or other programs leave no room for another model."""
    models = world.models("ab", fit=fit)

    async def requests():
        world.hold.clear()
        first = asyncio.create_task(ask(models, "a", 3))
        await until(lambda: models.running)
        world.free = free
        other = asyncio.create_task(ask(models, "b"))
        await until(lambda: models._claimed)
        later = asyncio.create_task(ask(models, "a"))
        used, measured = models.slots["a"].used, world.measured
        await asyncio.sleep(0.05)
        assert world.loads == ["a"]
        assert models.slots["a"].used > used  # idle seconds begin after the answer
        assert world.measured == measured  # which takes a process on a Mac, too long for each turn
        world.hold.set()
        return await gather(first, other, later)

    assert run(requests()) == ["a", "b", "a"]
    assert world.order == [*"aaa", "b", "a"]
    assert world.loads == [*"aba"]


def test_memory_that_other_programs_use_is_no_room(world):
    models = world.models(fit=2)
    assert run(ask(models, "a")) == "a"
    world.free = SIZE - 1
    assert run(ask(models, "b")) == "b"
    assert world.most == world.bytes == SIZE


def test_jobs_of_all_models_count_for_the_queue_and_are_refused_at_the_end(world):
    models = world.models("ab", queued=2, active=1)

    async def requests():
        slots = [models.named({"model": name}) for name in "ab"]
        for slot in slots:
            await models.take(slot, float("inf"))
        add = lambda slot: models.submit(slot.engine, [Job(DecodeRequest([1]), lambda event: None)])  # noqa: E731
        world.hold.clear()
        add(slots[0])
        await until(lambda: models.running)
        add(slots[0])
        add(slots[1])
        with pytest.raises(QueueFull):
            add(slots[1])
        world.hold.set()
        await until(lambda: not models.queued and not models.running)
        world.hold.clear()
        add(slots[0])
        await until(lambda: models.running)
        models.stop(10)
        with pytest.raises(QueueFull):
            add(slots[1])
        world.hold.set()

    run(requests())


def test_a_claim_ends_with_the_request_that_needs_it(world):
    models = world.models("ab", fit=1)

    async def requests():
        world.hold.clear()
        first = asyncio.create_task(ask(models, "a"))
        await until(lambda: models.running)
        other = asyncio.create_task(ask(models, "b"))
        await until(lambda: models._claimed)
        later = asyncio.create_task(ask(models, "a"))
        await until(lambda: models.queued == 2)
        other.cancel()
        await until(lambda: len(models.running) == 2)
        world.hold.set()
        return await gather(first, later)

    assert run(requests()) == ["a", "a"]
    assert world.loads == ["a"]


def test_a_loaded_model_answers_during_a_load(world):
    models, world.gates["b"] = world.models("ab"), threading.Event()

    async def requests():
        assert await ask(models, "a") == "a"
        waiting = asyncio.create_task(ask(models, "b"))
        await until(lambda: models.loading)
        assert [await ask(models, "a") for _ in range(3)] == ["a"] * 3
        assert models.loading.offer.name == "b"
        world.gates["b"].set()
        return await waiting

    assert run(requests()) == "b"


def test_failed_loads_fail_the_requests_that_wait_and_the_next_one_tries_again(world):
    models = world.models("ab")
    world.fails = {"a": ValueError("damaged\nmore"), "b": RuntimeError("broken")}
    answers = run(gather(ask(models, "a"), ask(models, "a"), ask(models, "b"), ask(models, "b")))
    assert [error.status for error in answers] == [503] * 4
    assert str(answers[0]) == "model='a' cannot be loaded: damaged"
    assert models.slots["a"].error == str(answers[0])
    assert {slot.engine.state for slot in models.slots.values()} == {"unloaded"}
    assert run(ask(models, "a")) == "a"
    assert models.slots["a"].error == ""


def test_a_tokenizer_of_code_names_no_option_to_clients(world):
    models = world.models("a")
    world.fails = {"a": ValueError(f"a: no usable tokenizer ({UNTRUSTED})")}
    (error,) = run(gather(ask(models, "a")))
    assert str(error).endswith("(it is code of the checkpoint, which this server does not run)")


def test_a_failed_load_leaves_no_memory_in_use(world):
    models = world.models("a")
    world.fails = {"a": ValueError("damaged")}
    gc.collect()
    gc.disable()
    try:
        run(gather(ask(models, "a")))
        assert (world.loads, world.bytes) == (["a"], 0)
    finally:
        gc.enable()


def test_a_model_that_does_not_fit_alone_is_refused_before_a_load(world):
    models = world.models("a", find=lambda: [ModelFacts("a", needed=5 * SIZE), ModelFacts("b", needed=SIZE)])
    with pytest.raises(Refused, match=r"needs 0\.021 GB, and the limit is") as error:
        run(ask(models, "a"))
    assert (error.value.status, world.loads) == (400, [])
    assert run(ask(models, "b")) == "b"


def test_requests_that_leave_the_queue(world):
    """By their time limit, by a disconnected client, and as the server ends; none keeps a model in use."""
    models, world.gates["a"] = world.models("ab", queued=3), threading.Event()

    async def requests():
        late = asyncio.create_task(ask(models, "a", until=time.monotonic() + 0.02))
        gone, stays = asyncio.create_task(ask(models, "a")), asyncio.create_task(ask(models, "a"))
        await until(lambda: models.queued == 3)
        with pytest.raises(QueueFull):
            await ask(models, "b")
        gone.cancel()
        with pytest.raises(Refused, match="--timeout") as error:
            await late
        assert error.value.status == 504
        await until(lambda: models.queued == 1)
        world.gates["a"].set()
        assert await stays == "a"
        world.gates["b"] = threading.Event()
        last = asyncio.create_task(ask(models, "b"))
        await until(lambda: models.loading)
        assert {slot.pins for slot in models.slots.values()} == {0}
        models.stop(0)
        with pytest.raises(Refused, match="shutting down"):
            await last
        with pytest.raises(QueueFull):
            await ask(models, "a")

    run(requests())


def test_active_jobs_of_all_models_count_together(world):
    models = world.models("ab", active=1)

    async def requests():
        await gather(ask(models, "a"), ask(models, "b"))
        del world.order[:]
        return await gather(*(ask(models, name, 3) for name in "abab"))

    assert run(requests()) == [*"abab"]
    assert "".join(world.order) in ("aaabbbaaabbb", "bbbaaabbbaaa")


async def granted(models, name):
    """Return the slot of a model, and a task that takes the model; it has the model, and its event loop is late."""
    slot = models.named({"model": name})
    task = asyncio.create_task(models.take(slot, float("inf")))
    await asyncio.sleep(0)
    end = time.monotonic() + 60
    while not slot.pins and time.monotonic() < end:
        time.sleep(0.001)
    return slot, task


def test_a_request_that_leaves_with_its_model_returns_it(world):
    models = world.models("a", idle_unload=0.02)

    async def requests():
        slot, task = await granted(models, "a")
        time.sleep(0.05)  # longer than the model may be idle
        assert (slot.pins, slot.engine.state) == (1, "ready")
        task.cancel()
        await gather(task)
        assert slot.pins == 0
        await until(lambda: not models.engines)

    run(requests())


def test_a_request_that_has_its_model_as_the_server_ends_is_refused(world):
    models = world.models("a")

    async def requests():
        _, task = await granted(models, "a")
        models.stop(0)
        models.thread.join(5)
        with pytest.raises(Refused, match="shutting down"):
            await task

    run(requests())


@pytest.mark.parametrize("grown", [0, SIZE])
def test_models_in_use_without_a_job_are_not_unloaded_and_cost_no_turns(world, monkeypatch, grown):
    """Whether their idle seconds have passed, or they have grown beyond the limit."""
    models, turns = world.models("ab"), []

    async def requests():
        slots = [models.named({"model": name}) for name in "ab"]
        for slot in slots:
            await models.take(slot, float("inf"))
            slot.engine.idle_unload = float("inf") if grown else 0
        world.grow(grown)
        monkeypatch.setattr(models, "_turn", lambda: turns.append(1) or Models._turn(models))
        models.signal.set()
        await asyncio.sleep(0.05)
        assert len(turns) < 5
        assert models.engines == [slot.engine for slot in slots]
        models.give_back(slots[0])
        await until(lambda: models.engines == [slots[1].engine])
        models.give_back(slots[1])
        await until(lambda: len(models.engines) == bool(grown))
        assert [slot.engine.idle_unload for slot in slots] == [float("inf")] * 2  # 0 was of the last request only

    run(requests())


def test_idle_models_are_unloaded(world):
    models = world.models("ab", idle_unload=0.02)

    async def requests():
        assert await gather(ask(models, "a"), ask(models, "b")) == ["a", "b"]
        await until(lambda: not models.engines)

    run(requests())
    assert world.bytes == 0


def test_models_that_have_grown_beyond_the_limit_are_unloaded_in_idle_time(world):
    models = world.models("ab")

    async def requests():
        assert await gather(ask(models, "a"), ask(models, "b")) == ["a", "b"]
        assert len(models.engines) == 2
        world.grow(SIZE)
        models.signal.set()
        await until(lambda: len(models.engines) == 1)
        world.grow(2 * SIZE)
        models.signal.set()
        await asyncio.sleep(0.02)
        assert len(models.engines) == 1  # the last one stays

    run(requests())


def test_the_models_that_a_request_can_name(world):
    models = world.models(find=lambda: [ModelFacts("a"), ModelFacts("c", problem="c: damaged"), ModelFacts("b")])
    models.aliases = ("x",)
    names = {"a": "a", "b": "b", "x": "a", None: "a", "b:latest": "b", "x:latest": "a"}
    assert {name: models.named({"model": name}).offer.name for name in names} == names
    for name, problem in (("", ""), ("A", ""), ("a:b", ""), ("c", " (c: damaged)"), ("*", "")):
        with pytest.raises(Refused) as error:
            models.named({"model": name})
        assert str(error.value) == f"model={name!r}{problem}: allowed is 'a', 'b', 'x'"
        assert (error.value.status, error.value.code) == (404, "model_not_found")
    with pytest.raises(Refused, match="a text"):
        models.named({"model": 1})
    models.aliases = ("*",)
    assert models.named({"model": "anything"}).offer.name == "a"


@pytest.mark.parametrize("offers", [[], [ModelFacts("a", problem="a: damaged")]])
def test_without_any_model_the_server_ends(world, offers):
    models = world.models(find=lambda: offers)
    models.thread.join(5)
    assert (models.state, type(models.error)) == ("failed", ValueError)
    assert ("a: damaged" if offers else "none was found") in str(models.error)
