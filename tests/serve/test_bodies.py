"""Bodies are parsed as `json.loads` does, within limits of text, structure and nesting, on threads of their own."""

import asyncio
import base64
import contextlib
import json
import re
import threading
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from sweep import SWEEP

from mlx_mtp.serve import body, preparation
from mlx_mtp.serve.body import DEPTH, parsed_body
from mlx_mtp.serve.chat import side_of
from mlx_mtp.serve.departure import CURRENT, Departure, check_client
from mlx_mtp.serve.fields import Refused
from mlx_mtp.serve.limits import QueueFull
from mlx_mtp.serve.places import entries_of
from mlx_mtp.serve.preparation import SMALL, Preparations

DATA = st.binary(min_size=12, max_size=60).map(lambda raw: base64.b64encode(raw).decode())
TEXTS = st.one_of(
    st.text(max_size=8),
    st.text('\\"/nu:,[]{} 0é😀', max_size=30),
    DATA,
    DATA.map("data:image/png;base64,{}".format),
    DATA.map(lambda data: data[:8] + "\r\n" + data[8:]),
    DATA.map('a\\"{}'.format),
)
LEAVES = TEXTS | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4))
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=5)

few = settings(max_examples=3000 if SWEEP else 25)


def encoded(value, ascii_only):
    return json.dumps(value, ensure_ascii=ascii_only).encode()


def numbers_in(value):
    """Return the numbers of strings (names too), of objects and lists, and of values in a JSON value."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    names = len(value) if isinstance(value, dict) else 0
    found = [numbers_in(each) for each in inner]
    own = (int(isinstance(value, str)), int(isinstance(value, dict | list)), 1)
    strings, containers, values = (sum(column) for column in zip(own, *found, strict=True))
    return strings, containers, values - names


@few
@given(OBJECTS, st.booleans())
def test_a_body_is_what_json_states(value, ascii_only):
    assert parsed_body(encoded(value, ascii_only)) == value
    assert parsed_body(b"\xef\xbb\xbf" + encoded(value, ascii_only)) == value


@few
@given(OBJECTS, st.booleans(), st.integers(0, 400))
def test_base64_is_not_counted_as_text(value, ascii_only, most):
    """Long base64 strings are cut out before the rest is parsed, and put back; nothing else changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "MOST_TEXT", most)
        patch.setattr(body, "LONG", 12)
        content, found = encoded(value, ascii_only), None
        with contextlib.suppress(Refused):
            found = parsed_body(content)
        assert found == value or (found is None and len(content) > most)


def test_base64_behind_a_quote_in_a_text_is_text(monkeypatch):
    monkeypatch.setattr(body, "MOST_TEXT", 120)
    monkeypatch.setattr(body, "LONG", 12)
    value = {"a": 'b"' + "QUJD" * 4, "b": "QUJD" * 100}
    assert parsed_body(encoded(value, True)) == value


def test_a_picture_of_many_megabytes_is_read():
    picture = "data:image/png;base64," + base64.b64encode(bytes(9 * 10**6)).decode()
    value = {"messages": [{"content": [{"text": "这 😀?"}, {"url": picture}, {"data": picture[22:]}]}]}
    assert parsed_body(encoded(value, False)) == value
    escaped = (
        encoded(value, False).replace(b"AAAA", b"AAA\\u002B", 1).replace(b"AAAA", b"AA\\u002f\\u003D", 1)
    )  # as in .NET
    assert parsed_body(escaped)["messages"][0]["content"][1]["url"][22:40] == "AAA+AA/=AAAAAAAAAA"
    with pytest.raises(Refused, match="more than 8,000,000 bytes"):
        parsed_body(encoded({"messages": [{"content": "word " * 1_600_001}]}, False))


@few
@given(OBJECTS, st.integers(0, 20), st.integers(0, 20))
@example({"a\\": "[,{" * 20, "b\\": "[" * 20}, 20, 20)
@example({'a"': "[,{" * 20}, 20, 20)
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(value, most_strings, most_containers):
    strings, containers, values = numbers_in(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "MOST_STRINGS", most_strings)
        patch.setattr(body, "MOST_CONTAINERS", most_containers)
        patch.setattr(body, "MOST_VALUES", values + containers)
        if strings <= most_strings and containers <= most_containers:
            assert parsed_body(encoded(value, True)) == value
            return
        patch.setattr(json, "loads", lambda *_, **__: pytest.fail("was parsed"))
        with pytest.raises(Refused, match=r"more than \d+ (strings|objects and lists)") as refused:
            parsed_body(encoded(value, True))
        assert refused.value.status == 413


