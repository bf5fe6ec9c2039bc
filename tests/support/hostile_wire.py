"""A hostile request as bytes with pauses, the connection that sends it, and what the client receives."""

import json
import random
import re
import selectors
import socket
import time
from typing import Any, NamedTuple

MOST_READ = 1 << 18  # bytes of a response that are kept
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count": "/v1/messages/count_tokens",
    "ollama": "/api/chat",
    "generate": "/api/generate",
}
CHATS = ("chat", "responses", "messages", "ollama")  # APIs that receive a conversation
MOST = {"responses": "max_output_tokens"}  # names of the field with the maximum of tokens; others: max_tokens


class Attack(NamedTuple):
    """A hostile request.

    pieces: (seconds to wait, bytes to send). leave: seconds after the last piece at which the client disconnects;
    None: after the response. reads: whether the client reads the response. answers: the only right statuses; (): any
    that is no failure. copies: connections that send the same at once. hangs: a server without protection never ends.
    """

    pieces: tuple[tuple[float, bytes], ...]
    leave: float | None = None
    reads: bool = True
    answers: tuple[int, ...] = ()
    copies: int = 1
    hangs: bool = False
    name: str = ""


class Outcome(NamedTuple):
    """What a client received. status: None without a response. left: the client disconnected before its end."""

    status: int | None
    left: bool
    seconds: float
    text: str

    @property
    def body(self) -> str:
        return self.text.partition("\r\n\r\n")[2].strip()


class Dice(random.Random):
    """Random numbers of one attack. scale: factor of all sizes."""

    scale = 1.0

    def size(self, most: int) -> int:
        """Return a number from half of `most` to `most`, scaled; at least 1."""
        return max(1, int(most * self.scale * self.uniform(0.5, 1)))


def post(path: str, body: bytes | dict[str, Any], **headers: str) -> Attack:
    """Return a well-formed POST. body: an object is written as JSON. headers: with _ for -."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {"Content-Type": "application/json", "Content-Length": str(len(data)), "Connection": "close"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n" + "".join(f"{n}: {v}\r\n" for n, v in named.items())
    return Attack(((0.0, head.encode() + b"\r\n" + data),))


def asked(api: str, text: Any = "What does len do?", **fields: Any) -> dict[str, Any]:
    """Return a body that asks an API for four tokens. text: the content of the newest message, or the prompt."""
    short = {MOST.get(api, "max_tokens"): 4, **fields}
    if api in ("completions", "generate"):
        body = {"prompt": text, **short}
    else:
        body = {"input" if api == "responses" else "messages": [{"role": "user", "content": text}], **short}
    if api in ("ollama", "generate"):
        body |= {"stream": False, "options": {"num_predict": body.pop("max_tokens"), **body.pop("options", {})}}
    return body


def ask(api: str, text: Any = "What does len do?", **fields: Any) -> Attack:
    return post(PATHS[api], asked(api, text, **fields))


def attempt(port: int, attack: Attack, patience: float) -> Outcome:
    """Send an attack and return its outcome. patience: seconds after the last piece until the client disconnects."""
    begun, stay = time.monotonic(), patience if attack.leave is None else min(attack.leave, patience)
    connections = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(attack.copies)]
    sendings = [_Sending(connection, attack, stay) for connection in connections]
    try:
        with selectors.DefaultSelector() as selector:
            while any(not sending.ended for sending in sendings):
                _step(selector, sendings)
    finally:
        for connection in connections:
            connection.close()
    found = next((sending for sending in sendings if sending.is_failure), sendings[0])
    left = any(sending.left for sending in sendings)
    return Outcome(found.status, left, time.monotonic() - begun, bytes(found.received).decode("latin-1"))


def _step(selector: selectors.BaseSelector, sendings: "list[_Sending]") -> None:
    """Wait up to 50 ms for any of the connections, then advance all."""
    for sending in sendings:
        events = 0 if sending.ended else sending.events(time.monotonic())
        if sending.connection in selector.get_map():
            selector.unregister(sending.connection)
        if events:
            selector.register(sending.connection, events, sending)
    ready = selector.select(0.05) if selector.get_map() else time.sleep(0.02)
    for key, events in ready or ():
        key.data.advance(events)


class _Sending:
    """One connection of an attack."""

    def __init__(self, connection: socket.socket, attack: Attack, stay: float):
        self.connection, self.attack, self.stay = connection, attack, stay
        self.received, self.ended, self.left = bytearray(), False, False
        self._pieces = [(wait, memoryview(data)) for wait, data in attack.pieces]
        self._next = time.monotonic() + self._pieces[0][0]
        connection.setblocking(False)

    @property
    def status(self) -> int | None:
        found = re.match(rb"HTTP/1\.\d (\d{3})", self.received)
        return int(found[1]) if found else None

    @property
    def is_failure(self) -> bool:
        return self.status is None or self.status >= 500

    def events(self, now: float) -> int:
        """Return the events to wait for; ends the connection once its time is spent."""
        if not self._pieces and now > self._next + self.stay:
            self.ended = self.left = True
            return 0
        writes = bool(self._pieces) and now >= self._next
        return (selectors.EVENT_READ if self.attack.reads else 0) | (selectors.EVENT_WRITE if writes else 0)

    def advance(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send()
            if events & selectors.EVENT_READ:
                self._receive()
        except BlockingIOError:
            pass
        except OSError:  # the server has closed the connection; what it sent before may be still there
            self._pieces, self._next = [], time.monotonic()
            self.ended = not (events & selectors.EVENT_WRITE and self.attack.reads)

    def _send(self) -> None:
        wait, data = self._pieces[0]
        sent = self.connection.send(data[: 1 << 20])
        if sent < len(data):
            self._pieces[0] = (wait, data[sent:])
            return
        self._pieces.pop(0)
        self._next = time.monotonic() + (self._pieces[0][0] if self._pieces else 0)

    def _receive(self) -> None:
        data = self.connection.recv(1 << 18)
        self.received += data[: max(0, MOST_READ - len(self.received))]
        self.ended = not data
