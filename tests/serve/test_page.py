"""The chat page in a real browser: answers, conversations, settings, hostile text, and what a reader must see."""

import hashlib
import json
import re

import httpx
import pytest
from browser import CHROMIUM, Browser
from served import listening

from mlx_mtp.serve.app import PAGE, Service, application
from mlx_mtp.serve.guard import Rules

VENDOR = PAGE / "vendor"

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def address(served):
    """The address of a real server with the same engine, which requires a key."""
    service = Service(served.service.engine, served.service.metrics, Rules("secret"), info=served.service.info)
    with listening(application(service)) as found:
        yield found


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
    assert page.run("document.querySelector('.assistant .said').textContent.trim()") == (
        "Return the number of items in a container."
    )
    assert "a cycle" in page.run("document.querySelector('.figures').textContent")
    assert page.run("messages.length") == 2
    assert page.run("find('meter').value") > 0
    send(page, "<b>What</b> does sorted do?")
    page.wait("document.querySelectorAll('.figures').length === 2")
    assert page.run("document.querySelectorAll('.user .said')[1].textContent") == "<b>What</b> does sorted do?"
    assert page.run("find('context').textContent").endswith("of 2,048")
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
    question = "hello " * 2500
    send(page, question)
    page.wait("document.querySelector('.error')")
    assert "too long" in page.run("document.querySelector('.error').textContent")
    assert page.run("messages.length") == 0
    assert page.run("text.value") == question.strip()  # a refused message returns to the box
    assert page.run("document.querySelectorAll('.user').length") == 0
    send(page, "Write a class.")
    page.run("find('stop').click()")
    page.wait("find('stop').hidden")
    assert "(stopped)" in page.run("talk.lastElementChild.textContent")
    send(page, "Write a class.")
    page.wait("document.querySelector('.assistant:last-child .said')")
    page.run("find('clear').click()")
    page.wait("find('stop').hidden")
    assert page.run("talk.childElementCount + messages.length") == 0


def failed(page, text):
    """Send a message that fails, and return the error that the page shows."""
    page.run("setText('')")
    send(page, text)
    page.wait("document.querySelector('.error') && find('stop').hidden")
    assert page.run("document.querySelectorAll('.error').length") == 1  # earlier ones have been removed
    return page.run("document.querySelector('.error').textContent")


def test_failures_are_in_words(page):
    page.run("find('clear').click()")
    for key, words in (("wrong", "key is wrong"), ("schlüssel ключ", "key is wrong"), ("", "needs an API key")):
        page.run(f"find('notice').textContent = ''; key.value = {key!r}; key.dispatchEvent(new Event('change'))")
        page.wait(f"find('notice').textContent.includes({words!r})")
        assert words in failed(page, "What does len do?")
    page.run("key.value = 'secret'; key.dispatchEvent(new Event('change'))")
    page.wait("find('notice').textContent === ''")
    page.run("window.whole = fetch; window.fetch = async () => { throw new TypeError('Failed to fetch'); }")
    assert "The server does not answer" in failed(page, "What does len do?")
    begun = 'data: {"choices": [{"delta": {"content": "Return"}}]}\n'
    page.run(f"""window.fetch = async () => new Response(new ReadableStream({{
      pull: stream => window.cut ? stream.error(new TypeError("network error"))
        : (window.cut = true, stream.enqueue(new TextEncoder().encode({begun!r}))),
    }}))""")
    assert "connection is broken" in failed(page, "What does len do?")
    assert page.run("messages.map(each => each.content)") == ["What does len do?", "Return"]
    page.run("draw()")  # as when the conversation is opened again
    assert "(cut: The server does not answer" in page.run("document.querySelector('.figures').textContent")
    page.run("window.fetch = window.whole; find('clear').click(); setText('')")


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (
            "messages[4].content[2]: picture 7: the PNG data are damaged",
            "Picture 3 of this message: the PNG data are damaged",
        ),
        ("messages[4].content: is empty", "is empty"),
        ("messages[0]: role 'x'", "role 'x'"),
        ("prompt is too long: 9 tokens > 8 maximum", "prompt is too long: 9 tokens > 8 maximum"),
    ],
)
def test_a_refusal_names_no_place_of_the_request(page, refusal, words):
    assert page.run(f"inWords({refusal!r})") == words


def test_a_message_is_edited_in_its_own_box_after_an_error(page):
    page.run("find('clear').click()")
    failed(page, "hello " * 2500)
    page.run("setText('')")
    ask(page, "What does len do?")
    failed(page, "hello " * 2500)
    page.run("document.querySelectorAll('.user .actions button')[0].click()")
    assert page.run("document.querySelector('.edit').closest('article').className") == "user"
    page.run("find('clear').click(); setText('')")


