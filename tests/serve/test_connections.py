"""Connections are bounded in time and number; what is no HTTP/1.1 gets one answer or none, and never a traceback."""

import asyncio
import contextlib
import json
import socket
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from served import listening
from starlette.responses import StreamingResponse

from mlx_mtp.serve import app as application
from mlx_mtp.serve import connection
from mlx_mtp.serve.app import ActiveRequest
from mlx_mtp.serve.connection import CHUNKS, MOST_PIPELINED
from mlx_mtp.serve.job import Prefilled
from mlx_mtp.serve.limits import JobLimits

HOST = b"Host: localhost\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
CHUNKED = CHAT + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"Connection: close\r\n\r\n"
HI = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).encode()
POSTED = CHAT + b"Content-Length: %d\r\n" % len(HI)


@pytest.fixture(scope="module")
def address(one_layer):
    """The address of a real server, for at most 64 connections."""
    with listening(one_layer.app, JobLimits(1, 0)) as url:
        yield urlsplit(url).hostname, urlsplit(url).port


def received(client):
    """Return all that a connection receives until the server closes it."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 16):
            found += piece
    return found


def sent(address, *pieces):
    with socket.create_connection(address, 20) as client, contextlib.suppress(ConnectionError):
        for piece in pieces:
            client.sendall(piece)
        return received(client)
    return b""


# What is sent, and the statuses of the answers until the connection is closed; b"": or none, as a reset may lose it.
RAW = {
    "a request": ([GET + LAST], b"200"),
    "a posted body": ([POSTED + LAST + HI], b"200"),
    "a body in two chunks": ([CHUNKED[:-2] + LAST + b"%x\r\n%s\r\n0\r\n\r\n" % (len(HI), HI)], b"200"),
    "a body that is awaited": ([POSTED + b"Expect: 100-continue\r\n" + LAST, HI], b"100 200"),
    "another expectation": ([POSTED + b"Expect: nothing\r\n" + LAST, HI], b"200"),
    "a body of a GET": ([GET + b"Content-Length: 2\r\n" + LAST + b"ab"], b"200"),
    "pipelined requests": ([GET + b"\r\n" + GET + LAST], b"200 200"),
    "HTTP/1.0": ([b"GET /health HTTP/1.0\r\n" + HOST + b"\r\n"], b"200"),
    "a folded header": ([GET + b"A: b\r\n c\r\n" + LAST], b"200"),
    "an upgrade": ([GET + b"Upgrade: websocket\r\nConnection: upgrade\r\n" + LAST], b"200"),
    "letters of a key outside ASCII": (
        [GET + b"X-Api-Key: \xe9\xff\r\nAuthorization: Bearer \xff\r\n" + LAST],
        b"200",
    ),
    "a host of other bytes": ([b"GET / HTTP/1.1\r\nHost: \xff\r\n" + LAST], b"403"),
    "a path of other bytes": ([b"GET /%ff%00/..%2f HTTP/1.1\r\n" + HOST + LAST], b"404"),
    "a file of another name": ([b"GET /page/" + b"a" * 5000 + b" HTTP/1.1\r\n" + HOST + LAST], b"404"),
    "a file outside": ([b"GET /page/..%2f..%2fguard.py HTTP/1.1\r\n" + HOST + LAST], b"404"),
    "a whole address": ([b"GET http://[::1/ HTTP/1.1\r\n" + HOST + LAST], b"404"),
    "CONNECT": ([b"CONNECT localhost:80 HTTP/1.1\r\n" + HOST + LAST], b"404"),
    **{
        name: ([name.encode() + b" /health HTTP/1.1\r\n" + HOST + LAST], b"405")
        for name in ("OPTIONS", "TRACE", "BREW")
    },
    "HEAD": ([b"HEAD /health HTTP/1.1\r\n" + HOST + LAST], b"200"),
    "both lengths": (
        [CHAT + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + GET + LAST],
        b"400",
    ),
    "two lengths": ([CHAT + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"], b"400"),
    "a negative length": ([CHAT + b"Content-Length: -3\r\n\r\n"], b"400"),
    "another transfer encoding": ([CHAT + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"], b"400"),
    "a chunk of a bad size": ([CHUNKED, b"zz\r\n"], b"400"),
    "a chunk of a negative size": ([CHUNKED, b"-1\r\nab"], b"400"),
    "a chunk of a huge size": ([CHUNKED, b"f" * 30 + b"\r\nab"], b"400"),
    "small chunks": ([CHUNKED + b"1\r\n \r\n" * (CHUNKS + 1)], b"400"),
    "a body that is too large": ([CHAT + b"Content-Length: 99999999999999\r\n" + LAST], b"413"),
    "two hosts": ([GET + HOST + LAST], b"400"),
    "no host": ([b"GET /health HTTP/1.1\r\n" + LAST], b"400"),
    "a space before a colon": ([GET + b"A : b\r\n" + LAST], b"400"),
    "HTTP/0.9": ([b"GET /health\r\n\r\n"], b"400"),
    "HTTP/2": ([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"], b"403 400"),
    "TLS": ([b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n"], b"400"),
    "a long header": ([GET + b"A: " + b"a" * 40_000], b"400"),
    "a long path": ([b"GET /" + b"a" * 40_000], b"400"),
    "requests without end": ([POSTED + b"\r\n" + HI, GET * 10 + b"A: b\r\n" * (MOST_PIPELINED // 6)], b""),
}


@pytest.mark.parametrize("name", RAW)
def test_what_is_sent_gets_an_answer_or_is_closed(address, caplog, name):
    pieces, statuses = RAW[name]
    found = sent(address, *pieces)
    heads = [head.partition(b"\r\n\r\n")[0].lower() for head in found.split(b"HTTP/1.1 ")[1:]]
    assert b" ".join(head[:3] for head in heads) in (statuses, b"" if b"4" in statuses else statuses)
    assert all(b"x-content-type-options: nosniff" in head for head in heads if head[:3] != b"100")
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.parametrize(
    ("limit", "first"),
    [
        ("HEAD_SECONDS", b""),
        ("HEAD_SECONDS", b"GET / HT"),
        ("HEAD_SECONDS", GET + b"\r\n" + GET),
        ("BODY_SECONDS", CHAT + b"Content-Length: 1000\r\n\r\n{"),
        ("BODY_SECONDS", GET + b"Content-Length: 1000\r\n\r\n{"),
    ],
)
def test_what_never_ends_is_closed(address, monkeypatch, limit, first):
    monkeypatch.setattr(connection, limit, 0.1)
    with socket.create_connection(address, 0.02) as client, contextlib.suppress(ConnectionError):
        client.sendall(first)
        for _ in range(500):
            with contextlib.suppress(TimeoutError):
                if not client.recv(1 << 16):
                    return
            if first:
                client.sendall(b"a")  # does not extend the time
        pytest.fail("the connection is still open")


def test_the_connection_that_waits_longest_makes_room(address):
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address, 20)) for _ in range(64)]
        for each in slow:
            each.sendall(b"GET /health HTTP/1.1\r\n")
            time.sleep(0.001)
        assert b" 200 " in sent(address, GET + LAST)
        assert b" 503 " in received(slow[0])
        slow[-1].sendall(HOST + LAST)
        assert b" 200 " in received(slow[-1])


def test_a_client_that_reads_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.1)
    made = []

    async def endless():
        while len(made) < 10_000:
            made.append(1)
            await asyncio.sleep(0)
            yield b"x" * 100_000

    async def app(scope, receive, send):
        if scope["type"] == "http":
            await StreamingResponse(endless())(scope, receive, send)

    with listening(app) as url, socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), 20) as client:
        client.sendall(GET + b"\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                time.sleep(0.01)
                client.send(b"a")
            pytest.fail("the connection is still open")
    assert len(made) < 1000


def test_events_that_are_not_read_end_their_stream(monkeypatch):
    monkeypatch.setattr(application, "MOST_UNSENT", 5)

    async def events():
        service = SimpleNamespace(timeout=1.0)
        active = ActiveRequest(service, SimpleNamespace(requests=[None]), "/", 0.0)
        for i in range(100):
            active._emit(0, Prefilled(i))
        await asyncio.sleep(0)
        return active.jobs[0].cancelled, [active._events.get_nowait()[2] for _ in range(active._events.qsize())]

    cancelled, found = asyncio.run(events())
    assert cancelled
    assert found == [*map(Prefilled, range(5)), application.SLOW]
