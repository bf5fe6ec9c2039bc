"""Each request has the text of a model with its adapter alone, whatever requests of others run meanwhile."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import lora
import pytest
import served
from sweep import sampled

import mlx_mtp
from mlx_mtp.serve.fields import ModelInfo, Refused
from mlx_mtp.serve.job import DecodeRequest, Job
from mlx_mtp.serve.prefix_files import PrefixFiles
from mlx_mtp.serve.server import Loaded

PROMPTS = [[1, 5, 6, 7, 9, 4, 12, 8, 8, 5], [1, 5, 6, 7, 9, 4, 12, 8, 6]]  # they share two chunks of four tokens
N = 5


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def load(path, adapters=None):
    """Load a model and its tokenizer, which has as its only end of text a token that the model never generates."""
    model, tokenizer = mlx_mtp.load(path, {"eos_token": "]"}, adapter_path=adapters)
    tokenizer.eos_token_ids = {tokenizer.eos_token_id}  # also without the one that the template writes
    return model, tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a checkpoint, its adapters by name, and the texts of a model with one or none, by name and prompt."""
    folder = tmp_path_factory.mktemp("adapters")
    path = lora.checkpoint(folder / "model")
    model, tokenizer = load(path)
    paths = {name: lora.save(folder / name, model, seed) for seed, name in enumerate(("one", "two"))}
    models = {None: model} | {name: load(path, a)[0] for name, a in paths.items()}
    texts = {}
    for name, each in models.items():
        for i, prompt in enumerate(PROMPTS):
            steps = mlx_mtp.generate_step(prompt, each, max_tokens=N, num_draft_tokens=0)
            texts[name, i] = tokenizer.decode([token for token, *_ in steps])
    assert len({*texts.values()}) == len(texts)
    return path, paths, texts


@contextmanager
def serving(path, adapters, k, **settings):
    """Yield a client of a server that decodes with k drafts, with its `service`."""

    def loaded():
        return Loaded(*load(path, adapters), {}, {})

    settings = {"options": {"adaptive": False, "num_draft_tokens": k}, "step": 4, **settings}
    with served.serving(loaded, raises=False, **settings) as client:
        yield client


def ask(client, i, **more):
    """Return the text of a completion, and the number of reused prompt tokens."""
    body = {"prompt": PROMPTS[i], "max_tokens": N, **more}
    found = client.post("/v1/completions", json=body).json()
    assert "choices" in found, found
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def fields(name, alias=False):
    return {} if name is None else {"model": f"demo:{name}"} if alias else {"adapter": name}


@pytest.mark.parametrize("k", sampled([2], range(3)))
def test_requests_of_several_adapters_at_once(files, tmp_path, k):
    """Prefixes in memory and in files are those of one adapter; one server's files serve another with it alone."""
    path, paths, texts = files
    prefixes = PrefixFiles(tmp_path / "prefixes", 1 << 28)
    with serving(path, paths, k, cache_files=prefixes) as client, ThreadPoolExecutor(6) as pool:
        first = {name: ask(client, 0, **fields(name)) for name in (None, "one", "two")}
        assert first == {name: (texts[name, 0], 0) for name in first}
        cases = [(name, i, alias) for name in first for i in (1, 0) for alias in (False, True)]
        found = pool.map(lambda case: ask(client, case[1], **fields(case[0], case[2])), cases)
        for (name, i, _), (text, cached) in zip(cases, found, strict=True):
            assert (text, cached >= 4) == (texts[name, i], True)
        served = client.service.engine.served
        prefixes.save(served.tree)
        assert len({tree.identity for tree in served.tree.trees}) == 3
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert names == ["demo", "demo:one", "demo:two"]
    with serving(path, paths["two"], k, cache_files=PrefixFiles(tmp_path / "prefixes", 1 << 28)) as client:
        assert ask(client, 1) == (texts["two", 1], 8)
        assert ask(client, 1, adapter="two")[0] == ask(client, 1, model="demo:two")[0] == texts["two", 1]
        assert client.post("/v1/completions", json={"prompt": "a", "adapter": "one"}).status_code == 400


def test_a_long_answer_does_not_delay_those_of_other_adapters(files):
    path, paths, _ = files
    with serving(path, paths, 2) as client:
        ended, submit = [], client.service.engine.submit

        def job(name, n):
            return Job(DecodeRequest(PROMPTS[0], max_tokens=n, adapter=name), lambda event: hear(name, event))

        def hear(name, event):
            if hasattr(event, "reason"):
                ended.append(name)

        jobs = [job("one", 24), job("two", 4), job(None, 4)]
        submit(jobs)
        while not all(each.finished for each in jobs):
            time.sleep(0.01)
        assert ended[-1] == "one"
        assert sorted(ended, key=str) == [None, "one", "two"]


def info(*adapters, names=("demo", "x:one")):
    more = dict.fromkeys(
        ("tokenizer", "marks", "positions", "max_tokens", "defaults", "template", "turns", "created")
    )
    return ModelInfo(names=names, adapters=adapters, **more)


NAMED = {
    "neither": ({}, None),
    "null": ({"adapter": None, "model": None}, None),
    "a model": ({"model": "demo"}, None),
    "a model with the name of an alias": ({"model": "x:one"}, None),
    "the field": ({"adapter": "two"}, "two"),
    "an alias": ({"model": "demo:two"}, "two"),
    "both": ({"model": "demo:two", "adapter": "two"}, "two"),
    "an alias of an alias": ({"model": "x:one:two"}, "two"),
}
REFUSED = {
    "an unknown one": ({"adapter": "three"}, "adapter='three': allowed is 'one', 'two'"),
    "an empty one": ({"adapter": ""}, "adapter='': allowed is 'one', 'two'"),
    "a number": ({"adapter": 1}, "adapter=1: allowed is 'one', 'two'"),
    "two": ({"adapter": "one", "model": "demo:two"}, "adapter='one': contradicts model='demo:two'; send one"),
}


@pytest.mark.parametrize("case", NAMED)
def test_the_adapter_that_a_request_names(case):
    body, expected = NAMED[case]
    assert info("one", "two").adapter_of(body) == expected
    assert info("one", "two").called(body) == (body.get("model") or "demo")


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_are_refused(case):
    body, message = REFUSED[case]
    with pytest.raises(Refused) as error:
        info("one", "two").adapter_of(body)
    assert (str(error.value), error.value.status, error.value.param) == (message, 400, "adapter")


def test_any_model_name_may_be_followed_by_an_adapter():
    anything = info("one", names=("demo", "*"))
    assert [anything.adapter_of({"model": name}) for name in ("gpt:one", "gpt:two", "gpt")] == ["one", None, None]
    with pytest.raises(Refused, match="model='demo:two': allowed is 'demo', 'x:one', 'demo:one', 'x:one:one'"):
        info("one").called({"model": "demo:two"})


def test_a_server_without_adapters(random_chat):
    response = random_chat(adapter="one")
    assert response.status_code == 400
    assert "adapter='one': allowed is none" in response.json()["error"]["message"]
