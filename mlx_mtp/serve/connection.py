"""Bound the time, headers, chunks and pipelined requests of an HTTP/1.1 connection, and the number of connections."""

import asyncio
import http
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .guard import SAFE_HEADERS

HEAD_SECONDS, BODY_SECONDS = 20.0, 60.0  # maxima for the first line and the headers of a request, and for its body
UNREAD_SECONDS = 60.0  # maximum for which a client reads nothing while the send buffer is full
MOST_HEAD = 32 * 1024  # bytes of the first line and the headers
CHUNKS, LEAST_CHUNK = 1000, 64  # from this number of chunks on, their minimum average of bytes
MOST_PIPELINED = 64 * 1024  # bytes received behind a request that is not answered yet
REASONS = {
    400: "the request is not valid HTTP/1.1",
    408: "the rest of the request did not arrive in time",
    503: "too many connections are open; try again later",
}


class BoundedParser(h11.Connection):
    """A parser that also rejects bodies of ambiguous length, and bodies in chunks of a few bytes."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        """Return as h11's method; also raises RemoteProtocolError for these bodies."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("both content-length and transfer-encoding are given")
        elif isinstance(event, h11.Data):
            self._chunks, self._bytes = self._chunks + 1, self._bytes + len(event.data)
            if self._chunks > CHUNKS and self._bytes < LEAST_CHUNK * self._chunks:
                raise h11.RemoteProtocolError("the body has too many small chunks")
        return event


class Connection(H11Protocol):
    """uvicorn's connection, with the limits of this module.

    most: maximum number of open connections. For a further one, that which has waited longest for the rest of a
    request is closed, or else the new one. waiting: loop.time() from which the rest of a request is awaited; None
    while the server has it.
    """

    def __init__(self, *args: Any, most: int, **more: Any):
        super().__init__(*args, **more)
        self.conn = BoundedParser(h11.SERVER, MOST_HEAD)
        self.waiting: float | None = None
        self._most, self._phase = most, (None, None)
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()
        if len(self.connections) > self._most:
            found: Any = [each for each in self.connections if getattr(each, "waiting", None) is not None]
            min(found, key=lambda each: each.waiting).refuse(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting = None
        for timer in (self._timer, self._unread):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        if self.flow.read_paused and self.conn.their_state is h11.DONE:
            if len(self.conn.trailing_data[0]) > MOST_PIPELINED:
                self.transport.abort()
            else:
                self.flow.resume_reading()  # otherwise the client's departure is not noticed

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch()

    def _watch(self) -> None:
        """Start the time limit of the part of a request that is awaited, unless it has started."""
        state = self.conn.their_state
        if (phase := (self.cycle, state)) == self._phase:
            return
        self._phase, self.waiting = phase, None
        if self._timer:
            self._timer.cancel()
        if state in (h11.IDLE, h11.SEND_BODY):
            self.waiting = self.loop.time()
            seconds = HEAD_SECONDS if state is h11.IDLE else BODY_SECONDS
            self._timer = self.loop.call_later(seconds, self.refuse, 408)

    def refuse(self, status: int) -> None:
        """Close the connection, with a response of this status unless one has begun."""
        self.waiting = None
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            text = REASONS[status] + "\n"
            headers = {"connection": "close", "content-type": "text/plain", "content-length": str(len(text))}
            lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}"]
            lines += [f"{name}: {value}" for name, value in (headers | SAFE_HEADERS).items()]
            self.transport.write("\r\n".join([*lines, "", text]).encode())
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return False

    def send_400_response(self, msg: str) -> None:
        self.refuse(400)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread:
            self._unread.cancel()