def number_kept(page):
    """Return the number of conversations in the page's database; writes that began before have ended."""
    return page.run("allConversations().then(all => all.length)")


def reload(page):
    number_kept(page)  # a reload cuts off writes
    page.run("window.old = true")
    page.send("Page.reload")
    page.wait("!window.old && document.readyState === 'complete' && find('list').children.length")
    page.run("key.value = 'secret'; key.dispatchEvent(new Event('change'))")


def ask(page, text):
    """Send a message and wait until its answer has ended."""
    before = page.run("document.querySelectorAll('.assistant .figures').length")
    send(page, text)
    page.wait(f"find('stop').hidden && document.querySelectorAll('.assistant .figures').length > {before}")


def test_conversations_are_kept(page):
    page.run("find('clear').click()")
    ask(page, "What does len do?")
    page.run("find('open-settings').click(); settingsForm.elements.max_tokens.value = '3'; find('settings').close()")
    page.wait("current.settings.max_tokens === '3'")  # the event `close` comes after the call
    ask(page, "What does sorted do?")
    assert "Cut: the limit" in page.run("talk.lastElementChild.textContent")
    page.run("setText('half a mess')")
    kept = page.run("JSON.stringify(messages)")
    reload(page)
    assert page.run("JSON.stringify(messages)") == kept
    assert page.run("text.value") == "half a mess"
    assert page.run("current.settings.max_tokens") == "3"
    assert page.run("document.querySelector('[aria-current]').textContent") == "What does len do?"
    exported = page.run("JSON.stringify({conversations: [current]})")
    page.run(f"importFile(new File([{exported!r}], 'x.json'))")
    page.wait("find('list').children.length >= 2 && messages.length === 4")
    page.run("importFile(new File(['{}'], 'x.json'))")
    page.wait("find('notice').textContent.includes('x.json was not imported')")
    before = number_kept(page)  # the list may be drawn later
    page.run("window.confirm = () => true; window.prompt = () => 'Renamed'; rename(current)")
    page.wait("document.querySelector('[aria-current]').textContent === 'Renamed'")
    page.run("remove(current)")
    page.wait(f"find('list').children.length === {before - 1} && messages.length === 0")
    page.run("setText('')")


def test_an_answer_that_a_reload_cuts_is_kept(page):
    page.run("find('clear').click()")
    page.run("current.messages.push({role: 'user', content: 'q'}), save()")
    page.run("partialAt = 0; partial(current, {role: 'assistant', content: 'begun'}, true)")
    reload(page)
    page.wait("messages.length === 2")
    assert "begun" in page.run("talk.lastElementChild.textContent")
    assert "cut by a reload" in page.run("talk.lastElementChild.textContent")


def test_edit_and_regenerate(page):
    page.run("find('clear').click()")
    ask(page, "What does len do?")
    first = page.run("messages[1].content")
    page.run("document.querySelector('.assistant .actions button:last-child').click()")
    page.wait("find('stop').hidden && messages.length === 2 && document.querySelector('.assistant .figures')")
    assert page.run("messages[1].content") == first
    page.run("document.querySelector('.user .actions button').click()")
    page.run("document.querySelector('.edit').value = 'What does sorted do?'")
    page.run("document.querySelector('.user .actions button').click()")
    page.wait("messages.length === 2 && messages[0].content.includes('sorted') && find('stop').hidden")
    assert page.run("messages[1].content") != first
    kept = page.run("JSON.stringify(messages)")
    page.run("document.querySelector('.user .actions button').click()")
    page.run("document.querySelector('.edit').value = 'hello '.repeat(2500)")  # is refused
    page.run("document.querySelector('.user .actions button').click()")
    page.wait("document.querySelector('.error') && messages.length === 2")
    assert page.run("JSON.stringify(messages)") == kept
    page.run("setText('')")


HOSTILE = (
    """<script>window.hit = 1</script><img src=x onerror="window.hit = 1"> <b>bold</b>
[link](javascript:window.hit=1) [old](ftp://example.org) [good](https://example.org/a) ![picture](https://example.org/p.png)
<style>body { display: none }</style> <form action=x><input name=key></form>

[ref]: https://example.org

- [ ] task

```html
<script>window.hit = 1</script>
```

"""
    + "x" * 100_000
)


def test_hostile_text_is_only_text(page):
    page.run("find('clear').click()")
    page.run(f"showMessage({{role: 'assistant', content: {json.dumps(HOSTILE)}, reasoning: '<b>t</b>'}}, [])")
    said = "document.querySelector('.assistant .said')"
    text = page.run(f"{said}.textContent")
    for each in (
        "<script>window.hit = 1</script>",
        "<img src=x",
        "<b>bold</b>",
        "p.png",
        "<style>",
        "[ref]:",
        "x" * 100_000,
    ):
        assert each in text
    assert page.run(f"{said}.querySelectorAll('script, img, style, form, input, iframe').length") == 0
    assert (
        page.run(f"[...{said}.querySelectorAll('a')].map(a => a.href).join()")
        == ",,https://example.org/a,https://example.org/"
    )
    assert page.run(f"{said}.querySelector('pre button').textContent") == "Copy code"
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("window.hit") is None
    assert page.run("document.querySelector('.assistant details div').textContent") == "<b>t</b>"


