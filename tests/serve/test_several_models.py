"""A server for the models of a folder: two copies of the demo swapped under load, next to damaged ones."""

import contextlib
import gc
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from browser import CHROMIUM, Browser
from served import KEY, listening, serving_several
from sweep import sampled

from mlx_mtp.demo import demo_path
from mlx_mtp.serve.catalog import offers
from mlx_mtp.serve.guard import Rules
from mlx_mtp.serve.prefix_files import PrefixFiles

SIZE = 17_364_256  # bytes of the demo's weights
QUESTION = [{"role": "user", "content": "What does len do?"}]
ANSWER = "Return the number of items in a container."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Copies of the demo named one and two, one whose weights are cut, and one without a tokenizer."""
    made = tmp_path_factory.mktemp("models")
    for name in ("one", "two", "cut", "mute"):
        shutil.copytree(demo_path(), made / name)
    (weights,) = (made / "cut").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    for file in (made / "mute").glob("*token*"):
        file.unlink()
    return made


@pytest.fixture(scope="module")
def several(folder, tmp_path_factory):
    """A server with prefix files, in whose memory one of the models fits, and which requires a key."""
    gc.collect()  # models of other tests, which would leave room for both
    most = mx.get_active_memory() + SIZE * 3 // 2
    files = PrefixFiles(tmp_path_factory.mktemp("prefixes"), 1 << 26)
    more = {"cache_bytes": 1 << 26, "cache_files": files, "rules": Rules("secret"), "timeout": 60.0}
    with serving_several(folder, max_memory=most, **more) as client:
        client.headers.update(KEY)
        client.base = mx.get_active_memory()
        yield client


def unload(client):
    """Unload all models by requests, and wait until their memory is returned."""
    for name in ("one", "two"):
        if client.models.slots[name].ready:
            body = client.post("/api/generate", json={"model": name, "keep_alive": 0}).json()
            assert (body["done"], body["done_reason"], body["response"]) == (True, "unload", "")
    end = time.monotonic() + 60
    while (rest := mx.get_active_memory() - client.base) >= SIZE // 10 and time.monotonic() < end:
        time.sleep(0.01)
    assert rest < SIZE // 10
    assert not client.models.engines


def ask(client, name, **more):
    """Return the answer to a question by `name`, through the API of chat completions."""
    body = {"model": name, "messages": QUESTION, "max_tokens": 30, **more}
    found = client.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]["content"]


def ask_anthropic(client, name):
    found = client.post("/v1/messages", json={"model": name, "messages": QUESTION, "max_tokens": 30})
    return found.json()["content"][0]["text"]


def ask_ollama(client, name):
    found = client.post("/api/chat", json={"model": name, "messages": QUESTION, "stream": False})
    return found.json()["message"]["content"]


def count(client, name):
    found = client.post("/v1/messages/count_tokens", json={"model": name, "messages": QUESTION})
    return ANSWER if found.json().get("input_tokens") == 13 else found.text


def test_two_models_are_swapped_under_load_and_their_memory_is_returned(several):
    """Requests of all APIs at once; the bytes that MLX has allocated stay those of one model."""
    unload(several)
    slots = several.models.slots
    sizes, long, loads = [], {"model": "one", "prompt": "read this " * 45, "max_tokens": 1}, slots["one"].loads
    assert several.post("/v1/completions", json=long).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for name in ("one", "two"):
        assert ask(several, name) == ANSWER
        sizes.append(mx.get_active_memory() - several.base)
    assert slots["one"].loads == loads + 1
    assert max(sizes) < SIZE * 3 // 2
    apis = (ask, ask_anthropic, ask_ollama, count)
    cases = [(api, name) for api in apis for name in ("one", "two")]
    with ThreadPoolExecutor(len(cases)) as pool:
        found = [*pool.map(lambda case: case[0](several, case[1]), cases)]
    assert found == [ANSWER] * len(cases)
    assert mx.get_active_memory() - several.base < SIZE * 3 // 2
    assert sum(slot.ready is not None for slot in slots.values()) == 1
    again = several.post("/v1/completions", json=long).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64  # stored in a file at an unload


def test_the_list_of_models(several, folder):
    body = several.get("/v1/models").json()
    assert [(model["id"], model["max_model_len"]) for model in body["data"]] == [("one", 2048), ("two", 2048)]
    assert (body["first_id"], body["last_id"]) == ("one", "two")
    reasons = {each["id"]: each["reason"] for each in body["skipped"]}
    assert reasons.keys() == {"cut", "mute"}
    assert "truncated or damaged" in reasons["cut"]
    assert "tokenizer.json is missing" in reasons["mute"]
    assert several.get("/v1/models/two").json()["id"] == "two"
    assert several.get("/v1/models/three").status_code == 404
    tags = several.get("/api/tags").json()["models"]
    assert [(tag["name"], tag["size"], tag["details"]["family"]) for tag in tags] == [
        ("one", SIZE, "step3p5"),
        ("two", SIZE, "step3p5"),
    ]
    assert len({tag["digest"] for tag in tags}) == 2


UNKNOWN = "model='three': allowed is 'one', 'two'"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/chat/completions", lambda body: (body["error"]["message"], body["error"]["code"])),
        ("/v1/responses", lambda body: (body["error"]["message"], body["error"]["code"])),
        ("/v1/messages", lambda body: (body["error"]["message"], body["error"]["type"])),
        ("/v1/messages/count_tokens", lambda body: (body["error"]["message"], body["error"]["type"])),
        ("/api/chat", lambda body: (body["error"], "")),
        ("/api/generate", lambda body: (body["error"], "")),
        ("/api/show", lambda body: (body["error"], "")),
    ],
)
def test_unknown_names_list_the_known_ones(several, path, error):
    found = several.post(path, json={"model": "three"})
    assert found.status_code == 404
    assert error(found.json())[0] == UNKNOWN
    assert error(found.json())[1] in ("model_not_found", "not_found_error", "")
    cut = several.post(path, json={"model": "cut"})
    assert cut.status_code == 404
    assert "truncated or damaged" in error(cut.json())[0]


def buffers_of(ready):
    return ready.served.tree.buffers + ready.served.buffers.weights + ready.served.buffers.recordings


def test_health_and_metrics(several):
    """Without the key, health has no names."""
    for name in ("one", "two"):
        ask(several, name)
    body = several.get("/health").json()
    assert body["status"] == "ok"
    assert {name: state["state"] for name, state in body["models"].items()} == {"one": "unloaded", "two": "ready"}
    assert {each["id"] for each in body["skipped"]} == {"cut", "mute"}
    slot = several.models.slots["one"]
    several.models.loading, slot.progress = slot, ("Reading weights (MB)", 3, 17)
    body = several.get("/health").json()
    assert body["loading"] == {"stage": "Reading weights (MB)", "done": 3, "total": 17, "model": "one"}
    body = several.get("/health", headers={"Authorization": ""}).json()
    assert body == {"status": "ok", "queued": 0, "loading": {"stage": "Reading weights (MB)", "done": 3, "total": 17}}
    several.models.loading = slot.progress = None
    ready, end, text, own = several.models.slots["two"].ready, time.monotonic() + 60, "", [0, 1]
    while own[0] != own[1] and time.monotonic() < end:  # the prefill of idle time may store a chunk in between
        own[0] = buffers_of(ready)
        text = several.get("/metrics").text
        own[1] = buffers_of(ready)
    assert 'mlx_mtp:model_loaded{model="one"} 0.0' in text
    assert 'mlx_mtp:model_loaded{model="two"} 1.0' in text
    assert f'mlx_mtp:model_loads{{model="two"}} {float(several.models.slots["two"].loads)}' in text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert [int(float(figures["mlx_mtp:buffers"]))] * 2 == own
    running = several.get("/api/ps").json()["models"]
    assert [(model["name"], model["expires_at"][:4]) for model in running] == [("two", "9999")]


def test_keep_alive_unloads(several):
    ask(several, "two")
    unload(several)


def test_the_time_limit_counts_the_wait_for_a_load(several, monkeypatch):
    unload(several)
    with monkeypatch.context() as patched:
        patched.setattr(several.app.state.service, "timeout", 0.0)
        assert "--timeout" in count(several, "one")
    assert count(several, "one") == ANSWER  # the load that had begun has ended


def test_names_of_models_in_a_folder(tmp_path):
    """The directory's name, or the path in the folder if the name is another model's; given models come first."""
    for path in ("a/x", "b/x", "b/y", "y"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    found = offers([("y", tmp_path / "y")], tmp_path)
    assert [offer.name for offer in found] == ["y", "a/x", "b/x", "b/y"]
    assert all("config.json" in offer.problem for offer in found)
    assert [offer.name for offer in offers([], tmp_path / "b")] == ["x", "y"]


def test_a_model_with_several_paths_is_listed_once(tmp_path):
    """Of given models the first; in the folder the directory itself rather than links, which may form a cycle."""
    for path in ("folder/x", "folder/z", "elsewhere"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").write_text("{}")
    folder = tmp_path / "folder"
    links = {"a": "z", "b": "../elsewhere", "c": "../elsewhere", "cycle": ".", "given": "x"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    assert [offer.name for offer in offers([], folder)] == ["b", "x", "z"]
    named = [("one", folder / "given"), ("three", tmp_path / "elsewhere"), ("two", folder / "x")]
    assert [offer.name for offer in offers(named, folder)] == ["one", "three", "z"]


@pytest.mark.parametrize("limit", sampled([100], [None, 100, 5000]))
def test_an_offer_has_the_facts_of_a_load(limit):
    (found,) = offers([("demo", Path(demo_path()))], None, limit)
    assert (found.context, found.size, found.family, found.problem) == (min(limit or 2048, 2048), SIZE, "step3p5", "")
    assert SIZE < found.needed < 2 * SIZE


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")
def test_the_chat_page_offers_the_models(several, tmp_path):
    """The choice belongs to a conversation; a load is announced; one that is no longer served is the default."""
    with listening(several.app) as address, contextlib.closing(Browser(tmp_path)) as page:
        page.send("Page.navigate", url=address)
        page.wait("document.readyState === 'complete' && !find('key').hidden")
        page.run("key.value = 'secret'; key.dispatchEvent(new Event('change'))")
        page.wait("!find('choice').hidden")
        assert page.run("[...find('choice').options].map(option => option.text).join()") == "one,two"
        assert page.run("find('model').hidden && find('choice').value") == "one"
        page.run("find('choice').value = 'two'; find('choice').dispatchEvent(new Event('change'))")
        page.run("text.value = 'What does len do?'; find('form').requestSubmit()")
        page.wait("find('stop').hidden && document.querySelector('.assistant .figures')")
        assert page.run("messages.at(-1).content.trim()") == ANSWER
        assert several.models.slots["two"].ready
        assert page.run("find('context').textContent").endswith("of 2,048")
        page.run("find('clear').click(); current.settings.model = 'gone'; draw()")
        assert page.run("find('choice').value") == "one"
        loading = "{model: 'two', stage: 'Reading weights (MB)', done: 3, total: 1700}"
        assert page.run(f"loadText({loading})") == "Loading two: Reading weights (MB), 3 of 1,700"