HOSTILE = {
    "lists": (b'{"a": [' + b"[]," * 2_000_000 + b"[]]}", "objects and lists"),
    "objects": (b'{"a": [' + b"{}," * 60_000 + b"{}]}", "objects and lists"),
    "strings": (b'{"a": [' + b'"",' * 1_500_000 + b'""]}', "strings"),
    "names": (b"{" + b'"":1,' * 100_001 + b'"":1}', "strings"),
    "numbers": (b'{"a": [' + b"1," * 2_000_000 + b"1]}", "values"),
    "quotes": (b'"' * 9_000_000, "bytes"),
    "escaped quotes": (b'{"a": "' + b'\\"' * 4_500_000 + b'"}', "bytes"),
    "no object": (b"[]", "not a JSON object"),
    "deep": (b'{"a":' + b"[" * DEPTH + b"]" * DEPTH + b"}", "nested deeper"),
    "very deep": (b'{"a":' + b"[" * 40_000, "JSON"),
    "a huge integer": (b'{"a":' + b"9" * 5000 + b"}", "JSON"),
    "an infinite number": (b'{"a":1e999}', "a.*finite"),
    "NaN": (b'{"a":NaN}', "NaN"),
    "a lone surrogate": (b'{"a":"\\uD800"}', "a.*Unicode"),
    "an encoded surrogate": (b'{"a":"\xed\xa0\x80"}', "UTF-8"),
    "UTF-16": ('{"a":1}'.encode("utf-16"), "UTF-8"),
    "UTF-16 without a mark": ('{"a":1}'.encode("utf-16-le"), "JSON"),
    "UTF-32": ('{"a":1}'.encode("utf-32"), "UTF-8"),
    "Latin-1": ('{"a":"é"}'.encode("latin-1"), "UTF-8"),
    "two marks": ("\ufeff\ufeff{}".encode(), "JSON"),
    "nothing": (b"", "JSON"),
    "zeros": (bytes(1000), "JSON"),
    "a name of base64": (b'{"' + b"A" * 9_000_000 + b'":1}', "a name of more than"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_are_refused_in_one_line(name):
    content, reason = HOSTILE[name]
    with pytest.raises(Refused, match=reason) as refused:
        parsed_body(content)
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


class Client(SimpleNamespace):
    """A request whose client sends a body in pieces, and leaves when `leaves` is set."""

    def __init__(self, pieces=(), headers=None):
        super().__init__(pieces=pieces, headers=headers or {}, leaves=asyncio.Event(), taken=0)

    async def stream(self):
        for piece in self.pieces:
            self.taken += len(piece)
            yield piece

    async def receive(self):
        await self.leaves.wait()
        return {"type": "http.disconnect"}


async def _read(preparations, client, most=10**9):
    async with preparations.body(client, most) as content:
        return content, preparations.bytes


def test_memory_of_bodies_is_bounded_and_released(monkeypatch):
    monkeypatch.setattr(preparation, "MOST_BYTES", 10 * SMALL)
    piece, preparations = bytes(SMALL), Preparations()
    assert asyncio.run(_read(preparations, Client([piece] * 9))) == (bytes(9 * SMALL), 9 * SMALL)
    assert asyncio.run(_read(preparations, Client([piece]))) == (piece, 0)
    endless = Client(piece for _ in range(10**6))
    with pytest.raises(Refused, match="other large requests") as refused:
        asyncio.run(_read(preparations, endless))
    assert (refused.value.status, endless.taken) == (503, 11 * SMALL)
    assert preparations.bytes == 0


@pytest.mark.parametrize(
    ("client", "taken"), [(([b"abc"] * 9, {}), 12), (([b"abc"] * 9, {"content-length": "11"}), 0)]
)
def test_a_body_beyond_the_limit_is_not_read_further(client, taken):
    client = Client(*client)
    with pytest.raises(Refused, match="larger than 10 bytes") as refused:
        asyncio.run(_read(Preparations(), client, 10))
    assert (refused.value.status, client.taken) == (413, taken)


def test_work_ends_once_its_client_has_left():
    """The thread sees the departure; requests that wait for the thread, and whose clients leave, never start."""
    preparations, begun, ended, started = Preparations(), threading.Event(), threading.Event(), []

    def work():
        begun.set()
        try:
            while True:
                check_client()
        finally:
            ended.set()

    async def leave(client, function):
        with preparations.place(client, SMALL + 1, 0, 9) as place:
            await place.run(function)

    async def both():
        first, second = Client(), Client()
        tasks = [asyncio.create_task(leave(first, work))]
        await asyncio.to_thread(begun.wait)
        tasks += [asyncio.create_task(leave(second, lambda: started.append(1)))]
        await asyncio.sleep(0.01)
        assert preparations.active == 2
        second.leaves.set()
        first.leaves.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(each) for each in asyncio.run(both())] == [ClientDisconnect] * 2
    assert ended.wait(5)
    assert (preparations.active, started) == (0, [])


class PanicException(BaseException):
    """As of Rust libraries: no Exception."""


@pytest.mark.parametrize("size", [1, SMALL + 1])
def test_a_panic_is_a_refusal_in_one_line_and_ends_no_thread(size):
    def panic():
        raise PanicException("Onig: Regex search error: fail to memory allocation\nbacktrace")

    async def read():
        preparations = Preparations()
        for _ in range(4):
            with preparations.place(Client(), size, 0, 9) as work, pytest.raises(Refused) as refused:
                await work.run(panic)
            assert re.search(r"\(PanicException: Onig[^\n]*\)\Z", str(refused.value))
        with preparations.place(Client(), size, 0, 9) as work:
            return await work.run(int, "7")

    assert asyncio.run(read()) == 7


def test_requests_in_preparation_count_against_the_queue():
    preparations, client = Preparations(), SimpleNamespace()
    with preparations.place(client, 1, 1, 3), preparations.place(client, 1, 1, 3), pytest.raises(QueueFull):
        preparations.place(client, 1, 1, 3).__enter__()
    with preparations.place(client, 1, 2, 3):
        assert preparations.active == 1


@pytest.fixture
def gone():
    """The client of this thread's work, which has not left yet."""
    token = CURRENT.set(client := Departure())
    yield client
    CURRENT.reset(token)


def test_parsing_sees_a_departure(gone):
    gone.left = True
    with pytest.raises(ClientDisconnect):
        parsed_body(b"{}")


def test_reading_messages_sees_a_departure(gone):
    """After each of them: one message may have a million parts, and a conversation 10,000 messages."""
    entries = entries_of({"messages": [{"role": "user", "content": "a"}] * 3}, "messages", side_of)
    next(entries)
    gone.left = True
    with pytest.raises(ClientDisconnect):
        next(entries)