def test_streamed_markdown_is_that_of_the_whole_text(page):
    text = "# T\n\na *b*\nc\n\n1. x\n2. y\n\n   z\n\n```py\nd\n\ne\n```\n\n| a |\n|---|\n| 1 |\n\nend"
    streamed = page.run(f"""(() => {{
      const box = document.createElement("div"), view = new MarkdownView(box);
      for (const letter of {json.dumps(text)}) {{ view.add(letter); view.draw(); }}
      const whole = document.createElement("div"), other = new MarkdownView(whole);
      other.add({json.dumps(text)}); other.draw();
      return [box.innerHTML, whole.innerHTML];
    }})()""")
    assert streamed[0] == streamed[1]
    assert "<table" in streamed[0]


CONTRAST = """(() => {
  const light = color => {
    const linear = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map(linear);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const back = node => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)" && color !== "transparent") return color;
    }
  };
  const own = node => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
  const shown = [...document.querySelectorAll("body *")].filter(node => own(node) && node.getClientRects().length);
  return shown.map(node => {
    const [a, b] = [light(getComputedStyle(node).color), light(back(node))].sort((x, y) => y - x);
    return [node.tagName + "." + node.className + "#" + node.id, (a + .05) / (b + .05)];
  });
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast_and_every_control_a_name(page, scheme):
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.run("find('clear').click()")
    call = "{name: 'f', arguments: '{}'}"
    page.run(
        f"showMessage({{role: 'assistant', content: {json.dumps(HOSTILE[:600])}, reasoning: 't', calls: [{call}], "
        "finish: '(stopped)', figures: '9 tokens'}, []); new MessageView('assistant').add('error', 'wrong')"
    )
    for opened in ("1", "find('open-side').click()", "find('open-settings').click()"):
        page.run(opened)
        found = page.run(CONTRAST)
        assert len(found) > 10
        assert [each for each in found if each[1] < 4.5] == []
        nodes = page.send("Accessibility.getFullAXTree")["nodes"]
        controls = [
            n
            for n in nodes
            if n.get("role", {}).get("value") in ("button", "textbox", "spinbutton", "combobox", "link")
        ]
        assert controls
        assert [n for n in controls if not n.get("name", {}).get("value")] == []
    page.run("find('settings').close(); closeSide(); find('clear').click()")
    page.send("Emulation.setEmulatedMedia", features=[])


def test_keys_alone(page):
    page.run("find('clear').click(); text.focus()")

    def press(key, code, **more):
        page.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **more)
        page.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    page.send("Input.insertText", text="What does len do?")
    press("Enter", 13, text="\r")
    page.wait("messages.length === 2")
    page.run("document.activeElement.blur()")
    seen = set()
    for _ in range(40):
        press("Tab", 9)
        seen.add(
            page.run("document.activeElement.getAttribute('aria-label') || document.activeElement.textContent.trim()")
        )
    assert {"Settings", "Message", "Edit", "Copy", "Regenerate", "Conversations"} <= seen


def test_the_prefill_is_shown(page):
    page.run("progress({total: 4096, processed: 512})")
    assert page.run("find('notice').textContent") == "Reading the prompt: 512 of 4,096 tokens"
    page.run("progress({total: 4096, processed: 4096})")
    assert page.run("find('notice').textContent") == ""


def test_only_the_servers_own_files_are_loaded(served, address):
    """Also below a root path; the files need no key, and nothing outside the folder is served."""
    response = served.get("/")
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "script-src 'self'" in policy
    assert "default-src 'none'" in policy
    files = re.findall(r'(?:src|href)="([^"]+)"', response.text)
    assert len(files) == 9
    with httpx.Client(base_url=address) as client:
        assert [client.get(file).status_code for file in files] == [200] * len(files)
        assert client.get("/page/../app.py").status_code in (401, 404)
        assert client.get("/page/%2e%2e/app.py").status_code in (401, 404)
        assert client.get("/v1/models").status_code == 401


def test_libraries_are_unmodified():
    listed = set()
    for package in json.loads((VENDOR / "vendored.json").read_text()):
        for name, file in package["files"].items():
            assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == file["sha256"]
            listed.add(name)
    assert listed | {"vendored.json"} == {file.name for file in VENDOR.iterdir()}
