"""Jobs in a batch: each text is that of `generate`, whichever other jobs start, end or fail meanwhile."""

import threading
from contextlib import closing

import pytest
import tiny
from letters import Letters
from mlx_lm.sample_utils import make_logits_processors
from sweep import sampled

import mlx_mtp
from mlx_mtp.batch.generator import BatchGenerator
from mlx_mtp.serve.batch_decoder import BatchDecoder
from mlx_mtp.serve.engine import Engine
from mlx_mtp.serve.job import DecodeRequest, End, Job, RequestFailed, Served
from mlx_mtp.serve.prefixes import Chunking, PrefixTree

OPTIONS = {"num_draft_tokens": 2, "adaptive": False}
SAMPLINGS = ({}, {"temp": 0.9, "seed": 3}, {"temp": 1.0, "top_k": 4, "seed": 8})


@pytest.fixture
def engine(tiny_models):
    model = tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0]
    tree = PrefixTree(mlx_mtp.make_prompt_cache(model, num_draft_tokens=2), Chunking(4), 1 << 30)
    batch = BatchDecoder(model, Letters(), OPTIONS, 4)
    engine = Engine(load=lambda: Served(model, Letters(), tree, OPTIONS, None, batch=batch))
    engine.thread.start()
    yield engine
    engine.stop(0)
    engine.thread.join(5)
    assert not engine.thread.is_alive()


class Client:
    """Collects the events of a job; runs an action after `n` letters."""

    def __init__(self, request: DecodeRequest):
        self.job, self.events, self.finished = Job(request, self.take), [], threading.Event()
        self.n, self.act = -1, lambda: None

    def at(self, n: int, act) -> None:
        self.n, self.act = n, act

    @property
    def text(self) -> str:
        return "".join(getattr(event, "text", "") for event in self.events)

    def take(self, event) -> None:
        self.events.append(event)
        if len(self.text) == self.n:
            self.n = -1
            self.act()
        if isinstance(event, (End, RequestFailed)):
            self.finished.set()


def alone(model, request: DecodeRequest) -> str:
    """Return the text of a request from `generate_step`."""
    processors = make_logits_processors(**request.penalties) if request.penalties else None
    how = {"max_tokens": request.max_tokens, "num_draft_tokens": 0, **request.sampling}
    text = Letters().decode(
        [token for token, *_ in mlx_mtp.generate_step(request.prompt, model, logits_processors=processors, **how)]
    )
    return min((text[: text.index(stop)] for stop in request.stops if stop in text), key=len, default=text)


def requests() -> list[DecodeRequest]:
    found = []
    for i in range(8):
        more = {"penalties": {"repetition_penalty": 1.3}} if i == 4 else {}
        more |= {"logprobs": 2} if i == 5 else {}
        prompt = [(7 * i + 3 * j) % 40 for j in range(3 + 3 * i)]
        found.append(
            DecodeRequest(prompt, max_tokens=26 if i == 0 else 6 + i, sampling=dict(SAMPLINGS[i % 3]), **more)
        )
    return found


def test_eight_texts_equal_those_decoded_alone(engine, tiny_models):
    """All but the first start while it decodes, at different positions; the last one ends with a stop string."""
    model, every = tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0], requests()
    whole = alone(model, every[7])
    every[7] = DecodeRequest(**{**vars(every[7]), "stops": (whole[5:7],)})
    clients = [Client(request) for request in every]
    gone = Client(DecodeRequest([1, 2, 3], max_tokens=500))
    clients[0].at(5, lambda: engine.submit([gone.job, *(client.job for client in clients[1:4])]))
    clients[2].at(3, lambda: engine.submit([client.job for client in clients[4:]]))
    gone.at(4, lambda: setattr(gone.job, "cancelled", True))
    engine.submit([clients[0].job])
    assert all(client.finished.wait(20) for client in clients)
    for request, client in zip(every, clients, strict=True):
        assert client.text == alone(model, request)
        end = client.events[-1]
        assert end.reason == ("stop" if request.stops else "length")
        shown = len(client.text) + len(request.stops and request.stops[0])
        assert end.stats.generation_tokens == shown
        assert end.stats.drafted == [end.stats.cycles] * 2
        assert 1 < end.stats.tokens_per_cycle <= 3 or not sum(end.stats.accepted)
        assert end.stats.decode_time > 0
    assert not any(isinstance(event, (End, RequestFailed)) for event in gone.events)
    logprobs = [one for event in clients[5].events for one in getattr(event, "logprobs", ())]
    assert len(logprobs) == len(clients[5].text)
    assert {len(one.top) for one in logprobs} == {2}


