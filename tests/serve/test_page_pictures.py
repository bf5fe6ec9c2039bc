"""Pictures on the chat page in a real browser: paste, drop, choose, remove, send, keep, edit and export."""

import asyncio
import base64
import threading

import pytest
import uvicorn
from browser import CHROMIUM, Browser
from picture_requests import noise

from mlx_mtp.serve.app import Service, application
from mlx_mtp.serve.guard import Rules

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")
FILES = """
window.fileOf = (data, name, type) => {
  const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
  return new File([bytes], name, {type});
};
window.transferOf = (...files) => {
  const found = new DataTransfer();
  for (const file of files) found.items.add(file);
  return found;
};
"""


@pytest.fixture(scope="module")
def page(eyes, tmp_path_factory):
    service = Service(eyes.service.engine, eyes.service.metrics, Rules(), info=eyes.service.info)
    server = uvicorn.Server(uvicorn.Config(application(service), port=0, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        pass
    browser = Browser(tmp_path_factory.mktemp("profile"), size=(420, 760))
    browser.send("Page.navigate", url=f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/")
    browser.wait("document.readyState === 'complete' && document.getElementById('model').textContent === 'eyes'")
    browser.run(FILES)
    yield browser
    browser.close()
    server.should_exit = True
    thread.join()


def files_of(*seeds, kind="image/png"):
    made = (f"fileOf('{base64.b64encode(noise(seed)).decode()}', '{seed}.png', '{kind}')" for seed in seeds)
    return f"transferOf({', '.join(made)})"


def paste(page, transfer):
    page.run(f"document.dispatchEvent(new ClipboardEvent('paste', {{clipboardData: {transfer}}}))")


def drop(page, transfer):
    page.run(f"window.dropped = {transfer}")
    for kind in ("dragover", "drop"):
        how = "{dataTransfer: dropped, bubbles: true, cancelable: true}"
        page.run(f"document.body.dispatchEvent(new DragEvent('{kind}', {how}))")


def send(page, text):
    before = page.run("document.querySelectorAll('.assistant .figures').length")
    page.run("current.settings.max_tokens = '4'")
    page.run(f"text.value = {text!r}; find('form').requestSubmit()")
    page.wait(f"find('stop').hidden && document.querySelectorAll('.assistant .figures').length > {before}")


def test_pasted_dropped_and_chosen_pictures_are_sent_and_kept(page):
    paste(page, files_of(1))
    page.wait("tray.children.length === 1")
    drop(page, files_of(2, 3))
    page.wait("tray.children.length === 3")
    assert not page.run("document.body.classList.contains('dropping')")
    page.run(f"find('picture-files').files = {files_of(4)}.files")
    page.run("find('picture-files').dispatchEvent(new Event('change'))")
    page.wait("tray.children.length === 4")
    page.run("tray.children[1].querySelector('button').click()")
    assert page.run("tray.children.length") == 3
    page.wait("[...tray.querySelectorAll('img')].every(each => each.complete && each.naturalWidth === 40)")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    send(page, "What?")
    assert page.run("tray.hidden && tray.children.length === 0")
    assert page.run("messages[0].pictures.length") == 3
    assert page.run("[...document.querySelectorAll('.user img')].map(each => each.naturalWidth)") == [40, 40, 40]
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    kept = page.run("JSON.stringify(messages)")
    page.run("window.old = true")
    page.send("Page.reload")
    page.wait(
        "!window.old && document.readyState === 'complete' && document.querySelectorAll('.user img').length === 3"
    )
    assert page.run("JSON.stringify(messages)") == kept
    page.run(FILES)
    send(page, "And?")
    assert page.run("messages.length") == 4


def test_a_picture_alone_is_a_message_and_an_edit_keeps_it(page):
    page.run("find('clear').click()")
    paste(page, files_of(1))
    page.wait("tray.children.length === 1")
    send(page, "")
    assert page.run("current.title") == "Picture"
    page.run("document.querySelector('.user .actions button').click()")
    assert page.run("document.querySelectorAll('.user img').length") == 1
    page.run(
        "document.querySelector('.edit').value = 'What?'; document.querySelector('.user .actions button').click()"
    )
    page.wait("find('stop').hidden && messages.length === 2 && messages[0].content === 'What?'")
    assert page.run("messages[0].pictures.length") == 1
    exported = page.run("JSON.stringify(current)")
    assert page.run(f"parsedConversations({exported!r})[0].messages[0].pictures.length") == 1
    foreign = exported.replace("data:image/png;base64,", "https://example.org/")
    assert page.run(f"(() => {{ try {{ parsedConversations({foreign!r}); }} catch (e) {{ return e.message; }} }})()")


def test_other_files_are_named_and_not_added(page):
    drop(page, files_of(1, kind="image/tiff"))
    page.wait("find('notice').textContent")
    assert page.run("find('notice').textContent") == "1.png was not added: allowed are PNG, JPEG, WEBP and GIF."
    assert page.run("tray.hidden")
    page.run("window.bad = transferOf(...['a', 'b'].map(name => fileOf('AAAA', `${name}.png`, 'image/png')))")
    page.run(f"window.svg = {files_of(2, kind='image/svg+xml')}; bad.items.add(svg.files[0])")
    drop(page, "bad")
    page.wait("find('notice').textContent.includes('2.png')")
    lines = [
        "a.png, b.png were not added: the file is damaged.",
        "2.png was not added: allowed are PNG, JPEG, WEBP and GIF.",
    ]
    assert page.run("find('notice').textContent").splitlines() == lines
    assert page.run("tray.hidden")
    page.run("sees = false")
    paste(page, files_of(1))
    page.wait("find('notice').textContent.includes('text only')")
    page.run("sees = true")


def test_a_message_has_at_most_20_pictures(page):
    """The server refuses more in the newest message; of earlier messages' it leaves out the oldest."""
    page.run("find('clear').click(); setPictures(Array(19).fill('data:image/png;base64,AAAA'))")
    page.run("messages = [{role: 'user', content: '', pictures: Array(9).fill('data:image/png;base64,AAAA')}]")
    paste(page, files_of(1, 2, 3))
    page.wait("find('notice').textContent")
    assert page.run("[pictures.length, find('notice').textContent]") == [
        20,
        "2.png, 3.png were not added: a message has at most 20 pictures.",
    ]
    page.run("setPictures([]); find('clear').click()")


def test_a_refused_picture_returns_to_the_box(page):
    page.run("find('clear').click()")
    for i in range(40):  # more than fits
        page.run(f"showMessage({{role: 'assistant', content: 'earlier {i}'}}, [])")
    page.run("setPictures(Array(15).fill('data:image/png;base64,AAAA')); text.value = 'What?'")
    page.run("find('form').requestSubmit()")
    page.wait("document.querySelector('.error') && find('stop').hidden && pictures.length")
    words = page.run("document.querySelector('.error').textContent")
    assert words == "Picture 1 of this message: the data are not a PNG, JPEG, WEBP or GIF picture"
    assert page.run("[messages.length, text.value, pictures.length]") == [0, "What?", 15]
    shown = "document.querySelector('.error').getBoundingClientRect().bottom <= talk.getBoundingClientRect().bottom"
    page.wait(shown)  # not below the pictures that have returned
    page.run("setPictures([])")
