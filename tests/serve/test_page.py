"""The chat page in a real browser: it streams, stops, counts, requests the key, and fits a phone."""

import asyncio
import threading

import pytest
import uvicorn
from browser import CHROMIUM, Browser

from mlx_mtp.serve.app import Service, application
from mlx_mtp.serve.guard import Rules

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def address(served):
    """The address of a real server with the same engine, which requires a key."""
    service = Service(served.service.engine, served.service.metrics, Rules("secret"), info=served.service.info)
    server = uvicorn.Server(uvicorn.Config(application(service), port=0, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        pass
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def page(address, tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"), size=(400, 700))
    browser.send("Page.navigate", url=address)
    browser.wait("document.readyState === 'complete' && !document.getElementById('key').hidden")
    browser.run("key.value = 'secret'; key.dispatchEvent(new Event('change'))")
    browser.wait("document.getElementById('model').textContent === 'demo'")
    yield browser
    browser.close()


def send(page, text):
    page.run(f"text.value = {text!r}; find('form').requestSubmit()")


def test_a_conversation(page):
    send(page, "What does len do?")
    page.wait("document.querySelector('.assistant .figures')")
    assert page.run("document.querySelector('.assistant .said').textContent") == (
        "Return the number of items in a container."
    )
    assert "a cycle" in page.run("document.querySelector('.figures').textContent")
    assert page.run("messages.length") == 2
    assert page.run("find('meter').value") > 0
    send(page, "<b>What</b> does sorted do?")
    page.wait("document.querySelectorAll('.figures').length === 2")
    assert page.run("document.querySelectorAll('.user')[1].textContent") == "<b>What</b> does sorted do?"
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.picture()[:4] == b"\x89PNG"
    page.run("find('clear').click()")
    assert page.run("talk.childElementCount + messages.length") == 0


def test_paused_drafting_replaces_the_meter(page):
    words = "drafting paused: costs 3.8 plain steps, gains 3.6 tokens"
    made = f"{{draft_n: 0, draft_n_accepted: 0, tokens_per_second: 9, tokens_per_cycle: 1, paused: {words!r}}}"
    usage = (
        f"{{completion_tokens: 5, prompt_tokens: 9, prompt_tokens_details: {{cached_tokens: 0}}, mlx_mtp: {made}}}"
    )
    assert page.run(f"count({usage})").endswith(f"reused; {words}")
    assert page.run("find('paused').textContent") == words


def test_stop_and_errors(page):
    send(page, "hello " * 2500)
    page.wait("document.querySelector('.error')")
    assert "too long" in page.run("document.querySelector('.error').textContent")
    assert page.run("messages.length") == 0
    send(page, "Write a class.")
    page.run("find('stop').click()")
    page.wait("find('stop').hidden")
    assert "(stopped)" in page.run("talk.lastElementChild.textContent")
    send(page, "Write a class.")
    page.wait("document.querySelector('.assistant:last-child .said')")
    page.run("find('clear').click()")
    page.wait("find('stop').hidden")
    assert page.run("talk.childElementCount + messages.length") == 0