def test_invalid_options_fail_one_job_and_a_broken_batch_is_replaced(engine, tiny_models, monkeypatch):
    model = tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0]
    wrong, right = (
        Client(DecodeRequest([1, 2], sampling={"temp": -1})),
        Client(DecodeRequest([1, 2, 3], max_tokens=20)),
    )
    engine.submit([wrong.job, right.job])
    assert all(client.finished.wait(20) for client in (wrong, right))
    assert wrong.events[-1].status == 400
    assert "temp=-1" in wrong.events[-1].message
    assert right.text == alone(model, right.job.request)

    clients, step = [Client(DecodeRequest([i, 2, 3], max_tokens=20)) for i in range(2)], BatchGenerator.next

    def broken(batch):
        if all(client.text for client in clients):
            raise RuntimeError("out of memory")
        return step(batch)

    with monkeypatch.context() as context:
        context.setattr(BatchGenerator, "next", broken)
        engine.submit([client.job for client in clients])
        assert all(client.finished.wait(20) for client in clients)
    assert [client.events[-1].status for client in clients] == [500, 500]
    again = Client(clients[0].job.request)
    engine.submit([again.job])
    assert again.finished.wait(20)
    assert again.text == alone(model, again.job.request)


def test_a_job_of_a_failed_batch_does_not_affect_the_next_batch(tiny_models, monkeypatch):
    """The uids of each batch start at 0."""
    model, n = tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0], 5
    batch, prompts = BatchDecoder(model, Letters(), OPTIONS, 4), ([1, 2, 3], [4, 5, 6])
    steps, tokens = [], []
    for prompt in prompts:
        options = {**OPTIONS, "max_tokens": n, "stats": mlx_mtp.Stats(), "logprobs": False}
        steps.append(batch.decode(prompt, [mlx_mtp.make_prompt_cache(model, num_draft_tokens=2)], options))
        assert next(steps[-1]) is None
        if prompt is prompts[0]:
            with monkeypatch.context() as context:
                context.setattr(BatchGenerator, "next", lambda batch: 1 // 0)
                batch.step()
    with pytest.raises(RuntimeError, match="decoded together"):
        next(steps[0])
    while len(tokens) < n:
        batch.step()
        tokens += [response.token for response in iter(lambda: next(steps[1], None), None)]
    assert tokens == [token for token, *_ in mlx_mtp.generate_step(prompts[1], model, max_tokens=n)]
    batch.close()


def test_a_job_whose_logits_processor_raises_fails_alone(engine, tiny_models, monkeypatch):
    def broken(tokens, logits):
        if tokens.size > 7:
            raise ZeroDivisionError("of its own")
        return logits

    monkeypatch.setattr("mlx_mtp.serve.job.LogitRules", lambda **_: broken)
    clients = [
        Client(DecodeRequest([i, 2, 3], max_tokens=20, penalties={"any": i} if i == 1 else {})) for i in range(3)
    ]
    engine.submit([client.job for client in clients])
    assert all(client.finished.wait(20) for client in clients)
    assert [type(client.events[-1]) for client in clients] == [End, RequestFailed, End]
    assert clients[1].events[-1].message == "ZeroDivisionError: of its own"
    for client in clients[::2]:
        assert client.text == alone(tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0], client.job.request)


def test_a_stop_string_in_the_last_token_is_the_finish_reason(engine, tiny_models):
    request = DecodeRequest([1, 2, 3], max_tokens=6)
    whole = alone(tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0], request)
    client = Client(DecodeRequest([1, 2, 3], max_tokens=whole.index(whole[5]) + 1, stops=(whole[5],)))
    engine.submit([client.job])
    assert client.finished.wait(20)
    assert (client.events[-1].reason, client.events[-1].stop) == ("stop", whole[5])


ENDS = ((1, 9), (4, 9), (9, 9), (9, 10), (11, 12), (13, 14), (15, 16))  # (tokens taken, at most)
UNREAD = 5, 9  # the same; the sequence ends in the batch before its responses are read


def test_the_cache_is_returned_wherever_a_job_ends(tiny_models):
    """It contains the decoded tokens and can be continued."""
    model = tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0]
    batch, prompt = BatchDecoder(model, Letters(), {**OPTIONS, "prompt_lookup": True}, 4), [5, 6, 7, 8, 9]
    ahead, text = [], [token for token, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=22, num_draft_tokens=0)]
    for n, most in (UNREAD, *sampled([(1, 9), (9, 9), (9, 10), (15, 16)], ENDS)):
        held, tokens = [mlx_mtp.make_prompt_cache(model, num_draft_tokens=2)], []
        options = {**OPTIONS, "max_tokens": most, "stats": mlx_mtp.Stats(), "logprobs": False}
        with closing(batch.decode(prompt, held, options)) as responses:
            for response in responses:
                if response is None:
                    batch.step()
                    continue
                tokens.append(response.token)
                if len(tokens) == n:
                    break
            for _ in range(4 if (n, most) == UNREAD else 0):
                batch.step()
        assert tokens == text[:n]
        (cache,) = held
        known = [*prompt, *text]
        assert cache.tokens == known[: cache.offset]
        assert len(prompt) + n - 1 <= cache.offset < len(prompt) + n + 7
        ahead.append(cache.offset - len(prompt) - n + 1)
        rest = known[cache.offset : len(prompt) + 19]
        more = mlx_mtp.generate_step(rest, model, prompt_cache=cache, max_tokens=3)
        assert [token for token, *_ in more] == text[19:22]
    assert max(ahead) > 0
    batch.close()
